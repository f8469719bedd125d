"""Encodes the messages between server and child as frames.

A frame consists of a header (mark, length of the head, length of the body), a MessagePack head, and the raw bytes of
the tensors that the head describes. Head and tensors are padded to ALIGN bytes, so that arrays can be views of the
received bytes. Nothing is pickled. Lengths are checked before memory is allocated.

There are two sockets. On `work` the server sends what has to be done and the child sends everything it has to report.
On `control` the server sends what the child must receive while it works: cancellation, credit, answers of other models.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from oriel_inference.backends.python.messages import Message, TensorHead
from oriel_wire.v2.datatypes import DATATYPES, decode_raw, raw_view
from oriel_wire.v2.messages import Array

ALIGN = 16
MAX_HEAD_BYTES = 16 << 20
MAX_BODY_BYTES = 1 << 30
SCRATCH_BYTES = 64 * 1024
AHEAD = 16  # responses of one request that may be in flight before its reader has taken one
_MARK = b"oPY1"
_HEADER = struct.Struct("<4sIQ")
_PADDING = bytes(ALIGN)

Buffer = bytes | bytearray | memoryview
Part = tuple[str, str, Array]  # name, datatype, array


class FrameError(Exception):
    """The other side sent bytes that are not a frame, or more than a frame may hold."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def tensor_parts(parts: Sequence[Part], into: list[Buffer]) -> list[TensorHead]:
    """Append the bytes of the arrays to `into`, as views where possible. Raises BadMessage if an array does not match
    its datatype.
    """
    heads = []
    for name, datatype, array in parts:
        data = raw_view(array, datatype, array.shape, f"tensor {name[:64]!r}")
        size = len(data)
        heads.append(TensorHead(name, datatype, array.shape, size))
        into.append(data)
        if size % ALIGN:
            into.append(_PADDING[size % ALIGN :])
    return heads


def encode(message: Message, body: Sequence[Buffer] = (), *, max_body_bytes: int = MAX_BODY_BYTES) -> list[Buffer]:
    """Return the frame in pieces. body: the result of `tensor_parts`. Raises FrameError if the frame is too large."""
    head = _encoder.encode(message)
    size = sum(map(len, body))
    if len(head) > MAX_HEAD_BYTES or size > max_body_bytes:
        raise FrameError(f"{max(size, len(head))} bytes are more than fit into one message ({max_body_bytes})")
    return [_HEADER.pack(_MARK, len(head), size) + head + _PADDING[: -len(head) % ALIGN], *body]


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


class Assembler:
    """Cuts a stream into frames: read into `buffer()`, then report the number of bytes with `received`.

    Bodies belong to their frame alone and are writable. Large bodies are received into their final place.
    """

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._filled = 0
        self._large: memoryview | None = None  # a whole frame that does not fit the scratch buffer
        self._large_filled = 0
        self._head = 0

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._view[self._filled :]

    def received(self, count: int) -> list[tuple[Message, memoryview]]:
        """Handle `count` bytes written into the buffer; return the frames that are complete. Raises FrameError."""
        if self._large is not None:
            self._large_filled += count
            if self._large_filled < len(self._large):
                return []
            frame, self._large = self._large, None
            return [self._decode(frame[_HEADER.size :], self._head)]
        self._filled += count
        frames, at = [], 0
        while self._filled - at >= _HEADER.size:
            mark, head, body = _HEADER.unpack_from(self._scratch, at)
            if mark != _MARK or head > MAX_HEAD_BYTES or body > self._max_body_bytes:
                raise FrameError("a message is malformed or too large")
            total = _HEADER.size + head + -head % ALIGN + body
            if self._filled - at >= total:
                data = memoryview(self._scratch[at + _HEADER.size : at + total])
                frames.append(self._decode(data, head))
                at += total
                continue
            if total > SCRATCH_BYTES:
                # Not a bytearray, which would be filled with zeros first.
                self._large = np.empty(total, np.uint8).data.cast("B")
                self._large_filled, self._head = self._filled - at, head
                self._large[: self._large_filled] = self._view[at : self._filled]
                at = self._filled
            break
        rest = self._filled - at
        if at and rest:
            self._scratch[:rest] = self._scratch[at : self._filled]
        self._filled = rest
        return frames

    def _decode(self, data: memoryview, head: int) -> tuple[Message, memoryview]:
        try:
            message: Any = _decoder.decode(data[:head])
        except msgspec.MsgspecError as error:
            raise FrameError(f"a message cannot be read: {str(error)[:200]}") from error
        return message, data[head + -head % ALIGN :]
