"""Counters of the worker pools, and their sums as metrics."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from oriel_logic.observe.metrics import Metrics


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
    batched_calls, batched_rows: calls and rows in them.
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


class Totals:
    """Sums over all worker pools, those that have been closed included, so that no counter falls.

    Single writer: the loop.
    """

    def __init__(self) -> None:
        self._gone = Tally()

    def keep(self, tally: Tally) -> None:
        """Keep the counts of a pool that has been closed."""
        self._gone = added([self._gone, tally])

    def offer(self, metrics: Metrics, living: Callable[[], Iterable[Tally]]) -> None:
        """Register the counters. living: gives the tallies of the open pools."""

        def total() -> Tally:
            return added([self._gone, *living()])

        metrics.watch_total("oriel_logic_jobs", "Jobs finished by a worker", "", lambda: {"": total().jobs})
        metrics.watch_total(
            "oriel_logic_worker_busy_seconds", "Time that workers spent on jobs", "", lambda: {"": total().busy_s}
        )
        metrics.watch_total(
            "oriel_logic_job_wait_seconds",
            "Time that jobs waited before they started",
            "",
            lambda: {"": total().waited_s},
        )
        metrics.watch_total(
            "oriel_logic_jobs_dropped", "Jobs that were never started, by reason", "reason", lambda: total().dropped
        )
        metrics.watch_total(
            "oriel_logic_workers_killed", "Workers that were killed, by reason", "reason", lambda: total().killed
        )
        metrics.watch_total(
            "oriel_logic_workers_died",
            "Workers that ended without being killed by the server",
            "",
            lambda: {"": total().died},
        )
        metrics.watch_total(
            "oriel_logic_batches", "Micro-batches released, by reason", "reason", lambda: total().batches
        )
        metrics.watch_total("oriel_logic_batched_rows", "Rows in these batches", "", lambda: {"": total().batched_rows})


def added(tallies: Iterable[Tally]) -> Tally:
    sum_of = Tally()
    for each in tallies:
        sum_of.jobs += each.jobs
        sum_of.busy_s += each.busy_s
        sum_of.waited_s += each.waited_s
        sum_of.died += each.died
        sum_of.batched_calls += each.batched_calls
        sum_of.batched_rows += each.batched_rows
        sum_of.dropped.update(each.dropped)
        sum_of.killed.update(each.killed)
        sum_of.batches.update(each.batches)
    return sum_of
