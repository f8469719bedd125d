"""Reads the references of an ONNX model to other files, without a runtime.

Weights may lie in other files, named in the model file by its author. The runtime opens any name, so the names are read
first, and only those of regular files in the version's own folder are allowed.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_wire.v2.proto import model_config_pb2 as pb

MAX_DEPTH = 32
MAX_FIELDS = 20_000_000
MAX_LOCATIONS = 100_000
_PICKLE = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
_ZIP = b"PK\x03\x04"

# message -> {field number: message inside it}; the numbers are those of the public onnx.proto.
_TENSOR, _ENTRY = "tensor", "entry"
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
    _TENSOR: {13: _ENTRY},
}


def operator_libraries(config: pb.ModelConfig, file: str, folder: Path | None) -> tuple[str, ...]:
    """Return the paths of the libraries of custom operators that a configuration names.

    folder: the only folder that they may lie in, because they are code that runs in this process; None for none.
    Raises ConfigInvalid.
    """
    found = []
    for index, name in enumerate(config.model_operations.op_library_filename):
        path = Path() if folder is None or "\0" in name else (folder / name).resolve()
        if folder is None or not path.is_relative_to(folder.resolve()) or not path.is_file():
            reason = f"{name[:64]!r} is not in a folder that --allow-custom-ops DIR names: its code runs in the server"
            raise ConfigInvalid(file, f"model_operations.op_library_filename[{index}]", reason)
        found.append(str(path))
    return tuple(found)


def check_model_file(path: Path, shown: str) -> None:
    """Refuse a file that is not ONNX, and external weights that are not files of the version's own folder.

    shown: the file's name in errors. Raises LoadFailed.
    """
    with path.open("rb") as file:
        head = file.read(4)
        if head.startswith(_PICKLE) or head == _ZIP:
            raise LoadFailed(
                f"{shown} is a Python pickle or archive, which is never loaded: docs/your-model.md shows what to do"
            )
        if not head:
            raise LoadFailed(f"{shown} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                locations = external_locations(data)
            except ValueError as error:
                raise LoadFailed(f"{shown} is not a whole ONNX file: {error}") from error
    folder = path.parent.resolve()
    for location in sorted(locations):
        name = location[:100]
        parts = location.split("/")
        if "*" in location:
            # Older runtimes read such a name as an address in their own memory.
            raise LoadFailed(f"{shown} refers to weights in {name!r}: the name of a file must have no asterisk")
        if location.startswith("/") or "\\" in location or "\0" in location or ".." in parts:
            raise LoadFailed(f"{shown} refers to weights outside its version folder: {name!r}")
        target = (folder / location).resolve()
        if not target.is_relative_to(folder):
            raise LoadFailed(f"{shown} refers to weights outside its version folder: {name!r}")
        if not target.is_file():
            raise LoadFailed(f"{shown} refers to weights in {name!r}, which is missing")


def external_locations(data: "bytes | mmap.mmap") -> set[str]:
    """Return the names of the files that hold weights. Raises ValueError if `data` is not well-formed."""
    found: set[str] = set()
    waiting = [("model", 0, len(data), 0)]
    budget = MAX_FIELDS
    while waiting:
        kind, start, end, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError("messages are nested too deeply")
        inside = _INSIDE[kind]
        for field, begin, stop in _fields(data, start, end):
            budget -= 1
            if budget < 0:
                raise ValueError("it has too many fields")
            child = inside.get(field)
            if child == _ENTRY:
                key, value = _entry(data, begin, stop)
                if key == "location":
                    found.add(value)
                    if len(found) > MAX_LOCATIONS:
                        raise ValueError("it names too many files")
            elif child is not None:
                waiting.append((child, begin, stop, depth + 1))
    return found


def _fields(data: "bytes | mmap.mmap", at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, end) of every length-delimited field between `at` and `end`."""
    while at < end:
        tag, at = _varint(data, at, end)
        if not tag >> 3:
            raise ValueError("a field has no number")
        match tag & 7:
            case 0:
                _, at = _varint(data, at, end)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(data, at, end)
                if length > end - at:
                    raise ValueError("a field is longer than the file, the upload may be incomplete")
                yield tag >> 3, at, at + length
                at += length
            case _:
                raise ValueError("a field has an unknown kind")
        if at > end:
            raise ValueError("it ends in the middle of a field, the upload may be incomplete")


def _varint(data: "bytes | mmap.mmap", at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("it ends in the middle of a field, the upload may be incomplete")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")


def _entry(data: "bytes | mmap.mmap", start: int, end: int) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    for field, begin, stop in _fields(data, start, end):
        if field in texts:
            if stop - begin > 4096:
                raise ValueError("a file name is too long")
            texts[field] = bytes(data[begin:stop]).decode("utf-8", "replace")
    return texts[1], texts[2]
