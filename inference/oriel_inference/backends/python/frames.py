"""Encodes the messages between server and child as frames of `oriel_wire.process.messages`.

The head is MessagePack, the body has the raw bytes of the tensors that the head describes. Nothing is pickled.

There are two sockets. On `work` the server sends what has to be done and the child sends everything it has to report.
On `control` the server sends what the child must receive while it works: cancellation, credit, answers of other models.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from oriel_inference.backends.python.messages import Message, TensorHead
from oriel_wire.process.messages import ALIGN, MAX_BODY_BYTES, Buffer, FrameError, frame, padded
from oriel_wire.v2.datatypes import DATATYPES, decode_raw, raw_view
from oriel_wire.v2.messages import Array

AHEAD = 16  # responses of one request that may be in flight before its reader has taken one

_M = TypeVar("_M")
Part = tuple[str, str, Array]  # name, datatype, array

_encoder = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


def tensor_parts(parts: Sequence[Part], into: list[Buffer]) -> list[TensorHead]:
    """Append the bytes of the arrays to `into`, as views where possible. Raises BadMessage if an array does not match
    its datatype.
    """
    heads = []
    for name, datatype, array in parts:
        data = raw_view(array, datatype, array.shape, f"tensor {name[:64]!r}")
        heads.append(TensorHead(name, datatype, array.shape, padded(data, into)))
    return heads


def encode(
    message: msgspec.Struct, body: Sequence[Buffer] = (), *, max_body_bytes: int = MAX_BODY_BYTES
) -> list[Buffer]:
    """Return the frame in pieces. body: the result of `tensor_parts`. Raises FrameError if the frame is too large."""
    return frame(_encoder.encode(message), body, max_body_bytes=max_body_bytes)


def decode(head: memoryview) -> Message:
    """Return the message of a head. Raises FrameError."""
    return decode_with(_decoder, head)


def decode_with(decoder: "msgspec.msgpack.Decoder[_M]", head: memoryview) -> _M:
    """Return the message of a head of other messages than those of Python models. Raises FrameError."""
    try:
        return decoder.decode(head)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a message cannot be read: {str(error)[:200]}") from error


def read_tensors(heads: Sequence[TensorHead], body: memoryview, at: int = 0) -> tuple[list[Part], int]:
    """Return the tensors that begin at `at` in `body`, and where they end. Raises BadMessage if they do not fit."""
    parts = []
    for head in heads:
        what = f"tensor {head.name[:64]!r}"
        entry = DATATYPES.get(head.datatype)
        if entry is None or head.size < 0 or at + head.size > len(body):
            raise FrameError(f"{what} lies outside its message")
        parts.append((head.name, head.datatype, decode_raw(body, at, head.size, entry, head.shape, what)))
        at += head.size + -head.size % ALIGN
    return parts, at
