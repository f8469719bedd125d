"""What passes between the server and the process that reads and writes large JSON.

A frame is a head and `size` bytes. To the process: `code` is a Task, `length` that of the JSON part in front of binary
tensors, -1 if there are none. Back: `code` is a Result, `length` the same of the bytes that come back; a refusal's
bytes are its sentence.
"""

from enum import IntEnum
from struct import Struct

__all__ = ["FRAME", "PIECE_BYTES", "Result", "Task"]

FRAME = Struct("<BqQ")  # code, length, size
PIECE_BYTES = 1 << 20


class Task(IntEnum):
    """What to make of the bytes."""

    REQUEST = 1  # an infer request, its inputs as binary data
    RESPONSE = 2  # an infer response with binary outputs, as JSON alone
    LOAD = 3  # a load request, the files behind the rest


class Result(IntEnum):
    """What became of it."""

    DONE = 0
    INVALID = 1
    TOO_LARGE = 2
