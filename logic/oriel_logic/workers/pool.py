"""The worker pool: CPU work in SLA order, one job per process.

Life of a job: `call` queues it (SLA order: band, tenant, deadline) -> an idle worker takes it -> its answer settles the
caller's future. A job leaves the queue unstarted when its deadline passes, when its caller is cancelled, or when a more
urgent one displaces it. `worker` describes what happens to a started job whose caller leaves.

Ownership: everything here belongs to the loop. A job's future is set only if it is not done. A worker that dies fails
its own job alone; the keeper replaces it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, LogicError, Saturated, ServiceBroken, WorkerDied
from oriel_logic.observe.metrics import Tally
from oriel_logic.services.batching import BatchLimits, WrongRows, group_of, rows_in, size_of
from oriel_logic.services.context import Done, Work
from oriel_logic.services.definition import Definition
from oriel_logic.workers.batcher import Batcher
from oriel_logic.workers.frames import Frame, FrameTooLarge, Kind, Packed, Terms, pack, unpack
from oriel_logic.workers.keeper import Keeper
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.long_jobs import LongJobs
from oriel_logic.workers.worker import NOTHING, Hooks, Job, Pieces, PoolLimits, Worker
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue
from oriel_wire.context import CallContext

_log = logging.getLogger(__name__)
FIRST_COST_MS = 5.0
COST_SHARE = 0.2  # weight of the newest sample in the moving average
MAX_BATCHERS = 64
FAILED_START = "its process ended while it was imported or set up: its last lines are in the log"
HELD = "long"  # the queue's name for jobs that wait by the rule of `long_jobs`


class WorkerPool:
    """Runs jobs in worker processes.

    launch: makes a fork server; `server` is the first one.
    problems: {service: reason} for services that workers could not set up.
    on_problems: called with the problems of each worker that is ready.
    definitions: the services by name, once a worker is ready.
    tally: the counters of this pool.
    is_ready: True once all workers have been ready at the same time.
    """

    def __init__(
        self,
        server: ForkServer,
        limits: PoolLimits,
        *,
        launch: Callable[[], ForkServer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._keeper = Keeper(server, limits.workers, launch=launch, make=self._make, on_news=self._tell)
        self._clock = clock
        self.problems: dict[str, str] = {}
        self.on_problems: Callable[[dict[str, str]], None] = lambda problems: None
        self.definitions: dict[str, Definition] = {}
        self.tally = Tally()
        self._batchers: dict[tuple[str, tuple[Any, ...]], Batcher] = {}
        self._queue = SlaQueue(max_items=limits.max_waiting, max_bytes=limits.max_waiting_bytes)
        self._long = LongJobs()
        self._costs_ms: dict[str, float] = {}
        self._workers = self._keeper.workers
        self._idle: list[Worker] = []
        self._closing = False
        self.is_ready = False
        self._news_came = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of jobs in the queue, and of calls that wait for a batch."""
        return len(self._queue) + sum([each.waiting for each in self._batchers.values()])

    @property
    def busy(self) -> int:
        """The number of workers that run a job."""
        return sum(worker.job is not None for worker in self._workers.values())

    @property
    def pids(self) -> list[int]:
        """The processes of the workers that are ready."""
        return [worker.pid for worker in self._workers.values() if worker.is_ready and worker.pid]

    async def start(self) -> None:
        """Attach to the fork server and begin to start workers; returns before they are ready."""
        self._keeper.start()

    async def wait_ready(self, *, starts_once: bool = False) -> None:
        """Wait until all workers have been ready at the same time.

        starts_once: give up if a worker fails to start.
        Raises ServiceBroken if none can ever be started.
        """
        while not self.is_ready:
            if self._keeper.problem:
                raise ServiceBroken(f"no worker can be started: {self._keeper.problem}")
            if starts_once and self._keeper.failed_starts:
                raise ServiceBroken(FAILED_START)
            await self._news_came.wait()

    async def close(self) -> None:
        """End all workers; jobs that wait or run fail with WorkerDied. May be called twice."""
        self._closing = True
        await self._keeper.stop()
        if self._timer is not None:
            self._timer.cancel()
        for batcher in self._batchers.values():
            batcher.close()
        for ticket in self._queue.expire(inf):
            self._job(ticket).fail(WorkerDied("the server is stopping"))
        await self._keeper.close()

    async def call(self, work: Work) -> Done:
        """Run the referenced function in a worker.

        Its limits are described in `worker` and `memory`.
        Raises DeadlineExceeded (before or while it waits), Saturated, WorkerDied, HandlerTimedOut, MemoryExceeded,
        HandlerFailed, or the Refused that the function raised.
        Cancelled: the job leaves the queue, or, if it has started, the worker is notified and the answer dropped.
        """
        return await self.submit(self._job_of(work, self._packed_work(work)))

    async def stream(self, work: Work) -> AsyncIterator[Any]:
        """Yield the pieces of the referenced generator, which runs at most a few pieces ahead of its reader.

        The deadline bounds the first piece, `stream_idle_s` each later one.
        Raises what `call` raises, also after some pieces.
        Cancelled or closed: the generator is closed.
        """
        pieces: Pieces = asyncio.Queue()
        job = self._job_of(work, self._packed_work(work, streams=True), pieces)
        self._push(job)
        try:
            while (frame := await pieces.get()) is not None:
                try:
                    piece = unpack(frame)
                except Exception as error:  # a value whose class loads only in the worker
                    raise job.unreadable(error) from error
                if job.worker is not None:
                    job.worker.more(job)
                yield piece
            await job.future
        finally:
            self._leave(job)

    async def batched(self, work: Work, limits: BatchLimits) -> Done:
        """Run the referenced function on rows, its argument, together with those of other calls, and return the results
        of these rows.

        Without rows the function is not called: the result is an empty list.
        Raises what `call` raises, and HandlerFailed for a value that is not rows.
        """
        try:
            [rows] = work.arguments
            count, group = rows_in(rows), group_of(rows)
        except WrongRows as error:
            raise HandlerFailed(f"stage '{work.stage}': {error}") from error
        if not count:  # it would neither join a batch nor release one
            return Done([], 0)
        batcher = self._batchers.get((work.reference, group))
        if batcher is None:
            if len(self._batchers) >= MAX_BATCHERS:
                self._batchers = {key: each for key, each in self._batchers.items() if not each.is_idle}
            batcher = self._batchers[work.reference, group] = Batcher(
                self,
                limits,
                max_waiting=self._limits.max_waiting,
                max_waiting_bytes=self._limits.max_waiting_bytes,
                clock=self._clock,
            )
        return await batcher.call(work, count, size_of(rows))

    def batch_job(self, work: Work, parts: Callable[[], list[Any] | None], deadline: float) -> Job:
        """Make a job whose arguments, the rows of several callers, are collected when a worker is free."""

        def prepare() -> Packed | None:
            rows = parts()
            if rows is None:
                return None
            return self._packed(
                (work.reference, tuple(rows), terms_of(work.call, 0)._replace(is_batch=True)), work.stage
            )

        job = self._job_of(work, NOTHING)
        job.prepare = prepare
        job.may_repeat = False  # its rows have been collected
        job.ticket.deadline = deadline
        return job

    async def submit(self, job: Job) -> Done:
        """Queue `job` and wait for its answer; see `call`."""
        self._push(job)
        try:
            return await job.future
        finally:
            self._leave(job)

    def _push(self, job: Job) -> None:
        if job.ticket.deadline <= self._clock():
            raise DeadlineExceeded(job.stage)
        displaced = self._queue.push(job.ticket)
        if displaced is None:
            raise Saturated("too many requests wait for a worker: try again later", retry_after_s=1.0)
        self.tally.dropped["displaced"] += len(displaced)
        for ticket in displaced:
            self._job(ticket).fail(Saturated("displaced by a more urgent request", retry_after_s=1.0))
        self._dispatch()
        self._arm()

    def _leave(self, job: Job) -> None:
        """Remove a job whose caller has its answer or has left, and undo the circle of job and ticket."""
        if not job.started:
            self.tally.dropped["left"] += self._queue.remove(job.ticket)
        elif job.worker is not None:
            job.future.cancel()
            job.worker.abandon(job)
        job.ticket.payload = None

    def expire(self) -> None:
        """Fail every queued job whose deadline has passed; called by the pool's own timer."""
        self._timer = None
        for ticket in self._queue.expire(self._clock()):
            job = self._job(ticket)
            job.fail(DeadlineExceeded(job.stage))
            self.tally.dropped["expired"] += 1
        self._arm()

    # Reports of workers -------------------------------------------------------------------------------------------

    def ready(self, worker: Worker, frame: Frame) -> None:
        report = unpack(frame)
        worker.pid = report["pid"]  # the fork server's record of it may come later
        self._keeper.ready(worker)
        self.definitions = report["definitions"]
        self.problems |= report["problems"]
        self.on_problems(report["problems"])
        self._rests(worker)
        if len(self._idle) + self.busy >= self._limits.workers:
            self.is_ready = True
            self._tell()
        self._dispatch()

    def job_finished(self, worker: Worker, job: Job, frame: Frame) -> None:
        cost_ms = frame.cpu_us / 1000.0
        self._count(worker, job)
        job.spent(frame.cpu_us, job.future.done() or frame.kind not in (Kind.RESULT, Kind.REFUSED))
        self.tally.jobs += 1
        self._queue.settle(job.ticket, cost_ms)
        known = self._costs_ms.get(job.reference, cost_ms)
        self._costs_ms[job.reference] = known + COST_SHARE * (cost_ms - known)
        job.worker = None
        if worker.judge(job, frame.kind):
            self._keeper.replace(worker)
        broken = frame.kind is Kind.UNFIT and worker.answered > 1  # it cannot even begin with a job
        if frame.kind is Kind.EXHAUSTED:
            worker.killed_for = "memory_limit"  # it ends by itself
        elif broken:
            worker.kill("broken")
        else:
            self._rests(worker)
        if broken and job.may_repeat and not job.future.done():
            job.may_repeat, job.started = False, False
            job.ticket = _queued_again(job.ticket)
            self._queue.push(job.ticket)
            self._arm()
        else:
            job.answer(frame)
        self._dispatch()

    def gone(self, worker: Worker, job: Job | None) -> None:
        self._keeper.gone(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if not self._closing:
            if worker.killed_for:
                self.tally.killed[worker.killed_for] += 1
            else:
                self.tally.died += 1
        if job is not None:
            self._count(worker, job)
            job.spent(worker.spent_us, True)
            self._queue.settle(job.ticket, worker.spent_us / 1000.0)
            job.worker = None
            job.fail(WorkerDied("the worker process that handled this request ended; other requests are not affected"))
        self._dispatch()  # a spare one may step in

    # Internals ----------------------------------------------------------------------------------------------------

    def _rests(self, worker: Worker) -> None:
        """Let a worker have the next job. A suspect one ends if it rests while others are ready in its place."""
        self._idle.append(worker)
        suspect = self._keeper.suspect
        if suspect in self._idle and len(self.pids) > self._limits.workers:
            self._idle.remove(suspect)
            suspect.kill("broken")

    def _count(self, worker: Worker, job: Job) -> None:
        now = self._clock()
        self.tally.busy_s += now - worker.began_s
        self._long.job_finished(job, now - worker.began_s, now)

    def _packed(self, value: Any, stage: str) -> Packed:
        try:
            return pack(value, limit_bytes=self._limits.max_frame_bytes)
        except FrameTooLarge as error:
            raise HandlerFailed(f"the arguments of stage '{stage}' are too large: {error}") from error
        except Exception as error:  # whatever pickling a user's value raises
            raise HandlerFailed(f"the arguments of stage '{stage}' cannot travel to a worker process") from error

    def _packed_work(self, work: Work, *, streams: bool = False) -> Packed:
        terms = terms_of(work.call, work.memory_mb, streams=streams)
        return self._packed((work.reference, tuple(work.arguments), terms), work.stage)

    def _job_of(self, work: Work, packed: Packed, pieces: Pieces | None = None) -> Job:
        call = work.call
        ticket = Ticket(
            band=call.band,
            tenant=call.tenant,
            deadline=call.deadline,
            cost=self._costs_ms.get(work.reference, FIRST_COST_MS),
            size_bytes=packed.size_bytes,
        )
        ticket.payload = job = Job(
            reference=work.reference,
            stage=work.stage,
            request_id=call.request_id,
            prepare=lambda: packed,
            ticket=ticket,
            future=asyncio.get_running_loop().create_future(),
            queued_s=self._clock(),
            run_s=work.run_s,
            models=work.models,
            spent=work.spent,
            pieces=pieces,
        )
        return job

    @staticmethod
    def _job(ticket: Ticket) -> Job:
        assert isinstance(ticket.payload, Job)
        return ticket.payload

    def _dispatch(self) -> None:
        queue, most = self._queue, self._limits.workers
        while self._idle and len(running := [each.job for each in self._workers.values() if each.job]) < most:
            now = self._clock()
            is_last = 0 < len(running) == most - 1 and self._long.fill(running, now)
            if HELD in queue.aside and not is_last:
                queue.bring_back(HELD)
            ticket = queue.peek()
            if ticket is None:
                return
            job = self._job(ticket)
            if is_last and self._long.waits(job, running, now):
                ticket.model = HELD
                queue.set_aside()
                continue
            queue.pop()
            if ticket.deadline <= now:
                self._queue.settle(ticket, 0.0)
                job.fail(DeadlineExceeded(job.stage))
                self.tally.dropped["expired"] += 1
                continue
            if not self._begin(job, self._idle[-1], ticket.deadline - now):
                self._queue.settle(ticket, 0.0)

    def _begin(self, job: Job, worker: Worker, left_s: float) -> bool:
        try:
            packed = job.prepare()
            if packed is None:
                job.future.set_result(Done([], 0))
                return False
        except LogicError as error:
            job.fail(error)
            return False
        worker.begin(job, packed, left_s=left_s)
        self._idle.pop()
        job.worker = worker
        job.began_s = worker.began_s
        self.tally.waited_s += worker.began_s - job.queued_s
        return True

    def _arm(self) -> None:
        due = self._queue.next_deadline()
        if due is None:
            return
        delay_s = max(0.0, due - self._clock())
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self.expire)

    def _make(self, token: int, output: int) -> Worker:
        return Worker(Hooks(self.ready, self.job_finished, self.gone), token, output, self._limits, self._clock)

    def _tell(self) -> None:
        self._news_came.set()
        self._news_came.clear()


def terms_of(call: CallContext, memory_mb: int, *, streams: bool = False) -> Terms:
    return Terms(streams, memory_mb, call.request_id, call.deadline, call.tier, call.tenant)


def _queued_again(ticket: Ticket) -> Ticket:
    """Return a ticket like one that has left its queue. It was counted there, so it joins whatever the bounds are."""
    again = Ticket(
        band=ticket.band,
        tenant=ticket.tenant,
        deadline=ticket.deadline,
        cost=ticket.cost,
        weight=ticket.weight,
        size_bytes=ticket.size_bytes,
        payload=ticket.payload,
    )
    again.admitted = True
    return again
