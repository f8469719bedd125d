"""Bounds repeated requests (retries and hedges) to a share of the traffic, so that they never become the load.

In any 10 s that end with a repeat, repeats are at most one in ten of the requests, rounded up. This is the "retry
budget" of Google's SRE book, chapter 21, and of Finagle's `RetryBudget`, without their minimum number per second.
"""

from math import ceil
from typing import Final

MAX_ATTEMPTS: Final = 2
RATIO = 0.1
ABSENT_SHARE = 0.5  # for models that an endpoint does not have: clients choose the names
WINDOW_S: Final = 10


class RetryBudget:
    """Counts requests and repeats of the last seconds. Times are monotonic seconds and never count as going back.

    It counts by whole seconds, conservatively: of a second that is partly outside of the window, the repeats count and
    the requests do not.
    """

    def __init__(self) -> None:
        self._until = 1  # the whole second that is being counted ends here
        self._requests = [0] * WINDOW_S
        self._repeats = [0] * (WINDOW_S + 1)
        self.spent = 0

    def requested(self, now: float) -> None:
        """Count a request."""
        if now >= self._until:
            self._turn(int(now))
        self._requests[0] += 1

    def spend(self, now: float, *, share: float = 1.0) -> bool:
        """Spend one repeat; False if the budget is used up.

        share: the part of the budget that this kind of repeat may use, so that repeats which any client can cause leave
        some for the others.
        """
        if now >= self._until:
            self._turn(int(now))
        if sum(self._repeats) + 1 > ceil(share * RATIO * sum(self._requests)):
            return False
        self._repeats[0] += 1
        self.spent += 1
        return True

    def _turn(self, second: int) -> None:
        passed = min(second + 1 - self._until, WINDOW_S + 1)
        self._until = second + 1
        self._requests = ([0] * passed + self._requests)[:WINDOW_S]
        self._repeats = ([0] * passed + self._repeats)[: WINDOW_S + 1]
