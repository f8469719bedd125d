"""Measures how long a request had been waiting unread, so that a pause of the process does not extend its deadline.

A deadline counts from a request's arrival, but a server only knows when it read the request. While the event loop
polls, the two moments are the same. If the process or its machine was stopped for a while, all requests that arrived
meanwhile are read at once and would get their full time, although their senders may have given up long ago.

A timer fires every `BEAT_S`. The loop has paused if `PAUSE_S` pass without it; a shorter stall, such as a garbage
collection, is no pause. From then on, and for `DOUBT_S` after the loop has resumed, the kernel is asked for the age of
the data that is read: Linux records for each TCP connection when data last arrived. So a request is never judged older
than it is, and a request that arrives after the pause counts as new. If the kernel keeps no such record (other
systems, Unix sockets), data that is read before the next beat counts as old as the pause, if the pause lasted for at
least `UNKNOWN_S`.

Without a pause, a reader compares two numbers and makes no system call.

A connection of HTTP/2 carries many requests, and the kernel's record is of its latest bytes alone: `shared_age_s` says
when these hide older ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from time import monotonic

from oriel_wire.engine.kernel import Arrival

BEAT_S = 0.05
PAUSE_S = 0.15
DOUBT_S = 1.0
UNKNOWN_S = 0.5
CONNECT_TURNS = 16  # turns of the loop; a connection that the kernel has made is ready in fewer, also over HTTP/2
CONNECT_TURN_S = 0.005


class Pulse:
    """Detects the pauses of one loop. Single writer: that loop.

    fresh_until: data that is read before this monotonic time has just arrived; for later reads call `age_s`.
    pauses: number of pauses so far. paused_s: seconds of the latest one.
    on_beat: called at each beat with how late it is, in seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, clock: Callable[[], float] = monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._beat_at = clock()
        self.paused_s = 0.0
        self._just_resumed = False
        self._resumed_at = self._doubted_at = -inf
        self.pauses = 0
        self.on_beat: Callable[[float], None] | None = None
        self.fresh_until = self._beat_at + PAUSE_S
        self._timer: asyncio.TimerHandle | None = loop.call_later(BEAT_S, self._beat)

    def close(self) -> None:
        """Stop the timer. From then on everything that is read counts as new."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.fresh_until = inf

    def doubt(self) -> None:
        """Ask the kernel for the age of what is read from now on: some of it has waited although the loop did poll."""
        self._doubted_at = self._clock()
        self.fresh_until = -inf

    def age_s(self, arrival: Arrival | None, now: float) -> float:
        """Seconds since the data read at `now` arrived. arrival: the kernel's record, None if there is none.

        Call it only from `fresh_until` on: the loop may have resumed without having run its timers yet.
        """
        if now - self._beat_at >= PAUSE_S:
            self._resume(now)
        if arrival is not None:
            return arrival.age_s
        return self._unknown_s()

    def shared_age_s(self, arrival: Arrival | None, now: float, before_s: float) -> float:
        """`age_s` for a connection that carries many requests, on which something was read last at `before_s`.

        If its latest bytes came when the loop had resumed, and nothing was read from it since, they may hide
        requests that came during the pause, so the kernel's record says nothing about these.
        """
        age_s = self.age_s(arrival, now)
        if arrival is not None and age_s <= now - self._resumed_at and before_s < self._resumed_at:
            return max(age_s, self._unknown_s())
        return age_s

    def _unknown_s(self) -> float:
        return self.paused_s if self._just_resumed and self.paused_s >= UNKNOWN_S else 0.0

    def _resume(self, now: float) -> None:
        self.pauses += 1
        self.paused_s = now - self._beat_at
        self._resumed_at = self._beat_at = now
        self._just_resumed = True
        self.fresh_until = -inf
        if self.on_beat is not None:
            self.on_beat(self.paused_s - BEAT_S)  # the timer may not run for long

    def _beat(self) -> None:
        now = self._clock()
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        if now - self._beat_at >= PAUSE_S:
            self._resume(now)
        else:
            if now - self._resumed_at >= BEAT_S:
                self._just_resumed = False
            if self.on_beat is not None:
                self.on_beat(now - self._beat_at - BEAT_S)
        self._beat_at = now
        self.fresh_until = now + PAUSE_S if now - max(self._resumed_at, self._doubted_at) >= DOUBT_S else -inf


@asynccontextmanager
async def connecting_within(seconds: float) -> AsyncIterator[None]:
    """Bound an attempt to connect, but give it at least `CONNECT_TURNS` turns of the loop. Raises TimeoutError.

    A loop that has paused, or whose turns take long, would otherwise find the time over before it hears that the
    kernel made the connection meanwhile.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def count(turns: int) -> None:
            nonlocal timer
            if turns:
                timer = loop.call_later(CONNECT_TURN_S, count, turns - 1)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(max(0.0, seconds - CONNECT_TURNS * CONNECT_TURN_S), count, CONNECT_TURNS)
        try:
            yield
        finally:
            timer.cancel()
