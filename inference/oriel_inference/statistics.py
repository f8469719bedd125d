"""Counters of one model version, as the statistics extension and the metrics report them.

Single writer: the loop. Durations are (count, nanoseconds); in a batch each request is charged the whole batch's
compute time, as v2 clients expect.
"""

import time
from collections import Counter

from oriel_inference.batching.call import BatchTimes
from oriel_inference.errors import Outcome
from oriel_wire.v2.proto import v2_pb2

__all__ = ["Duration", "Statistics"]


class Duration:
    """How often and how long in all."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, seconds: float, times: int = 1) -> None:
        """`times` occurrences of `seconds` each; a clock's rounding never makes it negative."""
        self.count += times
        self.ns += max(0, int(seconds * 1e9)) * times


class _Stages:
    __slots__ = ("infer", "input", "output")

    def __init__(self) -> None:
        self.input, self.infer, self.output = Duration(), Duration(), Duration()

    def add(self, times: BatchTimes, count: int) -> None:
        self.input.add(times.assembled_s - times.started_s, count)
        self.infer.add(times.computed_s - times.assembled_s, count)
        self.output.add(times.split_s - times.computed_s, count)


class Statistics:
    """inferences: rows answered; executions: batches; batches: rows -> stages; releases: reason -> batches."""

    __slots__ = (
        "batches",
        "executions",
        "fail",
        "failures",
        "inferences",
        "last_ms",
        "queue",
        "releases",
        "stages",
        "success",
    )

    def __init__(self) -> None:
        self.success, self.fail, self.queue = Duration(), Duration(), Duration()
        self.stages = _Stages()
        self.inferences = 0
        self.executions = 0
        self.last_ms = 0
        self.batches: dict[int, _Stages] = {}
        self.failures: Counter[Outcome] = Counter()
        self.releases: Counter[str] = Counter()

    def executed(self, times: BatchTimes, calls: int) -> None:
        """A batch ran for `calls` requests."""
        self.executions += 1
        self.last_ms = time.time_ns() // 1_000_000
        self.stages.add(times, calls)
        batch = self.batches.get(times.rows)
        if batch is None:
            batch = self.batches[times.rows] = _Stages()
        batch.add(times, 1)

    def succeeded(self, rows: int, *, queue_s: float, total_s: float) -> None:
        """One request was answered."""
        self.inferences += rows
        self.success.add(total_s)
        self.queue.add(queue_s)

    def failed(self, outcome: Outcome, total_s: float = 0.0) -> None:
        """One request got no rows."""
        self.failures[outcome] += 1
        self.fail.add(total_s)

    def message(self, name: str, version: str) -> v2_pb2.ModelStatistics:
        """The statistics extension's entry of this version."""
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
                cache_hit=v2_pb2.StatisticDuration(),
                cache_miss=v2_pb2.StatisticDuration(),
            ),
        )
        for rows, stages in sorted(self.batches.items()):
            found.batch_stats.add(
                batch_size=rows,
                compute_input=_message(stages.input),
                compute_infer=_message(stages.infer),
                compute_output=_message(stages.output),
            )
        return found


def _message(duration: Duration) -> v2_pb2.StatisticDuration:
    return v2_pb2.StatisticDuration(count=duration.count, ns=duration.ns)
