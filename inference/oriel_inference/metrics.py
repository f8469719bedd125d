"""The `nv_inference_*` metrics, read from the models' own counters when somebody asks.

Triton's counters have no `_total`, which the client library insists on for counters: they are written as untyped, with
the names dashboards know.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
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
    Outcome.TOO_SHORT: "REJECTED",
    Outcome.STOPPING: "REJECTED",
    Outcome.CALLER_LEFT: "CANCELED",
    Outcome.BACKEND: "BACKEND",
}
_ALL_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_COUNTERS: tuple[tuple[str, str, Callable[[Statistics], int]], ...] = (
    ("nv_inference_request_success", "Requests answered", lambda s: s.success.count),
    ("nv_inference_count", "Rows answered", lambda s: s.inferences),
    ("nv_inference_exec_count", "Batches executed", lambda s: s.executions),
    ("nv_inference_request_duration_us", "From arrival to answer, summed", lambda s: s.success.ns // 1000),
    ("nv_inference_queue_duration_us", "Time in the queue, summed", lambda s: s.queue.ns // 1000),
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
        models = [(model, [model.spec.name, model.version]) for model in self._catalog.serving()]
        for name, text, read in _COUNTERS:
            family = UnknownMetricFamily(name, text, labels=_LABELS)
            for model, labels in models:
                family.add_metric(labels, read(model.batcher.statistics))
            yield family
        failures = UnknownMetricFamily(
            "nv_inference_request_failure", "Requests without an answer", labels=(*_LABELS, "reason")
        )
        releases = UnknownMetricFamily(
            "oriel_batches_released", "Batches by why they were started", labels=(*_LABELS, "reason")
        )
        pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests that wait", labels=_LABELS)
        loading = GaugeMetricFamily("nv_model_load_duration_secs", "How long loading took", labels=_LABELS)
        for model, labels in models:
            for reason, count in _failures(model).items():
                failures.add_metric([*labels, reason], count)
            for reason, count in sorted(model.batcher.statistics.releases.items()):
                releases.add_metric([*labels, reason], count)
            pending.add_metric(labels, model.batcher.pending)
            loading.add_metric(labels, model.load_s)
        yield from (failures, releases, pending, loading)


def _failures(model: ServingModel) -> Counter[str]:
    found = Counter(dict.fromkeys(_ALL_REASONS, 0))
    for outcome, count in model.batcher.statistics.failures.items():
        found[_REASONS.get(outcome, "OTHER")] += count
    return found
