"""Families of metrics for a registry of `prometheus_client`: name, help, names of the labels, and samples in one call.

labels: names, split by spaces. samples: the values of the labels, a text if there is one label, and the number; for a
family without labels a number alone.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_wire.observe.telemetry import Histogram

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)
Samples = Iterable[tuple[str | Sequence[str], float]] | float


class Reading(Collector):
    """Collects the families that a function makes when they are scraped."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def counter(name: str, text: str, labels: str = "", samples: Samples = ()) -> CounterMetricFamily:
    """Return a family of counters."""
    return _filled(CounterMetricFamily(name, text, labels=labels.split()), samples)


def gauge(name: str, text: str, labels: str = "", samples: Samples = ()) -> GaugeMetricFamily:
    """Return a family of gauges."""
    return _filled(GaugeMetricFamily(name, text, labels=labels.split()), samples)


def histogram(
    name: str, text: str, labels: str = "", samples: Iterable[tuple[Sequence[str], Histogram]] = ()
) -> HistogramMetricFamily:
    """Return a family of histograms."""
    family = HistogramMetricFamily(name, text, labels=labels.split())
    for of, found in samples:
        family.add_metric(of, found.buckets(), found.total)
    return family


def _filled(family: F, samples: Samples) -> F:
    for of, value in (((), samples),) if isinstance(samples, (int, float)) else samples:
        family.add_metric((of,) if isinstance(of, str) else of, value)
    return family
