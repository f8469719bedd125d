"""Whether a call can still be answered in time, and how much time callers give. Pure: learned from what happened.

A model's service times are predictable (Clockwork, OSDI 2020), so what cannot end before its deadline need not begin.
But a wrong refusal costs more than a wasted run: nothing is refused before SAMPLES batches were seen, nor while even a
quick batch would be in time, and one in PROBE is let through all the same, so that a model that became quicker shows.

Quantiles are followed by stochastic approximation (Robbins, Monro 1951) in relative steps: one number, no samples kept.
"""

from math import inf

from oriel_policies.batch import size_class

__all__ = ["LowQuantile", "ServiceFloor"]

SAMPLES = 50
PROBE = 20


class LowQuantile:
    """About the 10th percentile of what was lately observed: positive numbers. Infinite at first. Single writer.

    step: how far one observation moves it; a rare extreme hardly does, a change is followed within some 100 / step.
    """

    __slots__ = ("_down", "_up", "value")

    QUANTILE = 0.1

    def __init__(self, step: float) -> None:
        self.value = inf
        self._down = 1.0 - step * (1.0 - self.QUANTILE)
        self._up = 1.0 + step * self.QUANTILE

    def observe(self, sample: float) -> None:
        """One more sample."""
        value = self.value
        if value == inf:
            self.value = max(sample, 1e-9)  # nothing times anything is nothing
        else:
            self.value = value * (self._down if sample < value else self._up)


class ServiceFloor:
    """What a batch of some rows takes when it is quick, per row count; a larger batch is never quicker."""

    __slots__ = ("_quick", "_refused", "_seen", "ceiling_s")

    STEP = 0.02

    def __init__(self) -> None:
        self._quick: dict[int, LowQuantile] = {}
        self._seen: dict[int, int] = {}
        self._refused = 0
        self.ceiling_s = 0.0  # with more time than this, nothing is ever refused

    def observe(self, rows: int, seconds: float) -> None:
        """A batch of `rows` took `seconds`."""
        size = size_class(rows)
        quick = self._quick.get(size)
        if quick is None:
            quick = self._quick[size] = LowQuantile(self.STEP)
            self._seen[size] = 0
        quick.observe(seconds)
        self._seen[size] += 1
        if quick.value > self.ceiling_s:
            self.ceiling_s = quick.value

    def seconds(self, rows: int) -> float:
        """No batch with `rows` rows in it is likely to take less; 0.0 while too little is known."""
        known = [quick.value for size, quick in self._quick.items() if size <= rows and self._seen[size] >= SAMPLES]
        return max(known, default=0.0)

    def refuses(self, rows: int, left_s: float) -> bool:
        """Whether a call of `rows` rows with `left_s` seconds to its deadline should not begin."""
        if left_s >= self.ceiling_s or left_s >= self.seconds(rows):
            return False
        self._refused += 1
        return self._refused % PROBE != 0
