"""Bounds the memory of a job, beyond what its worker had when it was ready.

RLIMIT_DATA (Linux) counts private memory that was requested by Python, numpy or a native library, not the pages of
loaded files. The soft limit is set per job. Allocations past it fail, which Python and numpy raise as MemoryError. A
native library that does not expect that may crash: then the job fails like any whose worker died.

The arrays that a job is given are private memory too, views of the frames that brought them. The bound is larger by
these bytes while they live.
"""

import resource
import sys
import weakref

import numpy as np

from oriel_wire.process.messages import Assembler, Frame


def array_memory(size: int) -> memoryview:
    """Return a view of `size` bytes of a new array, which hold anything: its end can be seen by a weak reference."""
    return np.empty(size, np.uint8).data.cast("B")


class MemoryBound:
    """The memory bound of one worker, made once its services are set up."""

    def __init__(self) -> None:
        self._base = private_bytes()
        self._memory_mb = 0
        self._soft = 0  # the limit that is set; 0 for none
        self._memory: list[weakref.ref[np.ndarray]] = []  # arrays of frames larger than the scratch buffer

    def set(self, memory_mb: int) -> None:
        """Set the bound of the next job; 0 for none."""
        self._memory_mb = memory_mb
        soft = 0
        if memory_mb:
            frames = sum([array.nbytes for each in self._memory if (array := each()) is not None])
            soft = self._base + (memory_mb << 20) + frames
        if soft == self._soft or not sys.platform.startswith("linux"):
            return
        self._soft = soft
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bounded = soft and (hard == resource.RLIM_INFINITY or soft < hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft if bounded else hard, hard))

    def lift(self) -> None:
        """Remove the bound while the answer is made."""
        self.set(0)

    def receive(self, assembler: Assembler, count: int) -> list[Frame]:
        """Return the frames that end with `count` bytes in the assembler's buffer. Their memory, and that of a frame
        under way, is added to the bound. Raises FrameError.
        """
        memory_mb = self._memory_mb
        self.lift()
        try:
            frames = assembler.received(count)
            memory = assembler.buffer().obj
            if isinstance(memory, np.ndarray) and not any(each() is memory for each in self._memory):
                self._memory = [*(each for each in self._memory if each() is not None), weakref.ref(memory)]
            return frames
        finally:
            self.set(memory_mb)


def private_bytes() -> int:
    """Return the private memory of this process in bytes, 0 if it is unknown."""
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
