"""The JSON body of a load request: `config`, and files as base64 of any size.

A large one is taken apart in the process for large JSON: `unpack_files` leaves their sizes in the JSON and puts their
bytes behind it, `files_behind` finds them there.
"""

import base64
import binascii
from collections.abc import Callable
from typing import Any

import msgspec

from oriel_wire.errors import BadMessage

__all__ = ["FILE_PREFIX", "RepositoryBody", "decode_body", "files_behind", "from_base64", "unpack_files"]

FILE_PREFIX = "file:"


class RepositoryBody(msgspec.Struct):
    """What repository requests say."""

    ready: bool = False
    parameters: dict[str, Any] = {}


def decode_body(body: bytes) -> RepositoryBody:
    """Raises BadMessage; an empty body says nothing."""
    try:
        return msgspec.json.decode(body, type=RepositoryBody) if body.strip() else RepositoryBody()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"the body is not what this request takes: {str(error)[:200]}") from error


def from_base64(name: str, value: Any) -> bytes:
    """The bytes of a file parameter. Raises BadMessage."""
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise BadMessage(f"parameter {name[:100]!r} must be a string of base64") from error


def unpack_files(body: bytes) -> tuple[list[bytes | memoryview], int]:
    """A body -> its parts, the JSON first, and the length of that. A file's value is its size, null for no base64."""
    parameters = decode_body(body).parameters
    parts: list[bytes | memoryview] = []
    for name, value in parameters.items():
        if name.startswith(FILE_PREFIX):
            try:
                data = from_base64(name, value)
            except BadMessage:
                parameters[name] = None
            else:
                parts.append(data)
                parameters[name] = len(data)
    head = msgspec.json.encode({"parameters": parameters})
    return [head, *parts], len(head)


def files_behind(body: bytes, length: int) -> Callable[[str, Any], memoryview]:
    """What stands for `from_base64` with a body of `unpack_files`; files are asked for in their order."""
    view = memoryview(body)
    position = length

    def take(name: str, value: Any) -> memoryview:
        nonlocal position
        if not isinstance(value, int):
            raise BadMessage(f"parameter {name[:100]!r} must be a string of base64")
        position += value
        return view[position - value : position]

    return take
