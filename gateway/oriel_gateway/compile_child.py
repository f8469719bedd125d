"""`python -m oriel_gateway.compile_child FOLDER`: a folder of documents to a packed snapshot on standard output.

A process of its own, because compiling a hundred thousand tenants holds the interpreter for seconds and leaves some
hundred megabytes behind. If the documents are not good, the output is a JSON list of [file, path, reason] instead.
"""

import gc
import os
import sys
from pathlib import Path

import msgspec

from oriel_gateway.sources import FolderSource
from oriel_policies.documents import compile_documents
from oriel_policies.documents.packed import pack
from oriel_policies.errors import BadDocument

__all__ = ["LARGE_BYTES", "main"]

LARGE_BYTES = 4 * 1024 * 1024


def main(folder: str) -> None:
    """Write the answer; exit code 0 whether the documents are good or not."""
    gc.disable()  # it all lives until the end, which is near
    try:
        files = FolderSource(Path(folder)).read()
        if sum(map(len, files.values())) > LARGE_BYTES:
            os.nice(10)  # seconds of work: those who serve go first
        packed = pack(compile_documents(files))
    except BadDocument as bad:
        packed = msgspec.json.encode([(each.file, each.path, each.reason) for each in (bad, *bad.others)])
    with open(1, "wb", closefd=False) as out:
        out.write(packed)
    # Without the clean-up of a hundred thousand objects.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
