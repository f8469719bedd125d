"""What the shared limiter says of itself to Prometheus."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_gateway.limits.courier import Courier

__all__ = ["CourierCollector"]


class CourierCollector(Collector):
    """The state of a `Courier`."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        courier = self._courier
        yield GaugeMetricFamily(
            "oriel_gateway_limiter_up", "1 while the limiter's ledger is asked, 0 while it is not.", value=courier.up
        )
        yield GaugeMetricFamily(
            "oriel_gateway_limiter_replicas", "Gateways that share the limits.", value=courier.replicas
        )
        yield GaugeMetricFamily(
            "oriel_gateway_limiter_rest",
            "What of every limit is left for gateways that ask, because others have fallen silent; 1 is all.",
            value=courier.rest,
        )
        yield CounterMetricFamily("oriel_gateway_limiter_batches", "Batches of asks sent.", value=courier.asked)
        yield CounterMetricFamily(
            "oriel_gateway_limiter_batches_late", "Batches that came late or not at all.", value=courier.late
        )
