"""Keeps the most urgent tiers in time while the event loop has more to read than it can (`LoopOverload`).

An HTTP/1.1 connection that last asked for a less urgent tier is not read until its turn has come. Nor is one of HTTP/2
on which only such requests came lately. On an HTTP/2 connection that also carries urgent ones, the others are refused,
and their answers wait for a turn: until then their client has no streams for more.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic
from typing import Final

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.waiting.overload import BEAT_S, TURN_S, LoopOverload, shares
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.pulse import PAUSE_S

__all__ = ["Overload", "too_busy"]

_STALL_S: Final = 0.02
_STALLS: Final = 128
_GOING_ON_S: Final = TURN_S / 2  # seconds of a turn for resuming the connections whose turn has come
_READ_AGAIN: Final = 256  # connections that go on in one turn when the loop is not behind any more


class Overload:
    """The order in which the connections of one loop are read while it is behind. Single writer: the loop.

    lag_s: seconds by which the loop's timer was late at its latest beat, or the longest turn of the loop since the beat
    before, whichever is more: in turns as long as a beat the timer is never late.
    behind: True while it is overloaded.
    times: number of times that it has fallen behind.
    """

    def __init__(self, fronts: Iterable[HttpServer], ended: Callable[[], int]) -> None:
        """fronts: the servers, at any time. ended: tells how many requests have ended so far."""
        self._fronts = fronts
        self._ended = ended
        self._count = 0
        self._rule = LoopOverload()
        self.behind = False
        self._loop = asyncio.get_running_loop()
        self._queues: dict[int, deque[tuple[Callable[[], None], float]]] = {}
        self._turning = self._stopping = False
        self._turn_s = 0.0
        self._last_turn_s = 0.0
        self.lag_s = 0.0
        self.times = 0
        self._beat_s = inf
        self._stood_still: deque[tuple[float, float]] = deque(maxlen=_STALLS)  # the latest times, each from and until

    @property
    def waiting(self) -> int:
        """Connections that are not read, and refusals that are not written yet."""
        return sum(map(len, self._queues.values()))

    def beat(self, late_s: float) -> None:
        """Judge a beat of the loop's timer."""
        self._beat_s = now = monotonic()
        if late_s >= _STALL_S:
            self._stood_still.append((now - late_s, now))
        self.lag_s = late_s = max(late_s, self._last_turn_s)
        self._loop.call_soon(self._begin_turn)
        before, self._count = self._count, self._ended()
        was = self._rule.behind
        if not self._stopping and self._rule.beat(late_s, self._count - before) != was:
            self.times += not was
            self._apply()

    def stood_still_s(self, began_s: float, ended_s: float) -> float:
        """Return how long the loop stood still between two moments, as far as that is kept."""
        times = [
            *self._stood_still,
            (self._beat_s + BEAT_S, ended_s),
        ]  # the beat of a stall comes after what it held up
        return sum([max(0.0, min(ended_s, until) - max(began_s, since)) for since, until in times])

    def _begin_turn(self) -> None:
        self._loop.call_soon(self._end_turn, monotonic())

    def _end_turn(self, began_s: float) -> None:
        self._last_turn_s = monotonic() - began_s

    def stop(self) -> None:
        """Read everything from now on, because the gateway drains: what waits unread would look idle."""
        self._stopping = True
        self._rule.resume_all()
        self._apply()

    def _apply(self) -> None:
        self.behind = self._rule.behind
        for front in self._fronts:
            front.gate = self.join if self._rule.behind else None

    def join(self, rank: int, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later turn. It must not raise; it finds out itself whether its client is still there."""
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = deque()
        queue.append((go_on, monotonic()))
        self._start()

    def refuses(self, rank: int) -> bool:
        """Return whether to refuse a request of this rank that has its connection to itself."""
        return self._rule.refuses(rank)

    def refuses_stream(self, rank: int) -> bool:
        """Return whether to refuse a request of this rank that shares its connection with others."""
        self._start()  # the count of a turn ends with it
        return self._rule.crowds(rank) or self._rule.refuses(rank)

    def _start(self) -> None:
        if not self._turning:
            self._turning = True
            self._turn_s = monotonic()
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = monotonic()
        rule, queues = self._rule, self._queues
        most = rule.turn(now - self._turn_s) if rule.behind else _READ_AGAIN
        self._turn_s = now
        longest_s = 0.0
        for rank, count in shares({rank: len(queue) for rank, queue in queues.items()}, most).items():
            queue = queues[rank]
            ends_s = monotonic() + _GOING_ON_S
            wait_s, gone = 0.0, 0
            while gone < count and monotonic() < ends_s:
                go_on, since = queue.popleft()
                wait_s = now - since
                gone += 1
                go_on()
            longest_s = max(longest_s, wait_s)
            rule.went_on(rank, gone, wait_s if queue else 0.0)
        if longest_s >= PAUSE_S:
            for front in self._fronts:
                front.pulse.doubt()
        self._turning = bool(self.waiting)
        if self._turning:
            self._loop.call_soon(self._turn)


def too_busy() -> Refused:
    """Return the refusal of a request for which the loop has no time."""
    message = "the gateway receives more requests than it can handle, and more urgent ones go first"
    return Refused(Outcome.QUEUE_FULL, message, retry_after_s=1)
