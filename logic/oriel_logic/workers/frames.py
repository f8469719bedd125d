"""The bytes between the pool and a worker: `length u32 | kind u8 | cpu_us u32 | payload`, big endian.

Payloads are pickles: both ends run the same code for the same user, joined by a socket pair that nobody else can
open. `length` counts the payload only, and is checked before anything is read or allocated.
"""

import pickle
import struct
from enum import IntEnum
from typing import Any

__all__ = ["HEADER", "Frame", "FrameTooLarge", "Kind", "Unframer", "decode", "encode"]

HEADER = struct.Struct("!IBI")
MAX_U32 = 2**32 - 1


class Kind(IntEnum):
    """JOB goes to a worker, the others come from one.

    JOB: (reference, arguments). READY: {service: why it cannot run in this worker}, once, first.
    RESULT: the value. REFUSED: (outcome value, sentence). FAILED: (one line, traceback text), for the log.
    """

    JOB = 1
    READY = 2
    RESULT = 3
    REFUSED = 4
    FAILED = 5


class FrameTooLarge(ValueError):
    """A payload passes the bound both ends agreed on."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes are more than the {limit_bytes} that fit between service and worker")


class Frame:
    """One message. cpu_us: processor time the worker spent on it, 0 from the pool."""

    __slots__ = ("cpu_us", "kind", "payload")

    def __init__(self, kind: Kind, cpu_us: int, payload: bytes) -> None:
        self.kind = kind
        self.cpu_us = cpu_us
        self.payload = payload


def encode(kind: Kind, value: Any, *, limit_bytes: int, cpu_us: int = 0) -> bytes:
    """Raises FrameTooLarge, and whatever pickling `value` raises."""
    payload = pickle.dumps(value, protocol=5)
    if len(payload) > limit_bytes:
        raise FrameTooLarge(len(payload), limit_bytes)
    return HEADER.pack(len(payload), kind, min(cpu_us, MAX_U32)) + payload


def decode(frame: Frame) -> Any:
    """The value in a frame. Raises whatever unpickling raises."""
    return pickle.loads(frame.payload)


class Unframer:
    """Cuts a byte stream into frames. Raises FrameTooLarge as soon as a header says too much, ValueError if it lies."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        while len(buffer) >= HEADER.size:
            length, kind, cpu_us = HEADER.unpack_from(buffer)
            if length > self.limit_bytes:
                raise FrameTooLarge(length, self.limit_bytes)
            end = HEADER.size + length
            if len(buffer) < end:
                break
            frames.append(Frame(Kind(kind), cpu_us, bytes(memoryview(buffer)[HEADER.size : end])))
            del buffer[:end]
        return frames
