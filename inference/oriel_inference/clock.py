"""An interface for time and the loop, so that tests run queues and timers in virtual time."""

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Protocol


class VirtualTimer:
    """A scheduled call of a `VirtualClock`."""

    __slots__ = ("callback", "cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


# A scheduled call that may be cancelled, also twice.
Timer = asyncio.TimerHandle | VirtualTimer


class Clock(Protocol):
    """Times are absolute `time.monotonic()` seconds. Everything runs on the loop's thread."""

    def now(self) -> float: ...

    def call_soon(self, callback: Callable[[], None]) -> None: ...

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer: ...

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """Schedule a callback from any thread. Other methods are for the loop's thread only."""
        ...


class LoopClock:
    """The running asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    now = staticmethod(time.monotonic)  # a call asks a dozen times

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        # Not loop.call_at: a loop's clock may be cached or have another origin.
        return self._loop.call_later(max(0.0, when_s - time.monotonic()), callback)

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop closed while a batch was on the device, so there is no caller left to answer.
            if not self._loop.is_closed():
                raise


class VirtualClock:
    """Test double: time stands still until `advance`; `run` executes what is due now."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now = start_s
        self._soon: list[Callable[[], None]] = []
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._sequence = 0

    def now(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_at(self, when_s: float, callback: Callable[[], None]) -> VirtualTimer:
        self._sequence += 1
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (when_s, self._sequence, timer))
        return timer

    def run(self) -> None:
        """Run everything due at the present moment, in order."""
        while True:
            while self._soon:
                self._soon.pop(0)()
            if not self._timers or self._timers[0][0] > self._now:
                return
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled:
                timer.callback()

    def advance(self, seconds: float) -> None:
        """Move time forward, stopping at every timer on the way."""
        end = self._now + seconds
        self.run()
        while self._timers and self._timers[0][0] <= end:
            self._now = max(self._now, self._timers[0][0])
            self.run()
        self._now = end
        self.run()
