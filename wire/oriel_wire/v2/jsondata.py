"""The `data` member of v2 JSON tensors: lists of numbers, booleans or text <-> arrays.

Elements are type-checked while msgspec decodes them (a boolean is not a number, "1" is not 1, 1.0 is not
an integer), so that numpy only ever sees one kind of value and no Python loop runs over numbers.
"""

import json
import re
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import Datatype, check_bytes_count, element_count, shown, to_bytes_array
from oriel_wire.v2.depth import MAX_DEPTH

_ELEMENT_TYPES: dict[str, type] = {"f": float, "b": bool, "O": str}
_decoders: dict[tuple[type, int], tuple[Any, msgspec.json.Decoder[Any]]] = {}
_COUNTED_BYTES = 1 << 16
_OPENING = re.compile(rb"[ \t\r\n\[]*")
_packer = msgspec.msgpack.Encoder()
_PACKED = np.dtype([("tag", "u1"), ("value", ">f8")])  # a number in MessagePack


def decode_data(data: msgspec.Raw | list[Any], entry: Datatype, shape: tuple[int, ...], what: str) -> NDArray[Any]:
    """JSON `data` -> array [shape].

    data: the undecoded JSON text, or the list itself where NaN or infinities forced another decoder.
    It may be flat in row-major order or nested like the shape (dimensions of one may be left out).
    Raises BadMessage if elements have the wrong type or range, or their number is not the shape's.
    """
    if not entry.json:
        raise BadMessage(f"{what}: {entry.name} cannot travel as JSON, send it as binary data")
    count = element_count(shape, what)
    if not entry.size:
        check_bytes_count(count, what)
    element_type = _ELEMENT_TYPES.get(entry.dtype.kind, int)
    depth = _depth(data)
    if not 1 <= depth <= MAX_DEPTH:
        raise BadMessage(f"{what}: data must be a list, flat or nested like shape {shown(shape)}")
    if element_type is not str and isinstance(data, msgspec.Raw) and len(text := memoryview(data)) > _COUNTED_BYTES:
        # Decoding millions of lists takes seconds, so values are counted first: a comma follows each but the last.
        given = int(np.count_nonzero(np.frombuffer(text, np.uint8) == 0x2C)) + 1
        if given > max(count, 1):
            raise BadMessage(f"{what}: shape {shown(shape)} has {count} elements, data holds {given}")
    list_type, decoder = _decoder(element_type, depth)
    try:
        values = decoder.decode(data) if isinstance(data, msgspec.Raw) else msgspec.convert(data, list_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{what}: data does not hold {entry.name} elements: {str(error)[:160]}") from error
    if depth == 1 and len(values) != count:  # before anything is allocated
        raise BadMessage(f"{what}: shape {shown(shape)} has {count} elements, data holds {len(values)}")
    array = _to_array(values, depth, entry, what)
    if depth > 1 and not _same_layout(array.shape, shape):
        raise BadMessage(f"{what}: data is nested as {shown(array.shape)}, the shape is {shown(shape)}")
    return array.reshape(shape)


def encode_data(array: NDArray[Any], entry: Datatype, shape: tuple[int, ...], what: str) -> list[Any] | msgspec.Raw:
    """An array as what msgspec writes as the flat `data` list; the inverse of `decode_data`.

    NaN and infinities are written as the words other v2 servers and Python write. Raises BadMessage for
    FP16, BF16 and BYTES that are not UTF-8: those need binary data.
    """
    if not entry.json:
        raise BadMessage(f"{what}: {entry.name} cannot travel as JSON, ask for it as binary data")
    if array.shape != shape:
        raise BadMessage(f"{what}: its shape is {shown(shape)}, its array has {shown(array.shape)}")
    if entry.dtype.kind == "O":
        try:
            return [element.decode() for element in to_bytes_array(array, what).flat]
        except UnicodeDecodeError as error:
            raise BadMessage(f"{what}: its bytes are not UTF-8 text, ask for it as binary data") from error
    if array.dtype != entry.dtype:
        raise BadMessage(f"{what}: {entry.name} needs an array of {entry.dtype.name}, not {array.dtype}")
    values: list[Any] = array.reshape(-1).tolist()
    if entry.dtype.kind == "f" and not np.isfinite(array).all():
        return msgspec.Raw(json.dumps(values).encode())
    return values


def _depth(data: msgspec.Raw | list[Any]) -> int:
    """The depth of nesting at the first element."""
    if isinstance(data, msgspec.Raw):
        opening = _OPENING.match(memoryview(data))
        return opening.group().count(b"[") if opening else 0
    depth = 0
    level: Any = data
    while isinstance(level, list):
        depth += 1
        level = level[0] if level else None
    return depth


def _decoder(element_type: type, depth: int) -> tuple[Any, msgspec.json.Decoder[Any]]:
    found = _decoders.get((element_type, depth))
    if found is None:
        list_type: Any = element_type
        for _ in range(depth):
            list_type = list[list_type]
        found = _decoders[element_type, depth] = (list_type, msgspec.json.Decoder(list_type))
    return found


def _to_array(values: list[Any], depth: int, entry: Datatype, what: str) -> NDArray[Any]:
    try:
        if entry.dtype.kind == "O":
            array = np.array(values, dtype=object)
            flat = np.empty(array.size, dtype=object)
            flat[:] = [text.encode() for text in array.reshape(-1)]  # `flat` stops at 32 dimensions
            return flat.reshape(array.shape)
        if entry.dtype.kind != "f":
            return np.array(values, dtype=entry.dtype)
        wide = _floats(values, depth)
    except OverflowError as error:
        info = np.iinfo(entry.dtype)
        raise BadMessage(f"{what}: data has a value outside {entry.name} ({info.min} to {info.max})") from error
    except (ValueError, AttributeError, UnicodeEncodeError) as error:
        raise BadMessage(f"{what}: data is nested unevenly") from error
    with np.errstate(over="ignore", under="ignore"):
        array = wide.astype(entry.dtype)
    if not np.isfinite(array).all() and not np.array_equal(np.isfinite(array), np.isfinite(wide)):
        raise BadMessage(f"{what}: data has a number outside the range of {entry.name}")
    return array


def _floats(values: list[Any], depth: int) -> NDArray[np.float64]:
    """Floats, nested `depth` deep, as an array, which may be a view. Raises ValueError if they are nested unevenly.

    A writer of MessagePack puts them side by side five times as fast as numpy reads objects.
    """
    shape = [len(values)]
    for _ in range(depth - 1):
        (length,) = set(map(len, values))
        shape.append(length)
        values = list(chain.from_iterable(values))
    packed = _packer.encode(values)
    count = len(values)
    return np.frombuffer(packed, _PACKED, count, len(packed) - count * _PACKED.itemsize)["value"].reshape(shape)


def _same_layout(nested: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether both shapes hold the same elements in the same order.

    They may differ only in dimensions of size 1.
    """
    if 0 in nested or 0 in shape:
        return 0 in nested and 0 in shape
    return [dim for dim in nested if dim != 1] == [dim for dim in shape if dim != 1]
