"""The access log: one JSON object per request, in a file or on standard output. Writing it never delays a request.

A line holds names, sizes, times and outcomes; no payload, no credential, no address. Text from outside (the name of an
unknown model) is JSON-escaped and bounded, so it cannot forge a line.
"""

import time

import msgspec

from oriel_inference.dataplane.dataplane import Completion
from oriel_inference.errors import Outcome
from oriel_inference.servers.statuses import status_number
from oriel_wire.context import CallContext
from oriel_wire.observe.line_log import CLOSE_S, DELAY_S, MAX_QUEUED, LineLog
from oriel_wire.process.logs import timestamp

MAX_NAME = 128


class _Line(msgspec.Struct, kw_only=True):
    """The line of one request.

    time: the time when it ended, UTC.
    status: an HTTP status or a gRPC status code.
    queue_ms: milliseconds until its batch began, or until it ended.
    compute_ms: the time of its whole batch.
    bytes: size of its body or message as it arrived.
    Times of a stage that the request never reached are null.
    """

    time: str = ""
    trace_id: str = ""
    request_id: str
    model: str
    version: str = ""
    tier: str = ""
    tenant: str = ""
    protocol: str
    status: int
    reason: str
    rows: int = 0
    queue_ms: float | None = None
    compute_ms: float | None = None
    duration_ms: float | None = None
    bytes: int = 0


# A line, and the monotonic second of the end of its request.
_Note = tuple[_Line, float]


class AccessLog(LineLog[_Note]):
    """Writes the access log, see `LineLog`. Used by one thread, the loop's."""

    def __init__(
        self, path: str, *, max_queued: int = MAX_QUEUED, delay_s: float = DELAY_S, close_s: float = CLOSE_S
    ) -> None:
        super().__init__(path, _dated, max_queued=max_queued, delay_s=delay_s, close_s=close_s)

    def finished(
        self, ctx: CallContext, completion: Completion, received_s: float, ended_s: float, protocol: str, size: int
    ) -> None:
        """Log a request that reached a version of a model."""
        answer, error = completion.answer, completion.error
        line = _of_call(ctx, completion.serving.spec.name, protocol, Outcome.OK if error is None else error.outcome)
        line.version, line.rows, line.bytes = completion.serving.version, completion.rows, size
        line.queue_ms = _milliseconds((answer.times.started_s if answer is not None else ended_s) - completion.queued_s)
        if answer is not None:
            line.compute_ms = _milliseconds(answer.times.split_s - answer.times.started_s)
        line.duration_ms = _milliseconds(ended_s - received_s)
        self.put((line, ended_s))

    def refused(
        self, ctx: CallContext, outcome: Outcome, model: str, received_s: float, protocol: str, size: int
    ) -> None:
        """Log a request that reached no version."""
        now = time.monotonic()
        line = _of_call(ctx, model, protocol, outcome)
        line.duration_ms, line.bytes = _milliseconds(now - received_s), size
        self.put((line, now))

    def turned_away(self, request_id: str, status: int, outcome: Outcome, model: str) -> None:
        """Log an HTTP request of which only the head was read."""
        line = _Line(
            request_id=request_id, model=model[:MAX_NAME], protocol="http", status=status, reason=outcome.value
        )
        self.put((line, time.monotonic()))


def _of_call(ctx: CallContext, model: str, protocol: str, outcome: Outcome) -> _Line:
    return _Line(
        trace_id=f"{ctx.trace.trace_id:032x}",
        request_id=ctx.request_id,
        model=model[:MAX_NAME],
        tier=ctx.tier,
        tenant=ctx.tenant,
        protocol=protocol,
        status=status_number(outcome, protocol),
        reason=outcome.value,
    )


def _dated(note: _Note, offset_s: float) -> _Line:
    """Complete a line. offset_s: seconds from the monotonic clock to the wall clock."""
    line, ended_s = note
    line.time = timestamp(ended_s + offset_s)
    return line


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
