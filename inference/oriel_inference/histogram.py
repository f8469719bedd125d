"""Observations in fixed buckets, cheap enough for every request."""

from bisect import bisect_left
from collections.abc import Iterator

__all__ = ["Histogram"]


class Histogram:
    """bounds: upper bounds of the buckets, ascending, each inclusive; above the last there is one more. One writer."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(upper bound, observations at or below it) of every bucket but the last."""
        seen = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            yield bound, seen
