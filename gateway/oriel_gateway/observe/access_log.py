"""The gateway's access log: one JSON object per request, built off the loop from the records of requests.

A line holds names, sizes, times and outcomes, but no payload, no credential and no address.
"""

from typing import Any

from oriel_gateway.observe.decisions import stages
from oriel_gateway.observe.record import Record
from oriel_wire.observe.line_log import DELAY_S, MAX_QUEUED, LineLog
from oriel_wire.process.logs import timestamp


class AccessLog(LineLog[Record]):
    """The log of this gateway; see `LineLog`."""

    def __init__(self, path: str, *, max_queued: int = MAX_QUEUED, delay_s: float = DELAY_S) -> None:
        super().__init__(path, _line, max_queued=max_queued, delay_s=delay_s)


def _line(decided: Record, offset_s: float) -> dict[str, Any]:
    """Build the line of a request. offset_s: seconds from the monotonic clock to the wall clock."""
    tenant, target = decided.tenant, decided.target
    return {
        "time": timestamp(decided.ended_s + offset_s),  # when it ended, in UTC
        "trace_id": decided.mark.trace,
        "request_id": decided.mark.request_id,
        "tenant": tenant.name if tenant is not None else "",
        "tier": tenant.tier.name if tenant is not None else "",
        "route": target.plan.name if target is not None else "",
        "target": target.route if target is not None else "",
        "protocol": decided.protocol,
        "method": decided.method[:32],
        "status": decided.status,  # over HTTP; 0 for a gRPC call that was not refused
        "reason": decided.outcome.value,
        "bytes_in": decided.bytes_in,
        "bytes_out": decided.bytes_out,
        "duration_ms": round((decided.ended_s - decided.received_s) * 1e3, 3),
        "stages_ms": stages(decided),
    }
