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
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from itertools import accumulate
from typing import Any, NamedTuple

from oriel_wire.process.messages import ALIGN, Buffer, FrameError, frame, padded

HEAD = struct.Struct("<B3xI")
MAX_U32 = 2**32 - 1
NO_BODY = memoryview(b"")
LONG_FROM = 64 << 10  # bytes; shorter ones are copied into the pickle
MAX_BUFFERS = 1024
MAX_LOOKED_AT = 64  # entries of a list; later ones are copied into the pickle


class Kind(IntEnum):
    """The kind of a frame. JOB, MORE, CANCEL and CALLED go to a worker; the others come from one.

    JOB: (reference, arguments, Terms). READY: a Report; once, first. RESULT: (value, stages). REFUSED: an error as
    `outcomes.facts_of` describes it. FAILED: (outcome value, one line, traceback text). UNFIT: like FAILED, before the
    job's own function was called. EXHAUSTED: like FAILED, and the process ends. PIECE: one value of a stream; its end
    is one of the four before. MORE: one further piece may be sent. CANCEL: no caller waits for the job any more. CALL:
    (number, method, arguments, keywords), a call of a model. CALLED: (number, value, None), or (number, None, an error
    as in REFUSED).
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


class Pickler(pickle.Pickler):
    """Pickler that also takes long byte strings out of band if they are fields of a value: pickle would copy them."""

    def reducer_override(self, value: Any) -> Any:
        names: Any = getattr(type(value), "__slots__", None) or getattr(value, "__dict__", ())
        if not any(is_long(getattr(value, name, None)) for name in names):
            return NotImplemented
        reduced = value.__reduce_ex__(5)
        return tuple(with_long_ones_out(part) for part in reduced) if isinstance(reduced, tuple) else reduced


class OutOfBand:
    """Replaces a long byte string while it is pickled; unpickling gives the byte string again."""

    __slots__ = ("value",)

    def __init__(self, value: bytes) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(self.value),)


def is_long(value: object) -> bool:
    return type(value) is bytes and len(value) >= LONG_FROM


def has_long(value: object, levels: int = 3) -> bool:
    """Return whether `Pickler` would find a long byte string; this check costs less than that class does."""
    kind = type(value)
    if kind is bytes:
        return is_long(value)
    if kind is tuple or kind is list:
        return levels > 0 and any(has_long(each, levels - 1) for each in value[:MAX_LOOKED_AT])  # type: ignore[index]
    if kind is dict:
        return levels > 0 and any(is_long(each) for each in value.values())  # type: ignore[attr-defined]
    return is_long(getattr(value, "body", None))


def with_long_ones_out(value: Any) -> Any:
    """Return `value`, or a copy in which the long byte strings of a tuple, list or dict are out of band."""
    kind = type(value)
    if kind is bytes:
        return OutOfBand(value) if is_long(value) else value
    if kind is dict:
        if any(is_long(each) for each in value.values()):
            return {name: with_long_ones_out(each) for name, each in value.items()}
    elif (kind is tuple or kind is list) and any(is_long(each) for each in value):
        return kind(OutOfBand(each) if is_long(each) else each for each in value)
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

    if has_long(value):
        into = BytesIO()
        if type(value) is tuple:
            value = tuple(with_long_ones_out(part) for part in value)
        Pickler(into, protocol=5, buffer_callback=in_band).dump(with_long_ones_out(value))
        packed = Packed(into.getvalue(), buffers)
    else:
        packed = Packed(pickle.dumps(value, protocol=5, buffer_callback=in_band), buffers)
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

    sizes: those of the buffers in the body, in bytes. body: empty once the frame has been unpacked.
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
