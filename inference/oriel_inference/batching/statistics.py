"""Counters of one model version, as the statistics extension and the metrics report them.

Single writer: the loop. Durations are (count, nanoseconds). Each request of a batch is charged the compute time of the
whole batch, as v2 clients expect. Counters belong to a name and a version, not to a load: a version that is loaded
again continues to count (`Ledger`).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from math import inf

from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.batching.summaries import Summaries
from oriel_inference.errors import Outcome
from oriel_inference.model import ModelSpec
from oriel_wire.observe.telemetry import DURATION_BOUNDS_S, Histogram
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import v2_pb2

MAX_TIERS = 16
MAX_BATCH_SIZES = 1024
MAX_RESPONSES = 64
MAX_LEDGER = 4096
CHECKS = 2
OTHER_TIERS = "other"

LATENCY_S: tuple[float, ...] = (0.0005, *DURATION_BOUNDS_S, 30.0, 60.0)
BATCH_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0)


# Takes samples of executed rows: gets the specification of the load that ran a batch, the numbers of the batch's last
# row and of the next row to sample, its calls and their outputs. Returns the number of the next row. Never raises.
Offer = Callable[[ModelSpec | None, float, float, Sequence[Call], Sequence[Sequence[Array]]], float]


class Duration:
    """A number of occurrences and their total duration."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, seconds: float, times: int = 1) -> None:
        """Add `times` occurrences of `seconds` each; negative rounding errors of the clock count as 0."""
        self.count += times
        if seconds > 0.0:
            self.ns += int(seconds * 1e9) * times


class _Stages:
    __slots__ = ("infer", "input", "output")

    def __init__(self) -> None:
        self.input, self.infer, self.output = Duration(), Duration(), Duration()

    def add(self, times: BatchTimes, count: int) -> None:
        self.input.add(times.assembled_s - times.started_s, count)
        self.infer.add(times.computed_s - times.assembled_s, count)
        self.output.add(times.split_s - times.computed_s, count)


class Tier:
    """The requests of one tier.

    latency: seconds from arrival, of the answered requests.
    refusals: reasons of the others.
    """

    __slots__ = ("latency", "refusals")

    def __init__(self) -> None:
        self.latency = Histogram(LATENCY_S)
        self.refusals: Counter[Outcome] = Counter()


class Response:
    """The n-th responses of a decoupled model's requests; exactly one of the last four counters counts each of them.

    infer: time from the previous response (or the start) to this one.
    output: time to encode it.
    """

    __slots__ = ("cancel", "empty", "fail", "infer", "output", "success")

    def __init__(self) -> None:
        self.infer, self.output = Duration(), Duration()
        self.success, self.fail, self.empty, self.cancel = Duration(), Duration(), Duration(), Duration()


class Statistics:
    """The counters of one version.

    inferences: executed rows.
    executions: executed batches.
    batches: rows -> stages, for the first MAX_BATCH_SIZES sizes seen.
    sizes: rows of batches.
    releases: reason -> batches.
    tiers: tier -> requests.
    responses, first_response: the number of responses and the time to the first one, for a decoupled model; the latter
    in milliseconds.
    sequences: how sequences ended -> their number.
    language: tokens of a language model by kind ("prompt", "cached" ones among them, "generated"), and its "pauses".
    cache_hit, cache_miss: requests by whether the response cache had their answer; the times of looking, and of keeping
    the answer.
    summaries: quantiles of latencies; None if they are not shown.
    offer: takes samples of executed rows, the next one when `inferences` reaches sample_at. Writer: `quality`.
    """

    __slots__ = (
        "batches",
        "cache_hit",
        "cache_miss",
        "executions",
        "fail",
        "failures",
        "first_response",
        "inferences",
        "language",
        "last_ms",
        "offer",
        "queue",
        "releases",
        "responses",
        "sample_at",
        "sequences",
        "sizes",
        "stages",
        "success",
        "summaries",
        "tiers",
    )

    def __init__(self) -> None:
        self.success, self.fail, self.queue = Duration(), Duration(), Duration()
        self.cache_hit, self.cache_miss = Duration(), Duration()
        self.stages = _Stages()
        self.inferences = 0
        self.executions = 0
        self.last_ms = 0
        self.batches: dict[int, _Stages] = {}
        self.failures: Counter[Outcome] = Counter()
        self.releases: Counter[str] = Counter()
        self.sizes = Histogram(BATCH_ROWS)
        self.tiers: dict[str, Tier] = {}
        self.responses: list[Response] = []
        self.first_response = Histogram(FIRST_RESPONSE_MS)
        self.sequences: Counter[str] = Counter()
        self.language: Counter[str] = Counter()
        self.summaries: Summaries | None = None
        self.offer: Offer | None = None
        self.sample_at = inf

    def tier(self, name: str) -> Tier:
        """Return the counters of a tier; beyond MAX_TIERS the rest share OTHER_TIERS."""
        found = self.tiers.get(name)
        if found is None:
            if len(self.tiers) >= MAX_TIERS:
                name = OTHER_TIERS
            found = self.tiers.setdefault(name, Tier())
        return found

    def first_response_buckets(self, bounds: tuple[float, ...]) -> None:
        """Count first responses in these buckets from now on, starting at zero."""
        if bounds != self.first_response.bounds:
            self.first_response = Histogram(bounds)

    def response(self, number: int) -> Response | None:
        """Return the counters of a request's response `number`, from 0; beyond MAX_RESPONSES they share the last
        ones.
        """
        if number >= MAX_RESPONSES:
            return None
        while len(self.responses) <= number:
            self.responses.append(Response())
        return self.responses[number]

    def executed(
        self,
        times: BatchTimes,
        calls: int,
        members: Sequence[Call] = (),
        shares: Sequence[Sequence[Array]] = (),
        spec: ModelSpec | None = None,
    ) -> None:
        """Count a batch that answered `calls` requests. The rows of callers that left meanwhile were executed as
        well.

        members, shares: its calls and the outputs of each, from which rows are sampled. spec: the spec of the load that
        ran it, because one that is being replaced finishes its calls beside the next one.
        """
        self.executions += 1
        self.inferences += times.rows
        self.last_ms = time.time_ns() // 1_000_000
        self.stages.add(times, calls)
        self.sizes.observe(times.rows)
        if self.summaries is not None:
            self.summaries.executed(times, calls)
        if self.inferences >= self.sample_at and self.offer is not None:
            self.sample_at = self.offer(spec, self.inferences, self.sample_at, members, shares)
        batch = self.batches.get(times.rows)
        if batch is None:
            if len(self.batches) >= MAX_BATCH_SIZES:
                return
            batch = self.batches[times.rows] = _Stages()
        batch.add(times, 1)

    def succeeded(self, *, queue_s: float, total_s: float) -> None:
        """Count an answered request."""
        self.success.add(total_s)
        self.queue.add(queue_s)
        if self.summaries is not None:
            self.summaries.succeeded(queue_s, total_s)

    def count_failure(self, outcome: Outcome, total_s: float = 0.0) -> None:
        """Count a request that got no rows."""
        self.failures[outcome] += 1
        self.fail.add(total_s)

    def message(self, name: str, version: str, *, memory_bytes: int = 0) -> v2_pb2.ModelStatistics:
        """Return this version's entry of the statistics extension. memory_bytes: memory of the machine, 0 if
        unknown.
        """
        found = v2_pb2.ModelStatistics(
            name=name,
            version=version,
            last_inference=self.last_ms,
            inference_count=self.inferences,
            execution_count=self.executions,
            inference_stats=v2_pb2.InferStatistics(
                success=_message(self.success),
                fail=_message(self.fail),
                queue=_message(self.queue),
                compute_input=_message(self.stages.input),
                compute_infer=_message(self.stages.infer),
                compute_output=_message(self.stages.output),
                cache_hit=_message(self.cache_hit),
                cache_miss=_message(self.cache_miss),
            ),
        )
        if memory_bytes:
            found.memory_usage.add(type="CPU", id=0, byte_size=memory_bytes)
        for rows, stages in sorted(self.batches.items()):
            found.batch_stats.add(
                batch_size=rows,
                compute_input=_message(stages.input),
                compute_infer=_message(stages.infer),
                compute_output=_message(stages.output),
            )
        for number, response in enumerate(self.responses):
            found.response_stats[str(number)].CopyFrom(
                v2_pb2.InferResponseStatistics(
                    compute_infer=_message(response.infer),
                    compute_output=_message(response.output),
                    success=_message(response.success),
                    fail=_message(response.fail),
                    empty_response=_message(response.empty),
                    cancel=_message(response.cancel),
                )
            )
        return found


class Responses:
    """Counts the responses of one request of a decoupled model. arrived_s: the time when the request was queued."""

    __slots__ = ("_arrived_s", "_number", "_statistics")

    def __init__(self, statistics: Statistics, arrived_s: float) -> None:
        self._statistics = statistics
        self._arrived_s = arrived_s
        self._number = 0

    def sent(self, now: float, infer_s: float, output_s: float) -> None:
        """Count a response on its way to a caller that waits. infer_s, output_s: time to compute it and to encode
        it.
        """
        if not self._number:
            self._statistics.first_response.observe((now - self._arrived_s) * 1000.0)
        response = self._statistics.response(self._number)
        self._number += 1
        if response is not None:
            response.infer.add(infer_s)
            response.output.add(output_s)
            response.success.add(infer_s + output_s)

    def finished(self, infer_s: float, *, failed: bool, cancelled: bool) -> None:
        """Count the end of the responses, `infer_s` after the last one. cancelled: the caller had left."""
        response = self._statistics.response(self._number)
        if response is None:
            return
        if cancelled:
            response.cancel.add(infer_s)
            return
        response.infer.add(infer_s)
        (response.fail if failed else response.empty).add(infer_s)


class Ledger:
    """The counters of every version, kept while the process lives: a counter must not restart at zero with an update.

    summarises: True if their latencies are shown as summaries.
    The oldest of the versions that do not serve any more are forgotten beyond MAX_LEDGER. Each `open` checks CHECKS of
    them and adds one, so the ledger shrinks to its bound, and opening costs the same with any number of models that
    serve. Single writer: the loop.
    """

    def __init__(
        self, is_serving: Callable[[str, int], bool], *, max_versions: int = MAX_LEDGER, summarises: bool = False
    ) -> None:
        self._is_serving = is_serving
        self._summarises = summarises
        self._max_versions = max_versions
        self._kept: dict[tuple[str, int], Statistics] = {}

    def open(self, name: str, version: int) -> Statistics:
        """Return the counters of a version that is about to serve."""
        found = self._kept.pop((name, version), None) or Statistics()
        self._kept[name, version] = found
        if self._summarises and found.summaries is None:
            found.summaries = Summaries()
        for key in [*islice(self._kept, CHECKS)] if len(self._kept) > self._max_versions else ():
            forgotten = self._kept.pop(key)
            if key == (name, version) or self._is_serving(*key):
                self._kept[key] = forgotten  # behind the others, so that the next turn checks another one
            elif len(self._kept) <= self._max_versions:
                break
        return found


def _message(duration: Duration) -> v2_pb2.StatisticDuration:
    return v2_pb2.StatisticDuration(count=duration.count, ns=duration.ns)
