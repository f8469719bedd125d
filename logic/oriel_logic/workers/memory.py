"""Bounds the memory of a job, beyond what its worker had when it was ready.

RLIMIT_DATA (Linux) counts private memory that was requested by Python, numpy or a native library, not shared segments
or the pages of loaded files. The soft limit is set per job. Allocations past it fail, which Python and numpy raise as
MemoryError. A native library that does not expect that may crash: then the job fails like any whose worker died.
"""

import resource
import sys


class MemoryBound:
    """The memory bound of one worker, made once its services are set up."""

    def __init__(self) -> None:
        self._base = private_bytes()
        self._set = 0

    def set(self, memory_mb: int) -> None:
        """Set the bound of the next job; 0 for none."""
        if memory_mb == self._set or not sys.platform.startswith("linux"):
            return
        self._set = memory_mb
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = self._base + (memory_mb << 20) if memory_mb else hard
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))

    def lift(self) -> None:
        """Remove the bound while the answer is made."""
        self.set(0)


def private_bytes() -> int:
    """Return the private memory of this process in bytes, 0 if it is unknown."""
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
