"""Estimates how long a new call would wait for a model, for metrics and load reports. It only reads a batcher."""

from collections.abc import Collection

from oriel_inference.batching.running import Running
from oriel_inference.clock import Clock
from oriel_policies.waiting.batch import ServiceCurve, best_rate, expected_wait_s
from oriel_policies.waiting.queue import SlaQueue


class WaitEstimate:
    """The wait estimate of one batcher, from its own queue, idle sessions and running batches.

    max_rows: rows of one batch; 0 if every call runs alone.
    slots: number of runs that the cores allow at once.
    """

    def __init__(
        self,
        queue: SlaQueue,
        curve: ServiceCurve,
        idle: Collection[object],
        running: Collection[Running],
        *,
        max_rows: int,
        slots: int,
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._curve = curve
        self._idle = idle
        self._running = running
        self._max_rows = max_rows
        self._slots = slots
        self._clock = clock

    def by_band(self) -> list[tuple[int, int, float | None]]:
        """Return (band, waiting calls, expected wait of a new call in seconds or None) for band 0 and every band
        seen.
        """
        rate = self._rate()
        depths = {0: 0} | {band: items for band, items, _ in self._queue.depths()}
        return [(band, items, expected_wait_s(self._ahead(band), rate)) for band, items in sorted(depths.items())]

    def wait_s(self, band: int) -> float | None:
        """Return how many seconds a new call of `band` would wait in the queue; None if unknown."""
        return expected_wait_s(self._ahead(band), self._rate())

    def _rate(self) -> float:
        rows = self._max_rows
        if not rows:
            depths = self._queue.depths()
            rows = max(1, round(sum(each[2] for each in depths) / max(1, len(self._queue))))
        instances = len(self._idle) + len(self._running)
        return best_rate(self._curve.predict, rows, smaller=bool(self._max_rows)) * max(1, min(instances, self._slots))

    def _ahead(self, band: int) -> float:
        """Return the rows to be computed before a new call of `band`: none while an instance is idle and nothing
        waits.
        """
        ahead = float(self._queue.rows_ahead(band))
        if self._idle:
            return ahead
        now = self._clock.now()
        for batch in self._running:
            rows = sum([call.rows for call in batch.calls])
            needs_s = self._curve.predict(rows)
            if needs_s > 0.0:
                ahead += rows * max(0.0, 1.0 - (now - batch.calls[0].started_s) / needs_s)
        return ahead
