"""Metrics of the shared limiter for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_gateway.limits.ledger_client import LedgerClient


class LedgerClientCollector(Collector):
    """Collects the state of a `LedgerClient`."""

    def __init__(self, ledger_client: LedgerClient) -> None:
        self._ledger_client = ledger_client

    def collect(self) -> Iterator[Metric]:
        ledger_client = self._ledger_client
        yield GaugeMetricFamily(
            "oriel_gateway_limiter_up",
            "1 while the limiter's ledger is asked, 0 while it is not.",
            value=ledger_client.up,
        )
        yield GaugeMetricFamily(
            "oriel_gateway_limiter_replicas", "Gateways that share the limits.", value=ledger_client.replicas
        )
        yield GaugeMetricFamily(
            "oriel_gateway_limiter_rest",
            "What of every limit is left for gateways that ask, because others have fallen silent; 1 is all.",
            value=ledger_client.rest,
        )
        yield CounterMetricFamily("oriel_gateway_limiter_batches", "Batches of asks sent.", value=ledger_client.batches)
        yield CounterMetricFamily(
            "oriel_gateway_limiter_batches_late",
            "Batches that came late or not at all.",
            value=ledger_client.late_batches,
        )
