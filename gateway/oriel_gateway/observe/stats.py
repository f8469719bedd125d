"""Count calls: plain numbers on the hot path, which `admin.metrics` reads for a scrape."""

from bisect import bisect_left
from collections import Counter
from typing import Final

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.objectives import NO_TARGET, Cell, Objectives, times_of
from oriel_gateway.observe.record import Judged, Record
from oriel_gateway.observe.spending import Spending
from oriel_gateway.observe.usage import Usage
from oriel_policies.documents import Tenant
from oriel_policies.promise.objectives import LEARN_EVERY
from oriel_wire.observe.telemetry import DURATION_BOUNDS_S, Histogram

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

    recent: records of finished calls. The writer counts them `BATCH` at a time, and readers count the
    rest first: what calls have in common is then looked up once.
    """

    def __init__(self, objectives: Objectives, usage: Usage) -> None:
        self._objectives = objectives
        self._usage = usage
        self._series: dict[SeriesKey, Series] = {}
        self._waits: dict[tuple[str, str], Histogram] = {}
        self._refused: dict[Outcome, int] = {}
        # refusals that are not counted yet
        self._away: list[tuple[Outcome, Tenant | None, str, Judged | None]] = []
        self.recent: list[Record] = []
        self.spills: dict[tuple[str, str, str, str], int] = {}  # by (route, pool, next pool, reason)
        self._counted = 0

    def spend_by(self, spending: Spending) -> None:
        """Charge what is used from now on to the budgets of tenants."""
        self._usage.spending = spending

    def spilled(self, route: str, pool: str, to: str, reason: str) -> None:
        """Count a call that went on to another pool of its route."""
        key = (route, pool, to, reason)
        self.spills[key] = self.spills.get(key, 0) + 1

    @property
    def ended(self) -> int:
        """Requests that have ended so far, however they did."""
        return self._counted + len(self.recent) + len(self._away)

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
    def refused(self) -> dict[Outcome, int]:
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
        self._count_away()
        batch, self.recent = self.recent, []
        if batch:
            self._usage.count(batch)
        objectives = self._objectives
        for number in range(-self._counted % LEARN_EVERY, len(batch), LEARN_EVERY):
            record = batch[number]
            if record.judged is None and record.target is not None:
                objectives.learn(record.target.route, times_of(record))
        self._counted += len(batch)
        all_series = self._series
        last_tenant = last_target = last_outcome = None
        last_status = -1
        series, tier_name, cell = Series(), "", Cell(("", "", ""))
        for record in batch:
            tenant, target, outcome, status = record.tenant, record.target, record.outcome, record.status
            assert tenant is not None and target is not None
            if (
                tenant is not last_tenant
                or target is not last_target
                or status != last_status
                or outcome is not last_outcome
            ):
                last_tenant, last_target, last_status, last_outcome = tenant, target, status, outcome
                tier_name = tenant.tier.name
                reason = "answered" if outcome is Outcome.ANSWERED else outcome.value
                key = (target.pool, target.plan.name, tier_name, reason, status // 100)
                found = all_series.get(key)
                if found is None:
                    found = all_series[key] = Series()
                series = found
                cell = objectives.cell(tenant.name, tier_name, target.route)
            # This is `Histogram.observe` twice, inlined: a function call is a third of the cost here.
            ended_s, sent_s, response_s = record.ended_s, record.sent_s, record.response_s
            seconds = ended_s - record.received_s
            series.total += seconds
            series.counts[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
            if response_s and sent_s:
                upstream, upstream_s = series.upstream, response_s - sent_s
                upstream.total += upstream_s
                upstream.counts[bisect_left(DURATION_BOUNDS_S, upstream_s)] += 1
            series.bytes_in += record.bytes_in
            series.bytes_out += record.bytes_out
            if record.judged is None:
                cell.met += 1
            else:
                cell.bad(record.judged)
            if record.ahead >= 0:
                self.waited(target.pool, tier_name, (record.permit_s or ended_s) - record.queued_s)

    @property
    def attainment(self) -> dict[tuple[str, str], int]:
        """Requests by (tier, result)."""
        return self.objectives.attainment

    def waited(self, pool: str, tier: str, seconds: float) -> None:
        """Count a call that left the queue, with a permit or without."""
        found = self._waits.get((pool, tier))
        if found is None:
            found = self._waits[pool, tier] = Histogram()
        found.observe(seconds)

    def turned_away(self, record: Record) -> None:
        """Count a request that was refused before it reached a pool."""
        target = record.target
        self._away.append((record.outcome, record.tenant, NO_TARGET if target is None else target.route, record.judged))
        if len(self._away) >= BATCH:
            self._count_away()

    def _count_away(self) -> None:
        batch, self._away = self._away, []
        self._counted += len(batch)
        for (outcome, tenant, target, judged), times in Counter(batch).items():
            self._refused[outcome] = self._refused.get(outcome, 0) + times
            if tenant is not None and judged is not None:
                self._objectives.cell(tenant.name, tenant.tier.name, target).bad(judged, times)
