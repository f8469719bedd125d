"""Reads what the engine does not report of a GGUF file: how many tokens its model takes, and that the file is whole.

The engine answers from a file that is cut off with whatever lies behind its end.
"""

import math
import struct
from pathlib import Path
from typing import BinaryIO

from oriel_inference.errors import LoadFailed

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAX_ENTRIES, _MAX_DIMS = 1 << 16, 8
# type of a tensor -> weights and bytes of one of its blocks; those of other types count as none
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}


def context_of(path: Path) -> int:
    """Return the value of `<architecture>.context_length`. Raises LoadFailed, also if the file is cut off."""
    context, alignment = 0, 32
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _number(file, "I") < 2:
                raise LoadFailed(f"{path.name} is not a GGUF file of version 2 or later: convert it again")
            tensors, entries = _number(file, "Q"), _number(file, "Q")
            for _ in range(min(entries, _MAX_ENTRIES)):
                key = file.read(_number(file, "Q") & 0xFFFF)
                value = _value(file, _number(file, "I"))
                context = value if key.endswith(b".context_length") else context
                alignment = value if key == b"general.alignment" else alignment
            end = max((_tensor_end(file) for _ in range(min(tensors, _MAX_ENTRIES))), default=0)
            begin = math.ceil(file.tell() / max(1, alignment)) * max(1, alignment)
            whole = begin + end <= path.stat().st_size
    except (OSError, struct.error, KeyError, OverflowError, ValueError):
        whole = False
    if not whole:
        raise LoadFailed(f"{path.name} is cut off or damaged: copy it again")
    if context < 2:
        raise LoadFailed(f"{path.name} names no context_length: convert it again")
    return context


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0])


def _value(file: BinaryIO, kind: int) -> int:
    """Read a value; return it if it is a number."""
    if kind not in (_TEXT, _ARRAY):
        return _number(file, _NUMBERS[kind])
    kind, count = (_number(file, "I"), _number(file, "Q")) if kind == _ARRAY else (kind, 1)
    if kind != _TEXT:
        file.seek(count * struct.calcsize(_NUMBERS[kind]), 1)
    else:
        for _ in range(count):
            file.seek(_number(file, "Q"), 1)
    return 0


def _tensor_end(file: BinaryIO) -> int:
    """Read the description of a tensor; return where it ends behind the descriptions."""
    file.seek(_number(file, "Q"), 1)
    weights = math.prod(_number(file, "Q") for _ in range(min(_number(file, "I"), _MAX_DIMS)))
    per_block, size_bytes = _BLOCKS.get(_number(file, "I"), (1, 0))
    return _number(file, "Q") + weights // per_block * size_bytes
