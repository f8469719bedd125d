"""Frames between the server and the process that reads and writes large JSON.

A frame is a head and `size` bytes. To the process, `code` is a Task and `length` that of the JSON part in front of
binary tensors, -1 if there are none. From the process, `code` is a Result and `length` the same of its bytes; the bytes
of a refusal are its error text.
"""

from enum import IntEnum
from struct import Struct

__all__ = ["FRAME", "Result", "Task"]

FRAME = Struct("<BqQ")  # code, length, size


class Task(IntEnum):
    """The conversion to make."""

    REQUEST = 1  # an infer request, its inputs as binary data
    RESPONSE = 2  # an infer response with binary outputs, as JSON alone
    LOAD = 3  # a load request, the files behind the rest


class Result(IntEnum):
    """The outcome of a conversion."""

    DONE = 0
    INVALID = 1
    TOO_LARGE = 2
