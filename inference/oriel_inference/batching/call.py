"""One call inside a batcher, and what it gets back."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from oriel_inference.errors import BackendFailed, InferenceError
from oriel_policies.queue import Ticket
from oriel_wire.context import CallContext
from oriel_wire.v2.messages import Array, InferRequest

__all__ = ["Answer", "BatchTimes", "Call", "Closable", "Emit", "Reply", "StepRun", "deliver"]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """When one batch passed its stages, monotonic seconds; shared by its members. rows: of the whole batch."""

    started_s: float
    assembled_s: float
    computed_s: float
    split_s: float
    rows: int


class Answer(msgspec.Struct, frozen=True, gc=False):
    """One call's rows. outputs: in the order of the model's outputs, views of the batch's arrays.

    steps: what an ensemble ran for it, in the order in which they ended.
    """

    outputs: Sequence[Array]
    times: BatchTimes
    cost_us: int
    steps: "Sequence[StepRun]" = ()


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step of an ensemble. queued_s: when it was handed to its model."""

    model: str
    version: str
    queued_s: float
    answer: Answer


# Farther apart than any two deadlines: a level always outranks a deadline, and so does being parked within a level.
_LEVEL_S = 1e7
_PARKED_S = _LEVEL_S / 2

Reply = Callable[[Answer | InferenceError], None]
Emit = Callable[[Sequence[Array], Callable[[], None]], None]


class Closable(Protocol):
    """What wants to know when a call ends before its answer has come."""

    def close(self) -> None: ...


def deliver(call: "Call", result: Answer | InferenceError, model: str) -> None:
    """Tell the caller how it ended; never raises, for others wait behind it.

    An answer that cannot be made ready is a failure: nobody is left without a word.
    """
    reply = call.reply
    call.forget()
    try:
        reply(result)
        return
    except Exception:
        _log.exception("model %s: an answer could not be delivered", model)
    if isinstance(result, Answer):
        try:
            reply(BackendFailed("the server failed on this answer"))
        except Exception:
            _log.exception("model %s: a caller got no answer", model)


def _nobody(_: Answer | InferenceError) -> None:
    pass


class Call:
    """A request as the batcher sees it.

    inputs: name -> [rows, ...]. signature: calls with equal ones may share a batch (every non-batch dimension and the
    set of inputs). deadline: absolute; give_up_s: when the model's queue policy gives up on it, if that is earlier:
    then it is refused or, if it `delays`, parked. level: the caller's own ranking, which orders only its own calls of
    its own tier: 0 goes before 1. admitted: a step of an ensemble, which had its own bounds: no full queue refuses it.
    reply: called exactly once on the loop, unless the caller leaves first. emit: for decoupled models, called before
    that with each response's outputs and what to call once they are written. relay: set while such a model runs it, or
    a Python model. request_id: for the log. caller: a tenant or a connection, "" if not known. source: what
    the client sent and on whose behalf, for models that take requests one by one.
    """

    __slots__ = (
        "arrived_s",
        "caller",
        "deadline",
        "delays",
        "emit",
        "finished",
        "inputs",
        "level",
        "relay",
        "reply",
        "request_id",
        "rows",
        "signature",
        "source",
        "started_s",
        "ticket",
    )

    def __init__(
        self,
        *,
        inputs: Mapping[str, Array],
        rows: int,
        signature: Hashable,
        arrived_s: float,
        deadline: float,
        reply: Reply,
        band: int = 0,
        tenant: str = "",
        size_bytes: int = 0,
        give_up_s: float | None = None,
        delays: bool = False,
        level: int = 0,
        emit: Emit | None = None,
        admitted: bool = False,
        source: tuple[InferRequest, CallContext] | None = None,
        request_id: str = "",
        caller: str = "",
    ) -> None:
        self.inputs = inputs
        self.rows = rows
        self.signature = signature
        self.arrived_s = arrived_s
        self.deadline = deadline
        self.reply = reply
        self.emit = emit
        self.delays = delays
        self.level = level
        self.relay: Closable | None = None
        self.source = source
        self.request_id = request_id
        self.caller = caller
        self.started_s = 0.0  # when it left the queue for a batch; 0 before
        self.finished = False
        self.ticket = Ticket(
            band=band,
            tenant=tenant,
            deadline=deadline if give_up_s is None else min(deadline, give_up_s),
            cost=rows,
            size_bytes=size_bytes,
            rows=rows,
            payload=self,
            order=deadline + level * _LEVEL_S if level else deadline,
            admitted=admitted,
        )

    def forget(self) -> None:
        """Nobody is told anything any more. Its caller knows the call and the call its caller: a circle of some thirty
        objects, request body included, that only the garbage collector would find."""
        self.reply = _nobody
        self.emit = None
        self.ticket.payload = None

    def parked(self, until_s: float) -> Ticket:
        """A new ticket for one that has left the queue: behind the other calls of its level, expiring at `until_s`."""
        # Without rows it presses nobody.
        return self._renewed(until_s, rows=0, order=self.deadline + self.level * _LEVEL_S + _PARKED_S)

    def again(self) -> Ticket:
        """A new ticket for one that has left the queue, with the same rank and the same expiry."""
        return self._renewed(self.ticket.deadline, rows=self.ticket.rows, order=self.ticket.order)

    def _renewed(self, deadline: float, *, rows: int, order: float) -> Ticket:
        old = self.ticket
        self.ticket = Ticket(
            band=old.band,
            tenant=old.tenant,
            deadline=deadline,
            cost=old.cost,
            size_bytes=old.size_bytes,
            rows=rows,
            payload=self,
            order=order,
            admitted=old.admitted,
        )
        return self.ticket
