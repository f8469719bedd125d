"""Predicts how many rows of a batch that was just answered come back at once, in closed loops. Pure.

Theory. In a closed loop each caller sends its next request when the last one is answered. An instance that then starts
whatever waits at the moment a batch ends splits the callers into two groups that never meet (57 rows, 7 rows, 57 rows,
...), and pays for two batches to do the work of one. If most callers are known to return within a window after their
answers (a fifth of the batch's time, at least 5 and at most 50 ms), waiting for them is cheaper than running twice. How
many return, and how long the last of them takes, is learned per model. Arrivals that do not depend on answers hardly
fall into the window, so the learned share stays small and no batch waits. The wait ends as soon as the expected callers
have come, and with the window at the latest.

Times are absolute monotonic seconds.
"""

from collections.abc import Callable

MIN_WINDOW_S = 0.005
MAX_WINDOW_S = 0.050
WINDOW_SHARE = 0.2
ALPHA = 0.4
GAIN = 0.95
MOST = 0.7  # a smaller share is chance: such calls come anyway, and not together


def pays(rows: int, soon: int, wait_s: float, predict: Callable[[int], float]) -> bool:
    """Return whether it is cheaper to run `rows` that wait together with `soon` that arrive within `wait_s`.

    predict: rows of a batch -> seconds, as `ServiceCurve.predict`.
    """
    if rows < 1 or soon < 1:
        return False
    apart = predict(rows) + predict(soon)
    return wait_s + predict(rows + soon) < GAIN * apart


class Returns:
    """Learns the share of returning rows. until_s: end of the window after the last answers; calls before it have
    returned. Single writer.

    lag_s: seconds from the answers until the last of them arrives.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._answered = 0
        self._answered_s = 0.0
        self._came = 0
        self._last_s = 0.0
        self.lag_s = MIN_WINDOW_S
        self.until_s = 0.0

    def batch_finished(self, rows: int, took_s: float, now: float) -> None:
        """Record a batch of `rows` that took `took_s` and has just been answered."""
        self._close()
        self._answered = rows
        self._answered_s = now
        self.until_s = now + min(MAX_WINDOW_S, max(MIN_WINDOW_S, WINDOW_SHARE * took_s))

    def queued(self, rows: int, now: float) -> None:
        """Record a queued call of `rows` rows."""
        if now < self.until_s:
            self._came += rows
            self._last_s = now

    def expected(self, rows: int) -> int:
        """Return how many of the `rows` that are about to be answered will be followed by new ones at once."""
        return int(self._share * rows) if self._share >= MOST else 0

    def coming(self, now: float) -> tuple[int, float, float]:
        """Rows still expected, the latest time of their arrival, and their usual delay after the answers."""
        if now >= self.until_s:
            return 0, 0.0, 0.0
        return max(0, self.expected(self._answered) - self._came), self.until_s, self.lag_s

    def _close(self) -> None:
        if self._answered:
            self._share += ALPHA * (min(1.0, self._came / self._answered) - self._share)
            if self._came:
                self.lag_s += ALPHA * (self._last_s - self._answered_s - self.lag_s)
        self._came = 0
