"""Compiles documents without holding up the event loop: a child process compiles, this one maps its output."""

import asyncio
import mmap
import os
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Self

import msgspec

from oriel_gateway.documents.compile_child import Mistakes
from oriel_policies.documents import Snapshot
from oriel_policies.documents.packed import unpack
from oriel_policies.errors import BadDocument
from oriel_wire.process.child import spawn

CHILD = "oriel_gateway.documents.compile_child"
COMPILE_TIMEOUT_S = 120.0
_MAX_STDERR = 4096
_MAX_LINE = 1024 * 1024  # a hundred mistakes are a tenth of that


class BadFolder(BadDocument):
    """The first mistake of a folder.

    remaining: the previous snapshot without what the documents withdrew; None if there was no previous one, or if the
        folder cannot be read.
    withdrawn: names of what was withdrawn. keys: the number of withdrawn keys; tenants and issuers are not counted.
    mark: equal when the same was withdrawn.
    """

    def __init__(self, file: str, path: str, reason: str) -> None:
        super().__init__(file, path, reason)
        self.remaining: Snapshot | None = None
        self.withdrawn: list[str] = []
        self.keys = 0
        self.mark = ""


class FolderCompiler:
    """Compiles a folder again and again; what has not changed is taken from the previous output.

    pools: names of pools that the documents must contain.
    timeout_s: for one compilation.
    """

    def __init__(self, folder: Path, pools: Collection[str] = (), *, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._folder = folder
        self._pools = sorted(pools)
        self._timeout_s = timeout_s
        self._last: IO[bytes] | None = None  # the previous output, which had no mistakes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the previous output; snapshots made from it stay valid."""
        if self._last is not None:
            self._last.close()
            self._last = None

    async def compile(self) -> Snapshot:
        """The snapshot of the folder's documents. One call at a time.

        Raises BadDocument, with `others` for the mistakes after the first. Cancelled: the child is killed and nothing
        is left behind.
        """
        folder = self._folder
        try:
            out = _unnamed_file()
        except OSError as error:
            raise BadDocument(folder.name, "", f"there is no place to compile to: {error.strerror}") from error
        try:
            try:
                await _fill(out, folder, self._pools, self._last, self._timeout_s)
            except BadDocument:
                self.close()  # start from nothing after a child that failed
                raise
            snapshot = _read(out.fileno(), folder)
        except BaseException:
            out.close()
            raise
        self.close()
        self._last = out
        return snapshot


async def _fill(out: IO[bytes], folder: Path, pools: Sequence[str], last: IO[bytes] | None, timeout_s: float) -> None:
    """Let the child write to `out`. Raises BadDocument if it fails."""
    try:
        # In a thread: asyncio would fork on the event loop, which stops while a large process is copied.
        child = await _started(folder, pools, out, last)
    except OSError as error:
        raise BadDocument(folder.name, "", f"the compiler cannot be started: {error.strerror}") from error
    try:
        stderr = await _stderr_of(child, timeout_s)
    except subprocess.TimeoutExpired as error:
        child.kill()
        await _stderr_of(child)
        raise BadDocument(folder.name, "", f"compiling took more than {timeout_s:g} s") from error
    if child.returncode != 0:
        end = stderr[-_MAX_STDERR:].decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise BadDocument(folder.name, "", f"the compiler ended with code {child.returncode}: {end[:300]}")


def _unnamed_file() -> IO[bytes]:
    """A file that no other process can open and that is freed with its last mapping."""
    try:
        return tempfile.TemporaryFile(prefix="oriel-policies-")
    except OSError:
        # A container with a read-only file system. Memory, unlike a file's pages, is not reclaimed under pressure.
        if not hasattr(os, "memfd_create"):
            raise
        return os.fdopen(os.memfd_create("oriel-policies"), "w+b")


async def _started(
    folder: Path, pools: Sequence[str], out: IO[bytes], last: IO[bytes] | None
) -> "subprocess.Popen[bytes]":
    starting = asyncio.ensure_future(asyncio.to_thread(_start, folder, pools, out, last))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        child = await starting  # the thread goes on, and its child must be ended
        child.kill()
        await _stderr_of(child)
        raise


async def _stderr_of(child: "subprocess.Popen[bytes]", timeout_s: float | None = None) -> bytes:
    """Wait in a thread for the end of the child and return its error output. Raises TimeoutExpired.

    If the wait is cancelled, the child is killed, and is waited for all the same: a call that is cancelled while no
    thread is free would never run.
    """
    waiting = asyncio.ensure_future(asyncio.to_thread(child.communicate, timeout=timeout_s))
    try:
        _, stderr = await asyncio.shield(waiting)
    except asyncio.CancelledError:
        child.kill()
        await waiting
        raise
    return stderr


def _start(folder: Path, pools: Sequence[str], out: IO[bytes], last: IO[bytes] | None) -> "subprocess.Popen[bytes]":
    return spawn(
        CHILD,
        str(folder),
        *pools,
        stdin=subprocess.DEVNULL if last is None else last,
        stdout=out,
        stderr=subprocess.PIPE,
        environment=os.environ,
    )


def _read(descriptor: int, folder: Path) -> Snapshot:
    size = os.fstat(descriptor).st_size
    try:
        block = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        if bytes(block[:1]) != b"{":
            return unpack(block)
        line = os.pread(descriptor, min(size, _MAX_LINE), 0).partition(b"\n")[0]
        report = msgspec.json.decode(line, type=Mistakes)
        rest = block[len(line) + 1 :]
        remaining = unpack(rest) if rest else None
    except (ValueError, msgspec.DecodeError) as error:
        raise BadDocument(folder.name, "", "the compiler's answer cannot be read") from error
    bad = BadFolder(*report.mistakes[0])
    bad.others = tuple(BadDocument(*mistake) for mistake in report.mistakes[1:])
    bad.remaining, bad.withdrawn, bad.keys, bad.mark = remaining, report.withdrawn, report.keys, report.mark
    raise bad
