"""Compile documents and write the packed snapshot to standard output.

Usage: `python -m oriel_gateway.documents.compile_child FOLDER [POOL]...`

This is a process of its own, because compiling a hundred thousand tenants blocks the interpreter for seconds and leaves
some hundred megabytes behind. Standard input is the previous output, or empty: what has not changed since is taken from
there, so that a revoked key is refused within a second, however many tenants there are. If the documents have mistakes,
or lack one of these pools, the output is a line of JSON (`Mistakes`), followed by what is left in force of the previous
output: see `oriel_policies.documents.withdrawn`.
"""

import gc
import mmap
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from oriel_gateway.documents.source import FolderSource
from oriel_policies.documents import compile_documents
from oriel_policies.documents.packed import pack, pools_of
from oriel_policies.documents.renewed import renewed, wrong_lines
from oriel_policies.documents.withdrawn import withdrawn
from oriel_policies.errors import BadDocument

LARGE_BYTES = 4 * 1024 * 1024
MAX_NAMES = 20  # the most withdrawn names that are logged


class Mistakes(msgspec.Struct):
    """The mistakes of the documents: file, path, reason. withdrawn, keys, mark: see `Withdrawn`."""

    mistakes: list[tuple[str, str, str]]
    withdrawn: list[str] = []
    keys: int = 0
    mark: str = ""


def main(folder: str, pools: Sequence[str] = ()) -> None:
    """Write the output. The exit code is 0 whether the documents are good or not."""
    gc.disable()  # all objects live until the end, which is near
    size = os.fstat(0).st_size
    last = memoryview(mmap.mmap(0, size, access=mmap.ACCESS_READ)) if size else None
    files: dict[str, bytes] | None = None
    unreadable: list[BadDocument] = []
    try:
        files, unreadable = FolderSource(Path(folder)).readable()
        if unreadable:
            unreadable[0].others = tuple(unreadable[1:])
            raise unreadable[0]
        answer = _compiled(files, last, _Addressed(Path(folder).name, pools))
    except BadDocument as bad:
        mistakes = Mistakes([(each.file, each.path, each.reason) for each in (bad, *bad.others)])
        answer = _refused(mistakes, files, unreadable, last)
    with open(1, "wb", closefd=False) as out:
        out.writelines(answer)
    # Exit without the clean-up of a hundred thousand objects.
    os._exit(0)


class _Addressed:
    """The pools whose addresses the command line names: documents without one of them have a mistake.

    This is checked here, like any other mistake, or it would keep in force what the documents drop.
    """

    def __init__(self, folder: str, pools: Sequence[str]) -> None:
        self._folder = folder
        self._pools = pools

    def check(self, known: Collection[str]) -> None:
        """Check the pools. Raises BadDocument."""
        for name in self._pools:
            if name not in known:
                names = ", ".join(sorted(known))
                fix = f"add [pools.{name}], the command line names its address"
                raise BadDocument(self._folder, "pools", f"no pool is named {name!r}, only {names}: {fix}")


def _compiled(files: dict[str, bytes], last: memoryview | None, addressed: _Addressed) -> Sequence[bytes | memoryview]:
    if last is not None:
        parts = renewed(last, files)
        if parts is not None:
            addressed.check(pools_of(parts))
            return parts.block()
        # A mistake beside a hundred thousand tenants is found without compiling them: a withdrawal must not wait.
        rest = compile_documents({name: data for name, data in files.items() if not name.endswith(".ndjson")})
        if wrong := wrong_lines(last, files, rest):
            wrong[0].others = tuple(wrong[1:])
            raise wrong[0]
        addressed.check(rest.pools)
    if sum(map(len, files.values())) > LARGE_BYTES:
        os.nice(10)  # this is seconds of work, and serving goes first
    snapshot = compile_documents(files)
    addressed.check(snapshot.pools)
    return [pack(snapshot, files)]


def _refused(
    mistakes: Mistakes, files: dict[str, bytes] | None, unreadable: Sequence[BadDocument], last: memoryview | None
) -> Sequence[bytes | memoryview]:
    if files is None or last is None:
        return [msgspec.json.encode(mistakes), b"\n"]
    left = withdrawn(last, files, {each.file for each in unreadable})
    mistakes.withdrawn, mistakes.keys, mistakes.mark = left.names[:MAX_NAMES], left.keys, left.mark
    return [msgspec.json.encode(mistakes), b"\n", *left.parts.block()]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
