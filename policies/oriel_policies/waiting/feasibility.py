"""Decides whether a call can still be answered in time, from observed service times. Pure.

A model's service times are predictable (Clockwork, OSDI 2020), so a call that cannot end before its deadline should not
start. But a wrong refusal costs more than a wasted run: nothing is refused before SAMPLES batches were observed, nor
while a quick batch would be in time, and one call in PROBE is admitted anyway, so that a model that became quicker is
noticed.

Quantiles are tracked by stochastic approximation (Robbins, Monro 1951) in relative steps: one number, no samples kept.
"""

from enum import Enum
from math import inf

from oriel_policies.waiting.batch import size_class

SAMPLES = 50
LIKELY_SAMPLES = 20
PROBE = 20


class LowQuantile:
    """A running estimate of the 10th percentile of positive numbers. Infinite at first. Single writer.

    step: the part by which one observation moves it. A rare extreme hardly counts; a change is followed within some
    100 / step samples.
    """

    QUANTILE = 0.1

    def __init__(self, step: float) -> None:
        self.value = inf
        self._down = 1.0 - step * (1.0 - self.QUANTILE)
        self._up = 1.0 + step * self.QUANTILE

    def observe(self, sample: float) -> None:
        """Add one sample."""
        value = self.value
        if value == inf:
            self.value = max(sample, 1e-9)  # the steps are relative, so a value of zero could never change again
        else:
            self.value = value * (self._down if sample < value else self._up)


class ServiceFloor:
    """The service time of quick batches per row count; a larger batch is never quicker."""

    STEP = 0.02

    def __init__(self) -> None:
        self._quick: dict[int, LowQuantile] = {}
        self._seen: dict[int, int] = {}
        self._refused = 0
        self.ceiling_s = 0.0  # a call with more time than this is never refused

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
        """A lower bound for the time of a batch with `rows` rows; 0.0 while there are too few samples."""
        known = [quick.value for size, quick in self._quick.items() if size <= rows and self._seen[size] >= SAMPLES]
        return max(known, default=0.0)

    def refuses(self, rows: int, left_s: float) -> bool:
        """Return whether to refuse a call of `rows` rows because only `left_s` seconds are left until its deadline."""
        if left_s >= self.ceiling_s or left_s >= self.seconds(rows):
            return False
        self._refused += 1
        return self._refused % PROBE != 0


class Verdict(Enum):
    """A judgement. TOO_SHORT: no call has ever been that quick. INFEASIBLE: nine of ten are not."""

    ADMIT = "admit"
    TOO_SHORT = "too_short"
    INFEASIBLE = "infeasible"


class AnswerTimes:
    """The times of one kind of calls from the permit to the last byte, by size class of their bodies in bytes.

    fastest_s: the quickest call so far. likely_s: the mean plus twice the mean deviation, which few calls exceed, as in
    TCP's estimate of round trips (Jacobson 1988).
    """

    def __init__(self) -> None:
        self.floor = ServiceFloor()
        self.fastest_s = inf
        self._mean_s = self._deviation_s = 0.0
        self._count = self._refused = 0

    @property
    def likely_s(self) -> float:
        return self._mean_s + 2.0 * self._deviation_s

    @property
    def expected_s(self) -> float:
        """`likely_s`; 0.0 while there are too few samples."""
        return self.likely_s if self._count >= LIKELY_SAMPLES else 0.0

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Record a call that was answered successfully."""
        if seconds < self.fastest_s:
            self.fastest_s = seconds
        self._count = count = self._count + 1
        weight = max(0.05, 1.0 / count)
        error = seconds - self._mean_s
        self._mean_s += weight * error
        self._deviation_s += weight * (abs(error) - self._deviation_s)
        self.floor.observe(max(1, size_bytes), seconds)

    def quick_s(self, size_bytes: int) -> float:
        """The 10th percentile for this size class; 0.0 while there are too few samples."""
        return self.floor.seconds(size_class(max(1, size_bytes)))

    def judge(self, size_bytes: int, left_s: float) -> Verdict:
        """Judge whether a call with `left_s` seconds to its deadline should start.

        One call in PROBE that should not is admitted as a probe.
        """
        floor = self.floor
        if left_s >= floor.ceiling_s:
            return Verdict.ADMIT
        quick_s = self.quick_s(size_bytes)
        if not quick_s or left_s >= max(quick_s, self.fastest_s):
            return Verdict.ADMIT
        self._refused += 1
        if self._refused % PROBE == 0:
            return Verdict.ADMIT
        return Verdict.TOO_SHORT if left_s < self.fastest_s else Verdict.INFEASIBLE
