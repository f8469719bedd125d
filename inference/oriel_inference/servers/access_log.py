"""The access log: one JSON object per request, in a file or on standard output. Writing it never delays a request.

A line holds names, sizes, times and outcomes; no payload, no credential, no address. Text from outside (the name of an
unknown model) is JSON-escaped and bounded, so it cannot forge a line.
"""

import time
from typing import NamedTuple

import msgspec

from oriel_inference.dataplane.dataplane import Completion
from oriel_inference.errors import Outcome
from oriel_inference.servers.statuses import status_number
from oriel_wire.context import CallContext
from oriel_wire.observe.line_log import CLOSE_S, DELAY_S, MAX_QUEUED, LineLog, timestamp

MAX_NAME = 128


class _Line(msgspec.Struct, kw_only=True):
    """The line of one request.

    ts: when it ended, UTC.
    status: an HTTP status or a gRPC status code.
    queue_ms: until its batch began, or until it ended.
    compute_ms: the time of its whole batch.
    bytes: size of its body or message as it arrived.
    Times of a stage that the request never reached are null.
    """

    ts: str
    trace_id: str
    request_id: str
    model: str
    version: str
    tier: str
    tenant: str
    protocol: str
    status: int
    reason: str
    rows: int
    queue_ms: float | None
    compute_ms: float | None
    total_ms: float | None
    bytes: int


class _Note(NamedTuple):
    """A request that has ended, for a line. Durations of stages that it did not reach are negative.

    ctx, request_id: one of them is known. status: 0 if it follows from the outcome.
    """

    ended_s: float
    ctx: CallContext | None
    model: str
    protocol: str
    outcome: Outcome
    request_id: str = ""
    version: str = ""
    status: int = 0
    rows: int = 0
    waited_s: float = -1.0
    computed_s: float = -1.0
    total_s: float = -1.0
    size_bytes: int = 0


class AccessLog(LineLog[_Note]):
    """Writes the access log, see `LineLog`. Used by one thread, the loop's."""

    def __init__(
        self, path: str, *, max_queued: int = MAX_QUEUED, delay_s: float = DELAY_S, close_s: float = CLOSE_S
    ) -> None:
        super().__init__(path, _line, max_queued=max_queued, delay_s=delay_s, close_s=close_s)

    def finished(
        self, ctx: CallContext, completion: Completion, received_s: float, ended_s: float, protocol: str, size: int
    ) -> None:
        """Log a request that reached a version of a model."""
        answer, error, spec = completion.answer, completion.error, completion.serving.spec
        waited_s, computed_s = ended_s - completion.queued_s, -1.0
        if answer is not None:
            times = answer.times
            waited_s, computed_s = times.started_s - completion.queued_s, times.split_s - times.started_s
        outcome = Outcome.OK if error is None else error.outcome
        self.put(
            _Note(
                ended_s,
                ctx,
                spec.name,
                protocol,
                outcome,
                version=completion.serving.version,
                rows=completion.rows,
                waited_s=waited_s,
                computed_s=computed_s,
                total_s=ended_s - received_s,
                size_bytes=size,
            )
        )

    def refused(
        self, ctx: CallContext, outcome: Outcome, model: str, received_s: float, protocol: str, size: int
    ) -> None:
        """Log a request that reached no version."""
        now = time.monotonic()
        self.put(_Note(now, ctx, model, protocol, outcome, total_s=now - received_s, size_bytes=size))

    def turned_away(self, request_id: str, status: int, outcome: Outcome, model: str) -> None:
        """Log an HTTP request of which only the head was read."""
        self.put(_Note(time.monotonic(), None, model, "http", outcome, request_id, status=status))


def _line(note: _Note, offset_s: float) -> _Line:
    """Build a line. offset_s: from the monotonic clock to the wall clock."""
    ctx = note.ctx
    return _Line(
        ts=timestamp(note.ended_s + offset_s),
        trace_id=f"{ctx.trace.trace_id:032x}" if ctx is not None else "",
        request_id=ctx.request_id if ctx is not None else note.request_id,
        model=note.model[:MAX_NAME],
        version=note.version,
        tier=ctx.tier if ctx is not None else "",
        tenant=ctx.tenant if ctx is not None else "",
        protocol=note.protocol,
        status=note.status or status_number(note.outcome, note.protocol),
        reason=note.outcome.value,
        rows=note.rows,
        queue_ms=_milliseconds(note.waited_s),
        compute_ms=_milliseconds(note.computed_s),
        total_ms=_milliseconds(note.total_s),
        bytes=note.size_bytes,
    )


def _milliseconds(seconds: float) -> float | None:
    return None if seconds < 0.0 else round(seconds * 1000.0, 3)
