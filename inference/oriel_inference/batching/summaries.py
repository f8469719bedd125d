"""The latencies of one model version as summaries, for `--metrics-config summary_latencies=true`."""

from time import monotonic

from oriel_inference.batching.call import BatchTimes
from oriel_wire.observe.summary import Summary

# Triton's names of the latencies, in the names of its metrics.
STAGES = ("compute_input", "compute_infer", "compute_output")
TEXTS = {
    "request": "Time from entering the queue to the answer",
    "queue": "Time in the queue",
    "compute_input": "Time of assembling a request's batch",
    "compute_infer": "Time of executing a request's batch",
    "compute_output": "Time of splitting a request's batch",
}


class Summaries:
    """The summaries of one version, by the name that Triton gives each."""

    __slots__ = ("by_name",)

    def __init__(self) -> None:
        self.by_name = {name: Summary() for name in TEXTS}

    def succeeded(self, queue_s: float, total_s: float) -> None:
        """Count an answered request."""
        now = monotonic()
        self.by_name["queue"].observe(queue_s, now)
        self.by_name["request"].observe(total_s, now)

    def executed(self, times: BatchTimes, calls: int) -> None:
        """Count the stages of a batch for each request that it answered."""
        now, at = monotonic(), (times.started_s, times.assembled_s, times.computed_s, times.split_s)
        for stage, began_s, ended_s in zip(STAGES, at, at[1:], strict=False):
            if calls:
                self.by_name[stage].observe(ended_s - began_s, now, calls)
