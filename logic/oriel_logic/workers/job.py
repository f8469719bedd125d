"""One piece of work for a worker process, and how its answer becomes a value or an error."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from oriel_logic.errors import HandlerFailed, InputTooLarge, LogicError, MediaUnsupported, Outcome, Refused
from oriel_logic.workers.frames import Frame, Kind, decode
from oriel_policies.queue import Ticket

__all__ = ["Done", "Job"]

_log = logging.getLogger(__name__)
REFUSALS: dict[str, type[Refused]] = {
    Outcome.INPUT_REFUSED.value: Refused,
    Outcome.MEDIA_UNSUPPORTED.value: MediaUnsupported,
    Outcome.INPUT_TOO_LARGE.value: InputTooLarge,
}


@dataclass(frozen=True, slots=True)
class Done:
    """value: what the function returned. cpu_us: processor time the worker spent."""

    value: Any
    cpu_us: int


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """`frame` goes to the worker as it is. `started` once a worker has it; the pool is the only writer."""

    reference: str
    stage: str
    request_id: str
    frame: bytes
    ticket: Ticket
    future: asyncio.Future[Done]
    started: bool = field(default=False)

    def fail(self, error: LogicError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def answer(self, frame: Frame) -> None:
        """Settle with a worker's answer. An answer that nobody waits for is dropped undecoded."""
        if self.future.done():
            return
        try:
            value = decode(frame)
        except Exception as error:  # a value whose class loads only in the worker: this job's failure
            _log.error("request %s: the result of '%s' cannot be read", self.request_id, self.stage, exc_info=error)
            self.fail(self._failed())
            return
        if frame.kind is Kind.RESULT:
            self.future.set_result(Done(value, frame.cpu_us))
        elif frame.kind is Kind.REFUSED:
            outcome, message = value
            self.fail(REFUSALS.get(outcome, Refused)(message))
        else:
            summary, trace = value
            _log.error("request %s: stage '%s' failed: %s\n%s", self.request_id, self.stage, summary, trace)
            failed = self._failed()
            failed.add_note(summary)  # for the handler's author, in a self-test
            self.fail(failed)

    def _failed(self) -> HandlerFailed:
        return HandlerFailed(f"the service failed in its stage '{self.stage}': its log says why under this request id")
