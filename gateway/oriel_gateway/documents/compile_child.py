"""The child process that compiles documents for `compiler`.

This is a process of its own, because compiling a hundred thousand tenants blocks the interpreter for seconds and leaves
some hundred megabytes behind. It writes the packed snapshot into a file that it inherits. It may inherit the previous
output too: what has not changed since is taken from there, so that a revoked key is refused within a second, however
many tenants there are. If the documents have mistakes, or lack a pool, the answer names them (`Mistakes`), and the
file has what is left in force of the previous output: see `oriel_policies.documents.withdrawn`.
"""

import gc
import mmap
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from oriel_gateway.documents.source import FolderSource
from oriel_policies.documents import compile_documents
from oriel_policies.documents.packed import pack, pools_of
from oriel_policies.documents.renewed import renewed, wrong_lines
from oriel_policies.documents.withdrawn import withdrawn
from oriel_policies.errors import BadDocument
from oriel_wire.process.served import Parts, Requests

LARGE_BYTES = 4 * 1024 * 1024
MAX_NAMES = 20  # the most withdrawn names that are logged


class Mistakes(msgspec.Struct):
    """The mistakes of the documents: file, path, reason. withdrawn, keys, mark: see `Withdrawn`."""

    mistakes: list[tuple[str, str, str]]
    withdrawn: list[str] = []
    keys: int = 0
    mark: str = ""


def main() -> None:
    """Answer requests: folder, names of pools, descriptors of the file to write and of the previous output."""
    gc.disable()  # all objects live until the end, which is near
    requests = Requests(file_bytes=None)
    while (given := requests.next()) is not None:
        request, _ = given
        requests.answer(*_compile(request))


def _compile(request: dict[str, Any]) -> tuple[Any, Parts]:
    """Write the output; return the mistakes, None if there are none."""
    last, folder = None, Path(request["folder"])
    if request["last"] is not None:
        size = os.fstat(request["last"]).st_size
        last = memoryview(mmap.mmap(request["last"], size, access=mmap.ACCESS_READ))
    files: dict[str, bytes] | None = None
    unreadable: list[BadDocument] = []
    mistakes = None
    try:
        files, unreadable = FolderSource(folder).readable()
        if unreadable:
            unreadable[0].others = tuple(unreadable[1:])
            raise unreadable[0]
        parts = _compiled(files, last, partial(_check_addressed, folder.name, request["pools"]))
    except BadDocument as bad:
        mistakes = Mistakes([(each.file, each.path, each.reason) for each in (bad, *bad.others)])
        parts = _left(mistakes, files, unreadable, last)
    with open(request["out"], "wb", closefd=False) as out:
        out.writelines(parts)
    return msgspec.to_builtins(mistakes), ()


def _check_addressed(folder: str, addressed: Sequence[str], known: Collection[str]) -> None:
    """Check that the documents have the pools whose addresses the command line names. Raises BadDocument.

    This is a mistake like any other, or it would keep in force what the documents drop.
    """
    for name in addressed:
        if name not in known:
            names = ", ".join(sorted(known))
            fix = f"add [pools.{name}], the command line names its address"
            raise BadDocument(folder, "pools", f"no pool is named {name!r}, only {names}: {fix}")


def _compiled(
    files: dict[str, bytes], last: memoryview | None, check_pools: Callable[[Collection[str]], None]
) -> Sequence[bytes | memoryview]:
    if last is not None:
        parts = renewed(last, files)
        if parts is not None:
            check_pools(pools_of(parts))
            return parts.block()
        # A mistake beside a hundred thousand tenants is found without compiling them: a withdrawal must not wait.
        rest = compile_documents({name: data for name, data in files.items() if not name.endswith(".ndjson")})
        if wrong := wrong_lines(last, files, rest):
            wrong[0].others = tuple(wrong[1:])
            raise wrong[0]
        check_pools(rest.pools)
    if sum(map(len, files.values())) > LARGE_BYTES:
        os.nice(10)  # this is seconds of work, and serving goes first
    snapshot = compile_documents(files)
    check_pools(snapshot.pools)
    return [pack(snapshot, files)]


def _left(
    mistakes: Mistakes, files: dict[str, bytes] | None, unreadable: Sequence[BadDocument], last: memoryview | None
) -> Parts:
    """Return the output that is left in force, and add what was withdrawn to `mistakes`."""
    if files is None or last is None:
        return ()
    left = withdrawn(last, files, {each.file for each in unreadable})
    mistakes.withdrawn, mistakes.keys, mistakes.mark = left.names[:MAX_NAMES], left.keys, left.mark
    return left.parts.block()


if __name__ == "__main__":
    main()
