"""The log of a process: lines for people, or one JSON record per line. docs/logs.md has the fields and the bounds.

With ORIEL_LOG_FORMAT=json, `capture` leads the descriptors 1 and 2 to threads of this process, which make a record of
each line that user code, a library or the interpreter prints: nothing but records reaches the log.
"""

import atexit
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, BinaryIO, TextIO

from oriel_wire.errors import StartFailed
from oriel_wire.process.output import CHUNK_BYTES, WINDOW_S, Output

FORMAT_VARIABLE = "ORIEL_LOG_FORMAT"
# The last two are tritonserver's names of the text form.
FORMATS = ("", "text", "json", "default", "ISO8601")
# `extra` of a record that is a table: its lines are written unchanged.
PLAIN = {"oriel_plain": True}
# Fields of a JSON record that `extra` may set: those of a request, and the origin of a line that was printed.
FIELDS = ("request_id", "trace_id", "tenant", "tier", "target", "reason", "status", "duration_ms", "printed")
CUT = " [cut] "
# Bounds in bytes of JSON; a record has less than the 16 KiB at which container runtimes split lines.
MAX_MESSAGE_BYTES = 5000
MAX_TRACEBACK_BYTES = 8000
MAX_FIELD_BYTES = 256
# Bounds per second: records of one place in the code; those of what is printed, and details; places.
MAX_SAME = 20
MAX_DETAILS = 500
MAX_KINDS = 200
DRAIN_S = 0.5

_log = logging.getLogger(__name__)
_identity: dict[str, str | int] = {}
_kept: dict[int, int] = {}  # standard descriptor -> a copy of it from before `capture`


def configure_logging(unit: str, part: str = "") -> None:
    """Send the log records of this process to stderr, one line each, within the bounds.

    part: follows the unit in lines for people, such as "/1" for a worker; a JSON record has the process id.
    ORIEL_LOG_LEVEL sets the level (INFO), ORIEL_LOG_FORMAT the form (text).
    """
    _identity.update(unit=unit, instance=os.environ.get("HOSTNAME") or socket.gethostname(), pid=os.getpid())
    style, named = (os.environ.get(name, "") for name in (FORMAT_VARIABLE, "ORIEL_LOG_LEVEL"))
    handler = _BoundedHandler(open(_kept[2], "w", encoding="ascii", closefd=False) if _kept else sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _OneLine(unit + part))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    levels = logging.getLevelNamesMapping()
    level = levels.get(named.upper() or "INFO", logging.INFO)
    root.setLevel(level)
    if named and named.upper() not in levels:
        _log.warning("ORIEL_LOG_LEVEL is none of %s: INFO is used", ", ".join(levels))
    if style not in FORMATS:
        _log.warning("%s is neither text nor json: text is used", FORMAT_VARIABLE)
    for chatty in ("httpx", "httpcore", "uvicorn", "urllib3", "asyncio"):
        logging.getLogger(chatty).setLevel(max(level, logging.WARNING))


def log_to_file(path: str) -> None:
    """Append log records to this file instead. Raises StartFailed."""
    try:
        # The file stays open as long as the process.
        stream = open(path, "a", encoding="utf-8", buffering=1)
    except OSError as refused:
        raise StartFailed(f"the log file {path!r} cannot be opened: {refused.strerror}") from refused
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


def capture(unit: str) -> None:
    """Make records of all that this process prints from now on, its uncaught errors included, until it ends.

    Threads take the lines from pipes. Words in which a library reports that it kills the process may be lost.
    """
    readers = []
    for descriptor, name, level in ((1, "stdout", logging.INFO), (2, "stderr", logging.WARNING)):
        _kept[descriptor] = os.dup(descriptor)
        reading, writing = os.pipe()
        os.dup2(writing, descriptor)
        os.close(writing)
        readers.append(threading.Thread(target=_log_printed, args=(reading, name, level), daemon=True))
    configure_logging(unit)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    for reader in readers:
        reader.start()
    atexit.register(_drain, readers)


def standard_output() -> BinaryIO:
    """Return this process's own standard output, for what is meant for other programs: it is never captured."""
    return open(_kept[1], "wb", closefd=False) if _kept else sys.stdout.buffer


def error_descriptor() -> int | None:
    """Return the descriptor to which a child that writes records itself may write; None if there is none."""
    return _kept[2] if _kept else sys.__stderr__.fileno() if sys.__stderr__ else None


def is_captured() -> bool:
    """Return whether what this process prints becomes records."""
    return bool(_kept)


def write_refusal(line: str) -> None:
    """Write why this process cannot start: to stderr, or as a record."""
    if _kept:
        _log.critical("%s", line)
    else:
        sys.stderr.write(line + "\n")


def write_printed(line: str, source: str) -> None:
    """Write a line that the code of a user has printed. source: the process that printed it."""
    if _kept:
        _log.info("%s", line, extra={"printed": source})
    elif sys.__stderr__ is not None:
        sys.__stderr__.write(line + "\n")


def timestamp(seconds: float) -> str:
    """Return a time of the wall clock in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def head(level: str, message: str) -> dict[str, str | int]:
    """Return the fields that every record has, its time excepted."""
    return {"level": level, **_identity, "message": message}


class _BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes at most MAX_SAME records of one place in the code per second; a record with the count of others follows.

    Lines that user code prints have a bound of their own, so they and details have only a large one here. Nobody can
    make more kinds of records than MAX_KINDS: further ones count as one kind.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._window = 0.0
        self._reports = False  # True while a timer is on its way to `report`
        self._counts: Counter[tuple[str, int]] = Counter()
        self._left_out: Counter[tuple[str, int]] = Counter()
        self._examples: dict[tuple[str, int], tuple[str, int, str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._window + WINDOW_S:
            self._window = now
            self._counts.clear()
        kind = record.pathname, record.lineno
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = "", 0
        self._counts[kind] += 1
        bulky = record.levelno < logging.INFO or "printed" in record.__dict__
        if self._counts[kind] <= (MAX_DETAILS if bulky else MAX_SAME):
            return super().emit(record)
        if not self._reports:
            timer = threading.Timer(WINDOW_S, self.report)
            timer.daemon = True
            with suppress(RuntimeError):  # no thread can be started now: tried again at the next record
                timer.start()
                self._reports = True
        self._left_out[kind] += 1
        self._examples.setdefault(kind, (record.name, record.levelno, str(record.msg)[:MAX_FIELD_BYTES]))

    def handleError(self, record: logging.LogRecord) -> None:
        """Leave a record out that cannot be written. To print why, as logging does, would make records of that too, by
        a thread that waits for this handler: the process would stand still.
        """
        if not isinstance(error := sys.exception(), OSError):
            place = record.pathname, record.lineno
            text = f"a record of {place[0]}:{place[1]} cannot be formatted: {error!r}"
            super().emit(logging.LogRecord(record.name, logging.ERROR, *place, text, None, None))

    def report(self) -> None:
        """Write how many records of which kinds were left out since the last report."""
        assert self.lock is not None
        with self.lock:
            self._reports = False
            for kind, (name, level, text) in self._examples.items():
                counted = self._left_out[kind], text
                super().emit(
                    logging.LogRecord(name, level, *kind, "%d more like this were left out: %s", counted, None)
                )
            self._left_out.clear()
            self._examples.clear()

    def close(self) -> None:
        self.report()
        super().close()


class _OneLine(logging.Formatter):
    """`2025-01-31T12:00:00.123Z WARNING gateway oriel_gateway.app: text`, also for text with line breaks."""

    converter = staticmethod(time.gmtime)

    def __init__(self, unit: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {unit} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        if "oriel_plain" in record.__dict__:
            return "\n".join(map(one_line, record.getMessage().splitlines()))
        return one_line(f"{super().format(record)}\n{record.__dict__.get('traceback', '')}")


class _Json(logging.Formatter):
    """One JSON object in ASCII: beyond that there are further line ends and terminal controls."""

    def format(self, record: logging.LogRecord) -> str:
        known: Mapping[str, Any] = record.__dict__
        trace = known.get("traceback") or (self.formatException(record.exc_info) if record.exc_info else "")
        line: dict[str, str | int | float] = {"time": timestamp(record.created), **head(record.levelname, "")}
        line["logger"] = _cut(record.name, MAX_FIELD_BYTES)
        line["message"] = _cut(record.getMessage(), MAX_MESSAGE_BYTES)
        for name in FIELDS:
            if (value := known.get(name)) is not None:
                line[name] = value if isinstance(value, (int, float)) else _cut(str(value), MAX_FIELD_BYTES)
        if trace:
            line["traceback"] = _cut(trace, MAX_TRACEBACK_BYTES, keeps_end=True)
        return json.dumps(line, separators=(",", ":"))


def one_line(text: str) -> str:
    """Escape text from outside: it must not add lines or terminal control codes to a log."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text.strip().replace("\n", " | ")
    )


def _cut(text: str, most: int, *, keeps_end: bool = False) -> str:
    """Return a text that is at most `most` bytes in JSON; CUT stands for what is missing."""
    some = text[-most:] if keeps_end else text[:most]
    some = some.encode(errors="replace").decode().replace("\x7f", "\\x7f")
    if len(text) <= most >= len(json.dumps(some)):
        return some
    while (size := len(json.dumps(some))) > most - len(CUT):
        kept = len(some) * (most - len(CUT)) // size
        some = some[len(some) - kept :] if keeps_end else some[:kept]
    return CUT + some if keeps_end else some + CUT


def _log_printed(descriptor: int, name: str, level: int) -> None:
    """Log what comes through a pipe, line by line, until all its writers have closed it."""
    printed = Output()
    while True:
        # Without new text, what was left out is reported when its second is over.
        ready, _, _ = select.select([descriptor], [], [], WINDOW_S if printed.full else None)
        data = os.read(descriptor, CHUNK_BYTES) if ready else b""
        now = time.monotonic()
        lines = printed.received(data, now) if data else printed.flushed(now, end=bool(ready))
        for line in lines:
            _log.log(level, "%s", line, extra={"printed": name})
        if ready and not data:
            return


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    _log.critical("an error was not caught: %s", kind.__name__, exc_info=error)


def _drain(readers: list[threading.Thread]) -> None:
    """Log what has been printed, at the end of the process; what is printed later has no reader."""
    sys.stdout.flush()
    silent = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _kept:
        os.dup2(silent, descriptor)
    for reader in readers:
        reader.join(DRAIN_S)
