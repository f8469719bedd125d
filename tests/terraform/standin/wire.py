"""The few messages of plugin protocol 6 that are needed, encoded and decoded here: protobuf outside, msgpack inside.

A message is the bytes of its fields; `parsed` returns number -> values. Values of Terraform (cty) are msgpack in a
DynamicValue, where an unknown one is an extension: `UNKNOWN` here.
"""

import json
from collections.abc import Iterable
from typing import Any

import msgpack


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while True:
        low, number = number & 0x7F, number >> 7
        out.append(low | (0x80 if number else 0))
        if not number:
            return bytes(out)


def field(number: int, value: int | bool | str | bytes | None) -> bytes:
    """Encode one field; b"" for values that protobuf leaves out (None, False, 0, empty)."""
    if not value:
        return b""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return message(number, value.encode() if isinstance(value, str) else value)


def message(number: int, body: bytes) -> bytes:
    """Encode a message inside another one, which is present even if it is empty."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def parsed(body: bytes) -> dict[int, list[Any]]:
    """Return field number -> its values, in order. Raises ValueError for a wire type that the protocol does not use."""
    fields: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        shift = result = 0
        while True:
            byte = body[at]
            at += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result
            shift += 7

    while at < len(body):
        key = number()
        if key & 7 == 0:
            value: Any = number()
        elif key & 7 == 2:
            size = number()
            value = body[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {key & 7}")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def last(fields: dict[int, list[Any]], number: int) -> Any:
    return fields.get(number, [b""])[-1]


def decoded(dynamic_value: bytes) -> Any:
    """Return the value of a DynamicValue: None, bool, number, str, list, dict or UNKNOWN."""
    fields = parsed(dynamic_value)
    if 1 in fields:
        return msgpack.unpackb(last(fields, 1), raw=False, strict_map_key=False, ext_hook=lambda code, data: UNKNOWN)
    return json.loads(last(fields, 2) or b"null")


def encoded(value: Any) -> bytes:
    return field(1, msgpack.packb(value, default=lambda unknown: msgpack.ExtType(0, b"\0"), use_bin_type=True))


def diagnostic(summary: str, detail: str = "", attribute: str = "") -> bytes:
    """Encode an error as Terraform shows it. attribute: the argument of the resource that it points at."""
    path = message(4, message(1, field(1, attribute))) if attribute else b""
    return field(1, 1) + field(2, summary) + field(3, detail) + path


def joined(number: int, messages: Iterable[bytes]) -> bytes:
    return b"".join(message(number, each) for each in messages)
