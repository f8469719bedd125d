"""Shared memory between the pool and a worker: written by one, mapped by the other, freed with its last user.

A segment is an anonymous file (memfd, Linux) that exists only as a descriptor. The sender writes the buffers of one
frame into it (`pwrite`, so that no page of it is mapped or zeroed on this side), passes the descriptor with the frame
and closes its own. The receiver maps it and closes the descriptor; the views it makes keep the mapping alive, which
ends with the last of them. So a segment has no name, is never given back or used twice, and a killed process leaves
nothing behind.
"""

import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from oriel_logic.workers.frames import Frame, offsets


def written(buffers: Sequence[memoryview]) -> int:
    """Return the descriptor of a new segment that holds `buffers`. Raises OSError (no memory, no descriptors)."""
    *starts, end = offsets([buffer.nbytes for buffer in buffers])
    descriptor = anonymous_file()
    try:
        for start, buffer in zip(starts, buffers, strict=True):
            rest = buffer.cast("B") if buffer.nbytes else buffer
            while rest.nbytes:
                count = os.pwrite(descriptor, rest, start)
                rest, start = rest[count:], start + count
        os.ftruncate(descriptor, end)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("oriel", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def unpack(frame: Frame) -> Any:
    """Return the value in a frame; its arrays are writable views of the segment. Raises whatever unpickling raises."""
    if frame.descriptor < 0:
        return pickle.loads(frame.payload)
    *starts, end = offsets(frame.sizes)
    try:
        whole = memoryview(mmap.mmap(frame.descriptor, end)) if end else memoryview(b"")
    finally:
        drop(frame)
    buffers = [whole[start : start + size] for start, size in zip(starts, frame.sizes, strict=True)]
    payload = buffers.pop(0) if frame.in_segment else frame.payload
    return pickle.loads(payload, buffers=buffers)


def drop(frame: Frame) -> None:
    """Release a frame that will not be unpacked."""
    if frame.descriptor >= 0:
        os.close(frame.descriptor)
        frame.descriptor = -1
