"""One job for a worker process: its answer becomes a value, pieces of a stream, or an error."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from oriel_logic.errors import LogicError, Outcome
from oriel_logic.services.context import Spent, uncounted
from oriel_logic.workers.frames import Frame, Kind, Packed, unpack
from oriel_logic.workers.model_calls import ModelCalls
from oriel_logic.workers.outcomes import failure, raised
from oriel_policies.waiting.flows import Ticket

_log = logging.getLogger(__name__)
WAITED_S = 0.001  # a job that began later than this had to wait, because every worker was busy


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job.

    value: the result of the function.
    cpu_us: processor time that the worker spent.
    stages: (name, start, end) of what the function timed with `ctx.stage`, and before them `wait` if every worker was
    busy; monotonic seconds.
    """

    value: Any
    cpu_us: int
    stages: Sequence[tuple[str, float, float]] = ()


class Pieces:
    """The pieces of one stream between worker and reader. The worker sends at most `frames.WINDOW` ahead."""

    def __init__(self) -> None:
        self._waiting: deque[Frame] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.ended = False

    def put(self, frame: Frame) -> None:
        self._waiting.append(frame)
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    async def next(self) -> Frame | None:
        """Return the next piece; None once all have been read and the job has ended."""
        while not self._waiting:
            if self.ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()

    def drop(self) -> None:
        """Release the pieces that were not read."""
        self._waiting.clear()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Runner(Protocol):
    """The worker process that a job has been handed to, as far as the job's owner needs it."""

    def abandon(self, job: "Job") -> None: ...
    def more(self, job: "Job") -> None: ...


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
    models: ModelCalls | None = None
    spent: Spent = uncounted
    pieces: Pieces | None = None
    started: bool = field(default=False)
    worker: Runner | None = None
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
            self.pieces.end()

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
                self.pieces.end()
            return
        if frame.kind is Kind.REFUSED:
            self.fail(raised(value))
            return
        outcome, line, trace = value
        _log.error("request %s: stage '%s' failed: %s\n%s", self.request_id, self.stage, line, trace)
        failed = failure(outcome, self.stage)
        failed.add_note(line)  # for the handler's author, in a self-test
        self.fail(failed)

    def unreadable(self, error: Exception) -> LogicError:
        """Return the caller's error for an answer that cannot be unpacked here; `error` is logged."""
        _log.error("request %s: the result of '%s' cannot be read", self.request_id, self.stage, exc_info=error)
        return failure(Outcome.HANDLER_FAILED.value, self.stage)
