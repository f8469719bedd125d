"""Documents to snapshot without holding the loop: a child process compiles, this process maps what it wrote."""

import asyncio
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Self

import msgspec

from oriel_gateway.compile_child import Mistakes
from oriel_policies.documents import Snapshot
from oriel_policies.documents.packed import unpack
from oriel_policies.errors import BadDocument

__all__ = ["BadFolder", "FolderCompiler", "compile_folder"]

CHILD = "oriel_gateway.compile_child"
COMPILE_TIMEOUT_S = 120.0
_MAX_STDERR = 4096
_MAX_LINE = 1024 * 1024  # a hundred mistakes are a tenth of that


class BadFolder(BadDocument):
    """The first mistake of a folder. remaining: what was good before less what is `withdrawn` of it, in words and, with
    tenants and issuers left out, in keys; None if there was nothing before or the folder cannot be read. mark: the same
    for the same."""

    def __init__(self, file: str, path: str, reason: str) -> None:
        super().__init__(file, path, reason)
        self.remaining: Snapshot | None = None
        self.withdrawn: list[str] = []
        self.keys = 0
        self.mark = ""


async def compile_folder(folder: Path) -> Snapshot:
    """The snapshot of the documents in `folder`. Raises BadDocument, with `others` for the mistakes after the first.

    Cancelled: the child is killed and nothing is left behind.
    """
    with FolderCompiler(folder) as compiler:
        return await compiler.compile()


class FolderCompiler:
    """Compiles a folder again and again; each time what has not changed is taken from the time before.

    pools: that the documents have to have.
    """

    def __init__(self, folder: Path, pools: Collection[str] = ()) -> None:
        self._folder = folder
        self._pools = sorted(pools)
        self._last: IO[bytes] | None = None  # what is in it has been good

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was compiled last; snapshots that were made of it stay as they are."""
        if self._last is not None:
            self._last.close()
            self._last = None

    async def compile(self) -> Snapshot:
        """As `compile_folder`. One at a time."""
        folder = self._folder
        try:
            out = _unnamed_file()
        except OSError as error:
            raise BadDocument(folder.name, "", f"there is no place to compile to: {error.strerror}") from error
        try:
            try:
                await _fill(out, folder, self._pools, self._last)
            except BadDocument:
                self.close()  # a child that failed begins from nothing the next time
                raise
            snapshot = _read(out.fileno(), folder)
        except BaseException:
            out.close()
            raise
        self.close()
        self._last = out
        return snapshot


async def _fill(out: IO[bytes], folder: Path, pools: Sequence[str], last: IO[bytes] | None) -> None:
    """Have the child write to `out`. Raises BadDocument if it does not."""
    try:
        # From a thread: asyncio forks on the loop, which stands still while a large process is copied.
        child = await _started(folder, pools, out, last)
    except OSError as error:
        raise BadDocument(folder.name, "", f"the compiler cannot be started: {error.strerror}") from error
    try:
        _, said = await asyncio.to_thread(child.communicate, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        child.kill()
        await asyncio.to_thread(child.communicate)
        raise BadDocument(folder.name, "", f"compiling took more than {COMPILE_TIMEOUT_S:g} s") from error
    finally:
        child.kill()  # nothing if it has ended; the thread that waits for it buries it
    if child.returncode != 0:
        end = said[-_MAX_STDERR:].decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise BadDocument(folder.name, "", f"the compiler ended with code {child.returncode}: {end[:300]}")


def _unnamed_file() -> IO[bytes]:
    """Nobody else can open it, and it goes with the last map of it."""
    try:
        return tempfile.TemporaryFile(prefix="oriel-policies-")
    except OSError:
        # A container whose file system is read-only. In memory it is not given back under pressure.
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
        child = await starting  # the thread goes on: what it starts has to be ended
        child.kill()
        await asyncio.to_thread(child.communicate)
        raise


def _start(folder: Path, pools: Sequence[str], out: IO[bytes], last: IO[bytes] | None) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", CHILD, str(folder), *pools],
        stdin=subprocess.DEVNULL if last is None else last,
        stdout=out,
        stderr=subprocess.PIPE,
        env=environment,
    )


def _read(descriptor: int, folder: Path) -> Snapshot:
    size = os.fstat(descriptor).st_size
    try:
        block = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        if bytes(block[:1]) != b"{":
            return unpack(block)
        line = os.pread(descriptor, min(size, _MAX_LINE), 0).partition(b"\n")[0]
        said = msgspec.json.decode(line, type=Mistakes)
        rest = block[len(line) + 1 :]
        remaining = unpack(rest) if rest else None
    except (ValueError, msgspec.DecodeError) as error:
        raise BadDocument(folder.name, "", "the compiler's answer cannot be read") from error
    bad = BadFolder(*said.mistakes[0])
    bad.others = tuple(BadDocument(*mistake) for mistake in said.mistakes[1:])
    bad.remaining, bad.withdrawn, bad.keys, bad.mark = remaining, said.withdrawn, said.keys, said.mark
    raise bad
