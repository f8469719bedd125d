"""The metrics of a usage ledger, for the registry of a unit that uses `prometheus_client`."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from oriel_wire.engine.families import counter
from oriel_wire.usage.lines import LedgerCounts


def ledger_metrics(counts: LedgerCounts) -> Iterator[Metric]:
    """Yield the failures and losses of a ledger."""
    for name, text, values in counts.families():
        yield counter(name, text, "what", values.items())
