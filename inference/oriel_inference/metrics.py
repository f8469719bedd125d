"""The `nv_inference_*` metrics, read from the models' own counters when somebody asks."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_inference.errors import Outcome
from oriel_inference.lifecycle import Catalog, ServingModel
from oriel_inference.statistics import Statistics

__all__ = ["build_registry"]

_LABELS = ("model", "version")
_REASONS = {
    Outcome.QUEUE_FULL: "REJECTED",
    Outcome.QUEUE_TIMEOUT: "REJECTED",
    Outcome.DEADLINE: "REJECTED",
    Outcome.STOPPING: "REJECTED",
    Outcome.CALLER_LEFT: "CANCELED",
    Outcome.BACKEND: "BACKEND",
}
_FAILURE_LABELS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_COUNTERS = (
    ("nv_inference_request_success", "Requests answered", lambda s: s.success.count),
    ("nv_inference_count", "Rows answered", lambda s: s.inferences),
    ("nv_inference_exec_count", "Batches executed", lambda s: s.executions),
    ("nv_inference_request_duration_us", "From arrival to answer, summed", lambda s: s.success.ns // 1000),
    ("nv_inference_queue_duration_us", "Time in queues, summed", lambda s: s.queue.ns // 1000),
    ("nv_inference_compute_input_duration_us", "Assembling batches, summed", lambda s: s.stages.input.ns // 1000),
    ("nv_inference_compute_infer_duration_us", "Executing batches, summed", lambda s: s.stages.infer.ns // 1000),
    ("nv_inference_compute_output_duration_us", "Splitting batches, summed", lambda s: s.stages.output.ns // 1000),
)


def build_registry(catalog: Catalog) -> CollectorRegistry:
    """A registry of its own that reports on `catalog`."""
    registry = CollectorRegistry()
    registry.register(_ModelCollector(catalog))
    return registry


class _ModelCollector(Collector):
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterable[Metric]:
        serving = list(self._catalog.serving())
        for name, text, read in _COUNTERS:
            # Triton's names have no `_total`; a gauge family writes the name as it is.
            yield _family(name, text, serving, read)
        yield self._failures(serving)
        yield self._releases(serving)
        pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests that wait", labels=_LABELS)
        loading = GaugeMetricFamily("nv_model_load_duration_secs", "How long loading took", labels=_LABELS)
        for model in serving:
            pending.add_metric(_labels(model), model.batcher.pending)
            loading.add_metric(_labels(model), model.load_s)
        yield pending
        yield loading
