"""The messages between the pool and a worker, as frames of `oriel_wire.process.messages`.

    head: kind u8 | 3 zero bytes | cpu_us u32 | buffers x size u64       body: buffers, each padded | payload

Numbers are little endian. A payload is a pickle: both ends run the same code for the same user, joined by a socket
pair that no other process can open. Arrays and long byte strings are not in the pickle (protocol 5, out-of-band
buffers, PEP 574) but before it: they are sent from where they are, received into their final place, and arrays there
are views of the frame, whose memory ends with the last of them.
"""

import pickle
import struct
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass
from enum import IntEnum
from itertools import accumulate
from operator import is_not
from typing import Any, NamedTuple

from oriel_wire.process.messages import ALIGN, Buffer, FrameError, frame, padded

HEAD = struct.Struct("<B3xI")
MAX_U32 = 2**32 - 1
NO_BODY = memoryview(b"")
LONG_FROM = 64 << 10  # bytes; shorter ones are copied into the pickle
MAX_BUFFERS = 1024
MAX_LOOKED_AT = 64  # entries of a list; bytes in longer ones are copied into the pickle


class Kind(IntEnum):
    """The kind of a frame. JOB, MORE, CANCEL and CALLED go to a worker; the others come from one.

    JOB: (reference, arguments, Terms). READY: a Report; once, first. RESULT: (value, stages). REFUSED: a LogicError.
    FAILED: (outcome value, one line, traceback text). UNFIT: like FAILED, before the job's own function was called.
    EXHAUSTED: like FAILED, and the process ends. PIECE: one value of a stream; its end is one of the four before. MORE:
    one further piece may be sent. CANCEL: no caller waits for the job any more. CALL: (number, method, arguments,
    keywords), a call of a model. CALLED: (number, value, None), or (number, None, LogicError).
    """

    JOB = 1
    READY = 2
    RESULT = 3
    REFUSED = 4
    FAILED = 5
    PIECE = 6
    MORE = 7
    CANCEL = 8
    CALL = 9
    CALLED = 10
    EXHAUSTED = 11
    UNFIT = 12


class FrameTooLarge(ValueError):
    """A payload is larger than the bound that both ends use."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes are more than the {limit_bytes} that fit between service and worker")


class Packed:
    """A pickled value. It refers to the memory of the value's arrays, which must not change before it is sent."""

    __slots__ = ("buffers", "payload", "size_bytes")

    def __init__(self, payload: bytes, buffers: Sequence[memoryview]) -> None:
        self.payload = payload
        self.buffers = buffers
        self.size_bytes = len(payload) + sum([buffer.nbytes for buffer in buffers])


class OutOfBand:
    """Replaces a value while it is pickled; unpickling makes it again, of parts that pickle would copy."""

    __slots__ = ("made_by",)

    def __init__(self, *made_by: Any) -> None:
        self.made_by = made_by

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return self.made_by


def without_long(value: Any, levels: int = 3) -> Any:
    """Return `value`, or a copy with its long byte strings out of band, which pickle would copy.

    They are found in tuples, lists and dicts, and as the `body` of a value.
    """
    kind = type(value)
    if kind is bytes:
        return OutOfBand(bytes, (pickle.PickleBuffer(value),)) if len(value) >= LONG_FROM else value
    if kind is tuple or kind is list:
        if levels and len(value) <= MAX_LOOKED_AT:
            found = [without_long(each, levels - 1) for each in value]
            return kind(found) if any(map(is_not, found, value)) else value
    elif kind is dict:
        if levels and any(type(each) is bytes and len(each) >= LONG_FROM for each in value.values()):
            return {name: without_long(each, 0) for name, each in value.items()}
    elif is_dataclass(kind) and type(body := getattr(value, "body", None)) is bytes and len(body) >= LONG_FROM:
        rest = copy(value)  # not made anew: its class may do or refuse something then
        object.__setattr__(rest, "body", b"")
        return OutOfBand(with_body, (rest, without_long(body)))
    return value


def with_body(value: Any, body: bytes) -> Any:
    object.__setattr__(value, "body", body)
    return value


def pack(value: Any, *, limit_bytes: int) -> Packed:
    """Pickle a value. Raises FrameTooLarge, and whatever pickling raises."""
    buffers: list[memoryview] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LONG_FROM or len(buffers) >= MAX_BUFFERS:
            return True
        buffers.append(view)
        return False

    packed = Packed(pickle.dumps(without_long(value), protocol=5, buffer_callback=in_band), buffers)
    if packed.size_bytes > limit_bytes:
        raise FrameTooLarge(packed.size_bytes, limit_bytes)
    return packed


def encoded(kind: Kind, packed: Packed, *, cpu_us: int = 0) -> list[Buffer]:
    """Return the pieces of a frame, which refer to the memory of the packed value."""
    body: list[Buffer] = []
    sizes = [padded(buffer, body) for buffer in packed.buffers]
    body.append(packed.payload)
    head = HEAD.pack(kind, min(cpu_us, MAX_U32)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return frame(head, body)


def body_bound(limit_bytes: int) -> int:
    """Return the bytes of the longest body that a value of `limit_bytes` has."""
    return limit_bytes + MAX_BUFFERS * ALIGN


@dataclass(slots=True, eq=False, repr=False)
class Frame:
    """One received message. cpu_us: processor time the worker has spent on its job, 0 from the pool.

    sizes: bytes of each buffer in the body. body: empty once the frame has been unpacked.
    """

    kind: Kind
    cpu_us: int
    sizes: Sequence[int]
    body: memoryview


def decoded(head: memoryview, body: memoryview) -> Frame:
    """Return the frame with this head and body. Raises FrameError."""
    count = (len(head) - HEAD.size) // 8
    try:
        kind, cpu_us = HEAD.unpack_from(head)
        if count > MAX_BUFFERS or len(head) != HEAD.size + 8 * count:
            raise ValueError(f"its head has {len(head)} bytes")
        sizes = struct.unpack_from(f"<{count}Q", head, HEAD.size)
        if offsets(sizes)[-1] > len(body):
            raise ValueError("its buffers are longer than its body")
        return Frame(Kind(kind), cpu_us, sizes, body)
    except (struct.error, ValueError) as error:
        raise FrameError(f"a message cannot be read: {error}") from error


def offsets(sizes: Iterable[int]) -> list[int]:
    """Return the offsets of buffers of these sizes in their body, and of the payload."""
    return [0, *accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]


def unpack(frame: Frame) -> Any:
    """Take the value out of a frame, once; its arrays are writable views. Raises whatever unpickling raises."""
    body, frame.body = frame.body, NO_BODY
    *starts, end = offsets(frame.sizes)
    buffers = [body[start : start + size] for start, size in zip(starts, frame.sizes, strict=True)]
    return pickle.loads(body[end:], buffers=buffers)


WINDOW = 8  # pieces of a stream that may be sent before its reader has taken one


class Terms(NamedTuple):
    """The conditions of a job.

    streams: it yields pieces.
    is_batch: the arguments are the rows of several callers.
    memory_mb: the memory it may use beyond what its worker had when it was ready; 0 for no bound.
    deadline: monotonic seconds, which all processes of a machine share. The others are attributes of `ctx` in the
        worker.
    """

    streams: bool = False
    memory_mb: int = 0
    request_id: str = ""
    deadline: float = 0.0
    tier: str = ""
    tenant: str = ""
    is_batch: bool = False
