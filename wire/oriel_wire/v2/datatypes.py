"""The v2 datatypes: names, numpy dtypes, sizes, and the bytes of BYTES elements.

Everything is little endian and dense. A BYTES element is a uint32 length and that many bytes.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oriel_wire.errors import BadMessage

MAX_DIMENSIONS = 32
# A model may reduce over the empty axis: a result of the other dimensions is then allocated for no input byte.
MAX_EMPTY_EXTENT = 1 << 22
# Each element becomes an object on the loop's thread: more of them would block it for long.
MAX_BYTES_ELEMENTS = 1 << 18
_MAX_COUNT = 2**63 - 1
_MAX_ELEMENTS = _MAX_COUNT // 8
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Datatype:
    """`size` is bytes per element, 0 for BYTES; `json` says whether v2 JSON can carry it."""

    name: str
    dtype: np.dtype[Any]
    size: int
    config_name: str
    json: bool = True


def _table() -> dict[str, Datatype]:
    rows = {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2"}
    for bits in (8, 16, 32, 64):
        rows[f"INT{bits}"] = f"<i{bits // 8}"
        rows[f"UINT{bits}"] = f"<u{bits // 8}"
    table = {
        name: Datatype(name, np.dtype(code), np.dtype(code).itemsize, f"TYPE_{name}", name not in ("FP16", "BF16"))
        for name, code in rows.items()
    }
    table["BYTES"] = Datatype("BYTES", np.dtype(object), 0, "TYPE_STRING")
    return table


DATATYPES: Mapping[str, Datatype] = MappingProxyType(_table())
_BY_CONFIG_NAME = {entry.config_name: name for name, entry in DATATYPES.items()}
CONFIG_DATATYPES = f"it is one of {', '.join(_BY_CONFIG_NAME)}"
_BY_DTYPE = {(entry.dtype.kind, entry.size): name for name, entry in DATATYPES.items() if name != "BF16"}


def quoted(name: str) -> str:
    """A name from outside for an error message: short and printable."""
    return repr(name if len(name) <= 64 else name[:61] + "...")


def shown(shape: Sequence[object]) -> str:
    """A shape for an error message."""
    text = ", ".join(str(dim)[:24] for dim in shape[:8])
    return f"[{text}, ...]" if len(shape) > 8 else f"[{text}]"


def lookup(datatype: str, what: str) -> Datatype:
    """The entry of a v2 name; `what` names the tensor in the BadMessage raised for an unknown one."""
    entry = DATATYPES.get(datatype)
    if entry is None:
        raise BadMessage(f"{what}: datatype {quoted(datatype)} is not one of {', '.join(DATATYPES)}")
    return entry


def name_of(dtype: np.dtype[Any]) -> str:
    """The v2 name of a numpy dtype; text, byte strings and objects are BYTES.

    numpy itself has no BF16: a dtype named bfloat16 (ml_dtypes) is accepted as BF16.
    Raises BadMessage for others.
    """
    if dtype.kind in "OSU":
        return "BYTES"
    if dtype.name == "bfloat16":
        return "BF16"
    name = _BY_DTYPE.get((dtype.kind, dtype.itemsize))
    if name is None:
        raise BadMessage(f"arrays of {dtype} have no v2 datatype")
    return name


def to_config_name(datatype: str) -> str:
    """FP32 -> TYPE_FP32, BYTES -> TYPE_STRING (the names of model configurations)."""
    return lookup(datatype, "model configuration").config_name


def from_config_name(config_name: str) -> str:
    """TYPE_FP32 -> FP32, TYPE_STRING -> BYTES. Raises BadMessage for others, TYPE_INVALID included."""
    name = _BY_CONFIG_NAME.get(config_name)
    if name is None:
        raise BadMessage(f"model configuration: {quoted(config_name)} is not a tensor datatype: {CONFIG_DATATYPES}")
    return name


def element_count(shape: Sequence[int], what: str) -> int:
    """Elements in a concrete shape, in unbounded integers. Raises BadMessage for what no array can have."""
    check_dimensions(len(shape), what)
    count = math.prod(shape)
    if shape and min(shape) < 0:
        raise BadMessage(f"{what}: shape {shown(shape)} has a negative dimension")
    # numpy judges an empty shape by its other dimensions
    extent = count or math.prod(filter(None, shape))
    if extent > _MAX_ELEMENTS:
        if extent > _MAX_COUNT:
            reason = f"causes total element count to exceed maximum size of {_MAX_COUNT}"
            raise BadMessage(f"{what}: shape {shown(shape)} {reason}")
        raise BadMessage(f"byte size overflow for {what}: shape {shown(shape)} is larger than any tensor can be")
    if not count and extent > MAX_EMPTY_EXTENT:
        raise BadMessage(
            f"{what}: shape {shown(shape)} has no elements; the product of its other dimensions may be "
            f"{MAX_EMPTY_EXTENT} at most"
        )
    return count


def check_dimensions(rank: int, what: str) -> None:
    """Raise BadMessage for more dimensions than a tensor may have."""
    if rank > MAX_DIMENSIONS:
        raise BadMessage(f"{what}: {rank} dimensions, at most {MAX_DIMENSIONS} are supported")


def check_bytes_count(count: int, what: str) -> None:
    """Raise BadMessage for more BYTES elements than one tensor may have."""
    if count > MAX_BYTES_ELEMENTS:
        raise BadMessage(f"{what}: {count} BYTES elements, at most {MAX_BYTES_ELEMENTS} are accepted in one tensor")


def deserialize_bytes(
    data: bytes | memoryview, count: int, what: str, *, begin: int = 0, end: int | None = None
) -> NDArray[Any]:
    """`count` length-prefixed elements of data[begin:end] -> object array [count] of bytes.

    Raises BadMessage unless the elements fill it exactly; nothing is allocated before `count` prefixes are known to
    fit.
    """
    stop = len(data) if end is None else end
    if count > (stop - begin) // 4:
        raise BadMessage(f"expected {count} string elements for inference {what}, got {(stop - begin) // 4} at most")
    check_bytes_count(count, what)
    unpack = _LENGTH.unpack_from
    elements: list[bytes | memoryview] = []
    add = elements.append
    offset = begin
    for index in range(count):
        start = offset + 4
        if start > stop:
            raise BadMessage(f"expected {count} string elements for inference {what}, got {index}")
        offset = start + unpack(data, offset)[0]
        if offset > stop:
            text = f"expecting string of length {offset - start} but only {stop - start} bytes available"
            raise BadMessage(f"incomplete string data for inference {what}, {text}")
        add(data[start:offset])
    if offset != stop:
        raise BadMessage(f"unexpected number of string elements {count + 1} for inference {what}, expecting {count}")
    array = np.empty(count, dtype=object)
    array[:] = elements if isinstance(data, bytes) else [bytes(each) for each in elements]
    return array


def serialize_bytes(array: NDArray[Any], what: str) -> bytes:
    """The inverse of `deserialize_bytes`, row-major; str elements are written as UTF-8."""
    parts: list[bytes] = []
    for element in to_bytes_array(array, what).flat:
        parts.append(_LENGTH.pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def to_bytes_array(array: NDArray[Any], what: str) -> NDArray[Any]:
    """An object array of bytes with the same shape; text becomes UTF-8. Raises BadMessage for other things."""
    if array.dtype.kind == "O" and all(type(element) is bytes for element in array.flat):
        return array
    result = np.empty(array.size, dtype=object)
    for index, element in enumerate(array.flat):
        if isinstance(element, str):
            try:
                result[index] = element.encode()
            except UnicodeEncodeError as error:
                raise BadMessage(f"{what}: element {index} is not valid Unicode text") from error
        elif isinstance(element, bytes):
            result[index] = bytes(element)
        else:
            raise BadMessage(f"{what}: BYTES elements must be text or bytes, element {index} is neither")
    return result.reshape(array.shape)


def decode_raw(
    data: bytes | memoryview, offset: int, size: int, entry: Datatype, shape: tuple[int, ...], what: str
) -> NDArray[Any]:
    """The wire bytes data[offset:offset + size] -> array [shape]: a view, or a copy for BYTES.

    `offset + size` must lie within `data`. Raises BadMessage unless `size` is exactly what the shape needs.
    """
    count = element_count(shape, what)
    if not entry.size:
        return deserialize_bytes(data, count, what, begin=offset, end=offset + size).reshape(shape)
    if size != count * entry.size:
        raise wrong_size(what, count * entry.size, size)
    return np.ndarray(shape, entry.dtype, data, offset)  # one object; frombuffer and reshape would be two


def wrong_size(what: str, expected: int, got: int) -> BadMessage:
    """The refusal of a tensor whose data has another number of bytes than its shape; what: "input 'x'"."""
    return BadMessage(f"{what.partition(' ')[0]} byte size mismatch for {what}. Expected {expected}, got {got}")


def raw_view(array: NDArray[Any], datatype: str, shape: tuple[int, ...], what: str) -> bytes | memoryview:
    """The wire bytes of an array: a view where its memory already is the wire form.

    Raises BadMessage if the array does not have the datatype's dtype and the shape.
    """
    entry = lookup(datatype, what)
    if array.shape != shape:
        raise BadMessage(f"{what}: its shape is {shown(shape)}, its array has {shown(array.shape)}")
    if not entry.size:
        return serialize_bytes(array, what)
    if array.dtype != entry.dtype:
        raise BadMessage(f"{what}: {datatype} needs an array of {entry.dtype.name}, not {array.dtype}")
    return np.ascontiguousarray(array, dtype=entry.dtype).reshape(-1).view(np.uint8).data
