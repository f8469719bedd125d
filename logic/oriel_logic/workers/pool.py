"""The worker pool: CPU work in order of promise, one job per process.

Life of a job: `call` queues it (SLA order: band, tenant, deadline) -> an idle worker takes it -> its answer settles
the caller's future. A job leaves the queue unstarted when its deadline passes, when its caller is cancelled, or when
a more urgent one displaces it. A started job cannot be interrupted: a caller that leaves just drops its answer, and
a worker still busy `overrun_s` after the job's deadline is killed, because then it may never end.

Ownership: everything here belongs to the loop. A job's future is set only if it is not done. One task, the keeper,
starts workers: a worker that dies fails its own job alone and is replaced at once, or later and later if workers die
before they are ready. If the fork server is gone, its workers are too, and a new one is launched.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, Saturated, WorkerDied
from oriel_logic.workers.frames import Frame, FrameTooLarge, Kind, decode, encode
from oriel_logic.workers.job import Done, Job
from oriel_logic.workers.launch import Broken, Exited, ForkServer, Started
from oriel_logic.workers.worker import Worker
from oriel_policies.queue import Pushed, SlaQueue, Ticket
from oriel_wire.context import CallContext

__all__ = ["PoolLimits", "WorkerPool"]

_log = logging.getLogger(__name__)
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
FIRST_COST_MS = 5.0
COST_SHARE = 0.2  # of the newest sample in the moving average


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """max_frame_bytes: largest argument list or result. overrun_s: see the module."""

    workers: int = 2
    max_waiting: int = 256
    max_waiting_bytes: int = 256 << 20
    max_frame_bytes: int = 64 << 20
    overrun_s: float = 10.0


class WorkerPool:
    """launch: makes a fork server; `server` is the first one. on_problems: told what a worker could not set up.

    descriptions: {service: as `Definition.describe` gives it}, once a worker is ready. problem: why none can be started; ""
    while that is not known to be so.
    """

    def __init__(
        self,
        server: ForkServer,
        limits: PoolLimits,
        *,
        launch: Callable[[], ForkServer],
        on_problems: Callable[[dict[str, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server: ForkServer | None = server
        self._limits = limits
        self._launch = launch
        self._on_problems = on_problems
        self._clock = clock
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.problem = ""
        self._queue = SlaQueue(max_items=limits.max_waiting, max_bytes=limits.max_waiting_bytes)
        self._costs_ms: dict[str, float] = {}
        self._workers: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self._tokens = 0
        self._stillborn = 0
        self._closing = False
        self._missing = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Workers that work on a job."""
        return sum(worker.job is not None for worker in self._workers.values())

    @property
    def pids(self) -> list[int]:
        """Processes of the workers that are ready."""
        return [worker.pid for worker in self._workers.values() if worker.is_ready and worker.pid]

    @property
    def is_ready(self) -> bool:
        """Whether all workers have been ready at the same time, once."""
        return self._all_ready.is_set()

    async def start(self) -> None:
        """Attach to the fork server and begin to start workers; returns before they are ready."""
        assert self._server is not None
        asyncio.get_running_loop().add_reader(self._server.fileno(), self._news)
        self._missing.set()
        self._keeper = asyncio.create_task(self._keep(), name="worker pool keeper")

    async def wait_ready(self) -> None:
        await self._all_ready.wait()

    async def close(self) -> None:
        """End all workers; jobs that wait or run fail with WorkerDied. Closing twice is fine."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._timer is not None:
            self._timer.cancel()
        for worker in list(self._workers.values()):
            worker.close()
        while (ticket := self._queue.pop()) is not None:
            self._job(ticket).fail(WorkerDied("the server is stopping"))
        server, self._server = self._server, None
        if server is not None:
            asyncio.get_running_loop().remove_reader(server.fileno())
            await asyncio.to_thread(server.close)

    async def call(self, reference: str, arguments: Sequence[Any], *, call: CallContext, stage: str) -> Done:
        """Run the referenced function in a worker.

        Raises DeadlineExceeded (before or while it waits), Saturated, WorkerDied, HandlerFailed, or the Refused the
        function raised. Cancelled: the job leaves the queue, or, if it has started, its answer is dropped.
        """
        if call.deadline <= self._clock():
            raise DeadlineExceeded(stage)
        job = self._job_of(reference, arguments, call, stage)
        outcome, displaced = self._queue.push(job.ticket)
        for ticket in displaced:
            self._job(ticket).fail(Saturated("displaced by a more urgent request", retry_after_s=1.0))
        if outcome is Pushed.FULL:
            raise Saturated("too many requests wait for a worker: try again later", retry_after_s=1.0)
        self._dispatch()
        self._arm()
        try:
            return await job.future
        finally:
            if not job.started:
                self._queue.remove(job.ticket)

    def expire(self) -> None:
        """Fail every queued job whose deadline has passed; the pool's own timer calls this."""
        self._timer = None
        for ticket in self._queue.expire(self._clock()):
            job = self._job(ticket)
            job.fail(DeadlineExceeded(job.stage))
        self._arm()

    # -- told by workers -------------------------------------------------------------------------------------------

    def ready(self, worker: Worker, frame: Frame) -> None:
        report = decode(frame)
        self.problem = ""
        self.descriptions = report["descriptions"]
        if report["problems"]:
            self._on_problems(report["problems"])
        self._stillborn = 0
        self._idle.append(worker)
        if len(self._idle) + self.busy == self._limits.workers:
            self._all_ready.set()
        self._dispatch()

    def answered(self, worker: Worker, job: Job, frame: Frame) -> None:
        cost_ms = frame.cpu_us / 1000.0
        self._queue.settle(job.ticket, cost_ms)
        known = self._costs_ms.get(job.reference, cost_ms)
        self._costs_ms[job.reference] = known + COST_SHARE * (cost_ms - known)
        self._idle.append(worker)
        self._dispatch()
        job.answer(frame)

    def gone(self, worker: Worker, job: Job | None) -> None:
        del self._workers[worker.token]
        if worker in self._idle:
            self._idle.remove(worker)
        if not worker.is_ready:
            self._stillborn += 1
        if job is not None:
            job.fail(WorkerDied("the worker process that handled this request ended; other requests are not affected"))
        self._missing.set()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _job_of(self, reference: str, arguments: Sequence[Any], call: CallContext, stage: str) -> Job:
        try:
            frame = encode(Kind.JOB, (reference, tuple(arguments)), limit_bytes=self._limits.max_frame_bytes)
        except FrameTooLarge as error:
            raise HandlerFailed(f"the arguments of stage '{stage}' are too large: {error}") from error
        except Exception as error:  # whatever pickling a user's value raises
            raise HandlerFailed(f"the arguments of stage '{stage}' cannot travel to a worker process") from error
        ticket = Ticket(
            band=call.band,
            tenant=call.tenant,
            deadline=call.deadline,
            cost=self._costs_ms.get(reference, FIRST_COST_MS),
            size_bytes=len(frame),
        )
        ticket.payload = job = Job(
            reference=reference,
            stage=stage,
            request_id=call.request_id,
            frame=frame,
            ticket=ticket,
            future=asyncio.get_running_loop().create_future(),
        )
        return job

    @staticmethod
    def _job(ticket: Ticket) -> Job:
        assert isinstance(ticket.payload, Job)
        return ticket.payload

    def _dispatch(self) -> None:
        while self._idle:
            ticket = self._queue.pop()
            if ticket is None:
                return
            job, left_s = self._job(ticket), ticket.deadline - self._clock()
            if left_s <= 0:
                self._queue.settle(ticket, 0.0)
                job.fail(DeadlineExceeded(job.stage))
                continue
            self._idle.pop().begin(job, kill_after_s=left_s + self._limits.overrun_s)

    def _arm(self) -> None:
        deadline = self._queue.next_deadline()
        if deadline is None:
            return
        delay_s = max(0.0, deadline - self._clock())
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self.expire)

    def _news(self) -> None:
        """The fork server's control socket is readable."""
        assert self._server is not None
        events = self._server.events()
        if events is None:
            _log.error("the fork server ended; it is started again")
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.close(timeout_s=0.2)
            self._server = None
            self._stillborn += not self.is_ready
            for worker in list(self._workers.values()):
                worker.kill()
            self._missing.set()
            return
        for event in events:
            if isinstance(event, Started) and event.token in self._workers:
                self._workers[event.token].pid = event.pid
            elif isinstance(event, Broken):
                self.problem = event.problem
            elif isinstance(event, Exited) and not self._closing:
                _log.warning("worker process %d ended (%s); a new one is started", event.pid, event.how())

    async def _keep(self) -> None:
        while True:
            await self._missing.wait()
            self._missing.clear()
            try:
                if self._server is None:
                    await self._back_off()
                    self._server = self._launch()
                    asyncio.get_running_loop().add_reader(self._server.fileno(), self._news)
                while self._server is not None and len(self._workers) < self._limits.workers:
                    await self._back_off()
                    await self._add_worker(self._server)
            except OSError as error:
                _log.error("a worker process cannot be started: %s", error)
                self._stillborn += 1
                self._missing.set()

    async def _back_off(self) -> None:
        if self._stillborn:
            await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._stillborn, 10)))

    async def _add_worker(self, server: ForkServer) -> None:
        self._tokens += 1
        worker = Worker(self, self._tokens, limit_bytes=self._limits.max_frame_bytes)
        self._workers[worker.token] = worker
        link = None
        try:
            link = server.spawn(worker.token)
            await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=link)
        except BaseException:
            if not worker.is_connected:
                del self._workers[worker.token]
                if link is not None:
                    link.close()
            raise
