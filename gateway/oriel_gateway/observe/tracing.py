"""Record the gateway's stages as spans of one call: `gateway.request` with its children `queue` and `forward`."""

from typing import Any, Protocol

from oriel_gateway.errors import Outcome
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.trace import Span, SpanSink, TraceContext, child


class Address(Protocol):
    """The address of an endpoint."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Mark:
    """The ids of one call in logs and traces, in lower-case hex.

    parent: the client's span; "" if it sent none.
    own: the gateway's span.
    onward: the span of the hop to the upstream.
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
        """The id of the trace as a number."""
        return int(self.trace, 16)

    @property
    def span_id(self) -> int:
        """The id of the gateway's own span as a number."""
        return int(self.own, 16)

    @property
    def parent_id(self) -> int:
        """The id of the client's span as a number; 0 if it sent none."""
        return int(self.parent, 16) if self.parent else 0

    @property
    def forward_id(self) -> int:
        """The id of the span of the hop to the upstream as a number."""
        return int(self.onward, 16)

    def traceparent(self) -> str:
        """Return the header value for the upstream."""
        return f"00-{self.trace}-{self.onward}-{'01' if self.sampled else '00'}"

    def traceresponse(self) -> str:
        """Return the header value for the client: the gateway's own span."""
        return f"00-{self.trace}-{self.own}-{'01' if self.sampled else '00'}"


class Recorded(Protocol):
    """The facts of a finished call over any protocol. Times are monotonic seconds; 0.0 means not reached."""

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
    ahead: int  # calls before it when it joined the queue; -1 if it did not queue
    bytes_out: int
    timing: str  # `Server-Timing` of the server behind; "" if it sent none
    used: str  # what the answer said it used, see `oriel_wire.context.parse_cost`

    @property
    def beside(self) -> int: ...  # calls that its pool has in flight, itself included

    @property
    def protocol(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def endpoint(self) -> Address | None: ...

    @property
    def held(self) -> tuple[str, float] | None: ...


def record_call(call: Recorded, sink: SpanSink, end_s: float, error: str) -> None:
    """Record the spans of a finished, sampled call, without the stages that it never reached."""
    mark = call.mark
    own = TraceContext(mark.trace_id, mark.span_id, True, mark.state)
    spills = call.target.spills
    spilled = {"oriel.spilled": ", ".join([f"{each.pool}: {each.reason}" for each in spills])} if spills else {}
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
                **spilled,
            },
            error=error,
        )
    )
    if call.queued_s:
        until_s = call.permit_s or end_s
        attributes: dict[str, Any] = {"oriel.pool": call.target.pool, "oriel.band": call.tenant.tier.band}
        if call.held is not None:
            phase, held_s = call.held
            attributes |= {"oriel.cold_start.phase": phase, "oriel.cold_start.held_ms": round(held_s * 1e3, 3)}
        sink.record(
            Span(
                name="gateway.queue",
                context=child(own),
                parent_id=mark.span_id,
                start_s=call.queued_s,
                end_s=until_s,
                attributes=attributes,
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
    """Record the one span of a tenant's request that was refused before it became a call."""
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
