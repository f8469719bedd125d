"""Metrics of the shared limiter for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from oriel_gateway.limits.ledger_client import LedgerClient
from oriel_wire.engine.families import counter, gauge


def limiter_metrics(client: LedgerClient) -> Iterator[Metric]:
    """Yield the state of a `LedgerClient`."""
    text = "1 while the limiter's ledger is asked, 0 while it is not."
    yield gauge("oriel_gateway_limiter_up", text, "", client.up)
    yield gauge("oriel_gateway_limiter_replicas", "Gateways that share the limits.", "", client.replicas)
    text = "What of every limit is left for gateways that ask, because others have fallen silent; 1 is all."
    yield gauge("oriel_gateway_limiter_rest", text, "", client.rest)
    yield counter("oriel_gateway_limiter_batches", "Batches of asks sent.", "", client.batches)
    text = "Batches that came late or not at all."
    yield counter("oriel_gateway_limiter_batches_late", text, "", client.late_batches)
