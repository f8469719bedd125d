"""A bound on what a job may take, beside what its worker had when it was ready.

RLIMIT_DATA (Linux): private memory that was asked for, whether by Python, numpy or a native library; shared segments
and the pages of loaded files are not in it. The soft limit is set per job. What passes it gets no memory, which Python
and numpy raise as MemoryError. A native library that does not expect that may crash: then the job fails like any whose
worker died.
"""

import resource
import sys

__all__ = ["MemoryBound"]


class MemoryBound:
    """Made once a worker's services are set up."""

    def __init__(self) -> None:
        self._base = private_bytes()
        self._set = 0

    def set(self, memory_mb: int) -> None:
        """For the next job; 0: none."""
        if memory_mb == self._set or not sys.platform.startswith("linux"):
            return
        self._set = memory_mb
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = self._base + (memory_mb << 20) if memory_mb else hard
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))

    def lift(self) -> None:
        """While the answer is made."""
        self.set(0)


def private_bytes() -> int:
    """Private memory of this process in bytes, 0 where it cannot be known."""
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
