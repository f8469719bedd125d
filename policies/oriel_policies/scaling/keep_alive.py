"""Decides from a pool's idle gaps how long it keeps its last replica, and when it gets one before the next call."""

from collections import deque
from typing import Final

_KEPT: Final = 200
_ENOUGH: Final = 10
_REGULAR: Final = 1.25


class IdleGaps:
    """The lengths of the latest idle gaps. shortest_s: shorter ones are the distances of calls, not gaps."""

    __slots__ = ("_gaps", "_idle_s", "_shortest_s")

    def __init__(self, shortest_s: float) -> None:
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._shortest_s = shortest_s
        self._idle_s = 0.0

    def observe(self, idle_s: float) -> None:
        """Note that the pool has been idle for `idle_s`. A shorter time than before means that a gap has ended."""
        if idle_s < self._idle_s and self._idle_s >= self._shortest_s:
            self._gaps.append(self._idle_s)
        self._idle_s = idle_s

    def keep_alive_s(self, most_s: float) -> float:
        """Return the time that 99 of 100 gaps did not exceed, at most `most_s`; `most_s` while too few gaps are
        known.
        """
        return min(most_s, self._quantile(0.99)) if len(self._gaps) >= _ENOUGH else most_s

    def expects_call(self, start_s: float) -> bool:
        """Return whether a replica ordered now would be just in time, because all gaps are about equally long."""
        if len(self._gaps) < _ENOUGH:
            return False
        early, late = self._quantile(0.05), self._quantile(0.95)
        return late <= _REGULAR * early and early - start_s <= self._idle_s <= late

    def _quantile(self, share: float) -> float:
        ordered = sorted(self._gaps)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
