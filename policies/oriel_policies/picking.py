"""Which endpoint next: the better of two, by Peak-EWMA over outstanding work.

Two random endpoints are compared and the one with less load takes the call ("power of two choices", Mitzenmacher,
1996): the cost does not grow with their number, and no two gateways herd to the same one. Load is Finagle's Peak-EWMA
(twitter/finagle, `com.twitter.finagle.loadbalancer.PeakEwma`): what an answer costs times what is outstanding, where
the cost leaps up to a slow answer at once and comes down exponentially.
"""

from collections.abc import Callable
from math import exp
from typing import Final

__all__ = ["PeakEwma", "two_of"]

DECAY_S: Final = 10.0
PENALTY_S: Final = 1000.0  # an endpoint that has work and never answered, or has no room: behind every one that did
BUSY_S = 0.1
LONGEST_BUSY_S = 5.0


class PeakEwma:
    """How long one endpoint takes. cost_s: seconds per answer at `stamp_s`, from where it decays. busy_s: until then
    it has no room.

    Times are monotonic seconds and do not go back.
    """

    __slots__ = ("_refusals", "busy_s", "cost_s", "stamp_s")

    def __init__(self) -> None:
        self.cost_s = 0.0
        self.stamp_s = 0.0
        self.busy_s = 0.0
        self._refusals = 0

    def observed(self, latency_s: float, now: float) -> None:
        """An answer took this long."""
        cost_s = self.cost_s
        if latency_s >= cost_s:
            self.cost_s = latency_s
        else:
            self.cost_s = latency_s + (cost_s - latency_s) * exp((self.stamp_s - now) / DECAY_S)
        self.stamp_s = now
        self._refusals = 0

    def failed(self, latency_s: float, now: float, *, typical_s: float = 0.0) -> None:
        """It took this long to give no good answer: it may look slower for that, never quicker, not even by time that
        passes. typical_s: what others take, for an endpoint that never gave a good one."""
        self.cost_s = max(latency_s, self.cost_s, typical_s)
        self.stamp_s = now

    def refused(self, now: float, wait_s: float = 0.0) -> None:
        """It says that it has no room, and perhaps for how long: 0.1 s to 5 s, doubled while it goes on saying so."""
        if now >= self.busy_s:
            self.busy_s = now + min(LONGEST_BUSY_S, max(wait_s, BUSY_S * 2.0 ** min(self._refusals, 8)))
            self._refusals += 1

    def load(self, outstanding: int, now: float) -> float:
        """Expected seconds of work before a further call; less is better."""
        cost_s = self.cost_s
        if now < self.busy_s:
            return PENALTY_S + outstanding
        if cost_s == 0.0:
            return PENALTY_S + outstanding if outstanding else 0.0
        return cost_s * exp((self.stamp_s - now) / DECAY_S) * (outstanding + 1)


def two_of(count: int, random: Callable[[], float]) -> tuple[int, int]:
    """Two different indices below `count` (at least 2), each pair as likely as any other. random: [0, 1)."""
    first = int(random() * count)
    second = int(random() * (count - 1))
    return first, second + 1 if second >= first else second
