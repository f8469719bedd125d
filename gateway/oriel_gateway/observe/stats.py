"""Count calls: plain numbers on the hot path, which `admin.metrics` reads for a scrape."""

from bisect import bisect_left
from collections import Counter
from typing import Final

from oriel_gateway.errors import Outcome
from oriel_gateway.http_status import STATUS
from oriel_gateway.observe.decisions import Plain
from oriel_gateway.observe.top_tenants import TopTenants
from oriel_policies.documents import Tenant
from oriel_wire.telemetry import DURATION_BOUNDS_S, Histogram

BATCH: Final = 256
# Results against the target. met, late: answered within the tier's target, or after it. missed: refused or failed here
# or in a later server. excused: the caller's own doing (a wrong request, over its limits, left), which costs no error
# budget.
RESULTS = ("met", "late", "missed", "excused")


class Series(Histogram):
    """Durations of the calls of one kind, their bytes, and the time until the upstream's head."""

    __slots__ = ("bytes_in", "bytes_out", "late", "upstream")

    def __init__(self) -> None:
        super().__init__()
        self.late = 0  # calls that were answered after the tier's target
        self.bytes_in = 0
        self.bytes_out = 0
        self.upstream = Histogram()


class Stats:
    """All counters of this gateway. Single writer: the gateway's loop.

    recent: finished calls in the form of `decisions`. The writer counts them `BATCH` at a time, and readers count the
    rest first: what calls have in common is then looked up once.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str, str, str, int], Series] = {}
        self._waits: dict[tuple[str, str], Histogram] = {}
        self._turned_away: dict[tuple[str, str], int] = {}  # by (tier, result)
        self._refused: dict[Outcome, int] = {}
        self._away: list[tuple[Outcome, Tenant | None]] = []  # refusals that are not counted yet
        self._tenants = TopTenants()
        self.recent: list[Plain] = []
        self.spills: dict[tuple[str, str, str, str], int] = {}  # by (route, pool, next pool, reason)
        self._counted = 0

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
        """By (pool, route, tier, outcome, status class)."""
        self.count()
        return self._series

    @property
    def waits(self) -> dict[tuple[str, str], Histogram]:
        """By (pool, tier): the time in the queue of calls that had to wait, until their permit or until they left
        without.
        """
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
        """Count and clear `recent`."""
        self._count_away()
        batch, self.recent = self.recent, []
        self._counted += len(batch)
        all_series, tenants = self._series, self._tenants
        last_tenant = last_target = last_outcome = None
        last_status = -1
        series, tier_name, name, failure, target_s = Series(), "", "", "", 0.0
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
                failure = "" if answered and status < 400 else result_of(outcome, status)
            # This is `Histogram.observe` twice, inlined: a function call is a third of the cost here.
            seconds = ended_s - received_s
            series.total += seconds
            series.counts[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
            if response_s and sent_s:
                upstream, upstream_s = series.upstream, response_s - sent_s
                upstream.total += upstream_s
                upstream.counts[bisect_left(DURATION_BOUNDS_S, upstream_s)] += 1
            series.bytes_in += bytes_in
            series.bytes_out += bytes_out
            result = failure or ("met" if answered_s - received_s <= target_s else "late")
            if result == "late":
                series.late += 1
            tenants.count(name, result)
            if ahead >= 0:
                self.waited(target.pool, tier_name, (permit_s or ended_s) - queued_s)

    @property
    def attainment(self) -> dict[tuple[str, str], int]:
        """Requests by (tier, result)."""
        all_series = self.series  # this also counts the recent calls
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
        """Count a call that left the queue, with a permit or without."""
        found = self._waits.get((pool, tier))
        if found is None:
            found = self._waits[pool, tier] = Histogram()
        found.observe(seconds)

    def turned_away(self, outcome: Outcome, tenant: Tenant | None = None) -> None:
        """Count a request that was refused before it reached a pool. tenant: None if it is not known."""
        self._away.append((outcome, tenant))
        if len(self._away) >= BATCH:
            self._count_away()

    def _count_away(self) -> None:
        batch, self._away = self._away, []
        self._counted += len(batch)
        for (outcome, tenant), times in Counter(batch).items():
            self._refused[outcome] = self._refused.get(outcome, 0) + times
            if tenant is not None:
                result, name = result_of(outcome, 0), tenant.tier.name
                self._turned_away[name, result] = self._turned_away.get((name, result), 0) + times
                self._tenants.count(tenant.name, result, times)


def result_of(outcome: Outcome, status: int) -> str:
    """Return `missed` or `excused` for a call without a good answer. status: the upstream's, if it answered."""
    if outcome is Outcome.CALLER_LEFT:
        return "excused"
    return "missed" if (status or STATUS.get(outcome, 0)) >= 500 else "excused"
