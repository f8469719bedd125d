"""Bounds the cost of parsing a protobuf message before it is parsed.

An accepted message may need many times its size in memory, and block the event loop: a field of two bytes can become an
object of a hundred, a varint of one byte becomes a number of eight, and one character outside of Latin-1 makes all
others of its string four bytes wide. Large messages are therefore first walked level by level with their descriptor,
without allocating memory for their content. Small messages are harmless and not checked.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.grpc_names import read_varint

MAX_FIELDS = 20_000
# Limit for one field of one message: inputs, outputs, parameters.
MAX_MESSAGES = 1024
# The same limit as for JSON; converting them to an array takes as long.
MAX_INTEGERS = 524_288
MAX_TEXT_BYTES = 4 << 20
FREE_BYTES = 64 * 1024
_STEP = 1 << 20
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_PLAIN = {_FIXED64: 8, _FIXED32: 4}
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_MESSAGE, _INTEGERS, _TEXT = range(3)


def parse(kind: type[Message], data: bytes | memoryview) -> Any:
    """Parse a message. Raises BadMessage if the bytes are not one, TooLarge if parsing it would cost too much."""
    try:
        if len(data) > FREE_BYTES:
            _walk(data, kind.DESCRIPTOR)
        return kind.FromString(data)  # type: ignore[arg-type]  # it takes any buffer
    except TooLarge:
        raise
    except (DecodeError, BadMessage) as error:
        raise BadMessage("the message is not what this method takes") from error


def _walk(data: bytes | memoryview, descriptor: Any) -> None:
    fields = integers = text = 0
    waiting = [(0, len(data), descriptor)]
    while waiting:
        at, end, kind = waiting.pop()
        known = _known(kind)
        given: dict[int, int] = {}
        while at < end:
            fields += 1
            if fields > MAX_FIELDS:
                raise TooLarge(f"the message has more than {MAX_FIELDS} fields: send tensors as raw contents")
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = read_varint(data, at - 1)
                if tag <= 127:
                    raise TooLarge("a message of this size must have its tags in their shortest form")
            wire = tag & 7
            if wire == _SIZED:
                size, at = read_varint(data, at) if at == end or data[at] > 127 else (data[at], at + 1)
                if size > end - at:
                    raise DecodeError
                number = tag >> 3
                role, name, inner = known.get(number, _UNKNOWN)
                if role == _MESSAGE:
                    given[number] = count = given.get(number, 0) + 1
                    if count > MAX_MESSAGES:
                        raise TooLarge(f"{name}: more than {MAX_MESSAGES} are given, at most that many are accepted")
                    waiting.append((at, at + size, inner))
                elif role == _INTEGERS:
                    integers += _ends(data, at, size, MAX_INTEGERS - integers)
                    if integers > MAX_INTEGERS:
                        raise TooLarge(
                            f"{name}: the message has more than {MAX_INTEGERS} integers or booleans: send tensors as "
                            "raw contents"
                        )
                elif role == _TEXT:
                    text += size
                    if text > MAX_TEXT_BYTES:
                        raise TooLarge(f"{name}: names and text of the message are more than {MAX_TEXT_BYTES} bytes")
                at += size
            elif wire == _VARINT:
                at = read_varint(data, at)[1]
            elif wire in _PLAIN:
                at += _PLAIN[wire]
            else:
                # No encoder of these messages writes groups, and skipping them needs a full parse.
                raise TooLarge("a message of this size must have no groups")
        if at != end:
            raise DecodeError


_UNKNOWN = (-1, "", None)


@lru_cache(maxsize=128)
def _known(descriptor: Any) -> dict[int, tuple[int, str, Any]]:
    """Fields by number: role, name, the descriptor of a message."""
    found = {}
    for number, field in descriptor.fields_by_number.items():
        if field.message_type is not None:
            found[number] = (_MESSAGE, field.name, field.message_type)
        elif field.type == FieldDescriptor.TYPE_STRING:
            found[number] = (_TEXT, field.name, None)
        elif field.type != FieldDescriptor.TYPE_BYTES and field.cpp_type not in _FLOATS:
            found[number] = (_INTEGERS, field.name, None)
    return found


def _ends(data: bytes | memoryview, at: int, size: int, most: int) -> int:
    """The number of varints, or some number above `most`. Only the last byte of a varint is below 128."""
    view = np.frombuffer(data, np.uint8, size, at)
    found = 0
    for start in range(0, size, _STEP):
        found += int(np.count_nonzero(view[start : start + _STEP] < 128))
        if found > most:
            break
    return found
