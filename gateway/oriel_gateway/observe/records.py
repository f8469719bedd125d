"""Records of requests that are over: counted, kept for `oriel explain`, logged, traced."""

from collections.abc import Callable
from time import monotonic
from typing import Final

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.observe.access_log import AccessLog
from oriel_gateway.observe.budgets import Key
from oriel_gateway.observe.decisions import Decisions
from oriel_gateway.observe.objectives import NO_TARGET, Objectives
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.spans import SpanFacts, span_count, spans_of
from oriel_gateway.observe.stats import BATCH, SeriesKey, Stats
from oriel_gateway.observe.tracing import Address
from oriel_gateway.observe.usage import Usage
from oriel_policies.documents import Tenant
from oriel_wire.observe.exemplars import Exemplars
from oriel_wire.observe.semantics import NOWHERE
from oriel_wire.observe.telemetry import DURATION_BOUNDS_S
from oriel_wire.observe.trace import SpanSink

_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time
# Asks the server at an address for its spans of a trace, a while later. The last: whether it is an address for gRPC.
Recall = Callable[[Address, str, bool], None]


class Records:
    """Takes the record of each request that has ended. Single writer: the gateway's loop.

    traced: True if spans go anywhere. scheme: the scheme of the clients' URLs. kept: traces kept so far, by
    `oriel.kept`. recall: None if no server is asked for the spans of a trace that is kept only at its end. exemplars:
    traces of calls by the series of their duration. bad_exemplars: examples of late and missed calls by the key that
    they are counted under and cause.
    """

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
        self, refused: Refused, record: Record, status: int = 0, served_at: tuple[str, int] = NOWHERE
    ) -> None:
        """Record a request that was refused before it became a call; it is traced if its sender is known.

        record: the request's, to which the refusal is added. status: the status of its answer, 0 for the one of its
        outcome.
        served_at: the listener of a gRPC call.
        """
        tenant = record.tenant
        record.ended_s = monotonic()
        record.error = refused.message
        record.status = status or STATUS[record.outcome]
        if tenant is not None:
            record.judged = self.objectives.refused(record.outcome, tenant, refused.left_s)
        self._keep(record)
        if self.traced and tenant is not None:
            why = record.mark.kept or kept_for(record)
            if why:
                self.kept[why] = self.kept.get(why, 0) + 1
                self._note_bad(record, tenant)
                self.sink.keep(spans_of, (record, why, self.scheme, SpanFacts(served_at=served_at)), 1)

    def finished(self, record: Record, tenant: Tenant, route: str) -> bool:
        """Record a call that is over; return whether `trace` is to be asked about it. route: the route of its
        target.
        """
        if (
            record.answered_s - record.received_s > tenant.tier.target_s
            or record.status >= 400
            or record.outcome is not _ANSWERED
        ):
            record.judged = self.objectives.judge(record, tenant.tier, route)
        if record.token_s >= 0.0:
            self.stats.streamed(record, tenant.tier)
        self._keep(record)
        return self.traced and (record.judged is not None or record.mark.kept != "")

    def _keep(self, record: Record) -> None:
        self.decisions.append(record)
        if self.access_log is not None:
            self.access_log.put(record)
        recent = self.stats.recent
        recent.append(record)
        if len(recent) >= BATCH:
            self.stats.count()

    def trace(self, record: Record, facts: SpanFacts) -> None:
        """Send the spans of a call that was sampled from its beginning, or ended late, missed or with an error."""
        mark, tenant, target = record.mark, record.tenant, record.target
        assert tenant is not None and target is not None
        why = mark.kept
        if not why:
            why = kept_for(record)
            if not why:
                return
            if self.recall is not None:
                grpc = record.protocol == "grpc"
                for attempt in mark.attempts:
                    self.recall(attempt.endpoint, mark.trace, grpc)
                if record.endpoint is not None and record.sent_s:
                    self.recall(record.endpoint, mark.trace, grpc)
        self.kept[why] = self.kept.get(why, 0) + 1
        outcome = record.outcome
        reason = "answered" if outcome is _ANSWERED else outcome.value
        key = (target.pool, target.plan.name, tenant.tier.name, reason, record.status // 100)
        self.exemplars.note(key, record.ended_s - record.received_s, mark.trace, DURATION_BOUNDS_S)
        self._note_bad(record, tenant)
        self.sink.keep(spans_of, (record, why, self.scheme, facts), span_count(record))

    def _note_bad(self, record: Record, tenant: Tenant) -> None:
        """Keep the trace of a call that did not keep its promise, as an example of its cause."""
        judged, target = record.judged, record.target
        if judged is None or not judged.cause:
            return
        key = (tenant.name, tenant.tier.name, NO_TARGET if target is None else target.route)
        self.bad_exemplars.note((self.objectives.shown_as(key), judged.cause), 1.0, record.mark.trace)


def kept_for(record: Record) -> str:
    """Return why the trace of a request is kept that was not sampled at its beginning; "" if it is not.

    "sla": it was late, or refused although it was promised. "error": a server behind failed.
    """
    judged = record.judged
    if judged is None or judged.result == "excused":
        return ""
    failed = judged.result == "missed" and record.outcome in (Outcome.ANSWERED, Outcome.UPSTREAM_BROKEN)
    return "error" if failed else "sla"
