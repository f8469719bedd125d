"""The files of the usage ledger: an open segment that grows each second, and sealed ones that never change.

    FOLDER/usage/v1/open/INSTANCE-SEQ.ndjson                        the lines of this minute, on the disk each second
    FOLDER/usage/v1/2026-11-24/17/INSTANCE-SEQ.ndjson.gz            a minute, its lines added up

A segment is sealed by renaming a complete file, so that a reader never sees half of one. A server holds a lock on its
open segment; one without a lock was left by a crash, and whoever opens the folder next seals it and adds a line that
says so. Lines that a later version of Oriel has written are kept as they are.
All functions here block; they are called in one thread.
"""

import fcntl
import gzip
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from oriel_wire.usage.lines import UsageLine, decode_line, encode_lines, merge, merge_into, parse_segment, segment_name

ROOT = ("usage", "v1")
OPEN = "open"
MAX_OPEN_BYTES = 64 << 20
MAX_KEPT_BYTES = 1 << 30
MAX_SEGMENT_BYTES = 256 << 20


class UsageFiles:
    """Writes the segments of one instance below `folder`. Raises OSError where it cannot.

    instance: a name that never comes twice, letters and digits.
    """

    def __init__(self, folder: Path, instance: str) -> None:
        self._root = folder.joinpath(*ROOT)
        self._instance = instance
        self._sequence = 0
        self._file: IO[bytes] | None = None
        self._minute = ""
        self._lines: dict[tuple[str, ...], UsageLine] = {}
        self._written = 0
        self.recovered: list[str] = []
        self.lost_s = 0.0  # the longest time for which one of these had not written anything
        (self._root / OPEN).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._recover()

    def append(self, minute: str, lines: list[UsageLine]) -> None:
        """Write lines of a minute and wait until they are on the disk; seals the segment of the minute before."""
        if self._file is not None and (minute != self._minute or self._written >= MAX_OPEN_BYTES):
            self.seal()
        if not lines:
            if self._file is not None:
                os.utime(self._file.fileno())  # nothing was used since: a crash loses only what comes now
            return
        if self._file is None:
            self._sequence += 1
            self._file = _lock_new(self._path())
            self._minute, self._lines, self._written = minute, {}, 0
        data = encode_lines(lines)
        before = os.fstat(self._file.fileno()).st_mtime_ns
        try:
            self._file.write(data)
            os.fsync(self._file.fileno())
        except OSError:
            # A record that was written in part is written again as a whole.
            self._file.seek(self._written)
            self._file.truncate()
            os.utime(self._file.fileno(), ns=(before, before))  # when something was written last
            raise
        self._written += len(data)
        merge_into(self._lines, lines)

    def seal(self) -> None:
        """Seal the open segment, if there is one."""
        if self._file is None:
            return
        lines = list(self._lines.values())
        _seal(self._root, self._path(), lines[0].minute, encode_lines(lines))
        self._file.close()
        self._file = None
        self._lines = {}

    def sealed_segments(self) -> list[Path]:
        """Return the sealed segments, oldest first."""
        return _sealed(self._root)

    def prune(self, max_bytes: int = MAX_KEPT_BYTES) -> int:
        """Delete the oldest sealed segments beyond a size; return how many."""
        kept = deleted = 0
        for path in reversed(self.sealed_segments()):
            kept += path.stat().st_size
            if kept > max_bytes:
                path.unlink(missing_ok=True)
                deleted += 1
        return deleted

    def key(self, path: Path) -> str:
        """Return the name of a sealed segment in an object store."""
        return path.relative_to(self._root.parents[1]).as_posix()

    def _path(self) -> Path:
        return self._root / OPEN / f"{segment_name(self._instance, self._sequence)}.ndjson"

    def _recover(self) -> None:
        """Seal what crashed instances left."""
        for path in sorted((self._root / OPEN).glob("*.ndjson")):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue  # another server has just sealed it
            with file:
                if not _lock(file):
                    continue
                data, written_s = file.read(MAX_SEGMENT_BYTES), os.fstat(file.fileno()).st_mtime
                data = data[: data.rfind(b"\n") + 1]
                lines = [line for each in data.splitlines() if (line := decode_line(each)) is not None]
                if path.exists():
                    minute, unit = (lines[-1].minute, lines[-1].unit) if lines else (minute_of(written_s), "")
                    lost_s = max(0.0, time.time() - written_s)
                    crash = UsageLine(kind="crash", minute=minute, unit=unit, wall_ns=int(lost_s * 1e9))
                    # Added up only if this version knows all that is in them: nothing of a later one is lost.
                    whole = encode_lines(merge(lines)) if encode_lines(lines) == data else data
                    _seal(self._root, path, lines[0].minute if lines else minute, whole + encode_lines([crash]))
                    self.recovered.append(path.stem)
                    self.lost_s = max(self.lost_s, lost_s)
                path.unlink(missing_ok=True)


def read_segment(path: Path) -> Iterator[tuple[int, UsageLine | None]]:
    """Yield (number, line) of a segment, sealed or open; None is a line that this version cannot read. At most
    MAX_SEGMENT_BYTES are read. Raises OSError.
    """
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        yield from enumerate(_lines_of(file), start=1)  # type: ignore[arg-type]


def segments(folder: Path, *, with_open: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of every segment below a state folder, oldest first; an open one only if it is not sealed."""
    root = folder.joinpath(*ROOT)
    seen = set()
    for path in _sealed(root):
        name = path.name.removesuffix(".ndjson.gz")
        if parse_segment(name) is not None:
            seen.add(name)
            yield name, path
    for path in sorted((root / OPEN).glob("*.ndjson")) if with_open else ():
        if path.stem not in seen and parse_segment(path.stem) is not None:
            yield path.stem, path


def write_segment(path: Path, data: bytes) -> None:
    """Write a segment, all or nothing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open(partial, "wb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)


def lines_since(folder: Path, day: str, *, but: str = "") -> Iterator[UsageLine]:
    """Yield the lines that are on this machine from a day on, sealed or not; segments that cannot be read are left out.

    but: an instance whose segments are left out.
    """
    for name, path in segments(folder, with_open=True):
        if (path.suffix == ".gz" and path.parts[-3] < day) or name.partition("-")[0] == but:
            continue
        try:
            for _, line in read_segment(path):
                if line is not None and day <= line.minute:
                    yield line
        except (OSError, EOFError):
            continue


def minute_of(now_s: float) -> str:
    """Return the minute of a time as the ledger writes it."""
    return time.strftime("%Y-%m-%dT%H:%M", time.gmtime(now_s))


def _sealed(root: Path) -> list[Path]:
    return sorted(root.glob("????-??-??/??/*.ndjson.gz"), key=lambda path: (path.parts[-3:-1], path.name))


def _lines_of(file: IO[bytes]) -> Iterator[UsageLine | None]:
    left = MAX_SEGMENT_BYTES
    for line in file:
        left -= len(line)
        if left < 0:
            return
        if line.endswith(b"\n"):  # else a crash has cut it off, or it is being written
            yield decode_line(line)


def _seal(root: Path, path: Path, minute: str, lines: bytes) -> None:
    """Write the lines to the folder of their hour, and remove the open segment."""
    day, _, hour = minute.partition("T")
    # without a time stamp, so that the same lines are the same bytes
    final = root / day / hour[:2] / f"{path.stem}.ndjson.gz"
    write_segment(final, gzip.compress(lines, compresslevel=6, mtime=0))
    path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _private(path: str, flags: int) -> int:
    """Open a file that only this user reads: it says who used what."""
    return os.open(path, flags, 0o600)


def _lock_new(path: Path) -> IO[bytes]:
    file = open(path, "xb", buffering=0, opener=_private)
    _lock(file)
    try:
        _sync_folder(path.parent)
    except OSError:
        file.close()
        path.unlink()
        raise
    return file


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
