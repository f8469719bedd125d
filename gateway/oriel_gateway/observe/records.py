"""Records of requests that are over: counted, kept for `oriel explain`, logged, traced."""

from time import monotonic
from typing import Final

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.observe.access_log import AccessLog
from oriel_gateway.observe.decisions import NOT_REACHED, Decisions
from oriel_gateway.observe.objectives import Objectives
from oriel_gateway.observe.stats import BATCH, Stats
from oriel_gateway.observe.tracing import Address, Mark, Recorded, record_call, record_refusal
from oriel_gateway.observe.usage import Usage
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.trace import SpanSink

_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time


class Records:
    """Single writer: the gateway's loop. Both methods make the one tuple of `decisions.Decided` for a request.

    It stays a plain tuple: made from attributes it takes a third of the time of an object with slots and a quarter of
    that of a named tuple (docs/decisions, 65).
    """

    __slots__ = ("access_log", "decisions", "objectives", "sink", "stats", "usage")

    def __init__(self, sink: SpanSink) -> None:
        self.sink = sink
        self.objectives = Objectives()
        self.stats = Stats(self.objectives)
        self.decisions = Decisions()
        self.usage = Usage()
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
    ) -> None:
        """Record a request that was refused before it became a call; it is traced if its sender is known."""
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
        if tenant is not None and mark.sampled and self.sink.enabled:
            record_refusal(mark, tenant, self.sink, outcome, message, method, received_s, now)

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
            judged,
        )
        self.decisions.append(decided)
        if self.access_log is not None:
            self.access_log.put(decided)
        if call.outcome is _ANSWERED and call.status < 400:
            busy_s = 0.0 if call.used or not call.sent_s else (now - call.sent_s) / max(1, call.beside)
            self.usage.ended(call.tenant, call.target, bytes_in, call.bytes_out, call.used, busy_s)
        recent = self.stats.recent
        recent.append(decided)
        if len(recent) >= BATCH:
            self.stats.count()
        if call.mark.sampled and self.sink.enabled:
            record_call(call, self.sink, now, error)
