"""What the workers of a pool have done so far: plain counters that the metrics read."""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Single writer: the pool.

    jobs: finished by a worker, whatever their answer. busy_s: time workers spent on jobs. waited_s: time that the
    started jobs had waited. dropped: jobs that left the queue unstarted, by reason (expired, left, displaced).
    killed: workers that the pool killed, by reason. died: workers that ended otherwise, with or without a job.
    batches: released, by reason (full, delay, deadline); batched_calls, batched_rows: what was in them.
    """

    jobs: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    died: int = 0
    batches: Counter[str] = field(default_factory=Counter)
    batched_calls: int = 0
    batched_rows: int = 0
