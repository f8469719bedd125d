"""Keeps the last worker of a pool from callers whose jobs are long, so that they do not stop everybody else.

A job is *long* once it has run for `LONG_S`. A caller, a tenant and a service, is one of *short* jobs if a job of it
has ended sooner, and none has been long for `FORGET_S`. While all workers but one run jobs of other callers than those,
the last one takes none of a caller that had a long job in that time or that runs one of them, unless it is more urgent
than all that run, or nobody else has run a job for `FORGET_S`: neither a caller of short jobs, nor a more urgent tier.
A job that goes on after its caller has left still counts.
"""

from collections.abc import Collection
from typing import Final

from oriel_logic.workers.worker import Job

LONG_S: Final = 0.5
FORGET_S: Final = 60.0
MAX_SHORT: Final = 10_000
_SHORT: Final = -1  # in place of a band, for callers of short jobs


class LongJobs:
    """The callers of one pool. Single writer: the pool."""

    def __init__(self) -> None:
        self._long: dict[tuple[str, str], float] = {}  # (tenant, service) -> time of its latest long job
        self._short: set[tuple[str, str]] = set()  # callers of short jobs
        self._ended: dict[int, float] = {}  # band -> time when a job of it ended

    def job_finished(self, job: Job, seconds: float, now: float) -> None:
        """Record a job that has run for `seconds`."""
        self._runs(job, seconds, now)
        caller = _caller(job)
        if not self._was_long(caller, now):
            if len(self._short) >= MAX_SHORT:
                self._short.clear()
            self._short.add(caller)
        self._ended[_SHORT if caller in self._short else job.ticket.band] = now

    def fill(self, running: Collection[Job], now: float) -> bool:
        """Return whether no job of those that run is one of a caller of short jobs."""
        for job in running:
            self._runs(job, now - job.began_s, now)
        return all(_caller(job) not in self._short for job in running)

    def waits(self, job: Job, running: Collection[Job], now: float) -> bool:
        """Return whether a job may not have the last worker, while all others run the jobs `running`, which `fill`."""
        band, caller = job.ticket.band, _caller(job)
        return (
            caller not in self._short
            and (self._was_long(caller, now) or any(_caller(each) == caller for each in running))
            and any(each.ticket.band <= band for each in running)
            and any(other < band and now - at < FORGET_S for other, at in self._ended.items())
        )

    def _runs(self, job: Job, seconds: float, now: float) -> None:
        if seconds >= LONG_S:
            self._long = {caller: at for caller, at in self._long.items() if now - at < FORGET_S}
            self._long[_caller(job)] = now
            self._short.discard(_caller(job))

    def _was_long(self, caller: tuple[str, str], now: float) -> bool:
        return caller in self._long and now - self._long[caller] < FORGET_S


def _caller(job: Job) -> tuple[str, str]:
    return job.ticket.tenant, job.service
