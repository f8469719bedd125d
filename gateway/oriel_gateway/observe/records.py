"""Records of requests that are over: counted, kept for `oriel explain`, logged, traced."""

from time import monotonic

from oriel_gateway.errors import Refused
from oriel_gateway.observe.access_log import AccessLog
from oriel_gateway.observe.decisions import NOT_REACHED, Decisions
from oriel_gateway.observe.stats import BATCH, Stats
from oriel_gateway.observe.tracing import Address, Mark, Recorded, record_call, record_refusal
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.trace import SpanSink


class Records:
    """Single writer: the gateway's loop. Both methods make the one tuple of `decisions.Decided` for a request.

    It stays a plain tuple: made from attributes it takes a third of the time of an object with slots and a quarter of
    that of a named tuple (docs/decisions, 65).
    """

    __slots__ = ("access_log", "decisions", "sink", "stats")

    def __init__(self, sink: SpanSink) -> None:
        self.sink = sink
        self.stats = Stats()
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
    ) -> None:
        """Record a request that was refused before it became a call; it is traced if its sender is known."""
        outcome, message = refused.outcome, refused.message
        self.stats.turned_away(outcome, tenant)
        now = monotonic()
        # In the order of `Decided`.
        decided = (
            *(now, mark, method, protocol, tenant, target, outcome, status, message, received_s),
            *NOT_REACHED,
        )
        self.decisions.append(decided)
        if self.access_log is not None:
            self.access_log.put(decided)
        if tenant is not None and mark.sampled and self.sink.enabled:
            record_refusal(mark, tenant, self.sink, outcome, message, method, received_s, now)

    def ended(
        self, call: Recorded, now: float, error: str, answered_s: float, bytes_in: int, tried: tuple[Address, ...]
    ) -> None:
        """Record a call that is over.

        answered_s: when it was what its target is about: its end, or the first byte of a stream.
        """
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
        )
        self.decisions.append(decided)
        if self.access_log is not None:
            self.access_log.put(decided)
        recent = self.stats.recent
        recent.append(decided)
        if len(recent) >= BATCH:
            self.stats.count()
        if call.mark.sampled and self.sink.enabled:
            record_call(call, self.sink, now, error)
