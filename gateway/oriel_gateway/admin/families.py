"""Begin families of metrics: their name, their help, and the names of their labels."""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

__all__ = ["counter", "gauge", "histogram"]


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Return a family of counters without samples."""
    return CounterMetricFamily(name, text, labels=labels)


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Return a family of gauges without samples."""
    return GaugeMetricFamily(name, text, labels=labels)


def histogram(name: str, text: str, *labels: str) -> HistogramMetricFamily:
    """Return a family of histograms without samples."""
    return HistogramMetricFamily(name, text, labels=labels)
