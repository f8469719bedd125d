"""The numbers of a logic server, in a registry of its own. Labels are bounded: services are those that were loaded."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from oriel_logic.errors import Outcome
from oriel_logic.stages import Stage

__all__ = ["Metrics"]

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
MAX_STAGES = 64
OTHER = "other"


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "oriel_logic_requests", "Requests by service and outcome", ["service", "outcome"], registry=self.registry
        )
        self._seconds = Histogram(
            "oriel_logic_request_seconds",
            "From the head of a request to its answer",
            ["service"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._stages = Histogram(
            "oriel_logic_stage_seconds",
            "Time in a stage, waiting for a worker included",
            ["service", "stage"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._updates = Counter(
            "oriel_logic_updates", "Handlers set up, or gone, by result", ["result"], registry=self.registry
        )
        self.loop_lag = Histogram(
            "oriel_logic_loop_lag_seconds",
            "How long the event loop took to answer the watchdog",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )
        self._blocks = Counter(
            "oriel_logic_loop_blocked",
            "Times the event loop was held for more than 50 ms, by the service that did",
            ["service"],
            registry=self.registry,
        )
        self._stage_names: set[str] = set()

    def observe(self, service: str, outcome: Outcome, seconds: float, stages: list[Stage]) -> None:
        """One finished request; `service` must be one that was loaded, or ""."""
        self._requests.labels(service, outcome.value).inc()
        self._seconds.labels(service).observe(seconds)
        for stage in stages:
            self._stages.labels(service, self._bounded(stage.name)).observe(max(0.0, stage.end_s - stage.start_s))

    def count_block(self, service: str) -> None:
        """Something held the event loop; `service`: one that was loaded, or "" for none of them."""
        self._blocks.labels(service).inc()

    def count_update(self, result: str) -> None:
        """An update of a handler ended: "published", "failed", "removed" or "superseded"."""
        self._updates.labels(result).inc()

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        self.registry.register(_Gauge(name, text, read))

    def _bounded(self, stage: str) -> str:
        # Handlers name their own stages; one that makes names up per request must not fill the registry.
        if stage not in self._stage_names:
            if len(self._stage_names) >= MAX_STAGES:
                return OTHER
            self._stage_names.add(stage)
        return stage


class _Gauge:
    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name = name
        self._text = text
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._text, value=self._read())

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._text)
