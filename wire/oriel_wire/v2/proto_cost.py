"""What parsing a protobuf message would cost, found before it is parsed.

A field of two bytes can become an object of a hundred, and a varint of one byte a tensor element of eight: a message
that is allowed to arrive may need many times its size. Large messages are therefore walked by their own descriptor
first, without allocating for what they hold. Small ones cannot do harm and are not looked at.
"""

from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from oriel_wire.errors import BadMessage, TooLarge

__all__ = ["MAX_FIELDS", "MAX_UNPACKED_BYTES", "parse"]

MAX_FIELDS = 20_000
MAX_UNPACKED_BYTES = 64 << 20
FREE_BYTES = 64 * 1024
_STEP = 1 << 20
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_PLAIN = {_FIXED64: 8, _FIXED32: 4}
_WIDTHS = {
    FieldDescriptor.CPPTYPE_INT64: 8,
    FieldDescriptor.CPPTYPE_UINT64: 8,
    FieldDescriptor.CPPTYPE_INT32: 4,
    FieldDescriptor.CPPTYPE_UINT32: 4,
    FieldDescriptor.CPPTYPE_ENUM: 4,
    FieldDescriptor.CPPTYPE_BOOL: 1,
}


def parse(kind: type[Message], data: bytes, *, limit_bytes: int = MAX_UNPACKED_BYTES) -> Any:
    """The message. limit_bytes: how large its numbers may be together once they are unpacked.

    Raises BadMessage if the bytes are no such message; TooLarge if it has too many fields or numbers.
    """
    if len(data) > FREE_BYTES:
        _walk(data, kind.DESCRIPTOR, limit_bytes)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadMessage("the message is not what this method takes") from error


def _walk(data: bytes, descriptor: Any, limit_bytes: int) -> None:
    fields = unpacked = 0
    waiting = [(0, len(data), descriptor)]
    while waiting:
        at, end, kind = waiting.pop()
        known = kind.fields_by_number
        while at < end:
            fields += 1
            if fields > MAX_FIELDS:
                raise TooLarge(f"the message has more than {MAX_FIELDS} fields: send tensors as raw contents")
            tag, at = _varint(data, at, end)
            wire = tag & 7
            if wire == _SIZED:
                size, at = _varint(data, at, end)
                if size > end - at:
                    raise _no_message()
                field = known.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    waiting.append((at, at + size, field.message_type))
                elif field is not None and field.cpp_type in _WIDTHS:
                    # Every varint ends with the one byte below 128.
                    unpacked += _ends(data, at, size) * _WIDTHS[field.cpp_type]
                    if unpacked > limit_bytes:
                        raise TooLarge(f"the message's numbers make up more than {limit_bytes} bytes")
                at += size
            elif wire == _VARINT:
                at = _varint(data, at, end)[1]
            else:
                # A group has no length: its fields are counted as if they were this message's own.
                at += _PLAIN.get(wire, 0)
        if at != end:
            raise _no_message()


def _ends(data: bytes, at: int, size: int) -> int:
    view = np.frombuffer(data, np.uint8, size, at)
    return sum(int(np.count_nonzero(view[start : start + _STEP] < 128)) for start in range(0, size, _STEP))


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _no_message()


def _no_message() -> BadMessage:
    return BadMessage("the message is not what this method takes")
