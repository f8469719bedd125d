"""What the gateway counts: plain numbers on the hot path, read by a Prometheus collector when somebody scrapes."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_gateway.errors import Outcome
from oriel_gateway.pools import PoolGate
from oriel_policies.ejection import Cause

__all__ = ["Stats", "StatsCollector"]

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class _Series:
    __slots__ = ("buckets", "count", "on_time", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.on_time = 0
        self.total_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)


class Stats:
    """Calls by (pool, tier, outcome, status class)."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str, Outcome, int], _Series] = {}
        self.refused: dict[Outcome, int] = {}

    def ended(self, pool: str, tier: str, outcome: Outcome, status: int, seconds: float, on_time: bool) -> None:
        """A call that had reached a pool is over."""
        key = (pool, tier, outcome, status // 100)
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = _Series()
        series.count += 1
        series.on_time += on_time
        series.total_s += seconds
        series.buckets[bisect_left(BUCKETS_S, seconds)] += 1

    def turned_away(self, outcome: Outcome) -> None:
        """A request was refused before it reached a pool."""
        self.refused[outcome] = self.refused.get(outcome, 0) + 1


class StatsCollector(Collector):
    """`Stats` and the pools as Prometheus metrics."""

    def __init__(self, stats: Stats, pools: Callable[[], Mapping[str, PoolGate]]) -> None:
        self._stats = stats
        self._pools = pools

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        calls = HistogramMetricFamily(
            "oriel_gateway_request_duration_seconds",
            "Time from a complete head to the last upstream byte.",
            labels=["pool", "tier", "outcome", "status"],
        )
        on_time = CounterMetricFamily(
            "oriel_gateway_requests_on_time", "Answered within the tier's target.", labels=["pool", "tier"]
        )
        kept: dict[tuple[str, str], int] = {}
        for (pool, tier, outcome, status), series in list(self._stats.series.items()):
            running, buckets = 0, []
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), series.buckets, strict=True):
                running += count
                buckets.append((bound, running))
            label = f"{status}xx" if status else "none"
            calls.add_metric([pool, tier, outcome.value, label], buckets, series.total_s)
            kept[pool, tier] = kept.get((pool, tier), 0) + series.on_time
        for (pool, tier), count in kept.items():
            on_time.add_metric([pool, tier], count)
        refused = CounterMetricFamily(
            "oriel_gateway_refused", "Requests refused before they reached a pool.", labels=["reason"]
        )
        for outcome, count in list(self._stats.refused.items()):
            refused.add_metric([outcome.value], count)
        inflight = GaugeMetricFamily("oriel_gateway_inflight", "Permits that are out.", labels=["pool"])
        waiting = GaugeMetricFamily("oriel_gateway_waiting", "Calls that wait for a permit.", labels=["pool"])
        parked = GaugeMetricFamily(
            "oriel_gateway_waiting_for_endpoint", "Calls that wait because no endpoint is usable.", labels=["pool"]
        )
        usable = GaugeMetricFamily("oriel_gateway_endpoints_usable", "Endpoints that are asked.", labels=["pool"])
        known = GaugeMetricFamily("oriel_gateway_endpoints", "Endpoints that are known.", labels=["pool"])
        repeats = CounterMetricFamily("oriel_gateway_repeats", "Second copies of calls, sent.", labels=["pool"])
        ejected = CounterMetricFamily(
            "oriel_gateway_ejections", "Endpoints left alone for a while.", labels=["pool", "cause"]
        )
        for name, gate in self._pools().items():
            parked.add_metric([name], gate.endpoints.parked + gate.grpc.parked)
            usable.add_metric([name], len(gate.endpoints.usable) + len(gate.grpc.usable))
            known.add_metric([name], len(gate.endpoints) + len(gate.grpc))
            repeats.add_metric([name], gate.retries.spent)
            for cause in Cause:
                count = gate.endpoints.ejections.get(cause, 0) + gate.grpc.ejections.get(cause, 0)
                ejected.add_metric([name, cause.value], count)
            inflight.add_metric([name], gate.admission.inflight)
            waiting.add_metric([name], len(gate.admission.queue))
        yield from (calls, on_time, refused, inflight, waiting, parked, usable, known, repeats, ejected)
