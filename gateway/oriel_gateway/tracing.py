"""The gateway's rooms as spans of one call: request > queue, forward."""

from typing import TYPE_CHECKING, Protocol

from oriel_gateway.errors import Outcome
from oriel_gateway.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.trace import Span, SpanSink, TraceContext, child

if TYPE_CHECKING:
    from oriel_gateway.decisions import Address

__all__ = ["Mark", "Recorded", "record_call", "record_refusal"]


class Mark:
    """Who a call is in logs and traces; ids are lower-case hex.

    parent: the client's span, "" when it sent none; own: the gateway's; onward: of the hop to the upstream.
    """

    __slots__ = ("onward", "own", "parent", "request_id", "sampled", "state", "trace")

    def __init__(
        self, request_id: str, trace: str, own: str, onward: str, sampled: bool, parent: str = "", state: str = ""
    ) -> None:
        self.request_id = request_id
        self.trace = trace
        self.own = own
        self.onward = onward
        self.sampled = sampled
        self.parent = parent
        self.state = state

    @property
    def trace_id(self) -> int:
        """The trace, as a number."""
        return int(self.trace, 16)

    @property
    def span_id(self) -> int:
        """The gateway's own span, as a number."""
        return int(self.own, 16)

    @property
    def parent_id(self) -> int:
        """The client's span, as a number; 0 when it sent none."""
        return int(self.parent, 16) if self.parent else 0

    @property
    def forward_id(self) -> int:
        """The id of the span that covers the hop to the upstream, as a number."""
        return int(self.onward, 16)

    def traceparent(self) -> str:
        """For the upstream."""
        return f"00-{self.trace}-{self.onward}-{'01' if self.sampled else '00'}"

    def traceresponse(self) -> str:
        """The gateway's own span, as the client may link to it."""
        return f"00-{self.trace}-{self.own}-{'01' if self.sampled else '00'}"


class Recorded(Protocol):
    """What a finished call of any ingress says of itself. Times are monotonic seconds, 0.0 = not reached."""

    mark: Mark
    tenant: Tenant
    target: Target
    outcome: Outcome
    status: int
    received_s: float
    queued_s: float
    permit_s: float
    sent_s: float
    response_s: float
    deadline: float
    ahead: int  # calls before it when it came to the queue, -1: it did not queue
    bytes_out: int

    @property
    def protocol(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def endpoint(self) -> "Address | None": ...

    @property
    def tried(self) -> "tuple[Address, ...]": ...


def record_call(call: Recorded, sink: SpanSink, end_s: float, error: str) -> None:
    """Build the spans of a finished, sampled call. Stages it never reached are left out."""
    mark = call.mark
    own = TraceContext(mark.trace_id, mark.span_id, True, mark.state)
    sink.record(
        Span(
            name="gateway.request",
            context=own,
            parent_id=mark.parent_id,
            start_s=call.received_s,
            end_s=end_s,
            kind="server",
            attributes={
                "oriel.request_id": mark.request_id,
                "oriel.tenant": call.tenant.name,
                "oriel.tier": call.tenant.tier.name,
                "oriel.route": call.target.route,
                "oriel.outcome": call.outcome.value,
                "oriel.method": call.method,
                "oriel.status": call.status,
                "oriel.deadline_ms": round((call.deadline - call.received_s) * 1000.0, 3),
            },
            error=error,
        )
    )
    if call.queued_s:
        until_s = call.permit_s or end_s
        sink.record(
            Span(
                name="gateway.queue",
                context=child(own),
                parent_id=mark.span_id,
                start_s=call.queued_s,
                end_s=until_s,
                attributes={"oriel.pool": call.target.pool, "oriel.band": call.tenant.tier.band},
                error="" if call.permit_s else error,
            )
        )
    if call.permit_s:
        sink.record(
            Span(
                name="gateway.forward",
                context=TraceContext(mark.trace_id, mark.forward_id, True, mark.state),
                parent_id=mark.span_id,
                start_s=call.permit_s,
                end_s=end_s,
                kind="client",
                attributes={"oriel.pool": call.target.pool},
                error=error,
            )
        )


def record_refusal(
    mark: Mark,
    tenant: Tenant,
    sink: SpanSink,
    outcome: Outcome,
    error: str,
    method: str,
    received_s: float,
    end_s: float,
) -> None:
    """The one span of a tenant's request that was refused before it became a call."""
    sink.record(
        Span(
            name="gateway.request",
            context=TraceContext(mark.trace_id, mark.span_id, True, mark.state),
            parent_id=mark.parent_id,
            start_s=received_s,
            end_s=end_s,
            kind="server",
            attributes={
                "oriel.request_id": mark.request_id,
                "oriel.tenant": tenant.name,
                "oriel.tier": tenant.tier.name,
                "oriel.outcome": outcome.value,
                "oriel.method": method,
            },
            error=error,
        )
    )
