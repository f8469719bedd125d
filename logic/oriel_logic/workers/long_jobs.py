"""Keeps one worker of a pool free of long jobs, so that a slow service does not stop the quick ones beside it.

A job is *long* if its service's jobs have taken `LONG_S` or more. As long as the pool also runs jobs of services that
are quick, or of a more urgent tier, at most all workers but one are given to long jobs, whatever their services,
tenants and tiers. The others wait here, in the same order and within the same bounds as the pool's queue, and enter
that queue when one of them has ended. A job that goes on after its caller has left still counts.
"""

from collections.abc import Callable, Collection
from typing import Final

from oriel_logic.workers.job import Job
from oriel_policies.flows import Ticket
from oriel_policies.queue import SlaQueue

LONG_S: Final = 0.5
FORGET_S: Final = 60.0
_SHARE: Final = 0.3  # weight of the newest run in the moving average


class LongJobs:
    """The long jobs of one pool. Single writer: the pool.

    workers: of the pool. running: returns the jobs that they run.
    """

    def __init__(self, workers: int, queue: SlaQueue, running: Callable[[], Collection[Job]]) -> None:
        self._most = workers - 1
        self._running = running
        self.queue = queue
        self._ran: dict[str, tuple[float, float]] = {}  # by service: seconds on average, and when the latest ended
        self._bands: dict[int, float] = {}  # when a job of the band was seen
        self._released: set[Job] = set()  # those in the pool's queue

    def ran(self, job: Job, seconds: float, now: float) -> None:
        """Record a run that has ended."""
        known, _ = self._ran.get(_service(job), (seconds, 0.0))
        self._ran[_service(job)] = known + _SHARE * (seconds - known), now

    def holds_back(self, job: Job, now: float) -> bool:
        """Return whether a new job waits here; `release` gives it to the pool's queue."""
        band = job.ticket.band
        self._bands[band] = now
        if self._most < 1 or self._ran.get(_service(job), (0.0, 0.0))[0] < LONG_S:
            return False
        quick = any(seconds < LONG_S and now - at < FORGET_S for seconds, at in self._ran.values())
        job.is_long = quick or any(other < band and now - at < FORGET_S for other, at in self._bands.items())
        return job.is_long

    def holds(self, job: Job) -> bool:
        """Return whether a job that has not begun waits here, and not in the pool's queue."""
        return job.is_long and job not in self._released

    def release(self) -> Job | None:
        """Return the next job that may join the pool's queue, with a ticket for it."""
        if not self.queue or sum(job.is_long for job in self._running()) + len(self._released) >= self._most:
            return None
        waited = self.queue.pop()
        assert waited is not None and isinstance(waited.payload, Job)
        self.rejoins(waited.payload)
        return waited.payload

    def rejoins(self, job: Job) -> None:
        """Give a job that has left its queue a ticket for the pool's queue."""
        job.ticket = _queued_again(job.ticket)
        if job.is_long:
            self._released.add(job)

    def left(self, job: Job) -> None:
        """Note that a job has left the pool's queue: it runs now, or it has ended."""
        self._released.discard(job)


def _queued_again(ticket: Ticket) -> Ticket:
    """Return a ticket like one that has left its queue. It was counted there, so it joins whatever the bounds are."""
    return Ticket(
        band=ticket.band,
        tenant=ticket.tenant,
        deadline=ticket.deadline,
        cost=ticket.cost,
        weight=ticket.weight,
        size_bytes=ticket.size_bytes,
        payload=ticket.payload,
        admitted=True,
    )


def _service(job: Job) -> str:
    return job.reference.rpartition(":")[0]
