"""Compiles documents without holding up the event loop: a child process compiles, this one maps its output."""

import mmap
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Self

import msgspec

from oriel_gateway.documents.compile_child import Mistakes
from oriel_policies.documents import Snapshot
from oriel_policies.documents.packed import unpack
from oriel_policies.errors import BadDocument
from oriel_wire.process.helper import Helper, HelperEnded, HelperLate

CHILD = "oriel_gateway.documents.compile_child"
COMPILE_TIMEOUT_S = 120.0


class BadFolder(BadDocument):
    """The first mistake of a folder.

    remaining: the previous snapshot without what the documents withdrew; None if there was no previous one, or if the
        folder cannot be read.
    withdrawn: names of what was withdrawn. keys: the number of withdrawn keys; tenants and issuers are not counted.
    mark: equal when the same was withdrawn.
    """

    def __init__(self, mistakes: Mistakes, remaining: Snapshot | None) -> None:
        super().__init__(*mistakes.mistakes[0])
        self.others = tuple(BadDocument(*mistake) for mistake in mistakes.mistakes[1:])
        self.withdrawn, self.keys, self.mark = mistakes.withdrawn, mistakes.keys, mistakes.mark
        self.remaining = remaining


class FolderCompiler:
    """Compiles a folder again and again; what has not changed is taken from the previous output.

    pools: names of pools that the documents must contain.
    timeout_s: seconds allowed for one compilation.
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
            raise BadDocument(
                folder.name, "", f"a temporary file for the compiled policies cannot be made: {error.strerror}"
            ) from error
        try:
            try:
                mistakes = await self._fill(out)
            except BadDocument:
                self.close()  # start from nothing after a child that failed
                raise
            snapshot = _read(out.fileno(), mistakes, folder)
        except BaseException:
            out.close()
            raise
        self.close()
        self._last = out
        return snapshot

    async def _fill(self, out: IO[bytes]) -> Mistakes | None:
        """Let the child write to `out`; return the mistakes in the documents. Raises BadDocument if it fails."""
        request = {"folder": str(self._folder), "pools": self._pools, "out": out.fileno(), "last": None}
        descriptors = [out.fileno()]
        if self._last is not None:
            request["last"] = self._last.fileno()
            descriptors.append(self._last.fileno())
        name = self._folder.name
        try:
            answer, _ = await Helper(CHILD, descriptors=descriptors).ask_once(request, timeout_s=self._timeout_s)
            return msgspec.convert(answer, Mistakes | None)
        except HelperLate:
            raise BadDocument(name, "", f"compiling took more than {self._timeout_s:g} s") from None
        except HelperEnded as ended:
            raise BadDocument(name, "", f"the compiling process {ended}") from None
        except msgspec.ValidationError as error:
            raise BadDocument(name, "", "the compiling process sent an unreadable answer") from error
        except OSError as error:
            raise BadDocument(name, "", f"cannot start the compiling process: {error.strerror}") from error


def _unnamed_file() -> IO[bytes]:
    """A file that no other process can open and that is freed with its last mapping."""
    try:
        return tempfile.TemporaryFile(prefix="oriel-policies-")
    except OSError:
        # A container with a read-only file system. Memory, unlike a file's pages, is not reclaimed under pressure.
        if not hasattr(os, "memfd_create"):
            raise
        return os.fdopen(os.memfd_create("oriel-policies"), "w+b")


def _read(descriptor: int, mistakes: Mistakes | None, folder: Path) -> Snapshot:
    """Map the output. Raises BadFolder if there are mistakes."""
    try:
        empty = not os.fstat(descriptor).st_size
        snapshot = None if empty else unpack(memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)))
    except (ValueError, msgspec.DecodeError) as error:
        raise BadDocument(folder.name, "", "the compiler's output cannot be read") from error
    if mistakes is not None:
        raise BadFolder(mistakes, snapshot)
    if snapshot is None:
        raise BadDocument(folder.name, "", "the compiler has written nothing")
    return snapshot
