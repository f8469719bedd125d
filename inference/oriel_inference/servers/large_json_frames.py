"""Defines the frames between the server and the child process that converts large JSON.

A frame is a head (code, length, size) and `size` bytes. `length` is that of the JSON part in front of binary tensors,
-1 if there are none. `code` is a Task in frames to the child, and a Result in frames from it. The bytes of a refusal
are its error text.
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
