"""Reads the one fact of a GGUF file that the engine does not report: how many tokens its model takes."""

import struct
from pathlib import Path
from typing import BinaryIO

from oriel_inference.errors import LoadFailed

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MAX_ENTRIES = 4096


def context_of(path: Path) -> int:
    """Return the value of `<architecture>.context_length`. Raises LoadFailed."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _number(file, "I") < 2:
                raise LoadFailed(f"{path.name} is not a GGUF file of version 2 or later: convert it again")
            file.seek(8, 1)  # the number of tensors
            for _ in range(min(_number(file, "Q"), _MAX_ENTRIES)):
                key = file.read(_number(file, "Q") & 0xFFFF)
                kind = _number(file, "I")
                if key.endswith(b".context_length") and kind in (4, 5, 10, 11):
                    return max(2, _number(file, _NUMBERS[kind]))
                _skip(file, kind)
    except (OSError, struct.error, KeyError) as error:
        raise LoadFailed(f"{path.name} is cut off or damaged: copy it again") from error
    raise LoadFailed(f"{path.name} names no context_length: convert it again")


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0])


def _skip(file: BinaryIO, kind: int) -> None:
    """Skip a value, or all values of an array."""
    count = 1
    if kind == _ARRAY:
        kind, count = _number(file, "I"), _number(file, "Q")
    if kind == _TEXT:
        for _ in range(count):
            file.seek(_number(file, "Q"), 1)
    else:
        file.seek(count * struct.calcsize(_NUMBERS[kind]), 1)
