"""The gateway's access log: one JSON object per request, made off the loop from what `decisions` keeps.

A line holds names, sizes, times and outcomes; no payload, no credential, no address.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from oriel_gateway.decisions import Decided, Plain, stages
from oriel_wire.engine.lines import DELAY_S, MAX_QUEUED, LineLog

__all__ = ["AccessLog"]


class _Line(msgspec.Struct, kw_only=True):
    """One request. ts: when it ended, UTC. status: of HTTP, 0 for a gRPC call that was not refused.

    tenant, tier: "" if nobody could be identified; route, target: "" if it was refused before they were known.
    stages_ms: time in each room it came to, and in all.
    """

    ts: str
    trace_id: str
    request_id: str
    tenant: str
    tier: str
    route: str
    target: str
    protocol: str
    method: str
    status: int
    reason: str
    bytes_in: int
    bytes_out: int
    stages_ms: dict[str, float]


class AccessLog(LineLog[Plain]):
    """See `LineLog`."""

    def __init__(self, path: str, *, max_queued: int = MAX_QUEUED, delay_s: float = DELAY_S) -> None:
        super().__init__(path, lines, max_queued=max_queued, delay_s=delay_s)


def lines(notes: Sequence[Plain], offset_s: float) -> bytes:
    """offset_s: from the monotonic clock to the wall clock."""
    encode = msgspec.json.Encoder().encode
    written: list[bytes] = []
    for note in notes:
        decided = Decided(*note)
        tenant, target = decided.tenant, decided.target
        line = _Line(
            ts=datetime.fromtimestamp(decided.ended_s + offset_s, UTC).isoformat(timespec="milliseconds"),
            trace_id=decided.mark.trace,
            request_id=decided.mark.request_id,
            tenant=tenant.name if tenant is not None else "",
            tier=tenant.tier.name if tenant is not None else "",
            route=target.plan.name if target is not None else "",
            target=target.route if target is not None else "",
            protocol=decided.protocol,
            method=decided.method[:32],
            status=decided.status,
            reason=decided.outcome.value,
            bytes_in=decided.bytes_in,
            bytes_out=decided.bytes_out,
            stages_ms=stages(decided),
        )
        text = encode(line)
        # Beyond ASCII there are further line ends and terminal controls; JSON can say them all in ASCII.
        written.append(
            text if text.isascii() else json.dumps(msgspec.to_builtins(line), separators=(",", ":")).encode()
        )
    written.append(b"")
    return b"\n".join(written)
