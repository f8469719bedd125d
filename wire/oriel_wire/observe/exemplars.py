"""Keeps the id of the latest kept trace for each bucket of a metric, for OpenMetrics' exemplars. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping
from time import time
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["Exemplar", "Exemplars"]

MAX_AGE_S: Final = 300.0
MAX_SERIES: Final = 4096
_NONE: Final[Mapping[int, "Exemplar"]] = {}

K = TypeVar("K", bound=Hashable)


class Exemplar(NamedTuple):
    """A kept trace that was counted. trace: its id in hexadecimal. value: the value that was observed. at_s: epoch
    seconds.
    """

    trace: str
    value: float
    at_s: float


class Exemplars(Generic[K]):
    """The latest kept trace of each bucket, by series. Single writer.

    At most `max_series` series are kept; a new one takes the room of those whose traces are too old to be shown.
    """

    __slots__ = ("_clock", "_max_series", "_series")

    def __init__(self, *, max_series: int = MAX_SERIES, clock: Callable[[], float] = time) -> None:
        self._max_series = max_series
        self._clock = clock
        self._series: dict[K, dict[int, Exemplar]] = {}

    def note(self, key: K, value: float, trace: str, bounds: tuple[float, ...] = ()) -> None:
        """Keep the trace of something that was observed. bounds: the bounds of the histogram's buckets; a counter has
        none.
        """
        found = self._series.get(key)
        if found is None:
            if len(self._series) >= self._max_series and not self._make_room():
                return
            found = self._series[key] = {}
        found[bisect_left(bounds, value)] = Exemplar(trace, value, self._clock())

    def of(self, key: K) -> Mapping[int, Exemplar]:
        """Return the traces of a series by the number of their bucket, none of them older than `MAX_AGE_S`."""
        found = self._series.get(key)
        if found is None:
            return _NONE
        since_s = self._clock() - MAX_AGE_S
        return {bucket: exemplar for bucket, exemplar in found.items() if exemplar.at_s >= since_s}

    def _make_room(self) -> bool:
        self._series = {key: fresh for key in self._series if (fresh := dict(self.of(key)))}
        return len(self._series) < self._max_series
