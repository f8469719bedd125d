"""The JSON body of a load request: `config`, and files as base64 of any size.

A large one is taken apart in the process for large JSON: `unpack_files` leaves the sizes in the JSON and puts the bytes
behind it, where `files_behind` finds them.
"""

import base64
import binascii
from collections.abc import Callable
from typing import Any

import msgspec

from oriel_wire.errors import BadMessage

FILE_PREFIX = "file:"


class RepositoryBody(msgspec.Struct):
    """The content of a repository request."""

    ready: bool = False
    parameters: dict[str, Any] = {}


def decode_body(body: bytes) -> RepositoryBody:
    """Decode a body, which may be empty. Raises BadMessage."""
    try:
        return msgspec.json.decode(body, type=RepositoryBody) if body.strip() else RepositoryBody()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"the body does not have the form of this request: {str(error)[:200]}") from error


def from_base64(name: str, value: Any) -> bytes:
    """Return the bytes of a file parameter. Raises BadMessage."""
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise BadMessage(f"parameter {name[:100]!r} must be a string of base64") from error


def unpack_files(body: bytes) -> tuple[list[bytes | memoryview], int]:
    """Split a body into its parts, the JSON first, and return them with the length of the JSON. The value of a file is
    its size, null if it is not base64.
    """
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
    """Return the function that replaces `from_base64` for a body of `unpack_files`; files are requested in their
    order.
    """
    view = memoryview(body)
    position = length

    def part_of(name: str, value: Any) -> memoryview:
        nonlocal position
        if not isinstance(value, int):
            raise BadMessage(f"parameter {name[:100]!r} must be a string of base64")
        position += value
        return view[position - value : position]

    return part_of
