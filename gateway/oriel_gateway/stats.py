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

    __slots__ = ("bytes_in", "bytes_out", "upstream")

    def __init__(self) -> None:
        super().__init__()
        self.bytes_in = 0
        self.bytes_out = 0
        self.upstream = Histogram()


class Stats:
    """series: by (pool, route, tier, outcome, status class). Single writer: the gateway's loop."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str, str, str, int], Series] = {}
        self.waits: dict[tuple[str, str], Histogram] = {}  # by (pool, tier): of calls that had to queue
        self.attainment: dict[tuple[str, str], int] = {}  # by (tier, result)
        self.refused: dict[Outcome, int] = {}
        self.tenants = TopTenants()

    def ended(
        self,
        pool: str,
        route: str,
        tenant: Tenant,
        outcome: Outcome,
        status: int,
        *,
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
        series.count += 1
        series.total_s += seconds
        series.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        series.bytes_in += bytes_in
        series.bytes_out += bytes_out
        if upstream_s >= 0.0:
            series.upstream.observe(upstream_s)
        if outcome is Outcome.ANSWERED and status < 400:
            result = "met" if answered_s <= tier.target_s else "late"
        else:
            result = result_of(outcome, status)
        reached = self.attainment
        reached[name, result] = reached.get((name, result), 0) + 1
        self.tenants.count(tenant.name, result)

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
            self.attainment[name, result] = self.attainment.get((name, result), 0) + 1
            self.tenants.count(tenant.name, result)


def result_of(outcome: Outcome, status: int) -> str:
    """`missed` or `excused`, for whatever was not answered well. status: the upstream's, if it answered."""
    if outcome is Outcome.CLIENT_LEFT:
        return "excused"
    return "missed" if (status or STATUS.get(outcome, 0)) >= 500 else "excused"
