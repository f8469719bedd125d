"""Quantiles of durations as a summary of Prometheus. Pure.

A summary counts durations of the latest minute in buckets whose bounds grow by 2 %, so that its memory depends on the
spread of the durations and not on their number: 20 s and 1 us are 850 buckets apart.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import ceil, log, nan
from time import monotonic

SLICES, SLICE_S = 5, 12.0  # the minute passes in so many steps
_GROWTH = log(1.02)


class Summary:
    """Quantiles of the latest minute of durations.

    count: the number of all durations since the start. total_us: their sum in microseconds.
    """

    __slots__ = ("_slices", "count", "total_us")

    def __init__(self) -> None:
        self.count = self.total_us = 0
        # Number of a slice of time -> durations by bucket.
        self._slices: deque[tuple[int, Counter[int]]] = deque(maxlen=SLICES)

    def observe(self, seconds: float, now: float, times: int = 1) -> None:
        """Count `times` durations of `seconds` each that ended at `now`."""
        us = max(0, int(seconds * 1e6))
        self.count += times
        self.total_us += us * times
        number = int(now / SLICE_S)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, Counter()))
        self._slices[-1][1][ceil(log(us) / _GROWTH) if us else 0] += times

    def quantiles(self, shares: Sequence[float], now: float) -> Iterator[float]:
        """Yield the duration in microseconds that each share of the latest ones did not exceed, NaN without any."""
        counts: Counter[int] = Counter()
        for number, found in self._slices:
            if number > now / SLICE_S - SLICES:
                counts.update(found)
        ascending, seen, reached = sorted(counts), 0, 0
        for share in shares:
            while reached < len(ascending) and (not seen or seen < share * counts.total()):
                seen += counts[ascending[reached]]
                reached += 1
            yield round(1.02 ** (ascending[reached - 1] - 0.5)) if reached else nan

    def lines(self, shares: Sequence[float], name: str, labels: str) -> Iterator[str]:
        """Yield the lines of the metrics port."""
        yield f"{name}_count{{{labels}}} {self.count}\n{name}_sum{{{labels}}} {self.total_us}\n"
        for share, us in zip(shares, self.quantiles(shares, monotonic()), strict=True):
            yield f'{name}{{{labels},quantile="{share:g}"}} {us if us == us else "NaN"}\n'
