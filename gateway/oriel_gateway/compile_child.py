"""`python -m oriel_gateway.compile_child FOLDER`: a folder of documents to a packed snapshot on standard output.

A process of its own, because compiling a hundred thousand tenants holds the interpreter for seconds and leaves some
hundred megabytes behind. Standard input is the answer of the time before, or empty: what has not changed since is taken
from there, so that a revoked key is refused within a second, whoever else there is. If the documents are not good, the
output is a JSON list of [file, path, reason] instead.
"""

import gc
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from oriel_gateway.sources import FolderSource
from oriel_policies.documents import compile_documents
from oriel_policies.documents.packed import pack
from oriel_policies.documents.renewed import renewed
from oriel_policies.errors import BadDocument

__all__ = ["LARGE_BYTES", "main"]

LARGE_BYTES = 4 * 1024 * 1024


def main(folder: str) -> None:
    """Write the answer; exit code 0 whether the documents are good or not."""
    gc.disable()  # it all lives until the end, which is near
    try:
        answer = _compiled(FolderSource(Path(folder)).read())
    except BadDocument as bad:
        answer = [msgspec.json.encode([(each.file, each.path, each.reason) for each in (bad, *bad.others)])]
    with open(1, "wb", closefd=False) as out:
        out.writelines(answer)
    # Without the clean-up of a hundred thousand objects.
    os._exit(0)


def _compiled(files: dict[str, bytes]) -> Sequence[bytes | memoryview]:
    size = os.fstat(0).st_size
    if size:
        parts = renewed(memoryview(mmap.mmap(0, size, access=mmap.ACCESS_READ)), files)
        if parts is not None:
            return parts.block()
    if sum(map(len, files.values())) > LARGE_BYTES:
        os.nice(10)  # seconds of work: those who serve go first
    return [pack(compile_documents(files), files)]


if __name__ == "__main__":
    main(sys.argv[1])
