"""The bytes between the pool and a worker.

    length u32 | kind u8 | flags u8 | cpu_us u32 | buffers u16 | buffers x size u64 | payload

All numbers are big endian. A payload is a pickle: both ends run the same code for the same user, joined by a socket
pair that no other process can open. Arrays and long byte strings are not in the pickle (protocol 5, out-of-band
buffers, PEP 574) but one after another in shared memory, whose descriptor comes with the frame's first byte; see
`segments`. A pickle that is long itself is there too, before the others, so little goes through the socket.

`length` and the sizes are checked against the bound before anything is read, mapped or allocated.
"""

import pickle
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from itertools import accumulate
from typing import Any, NamedTuple

HEADER = struct.Struct("!IBBIH")
MAX_U32 = 2**32 - 1
IN_SEGMENT = 1  # flag: the payload is the first buffer
SHARED_FROM = 64 << 10  # bytes; shorter ones are copied through the socket, which costs less than a mapping
MAX_BUFFERS = 1024
MAX_LOOKED_AT = 64  # entries of a list; later ones are copied into the pickle
ALIGNED = 64  # bytes: where a buffer may begin in its segment, for vector instructions


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
    return type(value) is bytes and len(value) >= SHARED_FROM


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
        if view.nbytes < SHARED_FROM or len(buffers) >= MAX_BUFFERS - 1:
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


def head(kind: Kind, packed: Packed, *, cpu_us: int = 0) -> tuple[bytes, list[memoryview]]:
    """Return the bytes for the socket, and the buffers for the segment, in this order."""
    shared = list(packed.buffers)
    payload, flags = packed.payload, 0
    if len(payload) >= SHARED_FROM:
        shared.insert(0, memoryview(payload))
        payload, flags = b"", IN_SEGMENT
    header = HEADER.pack(len(payload), kind, flags, min(cpu_us, MAX_U32), len(shared))
    if not shared:
        return header + payload, shared
    return b"".join((header, *(buffer.nbytes.to_bytes(8, "big") for buffer in shared), payload)), shared


def offsets(sizes: Iterable[int]) -> list[int]:
    """Return the offsets of buffers of these sizes in their segment, and its end."""
    return [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]


@dataclass(slots=True, eq=False, repr=False)
class Frame:
    """One received message. cpu_us: processor time the worker has spent on its job, 0 from the pool.

    descriptor: the file descriptor of the segment, -1 if there is none; the owner of the frame closes it.
    """

    kind: Kind
    cpu_us: int
    payload: bytes
    sizes: tuple[int, ...] = ()
    descriptor: int = -1
    in_segment: bool = False


class Unframer:
    """Splits received bytes into frames.

    Descriptors come in the order of their frames, and never later than those.
    Raises FrameTooLarge as soon as a head announces too much, ValueError if it is inconsistent.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes | memoryview, descriptors: Iterable[int] = ()) -> list[Frame]:
        buffer = self._buffer
        buffer += data
        self._descriptors.extend(descriptors)
        frames: list[Frame] = []
        while len(buffer) >= HEADER.size:
            length, kind, flags, cpu_us, count = HEADER.unpack_from(buffer)
            if length > self.limit_bytes or count > MAX_BUFFERS:
                raise FrameTooLarge(length, self.limit_bytes)
            start = HEADER.size + 8 * count
            end = start + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                sizes = struct.unpack_from(f"!{count}Q", view, HEADER.size)
                payload = bytes(view[start:end])
            if length + sum(sizes) > self.limit_bytes:
                raise FrameTooLarge(length + sum(sizes), self.limit_bytes)
            if count and not self._descriptors:
                raise ValueError("a frame came without its segment")
            in_segment = bool(flags & IN_SEGMENT)
            if in_segment and not count:
                raise ValueError("a frame has no payload")
            descriptor = self._descriptors.popleft() if count else -1
            frames.append(Frame(Kind(kind), cpu_us, payload, sizes, descriptor, in_segment))
            del buffer[:end]
        return frames

    def left_over(self) -> list[int]:
        """Return the descriptors that no frame has claimed; the caller owns them."""
        rest = list(self._descriptors)
        self._descriptors.clear()
        return rest


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
