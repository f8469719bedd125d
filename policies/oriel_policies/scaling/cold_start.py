"""Estimates when a pool without servers gets its first one, and which calls are worth holding until then.

A start begins with the first call for a pool that has no address, and ends when its first server is usable. Its rest is
the median of the earlier starts that took longer than it has taken so far. One that takes longer than all of them is
expected to take as long again as it is late already. Until a start was seen, the documents' guess stands for all.

A pool whose servers have addresses and do not answer is not taken for a start: it may be back in a moment, and nothing
says when. Its calls are held and not judged.
"""

from collections import deque
from math import ceil
from typing import Final

_KEPT: Final = 32
_LEAST_S: Final = 1.0
_MOST_S: Final = 3600.0


class ColdStarts:
    """The starts of one pool. Single writer; times are monotonic seconds.

    guess_s: assumed seconds of a start, until one was seen.
    forget_s: seconds without a call after which a start is forgotten, since nobody waits for it and the autoscaler may
    have given it up; the next call begins another one.
    count: number of starts that were seen.
    """

    __slots__ = ("_began_s", "_called_s", "_seen", "count", "forget_s", "guess_s")

    def __init__(self, *, guess_s: float, forget_s: float) -> None:
        self.guess_s = guess_s
        self.forget_s = forget_s
        self.count = 0
        self._seen: deque[float] = deque(maxlen=_KEPT)
        self._began_s: float | None = None
        self._called_s = 0.0

    def called(self, now: float, *, empty: bool) -> None:
        """Note that a call needs the pool while no server is usable.

        empty: no server has an address.
        """
        if empty and (self._began_s is None or now - self._called_s > self.forget_s):
            self._began_s = now
        self._called_s = now

    def ready(self, now: float) -> None:
        """Note that a server is usable."""
        if self._began_s is not None:
            self._seen.append(now - self._began_s)
            self.count += 1
            self._began_s = None

    def elapsed_s(self, now: float) -> float | None:
        """Return how long the start under way has taken; None if none is."""
        return None if self._began_s is None else max(0.0, now - self._began_s)

    def rest_s(self, now: float) -> float | None:
        """Return how long the start under way is expected to take from now on; None if none is under way."""
        elapsed_s = self.elapsed_s(now)
        if elapsed_s is None:
            return None
        longer = [took_s for took_s in self._ordered() if took_s > elapsed_s]
        if longer:
            return longer[(len(longer) - 1) // 2] - elapsed_s
        return min(_MOST_S, max(_LEAST_S, elapsed_s - self._ordered()[-1]))

    def retry_after_s(self, now: float) -> int | None:
        """Return the whole seconds until the start under way has probably ended; None if none is under way."""
        rest_s = self.rest_s(now)
        return None if rest_s is None else max(1, ceil(rest_s))

    def quantile_s(self, share: float) -> float:
        """Return how long this share of the latest starts took at most; the guess if none was seen."""
        ordered = self._ordered()
        return ordered[max(0, ceil(share * len(ordered)) - 1)]

    def _ordered(self) -> list[float]:
        return sorted(self._seen) or [self.guess_s]


def hold_until(received_s: float, hold_s: float, requested_until: float) -> float:
    """Return when a call for a pool without servers is given up.

    That is after `hold_s`, or at the deadline that its caller asked for if that is earlier (infinite if it asked for
    none).
    """
    return min(received_s + hold_s, requested_until)


def worth_holding(now: float, rest_s: float | None, until: float) -> bool:
    """Return whether a server can be there before a call is given up.

    now, until: absolute seconds.
    rest_s: seconds until the server is there; None if that is not known.
    """
    return rest_s is None or now + rest_s <= until
