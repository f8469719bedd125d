"""A log of JSON lines in a file or on standard output that never blocks the event loop.

The loop puts a record into a bounded queue and goes on. A few times a second a daemon thread formats the records as
lines and appends them to the file. It opens the file for each of these writes, so the file may be renamed at any time.
Lines that do not fit into the queue or cannot be written are lost and counted.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from oriel_wire.errors import StartFailed
from oriel_wire.process.logs import head, standard_output

_log = logging.getLogger(__name__)

STDOUT = "-"
MAX_QUEUED = 16_384
DELAY_S = 0.2
CLOSE_S = 2.0
REPORT_EVERY_S = 60.0
WRITE_LINES = 1024

Note = TypeVar("Note")
_encode = msgspec.json.Encoder().encode


class LineLog(Generic[Note]):
    """A log of lines. Only one thread may call `put`. Raises StartFailed if the file cannot be written.

    path: a file, created if needed, or "-" for standard output.
    line: (record, offset) -> line; called on the log's thread; must not raise. offset: the seconds to add to a time of
    the monotonic clock to get one of the wall clock.
    """

    def __init__(
        self,
        path: str,
        line: Callable[[Note, float], msgspec.Struct | dict[str, Any]],
        *,
        max_queued: int = MAX_QUEUED,
        delay_s: float = DELAY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._path = path
        self._line = line
        self._max_queued = max_queued
        self._delay_s = delay_s
        self._close_s = close_s
        self._notes: deque[Note] = deque()
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

    def put(self, note: Note) -> None:
        """Queue a record; never waits."""
        if len(self._notes) >= self._max_queued:
            self._refused += 1
        else:
            self._notes.append(note)

    def close(self) -> None:
        """Write what is queued and stop; blocks at most `close_s`. Later records are lost."""
        self._stopping.set()
        self._thread.join(self._close_s)

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
                offset_s = time.time() - time.monotonic()
                # Each line begins with the fields that every record of the log has.
                common = json_line(head("INFO", "request"))[:-2] + b","
                self._append(b"".join([common + json_line(self._line(note, offset_s))[1:] for note in batch]))
            except OSError as error:
                self._failed += len(batch)
                self._report(error)

    def _append(self, data: bytes) -> None:
        if self._path == STDOUT:
            output = standard_output()
            output.write(data)
            output.flush()
            return
        with open(self._path, "ab") as file:
            file.write(data)

    def _report(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            _log.warning("the access log cannot be written (%s): %d lines lost so far", error.strerror, self.dropped)


def json_line(line: msgspec.Struct | dict[str, Any]) -> bytes:
    """Return a line of ASCII with its end. Beyond ASCII there are further line ends and terminal controls."""
    text = _encode(line)
    if not text.isascii():
        text = json.dumps(msgspec.to_builtins(line), separators=(",", ":")).encode()
    return text + b"\n"
