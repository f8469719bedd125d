"""The metrics of a usage ledger, for the registry of a unit that uses `prometheus_client`."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_wire.usage import LedgerCounts


class UsageLedgerCollector(Collector):
    """Collects the failures and losses of a ledger."""

    def __init__(self, counts: LedgerCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for name, text, values in self._counts.families():
            family = CounterMetricFamily(name, text, labels=["what"])
            for what, count in values.items():
                family.add_metric([what], count)
            yield family
