"""Keeps the last worker of a pool from callers whose jobs are long, so that they do not stop everybody else.

A job is *long* once it has run for `LONG_S`. From then on, and for `FORGET_S` after it has ended, all jobs of its
caller, a tenant and a service, count as long. While all workers but one run such jobs, the last one takes another of
them only if it is more urgent than all that run, or if nobody else has run a job for `FORGET_S`: neither a caller of
short jobs, nor a more urgent tier. A job that goes on after its caller has left still counts.
"""

from collections.abc import Collection
from typing import Final

from oriel_logic.workers.job import Job

LONG_S: Final = 0.5
FORGET_S: Final = 60.0
_SHORT: Final = -1  # in place of a band, for callers of short jobs


class LongJobs:
    """The callers of long jobs of one pool. Single writer: the pool."""

    def __init__(self) -> None:
        self._long: dict[tuple[str, str], float] = {}  # by tenant and service: when a long job of it ran
        self._ended: dict[int, float] = {}  # by band: when a job of it ended

    def ended(self, job: Job, seconds: float, now: float) -> None:
        """Record a job that has run for `seconds`."""
        self._runs(job, seconds, now)
        self._ended[job.ticket.band if self._is_long(job, now) else _SHORT] = now

    def fill(self, running: Collection[Job], now: float) -> bool:
        """Return whether all `running` jobs are long."""
        for job in running:
            self._runs(job, now - job.began_s, now)
        return all(self._is_long(job, now) for job in running)

    def waits(self, job: Job, running: Collection[Job], now: float) -> bool:
        """Return whether a job may not have the last worker, while all others run the long jobs `running`."""
        band = job.ticket.band
        return (
            self._is_long(job, now)
            and any(each.ticket.band <= band for each in running)
            and any(other < band and now - at < FORGET_S for other, at in self._ended.items())
        )

    def _runs(self, job: Job, seconds: float, now: float) -> None:
        if seconds >= LONG_S:
            self._long = {caller: at for caller, at in self._long.items() if now - at < FORGET_S}
            self._long[_caller(job)] = now

    def _is_long(self, job: Job, now: float) -> bool:
        return now - self._long.get(_caller(job), -FORGET_S) < FORGET_S


def _caller(job: Job) -> tuple[str, str]:
    return job.ticket.tenant, job.service
