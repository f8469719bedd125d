"""Endpoint picking: the better of two random endpoints, by Peak-EWMA over outstanding work.

Two random endpoints are compared and the one with less load takes the call ("power of two choices", Mitzenmacher,
1996): the cost does not grow with their number, and no two gateways herd to the same one. Load is Finagle's Peak-EWMA
(twitter/finagle, `com.twitter.finagle.loadbalancer.PeakEwma`): what an answer costs times what is outstanding, where
the cost rises to a slow answer at once and decays exponentially.
"""

from collections.abc import Callable
from math import exp
from typing import Final

DECAY_S: Final = 10.0
PENALTY_S: Final = 1000.0  # for an endpoint that has work and never answered, or has no capacity
BUSY_S = 0.1
LONGEST_BUSY_S = 5.0


class PeakEwma:
    """The cost of one endpoint. cost_s: seconds per answer at `stamp_s`, decaying from there. busy_s: the time until
    which it reports no capacity.

    Times are monotonic seconds and do not go back.
    """

    def __init__(self) -> None:
        self.cost_s = 0.0
        self.stamp_s = 0.0
        self.busy_s = 0.0
        self._refusals = 0

    def observed(self, latency_s: float, now: float) -> None:
        """Record the latency of an answer."""
        cost_s = self.cost_s
        if latency_s >= cost_s:
            self.cost_s = latency_s
        else:
            self.cost_s = latency_s + (cost_s - latency_s) * exp((self.stamp_s - now) / DECAY_S)
        self.stamp_s = now
        self._refusals = 0

    def record_failure(self, latency_s: float, now: float, *, typical_s: float = 0.0) -> None:
        """Record the latency of a failure. It may raise the cost, never lower it, not even by decay. typical_s: the
        latency of the others, for an endpoint without any good answer."""
        self.cost_s = max(latency_s, self.cost_s, typical_s)
        self.stamp_s = now

    def reported_full(self, now: float, wait_s: float = 0.0) -> None:
        """Record that it reports no capacity, perhaps for `wait_s`: 0.1 s to 5 s, doubled while the reports go on."""
        if now >= self.busy_s:
            self.busy_s = now + min(LONGEST_BUSY_S, max(wait_s, BUSY_S * 2.0 ** min(self._refusals, 8)))
            self._refusals += 1

    def load(self, outstanding: int, now: float) -> float:
        """Expected seconds of work ahead of a further call; less is better."""
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
