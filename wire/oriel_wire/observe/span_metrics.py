"""The metrics of traces and spans that every unit has, for its registry of `prometheus_client`."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from oriel_wire.engine.families import counter, gauge, histogram
from oriel_wire.observe.recall import Recaller
from oriel_wire.observe.spans import DROPPED, ExportingSink
from oriel_wire.observe.telemetry import Histogram
from oriel_wire.observe.trace import SpanSink


def span_metrics(unit: str, sink: SpanSink, kept: Mapping[str, int], recaller: Recaller | None) -> Iterator[Metric]:
    """Yield the metrics of traces and spans: kept, sent, dropped. Call it on the unit's loop.

    kept: traces that were kept, by why. recaller: the part that asks other servers for spans, or None.
    """
    lanes = sink.lanes if isinstance(sink, ExportingSink) else ()
    whys = [((unit, why), count) for why, count in kept.items()]
    yield counter("oriel_trace_kept", "Traces that were kept, by why.", "unit why", whys)
    if recaller is not None:
        results = [("found", recaller.found), ("gone", recaller.gone)]
        yield counter("oriel_trace_recalled", "Traces whose spans were asked for, by server.", "result", results)
    dropped = [(why, sum(lane.dropped[why] for lane in lanes)) for why in DROPPED]
    yield counter("oriel_spans_dropped", "Spans that were lost, by why.", "why", dropped)
    queued, capacity = sum(lane.pending for lane in lanes), sum(lane.capacity for lane in lanes)
    yield gauge("oriel_spans_queued", "Spans that wait to be sent.", "", queued)
    yield gauge("oriel_spans_capacity", "The most spans that may wait.", "", capacity)
    total = Histogram()
    for lane in lanes:
        total.add(lane.export_s)
    yield histogram("oriel_spans_export_seconds", "How long sending a batch of spans took.", "", [((), total)])
