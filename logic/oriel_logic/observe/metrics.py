"""The numbers of a logic server, in a registry of its own.

The counts of a request are kept in plain numbers, one object per service and tier, so that observing costs no lock and
no look-up of labels; `collect` writes them down when somebody asks. Labels are bounded: services are those that were
loaded, tiers and stages, whose names come from outside or from handlers, become "other" past a number.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.core import Metric

from oriel_logic.errors import Outcome
from oriel_logic.observe.stages import Stage
from oriel_wire.engine.families import Reading, counter, histogram
from oriel_wire.observe.telemetry import Histogram

# The buckets that the conventions for generative AI recommend.
GENERATION = (
    ("request_duration", (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)),
    (
        "time_to_first_token",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
    ("time_per_output_token", (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)),
)
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
MAX_STAGES = 64  # stages per service and tier
MAX_TIERS = 16
OTHER = "other"


class Series:
    """The counts and durations of one service and tier."""

    __slots__ = ("outcomes", "request", "stages")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.request = Histogram()
        self.stages: dict[str, Histogram] = {}

    def stage(self, name: str) -> Histogram:
        """Add a histogram for a stage that was not seen before; beyond MAX_STAGES they share one."""
        if len(self.stages) >= MAX_STAGES:
            name = OTHER
        return self.stages.setdefault(name, Histogram())


class Metrics:
    """Single writer: the loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._series: dict[tuple[str, str], Series] = {}
        self._tiers: set[str] = {""}
        self._generations: dict[tuple[str, str, str], tuple[Histogram, ...]] = {}
        self._updates: Counter[str] = Counter()
        self.registry.register(self)
        self.watch(self._counts)
        self._blocks: Counter[str] = Counter()
        self.loop_lag = LibraryHistogram(
            "oriel_logic_loop_lag_seconds",
            "How long the event loop took to answer the watchdog",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )

    def observe(self, service: str, tier: str, outcome: Outcome, seconds: float, stages: Iterable[Stage]) -> None:
        """One finished request; `service` must be one that was loaded, or ""."""
        series = self._series.get((service, tier))
        if series is None:
            series = self._series_of(service, tier)
        value = outcome._value_  # `value` is a descriptor of the enum, ten times slower
        series.outcomes[value] = series.outcomes.get(value, 0) + 1
        series.request.observe(seconds)
        known = series.stages
        for stage in stages:
            durations = known.get(stage.name)
            if durations is None:
                durations = series.stage(stage.name)
            spent_s = stage.end_s - stage.start_s
            durations.observe(spent_s if spent_s > 0.0 else 0.0)

    def observe_generation(self, operation: str, model: str, tier: str, times_s: Sequence[float], tokens: int) -> None:
        """One answer of a language model that is served. times_s: when its request, first token and end came."""
        key = operation, model, tier if tier in self._tiers else OTHER
        begun_s, first_s, ended_s = times_s
        found = self._generations.setdefault(key, tuple(Histogram(bounds) for _, bounds in GENERATION))
        found[0].observe(ended_s - begun_s)
        found[1].observe(first_s - begun_s)
        if tokens > 1:
            found[2].observe((ended_s - first_s) / (tokens - 1))

    def count_block(self, service: str) -> None:
        """Something held the event loop; `service`: one that was loaded, or "" for none of them."""
        self._blocks[service] += 1

    def count_update(self, result: str) -> None:
        """A change of a handler was dealt with: "published", "failed", "removed" or "superseded"."""
        self._updates[result] += 1

    def watch(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add families that `read` makes when they are scraped."""
        self.registry.register(Reading(read))

    def _counts(self) -> Iterator[Metric]:
        text = "Changes of handlers on the disk, by result"
        yield counter("oriel_logic_updates", text, "result", self._updates.items())
        text = "Times the event loop was held for more than 50 ms, by the service that did"
        yield counter("oriel_logic_loop_blocked", text, "service", self._blocks.items())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as the registry asks for them."""
        outcomes: Counter[tuple[str, str]] = Counter()
        for (service, _), series in self._series.items():
            for outcome, count in series.outcomes.items():
                outcomes[service, outcome] += count
        yield counter("oriel_logic_requests", "Requests by service and outcome", "service outcome", outcomes.items())
        requests = [(of, series.request) for of, series in self._series.items()]
        text = "From the head of a request to its answer"
        yield histogram("oriel_logic_request_seconds", text, "service tier", requests)
        labels = "gen_ai_operation_name gen_ai_request_model oriel_tier"
        for index, (name, _) in enumerate(GENERATION):
            found = [(of, histograms[index]) for of, histograms in self._generations.items()]
            yield histogram(f"gen_ai_server_{name}_seconds", "Answers of language models", labels, found)
        stages = [
            ((service, stage, tier), durations)
            for (service, tier), series in self._series.items()
            for stage, durations in series.stages.items()
        ]
        text = "Time in a stage, waiting for a worker included"
        yield histogram("oriel_logic_stage_seconds", text, "service stage tier", stages)

    def _series_of(self, service: str, tier: str) -> Series:
        if tier not in self._tiers:
            if len(self._tiers) >= MAX_TIERS:
                tier = OTHER
            self._tiers.add(tier)
        return self._series.setdefault((service, tier), Series())


@dataclass(slots=True)
class Tally:
    """The counters of one pool. Single writer: the pool.

    jobs: finished by a worker, whatever their answer.
    busy_s: time that workers spent on jobs.
    waited_s: time that the started jobs had waited.
    dropped: jobs that left the queue unstarted, by reason (expired, left, displaced).
    killed: workers that the pool killed, by reason.
    died: workers that ended otherwise, with or without a job.
    batches: released batches, by reason (full, delay, deadline).
    batched_rows: rows in them.
    """

    jobs: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    died: int = 0
    batches: Counter[str] = field(default_factory=Counter)
    batched_rows: int = 0


class Totals:
    """Sums over all worker pools, those that have been closed included, so that no counter falls.

    Single writer: the loop.
    """

    def __init__(self) -> None:
        self._gone = Tally()

    def keep(self, tally: Tally) -> None:
        """Keep the counts of a pool that has been closed."""
        self._gone = added([self._gone, tally])

    def collect(self, living: Iterable[Tally]) -> Iterator[Metric]:
        """Yield the counters. living: the tallies of the open pools."""
        total = added([self._gone, *living])
        yield counter("oriel_logic_jobs", "Jobs finished by a worker", "", total.jobs)
        yield counter("oriel_logic_worker_busy_seconds", "Time that workers spent on jobs", "", total.busy_s)
        text = "Time that jobs waited before they started"
        yield counter("oriel_logic_job_wait_seconds", text, "", total.waited_s)
        text = "Jobs that were never started, by reason"
        yield counter("oriel_logic_jobs_dropped", text, "reason", total.dropped.items())
        text = "Workers that were killed, by reason"
        yield counter("oriel_logic_workers_killed", text, "reason", total.killed.items())
        text = "Workers that ended without being killed by the server"
        yield counter("oriel_logic_workers_died", text, "", total.died)
        text = "Micro-batches released, by reason"
        yield counter("oriel_logic_batches", text, "reason", total.batches.items())
        yield counter("oriel_logic_batched_rows", "Rows in these batches", "", total.batched_rows)


def added(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for each in tallies:
        for name in Tally.__slots__:
            value = getattr(each, name)
            if isinstance(value, Counter):
                getattr(total, name).update(value)
            else:
                setattr(total, name, getattr(total, name) + value)
    return total
