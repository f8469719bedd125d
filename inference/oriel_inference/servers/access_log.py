"""The access log: one JSON object per request, on a file or standard output, never in the way of a request.

The loop puts what it knows into a bounded queue and goes on. A daemon thread makes lines of it and appends them, a few
times a second; the file is opened for each of these writes, so it may be renamed at any time. What does not fit into
the queue or cannot be written is counted and lost.

A line holds names, sizes, times and outcomes; no payload, no credential, no address. Text from outside (the name of a
model that does not exist) is JSON-escaped and bounded, so it forges no line.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from oriel_inference.dataplane import Completion
from oriel_inference.errors import Outcome
from oriel_inference.servers.statuses import status_number
from oriel_wire.context import CallContext
from oriel_wire.errors import StartFailed

__all__ = ["STDOUT", "AccessLog"]

_log = logging.getLogger(__name__)

STDOUT = "-"
MAX_QUEUED = 16_384
MAX_NAME = 128
DELAY_S = 0.2
CLOSE_S = 2.0
REPORT_EVERY_S = 60.0
WRITE_LINES = 1024


class _Line(msgspec.Struct, kw_only=True):
    """One request. ts: when it ended, UTC.

    status: of the protocol, an HTTP status or a gRPC status code. queue_ms: until its batch began, or until it ended;
    compute_ms: of its whole batch. Times of a stage the request never came to are null. bytes: of its body or message
    as it came.
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


# ended_s, context, request id, model, version, protocol, outcome, status (0: follows from the outcome), rows, queued,
# computed and whole seconds (negative: unknown), bytes
_Note = tuple[float, CallContext | None, str, str, str, str, Outcome, int, int, float, float, float, int]


class AccessLog:
    """path: a file, made if need be, or "-". Notes are taken on one thread, the loop's. Raises StartFailed."""

    def __init__(self, path: str, *, max_queued: int = MAX_QUEUED, delay_s: float = DELAY_S) -> None:
        self._path = path
        self._max_queued = max_queued
        self._delay_s = delay_s
        self._notes: deque[_Note] = deque()
        self._refused = 0
        self._failed = 0
        self._reported_s = -REPORT_EVERY_S
        self._stopping = threading.Event()
        try:
            self._append(b"")
        except OSError as error:
            raise StartFailed(f"--access-log: {path} cannot be written: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="oriel-access-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines lost: the queue was full (counted by the loop) or the file refused them (by the thread)."""
        return self._refused + self._failed

    def finished(
        self, ctx: CallContext, completion: Completion, received_s: float, ended_s: float, protocol: str, size: int
    ) -> None:
        """A request that had come to a version of a model."""
        if len(self._notes) >= self._max_queued:
            self._refused += 1
            return
        answer, error, serving = completion.answer, completion.error, completion.serving
        if answer is None:
            queued_s, computed_s = ended_s - completion.queued_s, -1.0
        else:
            times = answer.times
            queued_s, computed_s = times.started_s - completion.queued_s, times.split_s - times.started_s
        outcome = Outcome.OK if error is None else error.outcome
        total_s = ended_s - received_s
        self._notes.append(
            (
                ended_s,
                ctx,
                "",
                serving.spec.name,
                serving.version,
                protocol,
                outcome,
                0,
                completion.rows,
                queued_s,
                computed_s,
                total_s,
                size,
            )
        )

    def refused(
        self,
        ctx: CallContext,
        outcome: Outcome,
        model: str,
        received_s: float,
        ended_s: float,
        protocol: str,
        size: int,
    ) -> None:
        """A request that came to no version."""
        self._put((ended_s, ctx, "", model, "", protocol, outcome, 0, 0, -1.0, -1.0, ended_s - received_s, size))

    def turned_away(self, request_id: str, status: int, outcome: Outcome, model: str) -> None:
        """An HTTP request of which only the head was read."""
        now = time.monotonic()
        self._put((now, None, request_id, model, "", "http", outcome, status, 0, -1.0, -1.0, -1.0, 0))

    def close(self) -> None:
        """Write what is queued and stop; blocks at most CLOSE_S. What comes later is lost."""
        self._stopping.set()
        self._thread.join(CLOSE_S)

    def _put(self, note: _Note) -> None:
        if len(self._notes) >= self._max_queued:
            self._refused += 1
        else:
            self._notes.append(note)

    # The thread's side ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(self._delay_s):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        notes = self._notes
        while notes:
            batch = [notes.popleft() for _ in range(min(len(notes), WRITE_LINES))]
            try:
                self._append(_lines(batch, time.time() - time.monotonic()))
            except OSError as error:
                self._failed += len(batch)
                self._report(error)

    def _append(self, data: bytes) -> None:
        if self._path == STDOUT:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        with open(self._path, "ab") as file:
            file.write(data)

    def _report(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            _log.warning("the access log cannot be written (%s): %d lines lost so far", error.strerror, self.dropped)


def _lines(notes: Sequence[_Note], offset_s: float) -> bytes:
    """offset_s: from the monotonic clock to the wall clock."""
    encode = msgspec.json.Encoder().encode
    lines: list[bytes] = []
    for (
        ended_s,
        ctx,
        request_id,
        model,
        version,
        protocol,
        outcome,
        status,
        rows,
        queued,
        computed,
        total,
        size,
    ) in notes:
        line = _Line(
            ts=datetime.fromtimestamp(ended_s + offset_s, UTC).isoformat(timespec="milliseconds"),
            trace_id=f"{ctx.trace.trace_id:032x}" if ctx is not None else "",
            request_id=ctx.request_id if ctx is not None else request_id,
            model=model[:MAX_NAME],
            version=version,
            tier=ctx.tier if ctx is not None else "",
            tenant=ctx.tenant if ctx is not None else "",
            protocol=protocol,
            status=status or status_number(outcome, protocol),
            reason=outcome.value,
            rows=rows,
            queue_ms=_milliseconds(queued),
            compute_ms=_milliseconds(computed),
            total_ms=_milliseconds(total),
            bytes=size,
        )
        lines.append(encode(line))
    lines.append(b"")
    return b"\n".join(lines)


def _milliseconds(seconds: float) -> float | None:
    return None if seconds < 0.0 else round(seconds * 1000.0, 3)
