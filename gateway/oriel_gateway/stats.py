"""What the gateway counts: plain numbers on the hot path, read by `exposition` when somebody scrapes."""

from bisect import bisect_left

from oriel_gateway.answers import STATUS
from oriel_gateway.errors import Outcome
from oriel_gateway.top_tenants import TopTenants
from oriel_policies.documents import Tenant

__all__ = ["BUCKETS_S", "RESULTS", "Histogram", "Series", "Stats", "result_of"]

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
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
    """series: by (pool, route, tier, outcome, status class). Single writer: the gateway's loop."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str, str, str, int], Series] = {}
        self.waits: dict[tuple[str, str], Histogram] = {}  # by (pool, tier): of calls that had to queue
        self._turned_away: dict[tuple[str, str], int] = {}  # by (tier, result)
        self.refused: dict[Outcome, int] = {}
        self.tenants = TopTenants()

    def ended(
        self,
        pool: str,
        route: str,
        tenant: Tenant,
        outcome: Outcome,
        status: int,
        seconds: float,
        answered_s: float,
        upstream_s: float,
        bytes_in: int,
        bytes_out: int,
    ) -> None:
        """A call that had reached a pool is over.

        seconds: in all; answered_s: until what the target is about, the end, or the first byte of a stream;
        upstream_s: from its last byte to the upstream's head, below 0 if there was none.
        """
        tier = tenant.tier
        name = tier.name
        key = (pool, route, name, "answered" if outcome is Outcome.ANSWERED else outcome.value, status // 100)
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series()
        # `Histogram.observe` twice, spelled out: a call of a function is a third of what this costs.
        series.count += 1
        series.total_s += seconds
        series.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        if upstream_s >= 0.0:
            upstream = series.upstream
            upstream.count += 1
            upstream.total_s += upstream_s
            upstream.buckets[bisect_left(BUCKETS_S, upstream_s)] += 1
        series.bytes_in += bytes_in
        series.bytes_out += bytes_out
        if outcome is not Outcome.ANSWERED or status >= 400:
            result = result_of(outcome, status)
        elif answered_s <= tier.target_s:
            result = "met"
        else:
            result = "late"
            series.late += 1
        self.tenants.count(tenant.name, result)

    @property
    def attainment(self) -> dict[tuple[str, str], int]:
        """Requests by (tier, result)."""
        reached = dict(self._turned_away)
        for (_, _, tier, outcome, status), series in self.series.items():
            if outcome == "answered" and status < 4:
                parts = {"met": series.count - series.late, "late": series.late}
            else:
                parts = {result_of(Outcome(outcome), status * 100): series.count}
            for result, count in parts.items():
                reached[tier, result] = reached.get((tier, result), 0) + count
        return {key: count for key, count in reached.items() if count}

    def waited(self, pool: str, tier: str, seconds: float) -> None:
        """A call left the queue, with a permit or without."""
        found = self.waits.get((pool, tier))
        if found is None:
            found = self.waits[pool, tier] = Histogram()
        found.observe(seconds)

    def turned_away(self, outcome: Outcome, tenant: Tenant | None = None) -> None:
        """A request was refused before it reached a pool. tenant: if it is known by then."""
        self.refused[outcome] = self.refused.get(outcome, 0) + 1
        if tenant is not None:
            result, name = result_of(outcome, 0), tenant.tier.name
            self._turned_away[name, result] = self._turned_away.get((name, result), 0) + 1
            self.tenants.count(tenant.name, result)


def result_of(outcome: Outcome, status: int) -> str:
    """`missed` or `excused`, for whatever was not answered well. status: the upstream's, if it answered."""
    if outcome is Outcome.CLIENT_LEFT:
        return "excused"
    return "missed" if (status or STATUS.get(outcome, 0)) >= 500 else "excused"
