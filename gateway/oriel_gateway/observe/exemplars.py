"""Keeps the id of the latest kept trace for each bucket of the duration histogram, for OpenMetrics' exemplars."""

from bisect import bisect_left
from time import time

from prometheus_client.samples import Exemplar

from oriel_wire.telemetry import DURATION_BOUNDS_S

MAX_AGE_S = 300.0
MAX_SERIES = 4096

Key = tuple[str, str, str, str, int]


class Exemplars:
    """The latest kept trace of each bucket, by series (see `Stats.series`). The gateway's loop is the only writer."""

    __slots__ = ("_series",)

    def __init__(self) -> None:
        self._series: dict[Key, dict[int, tuple[str, float, float]]] = {}

    def note(self, key: Key, seconds: float, trace: str) -> None:
        """Keep the trace of a call that took so long."""
        found = self._series.get(key)
        if found is None:
            if len(self._series) >= MAX_SERIES:
                return
            found = self._series[key] = {}
        found[bisect_left(DURATION_BOUNDS_S, seconds)] = trace, seconds, time()

    def dressed(
        self, key: Key, buckets: list[tuple[str, int]]
    ) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Return the buckets of a series with their exemplars, none of which is older than `MAX_AGE_S`."""
        found = self._series.get(key)
        if found is None:
            return list(buckets)
        since = time() - MAX_AGE_S
        dressed: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for number, (bound, count) in enumerate(buckets):
            kept = found.get(number)
            if kept is None or kept[2] < since:
                dressed.append((bound, count))
            else:
                trace, seconds, at = kept
                dressed.append((bound, count, Exemplar({"trace_id": trace}, seconds, at)))
        return dressed
