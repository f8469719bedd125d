"""Export the counters of special routes as Prometheus metrics. Labels are names of the documents, or of models in a
bounded number.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric

from oriel_gateway.shared.state import RoutingState
from oriel_wire.engine.families import counter, gauge


def routing_metrics(state: RoutingState) -> Iterator[Metric]:
    """Yield splits, shadows, kept answers, comparisons and canaries."""
    text = "Calls by the side of a split they went to."
    yield counter("oriel_gateway_split_calls", text, "route side", state.side_counts.items())
    text = "Copies by how their answer compares."
    yield counter("oriel_gateway_shadow_copies", text, "route pool result", state.shadow_counts.items())
    text = "Answers of deterministic routes by source."
    yield counter("oriel_gateway_cache_answers", text, "route source", state.cache_counts.items())
    yield gauge("oriel_gateway_cache_bytes", "Bytes of kept answers.", "", state.cache.size_bytes)
    text = "Kept answers that made room for others."
    yield counter("oriel_gateway_cache_evicted", text, "", state.cache.evicted)
    text = "Calls that are being made for one or more callers."
    yield gauge("oriel_gateway_flights", text, "", len(state.flights))
    yield gauge("oriel_gateway_shadow_copies_inflight", "Copies that are on their way.", "", state.shadows)
    latest = list(state.agreement.latest.items())
    ratios = [(of, each.ratio) for of, each in latest if each.ratio is not None and each.error is not None]
    text = "Share of rows with the same class, of answers compared lately."
    yield gauge("oriel_model_agreement_ratio", text, "model with", ratios)
    errors = [(of, each.error) for of, each in latest if each.ratio is not None and each.error is not None]
    text = "Largest difference of an element, of answers compared lately."
    yield gauge("oriel_model_largest_error", text, "model with", errors)
    counts = [((*of, result), count) for of, each in latest for result, count in each.counts.items()]
    text = "Pairs of answers by how their values compare."
    yield counter("oriel_model_compared", text, "model with result", counts)
    text = "1 for a side of a split that gets no calls any more, until its route changes."
    rolled_back = [((found.route, found.side, found.reason), 1) for found in state.canaries.shown()]
    yield gauge("oriel_gateway_canary_rolled_back", text, "route side reason", rolled_back)
