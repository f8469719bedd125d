"""Export the counters of special routes as Prometheus metrics. Labels are names of the documents, or of models in a
bounded number.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from oriel_gateway.admin.families import counter, gauge
from oriel_gateway.shared.state import RoutingState


class RoutingCollector(Collector):
    """Collects splits, shadows, kept answers, comparisons and canaries."""

    def __init__(self, state: Callable[[], RoutingState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        sides = counter("oriel_gateway_split_calls", "Calls by the side of a split they went to.", "route", "side")
        for (route, side), count in list(state.side_counts.items()):
            sides.add_metric([route, side], count)
        shadows = counter(
            "oriel_gateway_shadow_copies", "Copies by how their answer compares.", "route", "pool", "result"
        )
        for (route, pool, result), count in list(state.shadow_counts.items()):
            shadows.add_metric([route, pool, result], count)
        answers = counter(
            "oriel_gateway_cache_answers", "Answers of deterministic routes by source.", "route", "source"
        )
        for (route, how), count in list(state.cache_counts.items()):
            answers.add_metric([route, how], count)
        size = gauge("oriel_gateway_cache_bytes", "Bytes of kept answers.")
        size.add_metric([], state.cache.size_bytes)
        evicted = counter("oriel_gateway_cache_evicted", "Kept answers that made room for others.")
        evicted.add_metric([], state.cache.evicted)
        flights = gauge("oriel_gateway_flights", "Calls that are being made for one or more callers.")
        flights.add_metric([], len(state.flights))
        copies = gauge("oriel_gateway_shadow_copies_inflight", "Copies that are on their way.")
        copies.add_metric([], state.shadows)
        yield from (sides, shadows, answers, size, evicted, flights, copies)
        yield from _compared(state)
        rolled_back = gauge(
            "oriel_gateway_canary_rolled_back",
            "1 for a side of a split that gets no calls any more, until its route changes.",
            "route",
            "side",
            "reason",
        )
        for found in state.canaries.shown():
            rolled_back.add_metric([found.route, found.side, found.reason], 1)
        yield rolled_back


def _compared(state: RoutingState) -> Iterator[Metric]:
    labels = ("model", "with")
    ratio = gauge(
        "oriel_model_agreement_ratio", "Share of rows with the same class, of answers compared lately.", *labels
    )
    error = gauge("oriel_model_largest_error", "Largest difference of an element, of answers compared lately.", *labels)
    counts = counter("oriel_model_compared", "Pairs of answers by how their values compare.", *labels, "result")
    for (model, compared_with), latest in list(state.agreement.latest.items()):
        if latest.ratio is not None and latest.error is not None:
            ratio.add_metric([model, compared_with], latest.ratio)
            error.add_metric([model, compared_with], latest.error)
        for result, count in latest.counts.items():
            counts.add_metric([model, compared_with, result], count)
    yield from (ratio, error, counts)
