"""One worker process as the loop sees it: one job is sent, and one answer or the pieces of a stream come back.

A job runs at most its own `run_s`, then the process is killed; a service sets that to bound its own time. If no caller
waits for a job any more (the caller left, or the deadline passed), the worker is notified, which ends generators,
coroutines and model calls; a plain function cannot be interrupted. Killing it costs a new process and its `setup`,
letting it run costs the unknown rest of the job: so it gets as long as its replacement would take, at least
`grace_min_s` and at most `overrun_s`, and is killed then. This is the rent-or-buy rule: it costs never more than
twice what it would with knowledge of the job's length.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from oriel_logic.client.models import Models
from oriel_logic.errors import DeadlineExceeded, HandlerFailed, HandlerTimedOut, LogicError, MemoryExceeded, Outcome
from oriel_logic.services.context import Done, Spent, uncounted
from oriel_logic.workers.forkserver import kill_group
from oriel_logic.workers.frames import Frame, Kind, Packed, body_bound, decoded, encoded, pack, unpack
from oriel_logic.workers.model_calls import CallServer
from oriel_policies.waiting.flows import Ticket
from oriel_wire.process.logs import write_printed
from oriel_wire.process.messages import FrameError, MessageStream
from oriel_wire.process.output import OutputPipe

_log = logging.getLogger(__name__)
WAITED_S = 0.001  # a job that began later than this had to wait, because every worker was busy
ANSWERS = (Kind.RESULT, Kind.REFUSED, Kind.FAILED, Kind.UNFIT, Kind.EXHAUSTED)
FAILURES = 4  # jobs of several services that fail in a row
KILLED = {
    "abandoned": "nobody waited for its job any more",
    "broken": "it could not begin with a job, or failed jobs of several services",
    "memory_limit": "its job needed more memory than its service allows",
    "overrun": "the time of its job was over",
    "protocol": "it sent what cannot be read",
    "stalled": "its stream stood still",
    "time_limit": "its job took longer than its service allows",
}
NOTHING = pack(None, limit_bytes=100)
Pieces = asyncio.Queue[Frame | None]  # pieces of one stream, then None; the worker sends `frames.WINDOW` ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """The limits of a pool.

    max_frame_bytes: largest argument list, result or piece.
    overrun_s: the longest time that an abandoned job may keep its worker, see `worker`.
    grace_min_s: the time that every abandoned job may keep it.
    stream_idle_s: longest time between two pieces of a stream, whether worker or reader is slow.
    """

    workers: int = 2
    max_waiting: int = 256
    max_waiting_bytes: int = 256 << 20
    max_frame_bytes: int = 64 << 20
    overrun_s: float = 10.0
    grace_min_s: float = 1.0
    stream_idle_s: float = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One job. The pool is its only writer. `started` is set once a worker has it, `worker` while a worker has it.

    prepare: gives the frame to send, once a worker is free; None if the job is not needed any more.
    run_s: bound on its run time.
    models: answers its model calls.
    spent: called with its processor time at its end.
    pieces: set if it is a stream.
    may_repeat: True if another worker gets it if one cannot even begin with it.
    """

    reference: str
    stage: str
    request_id: str
    prepare: Callable[[], Packed | None]
    ticket: Ticket
    future: asyncio.Future[Done]
    queued_s: float
    run_s: float | None = None
    models: Models | None = None
    spent: Spent = uncounted
    pieces: Pieces | None = None
    started: bool = False
    worker: "Worker | None" = None
    began_s: float = 0.0
    may_repeat: bool = True

    @property
    def service(self) -> str:
        """The service or file that the code belongs to."""
        return self.reference.rpartition(":")[0]

    def fail(self, error: LogicError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            if self.pieces is not None:
                self.future.exception()  # a reader that has left will not retrieve it
        if self.pieces is not None:
            self.pieces.put_nowait(None)

    def answer(self, frame: Frame) -> None:
        """Finish the job with a worker's last frame, unless no caller waits for it."""
        if self.future.done():
            return
        try:
            value = unpack(frame)
        except Exception as error:  # a value whose class loads only in the worker fails this job
            self.fail(self.unreadable(error))
            return
        if frame.kind is Kind.RESULT:
            stages = value[1]
            if self.began_s - self.queued_s >= WAITED_S:
                stages = (("wait", self.queued_s, self.began_s), *stages)
            self.future.set_result(Done(value[0], frame.cpu_us, stages))
            if self.pieces is not None:
                self.pieces.put_nowait(None)
            return
        if frame.kind is Kind.REFUSED:
            self.fail(value)
            return
        outcome, line, trace = value
        about = {
            "request_id": self.request_id,
            "target": self.service.rpartition(":")[2],
            "reason": outcome,
            "traceback": trace,
        }
        _log.error("request %s: stage '%s' failed: %s", self.request_id, self.stage, line, extra=about)
        failed = failure(outcome, self.stage)
        failed.add_note(line)  # for the handler's author, in a self-test
        self.fail(failed)

    def unreadable(self, error: Exception) -> LogicError:
        """Return the caller's error for an answer that cannot be unpacked here; `error` is logged."""
        about = {"request_id": self.request_id, "target": self.service}
        _log.error(
            "request %s: the result of '%s' cannot be read", self.request_id, self.stage, exc_info=error, extra=about
        )
        return failure(Outcome.HANDLER_FAILED.value, self.stage)


def failure(outcome: str, stage: str) -> LogicError:
    """Make the caller's error for a job that failed; the reason is in the log."""
    if outcome == Outcome.MEMORY_EXCEEDED.value:
        return MemoryExceeded(f"the service needed more memory in its stage '{stage}' than its limit allows")
    return HandlerFailed(f"the service failed in its stage '{stage}': its log says why under this request id")


@dataclass(frozen=True, slots=True)
class Hooks:
    """The pool's functions that a worker calls. `gone` is called exactly once, last."""

    ready: Callable[["Worker", Frame], None]
    job_finished: Callable[["Worker", Job, Frame], None]
    gone: Callable[["Worker", Job | None], None]


class Worker:
    """One worker process.

    job: the job that it runs.
    is_ready: True once its services are set up.
    pid: 0 until known.
    setup_s: time from its start until it was ready.
    failed: the services whose jobs have failed since the last good answer, one entry for each of the latest FAILURES.
    answered: jobs that it has answered.
    spent_us: processor time of the job that ended with it; the time that it ran if only that is known.
    killed_for: why we killed it, one of KILLED; "" if we did not.
    """

    def __init__(
        self,
        hooks: Hooks,
        token: int,
        output: int,
        limits: PoolLimits,
        clock: Callable[[], float],
    ) -> None:
        self.token = token
        self.pid = 0
        self.is_ready = False
        self.job: Job | None = None
        self.setup_s = 0.0
        self.began_s = 0.0
        self.spent_us = 0
        self._began_cpu_ns = 0
        self.killed_for = ""
        self.failed: deque[str] = deque(maxlen=FAILURES)
        self.answered = 0
        self._hooks = hooks
        self._limits = limits
        self._clock = clock
        self._spawned_s = clock()
        self._stream = MessageStream(
            max_body_bytes=body_bound(limits.max_frame_bytes), on_frame=self._took, on_lost=self._lost
        )
        self._output = OutputPipe(output, _show)
        self._calls: CallServer | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, sock: socket.socket) -> None:
        """Take over the socket of the process. Raises OSError."""
        await self._stream.open(sock)

    def begin(self, job: Job, packed: Packed, *, left_s: float) -> None:
        """Send `job`, whose caller waits for another `left_s`."""
        assert self.job is None
        self._send(Kind.JOB, packed)
        self.job = job
        self.began_s = self._clock()
        self._began_cpu_ns = cpu_ns(self.pid)
        job.started = True
        self._arm(left_s + self._limits.overrun_s, "overrun")
        if job.run_s is not None:
            self._arm_sooner(job.run_s, "time_limit")

    def abandon(self, job: Job) -> None:
        """Notify the worker that no caller waits for `job` any more, and bound its remaining time."""
        if self.job is job:
            while job.pieces is not None and not job.pieces.empty():
                job.pieces.get_nowait()
            self._send(Kind.CANCEL, NOTHING)
            if self._calls is not None:
                self._calls.cancel()
            self._arm_sooner(max(self._limits.grace_min_s, min(self.setup_s, self._limits.overrun_s)), "abandoned")

    def more(self, job: Job) -> None:
        """Allow another piece of the stream `job`, because one has been read."""
        if self.job is job:
            self._send(Kind.MORE, NOTHING)
            self._arm(self._limits.stream_idle_s, "stalled")

    def kill(self, reason: str) -> None:
        """Kill the process at once; its job fails for `reason`. `gone` follows."""
        self.killed_for = self.killed_for or reason
        if self.job is not None and reason in ("time_limit", "stalled"):
            limit = (
                f"{self.job.run_s:g} s"
                if reason == "time_limit"
                else f"{self._limits.stream_idle_s:g} s between two pieces"
            )
            self.job.fail(HandlerTimedOut(f"the service took longer than {limit} in its stage '{self.job.stage}'"))
        elif self.job is not None and reason == "overrun":  # its caller gives up at the same time or has left
            self.job.fail(DeadlineExceeded(self.job.stage))
        self._measure()
        kill_group(self.pid)
        self._stream.close()

    def judge(self, job: Job, kind: Kind) -> bool:
        """Record the answer of a job; return whether the process may be broken, because jobs of several services have
        failed one after the other.
        """
        self.answered += 1
        if kind is Kind.RESULT or kind is Kind.REFUSED:
            self.failed.clear()
            return False
        self.failed.append(job.service)
        return len(self.failed) == FAILURES and len(set(self.failed)) > 1

    def close(self) -> None:
        """Let an idle process end by closing its socket."""
        self._stream.close()

    def _send(self, kind: Kind, packed: Packed) -> None:
        self._stream.send(encoded(kind, packed))

    def _took(self, head: memoryview, body: memoryview) -> None:
        frame, job = decoded(head, body), self.job
        if frame.kind is Kind.READY:
            self.is_ready = True
            self.setup_s = self._clock() - self._spawned_s
            self._hooks.ready(self, frame)
        elif job is None:
            return
        elif frame.kind is Kind.PIECE:
            if job.pieces is None:
                job.fail(HandlerFailed(f"the service gave a stream in its stage '{job.stage}' where one value belongs"))
                self.abandon(job)
            elif not job.future.done():  # else it was abandoned
                self._arm(self._limits.stream_idle_s, "stalled")
                job.pieces.put_nowait(frame)
        elif frame.kind is Kind.CALL:
            if self._calls is None:
                self._calls = CallServer(job.models, self._send, limit_bytes=self._limits.max_frame_bytes)
            self._calls.answer(frame)
        elif frame.kind in ANSWERS:
            self.job = None
            self._rest()
            self._hooks.job_finished(self, job, frame)
        else:
            raise FrameError(f"a worker sent {frame.kind.name}")

    def _measure(self) -> None:
        if self.job is not None and not self.spent_us:
            ran_s, used_ns = self._clock() - self.began_s, cpu_ns(self.pid)
            self.spent_us = max(0, used_ns - self._began_cpu_ns) // 1000 if used_ns else int(ran_s * 1e6)

    def _lost(self, problem: str) -> None:
        if problem:
            self.kill("protocol")
        self._measure()
        job, self.job = self.job, None
        self._rest()
        self._output.close()
        self._hooks.gone(self, job)

    def _arm(self, seconds: float, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.kill, reason)

    def _arm_sooner(self, seconds: float, reason: str) -> None:
        if self._timer is None or self._timer.when() > asyncio.get_running_loop().time() + seconds:
            self._arm(seconds, reason)

    def _rest(self) -> None:
        if self._calls is not None:
            self._calls.cancel()
            self._calls = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def cpu_ns(pid: int) -> int:
    """Return the processor time of a process so far; 0 if it has been reaped, or is none of Linux's."""
    with suppress(OSError):
        return time.clock_gettime_ns(~pid << 3 | 2)  # the number of its clock, as of clock_getcpuclockid()
    return 0


def _show(line: str) -> None:
    write_printed(line, "worker")
