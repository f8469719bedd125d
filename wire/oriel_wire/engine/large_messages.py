"""Returns the memory of large messages to the operating system.

gRPC receives a message in small pieces on threads of its own and joins them twice: one of 60 MB takes 180 for a moment.
All of it is freed, but the allocator keeps what came in small pieces, per thread (measured: 260 MiB after fifty such
messages), and the next one comes on top of that. So all threads share one arena, and it is told to give free memory
back (other arenas than the first keep what is at their end), once as many bytes have come that this costs little.

What gRPC reads ahead is never freed as long as a connection lives: buffers for twice as much as one read has ever
brought, 3 MiB after some messages of 1 MiB (measured: 8 to 33 % of what 250 of them took, with 8 to 32 connections;
grpc issue 42194). `READ_AHEAD` bounds it; a quarter of a MiB costs 8 % more CPU for a message of 1 MiB, and is what 32
of them leave 2 to 4 % with.

HTTP bodies are received in pieces that many senders brought in turns: freed, they leave holes (measured at the gateway:
of 150 bodies of 1 MiB in pieces of 16 KiB the process kept between nothing and all). The same call ends that; it holds
the allocator for some milliseconds, so a busy gateway makes it seldom.
"""

import asyncio
import ctypes
from collections.abc import Callable

__all__ = ["READ_AHEAD", "LargeMessages", "share_memory"]

LARGE_BYTES = 1 << 20
GIVE_BACK_BYTES = 16 << 20
# The call of the message ends by itself shortly after its answer.
DELAY_S = 0.01


# An option of gRPC channels and servers.
READ_AHEAD = ("grpc.experimental.tcp_max_read_buffer_size", 256 * 1024)
_M_ARENA_MAX = -8


def share_memory() -> None:
    """Make all threads that start from now on share one arena, if the C library has arenas."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def _trim() -> None:
    """Trim the C library's heap, if it can: takes some milliseconds, without the interpreter lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class LargeMessages:
    """Decides when to return memory. give_back: called on a thread, never concurrently, at the earliest `delay_s` after
    it became worth while.

    least_bytes: smaller messages do not count. Single writer: the loop.
    """

    def __init__(
        self, give_back: Callable[[], None] = _trim, *, least_bytes: int = LARGE_BYTES, delay_s: float | None = None
    ) -> None:
        self._give_back = give_back
        self._least_bytes = least_bytes
        self._delay_s = delay_s
        self._bytes = 0
        self._running = False

    def ended(self, size: int) -> None:
        """A message of `size` bytes was served or refused and is no longer needed."""
        if size < self._least_bytes:
            return
        self._bytes += size
        self._begin()

    def _begin(self, least_bytes: int = GIVE_BACK_BYTES) -> None:
        if self._bytes >= least_bytes and not self._running:
            self._running = True
            self._bytes = 0
            delay_s = DELAY_S if self._delay_s is None else self._delay_s
            asyncio.get_running_loop().call_later(delay_s, self._run)

    def _run(self) -> None:
        done = asyncio.get_running_loop().run_in_executor(None, self._give_back)
        done.add_done_callback(self._done)

    def _done(self, done: "asyncio.Future[None]") -> None:
        done.exception()
        self._running = False
        if self._bytes:  # messages that ended meanwhile may be the last: their memory is returned as well
            self._begin(least_bytes=1)
