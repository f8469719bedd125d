"""Export the counters of special routes as Prometheus metrics. Labels are names of the documents, and so are
bounded.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_gateway.shared.state import RoutingState


class RoutingCollector(Collector):
    """Collects splits, shadows and kept answers."""

    def __init__(self, state: Callable[[], RoutingState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        sides = CounterMetricFamily(
            "oriel_gateway_split_calls", "Calls by the side of a split they went to.", labels=["route", "side"]
        )
        for (route, side), count in list(state.side_counts.items()):
            sides.add_metric([route, side], count)
        shadows = CounterMetricFamily(
            "oriel_gateway_shadow_copies", "Copies by how their answer compares.", labels=["route", "pool", "result"]
        )
        for (route, pool, result), count in list(state.shadow_counts.items()):
            shadows.add_metric([route, pool, result], count)
        answers = CounterMetricFamily(
            "oriel_gateway_cache_answers", "Answers of deterministic routes by source.", labels=["route", "source"]
        )
        for (route, how), count in list(state.cache_counts.items()):
            answers.add_metric([route, how], count)
        size = GaugeMetricFamily("oriel_gateway_cache_bytes", "Bytes of kept answers.")
        size.add_metric([], state.cache.size_bytes)
        evicted = CounterMetricFamily("oriel_gateway_cache_evicted", "Kept answers that made room for others.")
        evicted.add_metric([], state.cache.evicted)
        flights = GaugeMetricFamily("oriel_gateway_flights", "Calls that are being made for one or more callers.")
        flights.add_metric([], len(state.flights))
        copies = GaugeMetricFamily("oriel_gateway_shadow_copies_inflight", "Copies that are on their way.")
        copies.add_metric([], state.shadows)
        yield from (sides, shadows, answers, size, evicted, flights, copies)
