"""Records of requests that are over: counted, kept for `oriel explain`, logged, traced."""

from collections.abc import Callable
from time import monotonic
from typing import Final

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.observe.access_log import AccessLog
from oriel_gateway.observe.budgets import Key
from oriel_gateway.observe.decisions import NOT_REACHED, Decisions, Plain
from oriel_gateway.observe.objectives import NO_TARGET, Judged, Objectives
from oriel_gateway.observe.spans import span_count, spans_of
from oriel_gateway.observe.stats import BATCH, SeriesKey, Stats
from oriel_gateway.observe.tracing import Address, Mark, Recorded
from oriel_gateway.observe.usage import Usage
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.observe.exemplars import Exemplars
from oriel_wire.observe.semantics import NOWHERE
from oriel_wire.observe.telemetry import DURATION_BOUNDS_S
from oriel_wire.observe.trace import SpanSink

_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time
# Asks the server at an address for its spans of a trace, a while later. The last: whether it is an address for gRPC.
Recall = Callable[[Address, str, bool], None]


class Records:
    """Single writer: the gateway's loop. Both methods make the one tuple of `decisions.Decided` for a request.

    traced: whether spans go anywhere. scheme: of the clients' URLs. kept: traces kept so far, by `oriel.kept`. recall:
    None if no server is asked for the spans of a trace that is kept only at its end. exemplars: traces of calls by the
    series of their duration. bad_exemplars: of late and missed calls by the key that they are counted under and cause.

    It stays a plain tuple: made from attributes it takes a third of the time of an object with slots and a quarter of
    that of a named tuple (docs/decisions, 65).
    """

    __slots__ = (
        *("access_log", "bad_exemplars", "decisions", "exemplars", "kept", "objectives"),
        *("recall", "scheme", "sink", "stats", "traced"),
    )

    def __init__(self, sink: SpanSink) -> None:
        self.sink = sink
        self.traced = sink.enabled
        self.scheme = "http"
        self.kept: dict[str, int] = {}
        self.exemplars: Exemplars[SeriesKey] = Exemplars()
        self.bad_exemplars: Exemplars[tuple[Key, str]] = Exemplars()
        self.recall: Recall | None = None
        self.objectives = Objectives()
        self.stats = Stats(self.objectives, Usage())
        self.decisions = Decisions()
        self.access_log: AccessLog | None = None

    def turned_away(
        self,
        refused: Refused,
        mark: Mark,
        tenant: Tenant | None,
        method: str,
        received_s: float,
        *,
        protocol: str = "http",
        status: int = 0,
        target: Target | None = None,
        served_at: tuple[str, int] = NOWHERE,
    ) -> None:
        """Record a request that was refused before it became a call; it is traced if its sender is known.

        served_at: the listener of a gRPC call.
        """
        outcome, message = refused.outcome, refused.message
        judged = None if tenant is None else self.objectives.refused(outcome, tenant, refused.left_s)
        self.stats.turned_away(outcome, tenant, target, judged)
        now = monotonic()
        # In the order of `Decided`.
        decided = (
            *(now, mark, method, protocol, tenant, target, outcome, status, message, received_s),
            *NOT_REACHED,
            judged,
        )
        self.decisions.append(decided)
        if self.access_log is not None:
            self.access_log.put(decided)
        if self.traced and tenant is not None:
            why = mark.kept or kept_for(judged, outcome)
            if why:
                self.kept[why] = self.kept.get(why, 0) + 1
                self._note_bad(tenant, target, judged, mark)
                self.sink.keep(spans_of, (decided, why, self.scheme, "", served_at), 1)

    def ended(
        self,
        call: Recorded,
        now: float,
        error: str,
        answered_s: float,
        bytes_in: int,
        tried: tuple[Address, ...],
        limited_s: float,
        held_s: float,
    ) -> None:
        """Record a call that is over. answered_s, limited_s, held_s: see `Decided`."""
        judged = None
        if (
            answered_s - call.received_s > call.tenant.tier.target_s
            or call.status >= 400
            or call.outcome is not _ANSWERED
        ):
            judged = self.objectives.judge(call, call.target.route, answered_s, limited_s, held_s)
        # In the order of `Decided`.
        decided = (
            now,
            call.mark,
            call.method,
            call.protocol,
            call.tenant,
            call.target,
            call.outcome,
            call.status,
            error,
            call.received_s,
            call.queued_s,
            call.permit_s,
            call.sent_s,
            call.response_s,
            call.deadline,
            call.ahead,
            bytes_in,
            call.bytes_out,
            call.endpoint,
            tried,
            answered_s,
            call.timing,
            limited_s,
            held_s,
            call.used,
            call.beside,
            judged,
        )
        self.decisions.append(decided)
        if self.access_log is not None:
            self.access_log.put(decided)
        recent = self.stats.recent
        recent.append(decided)
        if len(recent) >= BATCH:
            self.stats.count()
        if self.traced and (judged is not None or call.mark.kept):
            self._trace(call, decided, judged)

    def _trace(self, call: Recorded, decided: Plain, judged: Judged | None) -> None:
        """Send the spans of a call that was sampled from its beginning, or ended late, missed or with an error."""
        mark = call.mark
        why = mark.kept
        if not why:
            why = kept_for(judged, call.outcome)
            if not why:
                return
            if self.recall is not None:
                grpc = call.protocol == "grpc"
                for _, endpoint, _, _, _ in mark.attempts:
                    self.recall(endpoint, mark.trace, grpc)
                if call.endpoint is not None and call.sent_s:
                    self.recall(call.endpoint, mark.trace, grpc)
        self.kept[why] = self.kept.get(why, 0) + 1
        target, outcome = call.target, call.outcome
        reason = "answered" if outcome is _ANSWERED else outcome.value
        key = (target.pool, target.plan.name, call.tenant.tier.name, reason, call.status // 100)
        self.exemplars.note(key, decided[0] - call.received_s, mark.trace, DURATION_BOUNDS_S)
        self._note_bad(call.tenant, target, judged, mark)
        client, extras = call.client, call.extras
        version = "" if client is None else client.http_version
        model = target.renames or ("" if extras is None else extras.model)
        record = (decided, why, self.scheme, version, call.served_at, call.code, call.held, model)
        self.sink.keep(spans_of, record, span_count(mark, call.permit_s, call.ahead))

    def _note_bad(self, tenant: Tenant, target: Target | None, judged: Judged | None, mark: Mark) -> None:
        """Keep the trace of a call that did not keep its promise, as an example of its cause."""
        if judged is None or not judged.cause:
            return
        key = (tenant.name, tenant.tier.name, NO_TARGET if target is None else target.route)
        self.bad_exemplars.note((self.objectives.shown_as(key), judged.cause), 1.0, mark.trace)


def kept_for(judged: Judged | None, outcome: Outcome) -> str:
    """Return why the trace of a request is kept that was not sampled at its beginning; "" if it is not.

    "sla": it was late, or refused although it was promised. "error": a server behind failed.
    """
    if judged is None or judged.result == "excused":
        return ""
    failed = judged.result == "missed" and outcome in (Outcome.ANSWERED, Outcome.UPSTREAM_BROKEN)
    return "error" if failed else "sla"
