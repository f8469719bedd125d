"""What the gateway counts: plain numbers on the hot path, read by `exposition` when somebody scrapes."""

from bisect import bisect_left
from collections import Counter
from typing import Final

from oriel_gateway.answers import STATUS
from oriel_gateway.decisions import Plain
from oriel_gateway.errors import Outcome
from oriel_gateway.top_tenants import TopTenants
from oriel_policies.documents import Tenant

__all__ = ["BATCH", "BUCKETS_S", "RESULTS", "Histogram", "Series", "Stats", "result_of"]

BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH: Final = 256
# What became of the promise. met, late: answered within the tier's target, or after it. missed: refused or failed here
# or further in. excused: the caller's own doing (a wrong request, over its limits, left), which costs no error budget.
RESULTS = ("met", "late", "missed", "excused")


class Histogram:
    """Seconds in `BUCKETS_S`."""

    __slots__ = ("buckets", "count", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.total_s += seconds
        self.buckets[bisect_left(BUCKETS_S, seconds)] += 1


class Series(Histogram):
    """Calls of one kind, their bytes, and how long the upstream took until its head."""

    __slots__ = ("bytes_in", "bytes_out", "late", "upstream")

    def __init__(self) -> None:
        super().__init__()
        self.late = 0  # answered, but after the tier's target
        self.bytes_in = 0
        self.bytes_out = 0
        self.upstream = Histogram()


class Stats:
    """Single writer: the gateway's loop. recent: ended calls as `decisions` keeps them, counted `BATCH` at a time by
    whoever puts them there, and before anybody reads: what calls have in common is then looked up once.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str, str, str, int], Series] = {}
        self._waits: dict[tuple[str, str], Histogram] = {}
        self._turned_away: dict[tuple[str, str], int] = {}  # by (tier, result)
        self._refused: dict[Outcome, int] = {}
        self._away: list[tuple[Outcome, Tenant | None]] = []  # not counted yet
        self._tenants = TopTenants()
        self.recent: list[Plain] = []

    @property
    def series(self) -> dict[tuple[str, str, str, str, int], Series]:
        """By (pool, route, tier, outcome, status class)."""
        self.count()
        return self._series

    @property
    def waits(self) -> dict[tuple[str, str], Histogram]:
        """By (pool, tier): of calls that had to queue, until their permit, or until they left without."""
        self.count()
        return self._waits

    @property
    def refused(self) -> dict[Outcome, int]:
        """Requests that were refused before they reached a pool."""
        self.count()
        return self._refused

    @property
    def tenants(self) -> TopTenants:
        """Requests by tenant."""
        self.count()
        return self._tenants

    def count(self) -> None:
        """Count what is in `recent`, and empty it."""
        self._count_away()
        batch, self.recent = self.recent, []
        all_series, tenants = self._series, self._tenants
        last_tenant = last_target = last_outcome = None
        last_status = -1
        series, tier_name, name, judged, target_s = Series(), "", "", "", 0.0
        for decided in batch:
            (
                ended_s, _, _, _, tenant, target, outcome, status, _, received_s, queued_s, permit_s, sent_s,
                response_s, _, ahead, bytes_in, bytes_out, _, _, answered_s,
            ) = decided  # fmt: skip
            if (
                tenant is not last_tenant
                or target is not last_target
                or status != last_status
                or outcome is not last_outcome
            ):
                last_tenant, last_target, last_status, last_outcome = tenant, target, status, outcome
                answered = outcome is Outcome.ANSWERED
                name, tier_name, target_s = tenant.name, tenant.tier.name, tenant.tier.target_s
                reason = "answered" if answered else outcome.value
                key = (target.pool, target.plan.name, tier_name, reason, status // 100)
                found = all_series.get(key)
                if found is None:
                    found = all_series[key] = Series()
                series = found
                judged = "" if answered and status < 400 else result_of(outcome, status)
            # `Histogram.observe` twice, spelled out: a call of a function is a third of what this costs.
            seconds = ended_s - received_s
            series.count += 1
            series.total_s += seconds
            series.buckets[bisect_left(BUCKETS_S, seconds)] += 1
            if response_s and sent_s:
                upstream, upstream_s = series.upstream, response_s - sent_s
                upstream.count += 1
                upstream.total_s += upstream_s
                upstream.buckets[bisect_left(BUCKETS_S, upstream_s)] += 1
            series.bytes_in += bytes_in
            series.bytes_out += bytes_out
            result = judged or ("met" if answered_s - received_s <= target_s else "late")
            if result == "late":
                series.late += 1
            tenants.count(name, result)
            if ahead >= 0:
                self.waited(target.pool, tier_name, (permit_s or ended_s) - queued_s)

    @property
    def attainment(self) -> dict[tuple[str, str], int]:
        """Requests by (tier, result)."""
        all_series = self.series  # counts what has not been
        reached = dict(self._turned_away)
        for (_, _, tier, outcome, status), series in all_series.items():
            if outcome == "answered" and status < 4:
                parts = {"met": series.count - series.late, "late": series.late}
            else:
                parts = {result_of(Outcome(outcome), status * 100): series.count}
            for result, count in parts.items():
                reached[tier, result] = reached.get((tier, result), 0) + count
        return {key: count for key, count in reached.items() if count}

    def waited(self, pool: str, tier: str, seconds: float) -> None:
        """A call left the queue, with a permit or without."""
        found = self._waits.get((pool, tier))
        if found is None:
            found = self._waits[pool, tier] = Histogram()
        found.observe(seconds)

    def turned_away(self, outcome: Outcome, tenant: Tenant | None = None) -> None:
        """A request was refused before it reached a pool. tenant: if it is known by then."""
        self._away.append((outcome, tenant))
        if len(self._away) >= BATCH:
            self._count_away()

    def _count_away(self) -> None:
        batch, self._away = self._away, []
        for (outcome, tenant), times in Counter(batch).items():
            self._refused[outcome] = self._refused.get(outcome, 0) + times
            if tenant is not None:
                result, name = result_of(outcome, 0), tenant.tier.name
                self._turned_away[name, result] = self._turned_away.get((name, result), 0) + times
                self._tenants.count(tenant.name, result, times)


def result_of(outcome: Outcome, status: int) -> str:
    """`missed` or `excused`, for whatever was not answered well. status: the upstream's, if it answered."""
    if outcome is Outcome.CLIENT_LEFT:
        return "excused"
    return "missed" if (status or STATUS.get(outcome, 0)) >= 500 else "excused"
