"""One call inside a batcher, and its answer."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from oriel_inference.errors import BackendFailed, DeadlineExceeded, InferenceError, QueueTimeout
from oriel_policies.metering.usage import UsageRow
from oriel_policies.waiting.flows import Ticket
from oriel_wire.context import CallContext
from oriel_wire.v2.messages import Array, InferRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The monotonic seconds at which one batch passed its stages; shared by its members.

    rows: rows of the whole batch. device_ns: the device time that it is charged.
    steps: the number of executions of the model, more than one for a batch of scans.
    """

    started_s: float
    assembled_s: float
    computed_s: float
    split_s: float
    rows: int
    device_ns: int = 0
    steps: int = 1


class Decoding(NamedTuple):
    """How a language model made an answer.

    first_token_s: from the arrival to its first token. paused_s: in `pauses` pauses for more urgent calls.
    tokens_in, tokens_out: of the prompt, and of the answer.
    """

    first_token_s: float
    pauses: int
    paused_s: float
    tokens_in: int
    tokens_out: int


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The rows of one call.

    outputs: arrays in the order of the model's outputs, views of the batch's arrays.
    cost_us: the call's share of the batch's time, for fairness.
    device_ns: the call's share of the device time that the batch is charged.
    usage: the row of its caller; None if nobody accounts for it.
    steps: the steps that an ensemble ran for it, in the order in which they ended.
    decoding: set for an answer of a language model.
    """

    outputs: Sequence[Array]
    times: BatchTimes
    cost_us: int
    device_ns: int = 0
    usage: UsageRow | None = None
    steps: "Sequence[StepRun]" = ()
    decoding: Decoding | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the tokens that a language model read and wrote."""
        return (0, 0) if self.decoding is None else (self.decoding.tokens_in, self.decoding.tokens_out)


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step of an ensemble. queued_s: the time when it was given to its model."""

    model: str
    version: str
    queued_s: float
    answer: Answer


NOTHING_KEPT: frozenset[str] = frozenset()
# Larger than the distance of any two deadlines: a higher level always comes later, and so does a parked call within its
# level.
_LEVEL_S = 1e7
_PARKED_S = _LEVEL_S / 2

Reply = Callable[[Answer | InferenceError], None]
Emit = Callable[[Sequence[Array], Callable[[], None]], None]


def deliver(call: "Call", result: Answer | InferenceError, model: str) -> None:
    """Call the reply of a call; never raises, because other calls wait behind it.

    If the answer cannot be encoded, the caller gets an error instead.
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


def lateness(call: "Call") -> InferenceError:
    """Return the error of a call that waited for too long: for its queue policy, or for its deadline."""
    if call.ticket.deadline < call.deadline:
        return QueueTimeout("Request timeout expired")
    return DeadlineExceeded("queue")


def _nobody(_: Answer | InferenceError) -> None:
    pass


_NO_TICKET = Ticket(band=0, tenant="", deadline=0.0)


class Call(msgspec.Struct, kw_only=True, eq=False):
    """A request as the batcher sees it.

    inputs: name -> [rows, ...].
    signature: calls with equal signatures may share a batch (every non-batch dimension and the set of inputs).
    deadline: absolute.
    give_up_s: the time when the queue policy of the model gives up on it, if that is earlier; then it is refused or, if
    `delays`, parked.
    level: the caller's own ranking, which orders only its own calls of its own tier; 0 goes before 1.
    admitted: set for a step of an ensemble, which was admitted by the ensemble's bounds: a full queue does not refuse
    it.
    reply: called exactly once on the loop, unless the caller leaves first.
    emit: takes each response of a decoupled model; called before `reply` with the outputs of each response and a
    function to call once they are written.
    on_early_end: called if the call ends before its answer has come; set while a decoupled or a Python model runs it.
    request_id: the id for the log.
    caller: a tenant or a connection, "" if unknown.
    usage: the row that counts what the call uses; None for calls that nobody accounts for.
    source: the client's request and its context, for models that take requests one by one.
    keep: the outputs that may stay in the memory of the model's device, because only models there need them.
    started_s: the time when it left the queue for a batch; 0 before.
    ticket: its place in the queue, made with it.
    """

    inputs: Mapping[str, Array]
    rows: int
    signature: Hashable
    arrived_s: float
    deadline: float
    reply: Reply
    band: int = 0
    tenant: str = ""
    size_bytes: int = 0
    give_up_s: float | None = None
    delays: bool = False
    level: int = 0
    admitted: bool = False
    emit: Emit | None = None
    on_early_end: Callable[[], None] | None = None
    source: tuple[InferRequest, CallContext] | None = None
    request_id: str = ""
    caller: str = ""
    usage: UsageRow | None = None
    keep: frozenset[str] = NOTHING_KEPT
    started_s: float = 0.0
    finished: bool = False
    ticket: Ticket = _NO_TICKET

    def __post_init__(self) -> None:
        deadline, level = self.deadline, self.level
        self.ticket = ticket = Ticket(
            band=self.band,
            tenant=self.tenant,
            deadline=deadline if self.give_up_s is None else min(deadline, self.give_up_s),
            cost=self.rows,
            size_bytes=self.size_bytes,
            rows=self.rows,
            payload=self,
        )
        ticket.order = deadline + level * _LEVEL_S if level else deadline
        ticket.admitted = self.admitted

    def forget(self) -> None:
        """Drop the references to the caller. Caller and call refer to each other: a cycle of some thirty objects, the
        request body included, that only the garbage collector would find.
        """
        self.reply = _nobody
        self.emit = self.on_early_end = None
        self.ticket.payload = None

    def parked(self, until_s: float) -> Ticket:
        """Return a new ticket for a call that has left the queue: behind the other calls of its level, expiring at
        `until_s`.
        """
        # Without rows it delays no other call.
        return self._renewed(until_s, rows=0, order=self.deadline + self.level * _LEVEL_S + _PARKED_S)

    def again(self) -> Ticket:
        """Return a new ticket for a call that has left the queue, with the same rank and the same expiry."""
        return self._renewed(self.ticket.deadline, rows=self.ticket.rows, order=self.ticket.order)

    @property
    def waits(self) -> bool:
        """Return whether the call is in the queue."""
        return not (self.finished or self.started_s)

    def _renewed(self, deadline: float, *, rows: int, order: float) -> Ticket:
        old = self.ticket
        self.ticket = ticket = Ticket(
            band=old.band,
            tenant=old.tenant,
            deadline=deadline,
            cost=old.cost,
            size_bytes=old.size_bytes,
            rows=rows,
            payload=self,
        )
        ticket.order, ticket.admitted = order, old.admitted
        return ticket
