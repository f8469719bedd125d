"""One piece of work for a worker process, and how its answer becomes a value, pieces of a stream, or an error."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oriel_logic.errors import LogicError, Outcome
from oriel_logic.workers.asked import ModelCalls
from oriel_logic.workers.frames import Frame, Kind, Packed
from oriel_logic.workers.outcomes import failure, raised
from oriel_logic.workers.segments import drop, unpack
from oriel_policies.queue import Ticket

if TYPE_CHECKING:
    from oriel_logic.workers.worker import Worker

__all__ = ["Done", "Job", "Pieces"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """value: what the function returned. cpu_us: processor time the worker spent.

    stages: (name, start, end) of what the function timed by `ctx.stage`, monotonic seconds.
    """

    value: Any
    cpu_us: int
    stages: Sequence[tuple[str, float, float]] = ()


class Pieces:
    """The pieces of one stream between worker and reader. The worker sends at most `terms.WINDOW` ahead."""

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
        """The next piece; None once all have been read and the job has ended."""
        while not self._waiting:
            if self.ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()

    def drop(self) -> None:
        """Let go of what was not read."""
        while self._waiting:
            drop(self._waiting.popleft())

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """`started` once a worker has it, `worker` as long as it has; the pool is the only writer.

    prepare: gives what is sent, when a worker is there; None if there is nothing to be done any more.
    run_s: how long it may run. models: answers its calls of models. pieces: where it is a stream.
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
    pieces: Pieces | None = None
    started: bool = field(default=False)
    worker: "Worker | None" = None
    began_s: float = 0.0

    def fail(self, error: LogicError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            if self.pieces is not None:
                self.future.exception()  # a reader that has left will not ask for it
        if self.pieces is not None:
            self.pieces.end()

    def answer(self, frame: Frame) -> None:
        """Settle with a worker's last frame. An answer that nobody waits for is dropped as it is."""
        if self.future.done():
            drop(frame)
            return
        try:
            value = unpack(frame)
        except Exception as error:  # a value whose class loads only in the worker: this job's failure
            self.fail(self.unreadable(error))
            return
        if frame.kind is Kind.RESULT:
            self.future.set_result(Done(value[0], frame.cpu_us, value[1]))
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
        """What a caller is told whose answer cannot be unpacked here; the log gets `error`."""
        _log.error("request %s: the result of '%s' cannot be read", self.request_id, self.stage, exc_info=error)
        return failure(Outcome.HANDLER_FAILED.value, self.stage)
