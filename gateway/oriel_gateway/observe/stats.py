"""Count calls: plain numbers on the hot path, which `admin.metrics` reads for a scrape."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.cube import Cell, add_up
from oriel_gateway.observe.objectives import Objectives, times_of
from oriel_gateway.observe.record import Judged, Record
from oriel_gateway.observe.spending import Spending
from oriel_gateway.observe.usage import Usage
from oriel_policies.documents import Tier
from oriel_policies.promise.objectives import LEARN_EVERY, TOKENS
from oriel_wire.observe.telemetry import Histogram

BATCH: Final = 256


SeriesKey = tuple[str, str, str, str, int]  # pool, route, tier, outcome, the first digit of the status


class Series(Histogram):
    """Durations of the calls of one kind, their bytes, and the time until the upstream's head."""

    __slots__ = ("bytes_in", "bytes_out", "upstream")

    def __init__(self) -> None:
        super().__init__()
        self.bytes_in = 0
        self.bytes_out = 0
        self.upstream = Histogram()


class Stats:
    """All counters of this gateway. Single writer: the gateway's loop.

    recent: records of requests that have ended. The writer adds them up `BATCH` at a time, and who asks for counts has
    the rest added up first.
    readers: get the cells of each batch (`observe.cube`).
    """

    def __init__(self, objectives: Objectives, usage: Usage) -> None:
        self._objectives = objectives
        self._usage = usage
        self._series: dict[SeriesKey, Series] = {}
        self._waits: dict[tuple[str, str], Histogram] = {}
        self._refused: dict[Outcome, int] = {}
        self.recent: list[Record] = []
        self.spills: dict[tuple[str, str, str, str], int] = {}  # (route, pool, next pool, reason) -> calls
        # by (pool, tier), of streams whose tier has a time per token: the time to the first event, and that per token
        self.streams: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}
        self._counted = 0
        self.readers: list[Callable[[Sequence[Cell]], None]] = [self._count, usage.count, objectives.count]

    def spend_by(self, spending: Spending) -> None:
        """Charge what is used from now on to the budgets of tenants."""
        self._usage.spending = spending

    def streamed(self, record: Record, tier: Tier) -> None:
        """Count a stream whose tier has a time per token, and judge one that was in time but for that."""
        assert record.target is not None
        key = (record.target.pool, tier.name)
        found = self.streams.get(key)
        if found is None:
            found = self.streams[key] = (Histogram(), Histogram())
        found[0].observe(record.answered_s - record.received_s)
        if record.token_s:
            found[1].observe(record.token_s)
        if record.judged is None and record.token_s > tier.token_s:
            more_s = (record.ended_s - record.answered_s) * (1.0 - tier.token_s / record.token_s)
            record.judged = Judged("late", TOKENS, more_s, TOKENS)

    def spilled(self, route: str, pool: str, to: str, reason: str) -> None:
        """Count a call that went on to another pool of its route."""
        key = (route, pool, to, reason)
        self.spills[key] = self.spills.get(key, 0) + 1

    @property
    def finished_count(self) -> int:
        """Requests that have ended so far, however they did."""
        return self._counted + len(self.recent)

    @property
    def series(self) -> dict[tuple[str, str, str, str, int], Series]:
        """The counts by (pool, route, tier, outcome, status class)."""
        self.count()
        return self._series

    @property
    def waits(self) -> dict[tuple[str, str], Histogram]:
        """The time in the queue by (pool, tier), of calls that had to wait: until they got a permit or left."""
        self.count()
        return self._waits

    @property
    def refusals(self) -> dict[Outcome, int]:
        """Requests that were refused before they reached a pool."""
        self.count()
        return self._refused

    @property
    def objectives(self) -> Objectives:
        """The counts of kept and broken promises, up to now."""
        self.count()
        self._objectives.flush()
        return self._objectives

    @property
    def usage(self) -> Usage:
        """The use of all tenants, up to now."""
        self.count()
        return self._usage

    def count(self) -> None:
        """Count and clear `recent`."""
        batch, self.recent = self.recent, []
        if not batch:
            return
        for number in range(-self._counted % LEARN_EVERY, len(batch), LEARN_EVERY):
            record = batch[number]
            if record.judged is None and record.target is not None:
                self._objectives.learn(record.target.route, times_of(record))
        self._counted += len(batch)
        cells = add_up(batch, self._usage.classes)
        for read in self.readers:
            read(cells)

    def _count(self, cells: Iterable[Cell]) -> None:
        """Count the durations and bytes of calls, and the refusals before."""
        for cell in cells:
            tenant, target, outcome = cell.tenant, cell.target, cell.outcome
            if not cell.opened or tenant is None or target is None:
                self._refused[outcome] = self._refused.get(outcome, 0) + cell.requests
                continue
            tier = tenant.tier.name
            reason = "answered" if outcome is Outcome.ANSWERED else outcome.value
            key = (target.pool, target.plan.name, tier, reason, cell.status)
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = Series()
            series.observe_all(cell.durations_s)
            series.upstream.observe_all(cell.upstream_s)
            series.bytes_in += cell.bytes_in
            series.bytes_out += cell.bytes_out
            if cell.waits_s:
                waits = self._waits.get((target.pool, tier))
                if waits is None:
                    waits = self._waits[target.pool, tier] = Histogram()
                waits.observe_all(cell.waits_s)

    @property
    def attainment(self) -> dict[tuple[str, str], int]:
        """Requests by (tier, result)."""
        return self.objectives.attainment
