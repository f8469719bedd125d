"""Reads what the engine does not report of a GGUF file: how many tokens its model takes, and that the file is whole.

The engine answers from a file that is cut off with whatever lies behind its end.
"""

import re
import struct
from math import prod
from pathlib import Path

from oriel_inference.errors import LoadFailed

_HEAD_BYTES = 32 << 20  # more than the vocabulary and the descriptions of the tensors take
_ALIGN = 32
_CONTEXT = re.compile(rb"\.context_length[\4\5]\0\0\0(.{4})", re.DOTALL)
_TENSOR = re.compile(rb"\.(?:weight|bias)([\1-\4])\0\0\0")  # how the engine's models name them; number of dimensions
# type of a tensor -> weights and bytes of one of its blocks; those of other types count as none
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}


def context_of(path: Path) -> int:
    """Return the value of `<architecture>.context_length`. Raises LoadFailed, also if the file is cut off."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head[:4] != b"GGUF" or head[4:8] < b"\2":
        raise LoadFailed(f"{path.name} is not a GGUF file of version 2 or later: convert it again")
    described = end = 0
    try:
        for found in _TENSOR.finditer(head):
            *dims, kind, at = struct.unpack_from(f"<{found[1][0]}QIQ", head, found.end())
            weights, size_bytes = _BLOCKS.get(kind, (1, 0))
            described = found.end() + 8 * len(dims) + 12
            end = max(end, at + prod(dims) // weights * size_bytes)
        is_whole = 0 < -(-described // _ALIGN) * _ALIGN + end <= path.stat().st_size
    except struct.error:
        is_whole = False
    if not is_whole:
        raise LoadFailed(f"{path.name} is cut off or damaged: copy it again")
    named = _CONTEXT.search(head)
    if (context := int.from_bytes(named[1], "little") if named else 0) < 2:
        raise LoadFailed(f"{path.name} names no context_length: convert it again")
    return context
