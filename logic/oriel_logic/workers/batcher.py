"""Collects the calls of one batched function until they go to a worker together.

The inference batcher's rule (`oriel_policies.waiting.batch.decide`) releases a batch: it is full, its oldest call has
waited long enough, or the tightest deadline leaves no more time. Its members are chosen only when a worker is free: the
most urgent calls that wait then, in the order of the SLA queue, whole calls, at most `max_rows`. So a call that has
left or expired by then is not a member, and one that arrived meanwhile may be.

Released batches wait in the pool like other jobs, each as urgent as its most urgent call at its release; a more urgent
call that arrives later brings its own release. A release that finds no calls left is skipped.

Ownership: the loop. A call's future is set only if it is not done. A batch on a worker is not interrupted unless all of
its callers have left.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from oriel_logic.errors import DeadlineExceeded, LogicError, Saturated, WorkerDied
from oriel_logic.observe.metrics import Tally
from oriel_logic.services.batching import BatchLimits
from oriel_logic.services.context import Done, Work
from oriel_logic.workers.worker import Job
from oriel_policies.waiting.batch import BatchBounds, Fill, Idle, Run, ServiceCurve
from oriel_policies.waiting.batch_queue import BatchQueue
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue

STOPPING = "the server is stopping"


class Jobs(Protocol):
    """The part of the pool that is needed here."""

    tally: Tally

    def batch_job(self, work: Work, parts: Callable[[], list[Any] | None], deadline: float) -> Job: ...
    async def submit(self, job: Job) -> Done: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One call. work: the job with its rows, `count` of them. waits: True if it is in the queue."""

    work: Work
    count: int
    arrived_s: float
    ticket: Ticket
    future: asyncio.Future[Done]
    waits: bool = True


@dataclass(slots=True, eq=False)
class Batch:
    """A released batch. band: the band of the most urgent call at its release. members: set once a worker is free."""

    band: int
    members: list[Member] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def is_unwanted(self) -> bool:
        """Return whether all callers of the batch have left."""
        return bool(self.members) and all(member.future.cancelled() for member in self.members)

    def spent(self, cpu_us: int, is_lost: bool) -> None:
        """Divide the processor time of the batch among its callers by their rows, to the microsecond."""
        rows = sum([member.count for member in self.members])
        for member in self.members:
            part_us = cpu_us * member.count // rows
            member.work.spent(part_us, is_lost or member.future.done())
            cpu_us, rows = cpu_us - part_us, rows - member.count

    def one_left(self, _: object) -> None:
        if self.task is not None and self.is_unwanted:
            self.task.cancel()


class Batcher:
    """The batches of one function and one kind of rows, so that all of its calls can be combined."""

    def __init__(
        self,
        jobs: Jobs,
        limits: BatchLimits,
        *,
        max_waiting: int,
        max_waiting_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._bounds = BatchBounds(max_rows=limits.max_rows, max_delay_s=limits.max_delay_s)
        self._queue = SlaQueue(max_items=max_waiting, max_bytes=max_waiting_bytes)
        self._clock = clock
        self._curve = ServiceCurve()
        self._waiting: BatchQueue[Member] = BatchQueue(self._queue, self._bounds, self._curve)
        self._released: list[Batch] = []  # batches that no worker has taken yet
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def waiting(self) -> int:
        """The number of calls that wait for their batch."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._queue

    async def call(self, work: Work, count: int, size_bytes: int) -> Done:
        """Return the results of this caller's rows. Raises what `WorkerPool.call` raises."""
        now, call = self._clock(), work.call
        if call.deadline <= now:
            raise DeadlineExceeded(work.stage)
        ticket = Ticket(band=call.band, tenant=call.tenant, deadline=call.deadline, size_bytes=size_bytes, rows=count)
        ticket.payload = member = Member(
            work=work,
            count=count,
            arrived_s=now,
            ticket=ticket,
            future=asyncio.get_running_loop().create_future(),
        )
        displaced = self._queue.push(ticket)
        if displaced is None:
            raise Saturated("too many requests wait for a worker: try again later", retry_after_s=1.0)
        for each in displaced:
            self._drop(each.payload, Saturated("displaced by a more urgent request", retry_after_s=1.0), "displaced")
        self._waiting.rows += count
        self._waiting.arrived(member)
        self.consider()
        try:
            return await member.future
        finally:
            if self._queue.remove(ticket):
                self._left(member)
                self._jobs.tally.dropped["left"] += 1
            ticket.payload = None  # the two are a circle

    def close(self) -> None:
        """Fail every waiting call with WorkerDied; nothing more is released."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        while (ticket := self._queue.pop()) is not None:
            self._left(ticket.payload)
            fail(ticket.payload, WorkerDied(STOPPING))
        for task in list(self._running):
            task.cancel()

    def consider(self) -> None:
        """Release what is due, drop what has expired, and set the timer for the next check."""
        if self._closing:
            return
        now = self._clock()
        for ticket in self._queue.expire(now):
            self._drop(ticket.payload, DeadlineExceeded(ticket.payload.work.stage), "expired")
        while True:
            first = self._queue.peek()
            if first is None:
                return
            covered = self._bounds.max_rows * len(self._released)
            if covered and self._waiting.rows <= covered:
                if any(batch.band <= first.band for batch in self._released):
                    break  # the waiting jobs fit into the batches that are released already
                self._release(first.payload, "urgent")
                continue
            tightest_s = self._queue.next_deadline()
            if tightest_s is None:
                break
            decision = self._waiting.decide(now, tightest_s, released_rows=covered)
            if isinstance(decision, Idle):
                break
            if not isinstance(decision, Run):
                self._look_again(min(decision.at_s, tightest_s))
                return
            self._release(first.payload, "delay" if decision.reason == "idle_instance" else decision.reason)
        deadline = self._queue.next_deadline()
        if deadline is not None:
            self._look_again(deadline)

    def _release(self, first: Member, reason: str) -> None:
        self._jobs.tally.batches[reason] += 1
        latest = max([member.ticket.deadline for member in self._waiting.waiting()])
        batch = Batch(first.work.call.band)
        self._released.append(batch)

        def fill() -> list[Any] | None:
            self._released.remove(batch)
            batch.members = self._taken()
            self._jobs.tally.batched_rows += sum([each.count for each in batch.members])
            for each in batch.members:
                each.future.add_done_callback(batch.one_left)
            if len(batch.members) > 1:
                job.request_id = f"{job.request_id} and {len(batch.members) - 1} more in one batch"
            asyncio.get_running_loop().call_soon(self.consider)
            return [each.work.arguments[0] for each in batch.members] or None

        job = self._jobs.batch_job(replace(first.work, spent=batch.spent), fill, latest)
        task = batch.task = asyncio.create_task(self._run(job, batch), name="batch")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _taken(self) -> list[Member]:
        """Take the most urgent waiting calls that fit together."""
        now = self._clock()
        fill = Fill(self._bounds.max_rows, self._curve, now)
        members: list[Member] = []
        while (ticket := self._queue.peek()) is not None:
            member: Member = ticket.payload
            if ticket.deadline > now and not fill.admit(member.count, ticket.deadline):
                break
            self._queue.pop()
            if ticket.deadline <= now:
                self._drop(member, DeadlineExceeded(member.work.stage), "expired")
            else:
                self._left(member)
                members.append(member)
        return members

    async def _run(self, job: Job, batch: Batch) -> None:
        try:
            done = await self._jobs.submit(job)
            if batch.members:
                self._curve.observe(sum([each.count for each in batch.members]), self._clock() - job.began_s)
                give(batch.members, done)
        except LogicError as error:
            if batch in self._released and isinstance(error, Saturated):  # the pool has no room for it
                batch.members = self._taken()
                for member in batch.members:
                    fail(member, error)
            await self._again(batch.members, error)
        finally:
            job.prepare = lambda: None  # it refers to the job
            if self._closing:
                for member in batch.members:
                    fail(member, WorkerDied(STOPPING))
            if batch in self._released:
                self._released.remove(batch)
            self.consider()

    async def _again(self, members: Sequence[Member], error: LogicError) -> None:
        """Try each caller of a failed batch alone, unless it had only one."""
        if len(members) == 1:
            fail(members[0], error)
            return
        async with asyncio.TaskGroup() as group:
            for member in members:
                if not member.future.done():
                    group.create_task(self._alone(member))

    async def _alone(self, member: Member) -> None:
        def only() -> list[Any] | None:
            return None if member.future.done() else [member.work.arguments[0]]

        job = self._jobs.batch_job(member.work, only, member.work.call.deadline)
        job.ticket.admitted = True  # its batch had a place: a full queue refuses no neighbour of a bad caller
        try:
            give([member], await self._jobs.submit(job))
        except LogicError as error:
            fail(member, error)

    def _left(self, member: Member) -> None:
        """Record that a call has left the queue."""
        member.waits = False
        self._waiting.rows -= member.count

    def _drop(self, member: Member, error: LogicError, reason: str) -> None:
        self._left(member)
        self._jobs.tally.dropped[reason] += 1
        fail(member, error)

    def _look_again(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at_s - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.consider)


def fail(member: Member, error: LogicError) -> None:
    if not member.future.done():
        member.future.set_exception(error)


def give(members: Sequence[Member], done: Done) -> None:
    """Give every caller its own part of a batch's answer, and its share of the cost by rows."""
    rows = sum([member.count for member in members])
    for member, value in zip(members, done.value, strict=False):  # no values: nobody was left when a worker was there
        if not member.future.done():
            member.future.set_result(Done(value, round(done.cpu_us * member.count / rows)))
