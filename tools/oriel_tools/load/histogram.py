"""Durations in buckets that grow by half a percent: a percentile of millions in bounded memory. Pure."""

import math

ERROR = 0.005
_LEAST_S = 1e-6
_MOST_S = 1e5
_PER_BUCKET = 1 / math.log1p(ERROR)


class Histogram:
    """Counts of durations in seconds. `count`: their number; `max_s`: the longest, exact. At most 5,080 buckets."""

    __slots__ = ("_buckets", "count", "max_s")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.max_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count one duration; what is below a microsecond counts as one."""
        index = 0
        if duration_s > _LEAST_S:
            index = math.ceil(math.log(min(duration_s, _MOST_S) / _LEAST_S) * _PER_BUCKET)
        self._buckets[index] = self._buckets.get(index, 0) + 1
        self.count += 1
        if duration_s > self.max_s:
            self.max_s = duration_s

    def merge(self, other: "Histogram") -> None:
        """Add the counts of `other`."""
        for index, count in other._buckets.items():
            self._buckets[index] = self._buckets.get(index, 0) + count
        self.count += other.count
        self.max_s = max(self.max_s, other.max_s)

    def percentile_s(self, share: float) -> float:
        """The duration that `share` (0..1) of all stayed within, by nearest rank; 0 without any.

        Never below the exact value and at most ERROR above it (from a microsecond to a day).
        """
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if seen >= rank:
                return min(self.max_s, _LEAST_S * (1 + ERROR) ** index)
        return self.max_s
