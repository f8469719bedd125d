"""Decides which of a server's models may compute: running instances times their threads stay within the cores of the
machine.

Single writer: the loop. A run takes as many units as it has threads and returns them afterwards. When there are not
enough, the model waits here, and the most urgent first call of all waiting models gets the next units. No model
overtakes the most urgent one, not even with a run that would fit where that one does not: a model with many threads
could otherwise starve.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter


@dataclass(slots=True, eq=False)
class Contender:
    """A model that wants to compute.

    units: threads of one of its runs, at most the total.
    urgency: returns (band, deadline) of the call that it would run next; None if it has nothing to run.
    granted: uses the units, which are taken already, or returns them with `release`.
    """

    units: int
    urgency: Callable[[], tuple[int, float] | None]
    granted: Callable[[], None]


class Cores:
    """The units of the machine. `acquire` never waits; a refused contender is called back through `granted`."""

    def __init__(self, total: int) -> None:
        self.total = max(1, total)
        self.free = self.total
        self._waiting: list[Contender] = []
        self._granting = False

    def acquire(self, contender: Contender) -> bool:
        """Take the contender's units now, or put it on the waiting list."""
        if contender in self._waiting:
            return False
        if not self._waiting and self.free >= contender.units:
            self._take(contender)
            return True
        self._waiting.append(contender)
        if not self._granting:
            self._grant()  # a waiting model may have nothing to run any more
        return False

    def release(self, units: int) -> None:
        """Return units and grant them to the most urgent waiting models."""
        self.free += units
        if self._waiting and not self._granting:
            self._grant()

    def _grant(self) -> None:
        self._granting = True
        try:
            while (chosen := self._next()) is not None:
                self._waiting.remove(chosen)
                self._take(chosen)
                chosen.granted()
        finally:
            self._granting = False

    def _take(self, contender: Contender) -> None:
        self.free -= contender.units

    def _next(self) -> Contender | None:
        """Return the waiting model that gets what it needs now; None if there is none."""
        _, chosen = min(self._contest(), key=itemgetter(0), default=(None, None))
        return chosen if chosen is not None and chosen.units <= self.free else None

    def _contest(self) -> list[tuple[tuple[int, float], Contender]]:
        """Return (urgency, model) of those that wait and have something to run; drop the others."""
        found = [(urgency, each) for each in self._waiting if (urgency := each.urgency()) is not None]
        if len(found) != len(self._waiting):
            self._waiting = [each for _, each in found]
        return found
