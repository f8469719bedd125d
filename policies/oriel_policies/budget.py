"""How much may be sent twice: a budget in proportion to the traffic, so that retries never become the load.

In any 10 s that end with a repeat, repeats are at most one in ten of the requests, rounded up (the "retry budget" of
Google's SRE book, chapter 21, and of Finagle's `RetryBudget`; here without a floor of so many per second).
"""

from math import ceil
from typing import Final

__all__ = ["ABSENT_SHARE", "MAX_ATTEMPTS", "RetryBudget"]

MAX_ATTEMPTS: Final = 2
RATIO = 0.1
ABSENT_SHARE = 0.5  # for models that one endpoint has not: a client names what it likes
WINDOW_S: Final = 10


class RetryBudget:
    """Requests and repeats of the last seconds. Times are monotonic seconds; one that goes back counts as now.

    Counted in whole seconds on the safe side: requests of a second that is partly out of the window are not counted,
    repeats are.
    """

    __slots__ = ("_repeats", "_requests", "_until", "spent")

    def __init__(self) -> None:
        self._until = 1  # the whole second that is being counted ends here
        self._requests = [0] * WINDOW_S
        self._repeats = [0] * (WINDOW_S + 1)
        self.spent = 0

    def requested(self, now: float) -> None:
        """A request came in."""
        if now >= self._until:
            self._turn(int(now))
        self._requests[0] += 1

    def spend(self, now: float, *, share: float = 1.0) -> bool:
        """Take one repeat; False: there is none left, and nothing was taken. share: of the budget that may be used up
        for this, so that what anybody can bring about leaves something for the rest."""
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
