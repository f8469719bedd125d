"""The gateway's rooms as spans of one call: request > queue, forward."""

from typing import TYPE_CHECKING

from oriel_wire.trace import Span, SpanSink, TraceContext, child

if TYPE_CHECKING:
    from oriel_gateway.call import Call

__all__ = ["record_call"]


def record_call(call: "Call", sink: SpanSink, end_s: float, error: str) -> None:
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
                "http.request.method": call.head.method,
                "http.response.status_code": call.status,
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
