"""Limits what user code prints and logs into a server's log: a share per second, the rest is counted.

User code is a Python model or a service. The output of its process comes through a pipe (`OutputPipe`).
"""

import asyncio
import fcntl
import io
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import TextIO

MAX_LINE_BYTES = 4096
MAX_LINES = 200
MAX_BYTES = 64 * 1024
WINDOW_S = 1.0
# Large and rare reads: 64 KiB at a time cost five milliseconds of the loop for each MB that is printed and left out.
CHUNK_BYTES = 1024 * 1024
PAUSE_S = 0.25


class Output:
    """Splits printed text into log lines. Pure; `now` is in seconds of any clock. Splitting stops when the share of a
    second is used up, and what is left out is counted.
    """

    def __init__(self) -> None:
        self._unfinished = b""
        self._window = float("-inf")
        self._lines = self._bytes = 0
        self._left_out = 0

    @property
    def full(self) -> bool:
        """Return whether the share of this second is used up, so that reading more can wait."""
        return self._lines >= MAX_LINES or self._bytes >= MAX_BYTES

    def received(self, data: bytes, now: float) -> list[str]:
        """Return lines for the log, in order; the first reports how many were left out before, if any."""
        found = self._turned(now)
        *lines, rest = (self._unfinished + data).split(b"\n", MAX_LINES - self._lines) if not self.full else (data,)
        if not self.full:
            for line in lines:
                self._take(line, found)
            if not self.full and len(rest) > MAX_LINE_BYTES:
                self._take(rest[:MAX_LINE_BYTES], found)
                rest = b""
        if self.full:
            self._left_out += rest.count(b"\n")
            rest = rest[rest.rfind(b"\n") + 1 :][:MAX_LINE_BYTES]
        self._unfinished = rest
        return found

    def flushed(self, now: float, *, end: bool = False) -> list[str]:
        """Return the lines that are due without new text. end: no more text follows, so the last line is complete."""
        found = self._turned(now)
        if end:
            if self._unfinished:
                self._take(self._unfinished, found)
            self._unfinished = b""
            if self._left_out:
                found.append(f"{self._left_out} lines left out")
                self._left_out = 0
        return found

    def _turned(self, now: float) -> list[str]:
        if now < self._window + WINDOW_S:
            return []
        self._window, self._lines, self._bytes = now, 0, 0
        left_out, self._left_out = self._left_out, 0
        return [f"{left_out} lines left out"] if left_out else []

    def _take(self, line: bytes, found: list[str]) -> None:
        if self.full:
            self._left_out += 1
            return
        text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        self._lines += 1
        self._bytes += min(len(line), MAX_LINE_BYTES)
        if text:
            found.append(text)


class OutputPipe:
    """Reads what one process prints, on the loop. write: takes each line for the log.

    descriptor: the reading end of a pipe, closed by `close`.
    """

    def __init__(self, descriptor: int, write: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._printed = Output()
        self._paused: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        with suppress(OSError):  # the kernel bounds what a user may have; then a process that prints much waits more
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        self._loop.add_reader(descriptor, self._read)

    def close(self) -> None:
        """Write what has arrived, and stop reading. Later calls do nothing."""
        if self._descriptor < 0:
            return
        if self._paused is not None:
            self._paused.cancel()
        self._read(last=True)
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        self._put(self._printed.flushed(self._loop.time(), end=True))

    def _read(self, *, last: bool = False) -> None:
        try:
            data = os.read(self._descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        self._put(self._printed.received(data, self._loop.time()))
        if not data:
            self._loop.remove_reader(self._descriptor)
        elif self._printed.full and not last:
            # A process that prints without pause waits for its pipe, so that it delays nobody else.
            self._loop.remove_reader(self._descriptor)
            self._paused = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._put(self._printed.flushed(self._loop.time()))
        self._loop.add_reader(self._descriptor, self._read)

    def _put(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(line)


class LimitedStream(io.TextIOBase):
    """Takes the place of `sys.stdout` in a process whose own loop runs user code. target: gets the whole lines."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._printed = Output()

    def write(self, text: str) -> int:
        for line in self._printed.received(text.encode(errors="replace"), monotonic()):
            self._target.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def fileno(self) -> int:
        return self._target.fileno()


class LogLimit:
    """Limits log messages to MAX_LINES and MAX_BYTES per second for each kind: details, errors, and the rest.

    Pure; `now` is in seconds of any clock. The last message of a second may exceed its share of bytes.
    """

    def __init__(self) -> None:
        self._window = float("-inf")
        self._used: dict[int, list[int]] = {}
        self._left_out: dict[int, int] = {}

    def allows(self, level: int, text: str, now: float) -> bool:
        """Return whether to log `text`; if not, its lines are counted. level: a level of `logging`."""
        if now >= self._window + WINDOW_S:
            self._window = now
            self._used.clear()
        lines = text.count("\n") + 1
        used = self._used.setdefault(_kind(level), [0, 0])
        if used[0] >= MAX_LINES or used[1] >= MAX_BYTES:
            self._left_out[_kind(level)] = self._left_out.get(_kind(level), 0) + lines
            return False
        used[0] += lines
        used[1] += len(text)
        return True

    @property
    def left_out(self) -> bool:
        """Return whether lines were left out that `counted` has not reported yet."""
        return bool(self._left_out)

    def counted(self) -> list[tuple[int, str]]:
        """Return level and text of a line for each kind of which something was left out since the last call."""
        found, self._left_out = self._left_out, {}
        return [(level, f"{lines} lines left out") for level, lines in found.items()]


def _kind(level: int) -> int:
    """Return the kind of a level. A model's errors must not drown in its other messages, nor these in details that are
    mostly hidden.
    """
    return logging.ERROR if level >= logging.ERROR else logging.INFO if level >= logging.INFO else logging.DEBUG
