"""What all worker pools did, added up: those that serve and those that are gone, so that no counter falls."""

from collections.abc import Callable, Iterable

from oriel_logic.metrics import Metrics
from oriel_logic.workers.tally import Tally

__all__ = ["Totals"]


class Totals:
    """Single writer: the loop."""

    def __init__(self) -> None:
        self._gone = Tally()

    def keep(self, tally: Tally) -> None:
        """The pool of this tally is closed."""
        self._gone = added([self._gone, tally])

    def offer(self, metrics: Metrics, living: Callable[[], Iterable[Tally]]) -> None:
        """living: the tallies of the pools that are there."""

        def total() -> Tally:
            return added([self._gone, *living()])

        metrics.watch_total("oriel_logic_jobs", "Jobs that a worker finished", "", lambda: {"": total().jobs})
        metrics.watch_total(
            "oriel_logic_worker_busy_seconds", "Time that workers spent on jobs", "", lambda: {"": total().busy_s}
        )
        metrics.watch_total(
            "oriel_logic_job_wait_seconds", "Time that started jobs had waited", "", lambda: {"": total().waited_s}
        )
        metrics.watch_total(
            "oriel_logic_jobs_dropped", "Jobs that were never started, by reason", "reason", lambda: total().dropped
        )
        metrics.watch_total(
            "oriel_logic_workers_killed", "Workers that were killed, by reason", "reason", lambda: total().killed
        )
        metrics.watch_total(
            "oriel_logic_workers_died", "Workers that ended by themselves", "", lambda: {"": total().died}
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
