"""The metrics of traces and spans that every unit has, for its registry of `prometheus_client`."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_wire.engine.recall import Recaller
from oriel_wire.engine.spans import DROPPED, ExportingSink
from oriel_wire.telemetry import Histogram
from oriel_wire.trace import SpanSink


class SpanCollector(Collector):
    """Collects what became of traces and spans. It is read on the unit's loop.

    kept: traces that were kept, by why. recaller: None where nobody else is asked for spans.
    """

    def __init__(
        self, unit: str, sink: SpanSink, kept: Callable[[], Mapping[str, int]], recaller: Recaller | None
    ) -> None:
        self._unit = unit
        self._lanes = sink.lanes if isinstance(sink, ExportingSink) else ()
        self._kept = kept
        self._recaller = recaller

    def collect(self) -> Iterator[Metric]:
        kept = CounterMetricFamily("oriel_trace_kept", "Traces that were kept, by why.", labels=["unit", "why"])
        for why, count in self._kept().items():
            kept.add_metric([self._unit, why], count)
        yield kept
        if self._recaller is not None:
            recalled = CounterMetricFamily(
                "oriel_trace_recalled", "Traces whose spans were asked for, by server.", labels=["result"]
            )
            recalled.add_metric(["found"], self._recaller.found)
            recalled.add_metric(["gone"], self._recaller.gone)
            yield recalled
        dropped = CounterMetricFamily("oriel_spans_dropped", "Spans that were lost, by why.", labels=["why"])
        for why in DROPPED:
            dropped.add_metric([why], sum(lane.dropped[why] for lane in self._lanes))
        yield dropped
        queued = sum(lane.queued for lane in self._lanes)
        yield GaugeMetricFamily("oriel_spans_queued", "Spans that wait to be sent.", value=queued)
        capacity = sum(lane.capacity for lane in self._lanes)
        yield GaugeMetricFamily("oriel_spans_capacity", "The most spans that may wait.", value=capacity)
        took = HistogramMetricFamily("oriel_spans_export_seconds", "How long sending a batch of spans took.")
        total = Histogram()
        for lane in self._lanes:
            total.add(lane.export_s)
        took.add_metric([], total.buckets(), total.total)
        yield took
