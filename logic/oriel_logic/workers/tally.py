"""Counters of the worker pools, and their sums as metrics."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from oriel_wire.engine.families import counter


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
