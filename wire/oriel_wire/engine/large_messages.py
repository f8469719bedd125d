"""Returns the memory of large bodies to the operating system.

HTTP bodies arrive in pieces from many senders in turn, so that freed bodies leave holes between others (measured at the
gateway: after 150 bodies of 1 MiB in pieces of 16 KiB the process kept between none and all of their memory). Trimming
returns these. It locks the allocator for some milliseconds, so a busy gateway does it rarely.
"""

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BYTES = 1 << 20
GIVE_BACK_BYTES = 16 << 20
DELAY_S = 0.01  # a call still holds its body for a moment after its answer
_M_ARENA_MAX = -8


def share_memory() -> None:
    """Make all threads that start from now on share one arena, if the C library has arenas: it returns all free memory
    of the first one only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def return_memory() -> None:
    """Trim the C library's heap, if it can: takes some milliseconds, without the interpreter lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class LargeMessages:
    """Decides when to return memory. Single writer: the loop.

    give_back: returns it; called on a thread, never concurrently, `delay_s` after enough messages have ended.
    least_bytes: smaller messages do not count.
    """

    def __init__(
        self, give_back: Callable[[], None] = return_memory, *, least_bytes: int = LARGE_BYTES, delay_s: float = DELAY_S
    ) -> None:
        self._give_back = give_back
        self._least_bytes = least_bytes
        self._delay_s = delay_s
        self._bytes = 0
        self._running = False

    def freed(self, size: int) -> None:
        """Count a message of `size` bytes that was served or refused and is no longer needed."""
        if size < self._least_bytes:
            return
        self._bytes += size
        self._begin()

    def _begin(self, least_bytes: int = GIVE_BACK_BYTES) -> None:
        if self._bytes >= least_bytes and not self._running:
            self._running = True
            self._bytes = 0
            asyncio.get_running_loop().call_later(self._delay_s, self._run)

    def _run(self) -> None:
        done = asyncio.get_running_loop().run_in_executor(None, self._give_back)
        done.add_done_callback(self._done)

    def _done(self, done: "asyncio.Future[None]") -> None:
        done.exception()
        self._running = False
        if self._bytes:  # messages that ended meanwhile may be the last: their memory is returned as well
            self._begin(least_bytes=1)
