"""The interface of a call, and of the objects that own calls.

Every call is a `GatewayCall` (`call.call`), a subclass of `Call`. The modules that a `GatewayCall` uses know only
`Call`. It is no Protocol, because compiled code reads the attributes of a class faster. Each call has a `Side`, which
speaks its protocol. The Protocols are implemented by connections, flights and shadow copies.
"""

from abc import ABC, abstractmethod
from time import monotonic
from typing import Any, Final, Protocol

from oriel_gateway.call.host import Host
from oriel_gateway.call.stream import AnswerStream
from oriel_gateway.clock import YOUNG, requested_until
from oriel_gateway.errors import Outcome, Refused, displaced, stopping
from oriel_gateway.limits import Grant
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.tracing import Address, Mark
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.grpc_answers import GrpcAnswer
from oriel_gateway.pools.pool import PoolGate, holding_of
from oriel_gateway.pools.sequences import Stick
from oriel_gateway.pools.stream_slots import StreamSlot
from oriel_gateway.pools.upstream_answers import AnswerKind
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.waiting.shares import Holding
from oriel_wire.errors import UpstreamError

COLLECT: Final = 0
LIMITED: Final = 1
QUEUED: Final = 2
JOINED: Final = 3
SENDING: Final = 4
ANSWERING: Final = 5
DONE: Final = 6
SMALL_BYTES: Final = 64 * 1024  # largest body that is kept until it is answered, since it may have to be sent again
_ANSWERED: Final = Outcome.ANSWERED  # compiled, a member of an enum costs a look-up by name each time


class Side(ABC):
    """The protocol of calls: how a request is written to a server, and what the server's answer means.

    One object serves all calls of its protocol, but for gRPC streams, of which each has a side of its own.

    streams: True for a gRPC stream, which is known as a streaming call before its answer.
    """

    __slots__ = ("grpc", "protocol", "streams")  # an attribute of the class would take longer to read

    def __init__(self, protocol: str, *, streams: bool = False) -> None:
        self.protocol = protocol
        self.grpc = protocol == "grpc"
        self.streams = streams

    def lines_for_others(self, call: "Call", left_out: tuple[bytes, ...]) -> bytes | None:
        """Return the lines of a call that is made for several callers; see `heads.head_lines`."""
        return None

    @property
    def messages(self) -> int:
        """The messages that were sent to the server."""
        return 1

    @property
    def may_move(self) -> bool:
        """Return whether the request can still go to another pool."""
        return True

    def requested_until(self, call: "Call") -> float:
        """Return the deadline that the caller asked for; infinite if it asked for none."""
        return requested_until(call.received_s, call.head.timeout)

    @abstractmethod
    def rename(self, call: "Call", model: str) -> bool:
        """Let the body name another model; False if that cannot be done."""

    @abstractmethod
    def write(self, call: "Call", connection: Any, now: float) -> None:
        """Write the whole request to a connection of a server."""

    @abstractmethod
    def classify(self, call: "Call", head: Any, data: bytes) -> AnswerKind:
        """Return what a whole error answer means."""

    def reads(self, call: "Call", head: Any, data: bytes, complete: bool) -> bool:
        """Read the head of a gRPC answer. False: the answer is not for the call, or the side has taken it."""
        return True

    def note_data(self, call: "Call", data: bytes, complete: bool) -> None:
        """Count more of the answer, which is passed on next."""
        call.bytes_out += len(data)
        if call.grant is not None:
            call.grant.move(len(data), monotonic())

    def settle(self, call: "Call", cost_s: float, executed: bool, now: float) -> None:
        """Settle what the limits granted, once, at the end."""
        if call.grant is not None:
            call.grant.settle(round(cost_s * 1e6), executed, now)

    def client_writable(self, call: "Call", writable: bool) -> None:
        """Note that the client of a gRPC stream stopped or resumed reading."""

    def room(self) -> None:
        """Go on sending: the server of a gRPC stream takes more."""

    def failed(self, call: "Call") -> None:
        """Note that a server did not answer, or stopped in its answer."""

    def finishing(self, call: "Call") -> None:
        """Charge the unanswered messages of a gRPC stream, whose call is about to end."""


class Call(ABC):
    """One call, from its authorised head to its last byte. Times are monotonic seconds, 0.0 means not reached; those
    and the sizes that are not named here are those of `Record`.

    client, head: see `Request`. A call without a client has a receiver. lines: the part of the head that is the same
    whenever it is sent, None until it is.
    record: the record of the call, made when it ends, None before; a call without a client gets none.
    state: see `call.lifecycle`. slot: its place among the deadlines.
    gate, endpoints: its pool, and the endpoints there that speak its protocol. endpoint: the one asked last.
    holding: its bytes of the pool's byte budget. stick: its tie to one endpoint, None for the least busy.
    bytes_in: bytes of the body that have come, or had when it was sent.
    stream: the side of an answer that comes in parts and is more than its bytes. stream_slot: the slot of a streaming
    call.
    early: the head of a stream of events that an engine has sent long before its first token, while that is awaited.
    answer: the status and trailers of a gRPC answer. extras: the hooks of a special route.
    """

    __slots__ = (
        *("client", "extras", "gateway", "head", "lines", "mark", "method", "receiver", "record", "side"),
        *("tenant", "target", "gate", "endpoints", "endpoint", "connection", "holding", "stick", "tried"),
        *("received_s", "limited_s", "queued_s", "permit_s", "sent_s", "response_s", "deadline", "state", "slot"),
        *("_body", "ahead", "answer", "bytes_in", "bytes_out", "cost_us", "grant", "status", "stream", "stream_slot"),
        *("early", "timing", "used"),
    )
    client: "Client | None"
    extras: "RouteHooks | None"
    gateway: Host
    head: Any
    lines: bytes | None
    mark: Mark
    method: str
    receiver: "Receiver | None"
    record: Record | None
    side: Side
    tenant: Tenant
    target: Target
    gate: PoolGate
    endpoints: EndpointSet[Any]
    endpoint: HttpEndpoint | None
    connection: Any
    holding: Holding | None
    stick: Stick | None
    tried: tuple[Address, ...]
    received_s: float
    limited_s: float
    queued_s: float
    permit_s: float
    sent_s: float
    response_s: float
    deadline: float
    state: int
    slot: int
    _body: bytes | list[Any] | None  # whole, or in pieces
    ahead: int
    answer: GrpcAnswer | None
    early: Any
    bytes_in: int
    bytes_out: int
    cost_us: int
    grant: Grant | None
    status: int
    stream: AnswerStream | None
    stream_slot: StreamSlot | None
    timing: str
    used: str

    def body(self) -> bytes:
        """Return the whole body; only before the call was sent."""
        body = self._body
        if body is None:
            return b""
        if not isinstance(body, bytes):
            body = self._body = b"".join(body)
        return body

    def replace_body(self, body: bytes | list[Any] | None, size_bytes: int) -> None:
        """Let the call have another body, of `size_bytes` bytes."""
        self._body, self.bytes_in = body, size_bytes

    @property
    def kept(self) -> bool:
        """Return whether the body is still here and can be sent (again)."""
        return self._body is not None or not self.bytes_in

    @property
    def sending(self) -> bool:
        """Return whether the call has a permit and no answer yet."""
        return self.state == SENDING

    @property
    def collecting(self) -> bool:
        """Return whether its client still sends the body."""
        return self.state == COLLECT

    @property
    def may_run_twice(self) -> bool:
        """Return whether it does no harm if the call is executed twice."""
        return self.target.plan.idempotent or (not self.bytes_in and self.method in ("GET", "HEAD"))

    def watch_until(self, deadline: float) -> None:
        """Set another time at which `expired` is called."""
        self.unwatch()
        self.slot = self.gateway.clock.watch(self, deadline, monotonic())

    def unwatch(self) -> None:
        """Cancel the call of `expired`."""
        clock = self.gateway.clock
        if self.slot == YOUNG:
            del clock.young[self]
            self.slot = 0
        else:
            clock.unwatch(self, self.slot)

    def limited(self, grant: Grant) -> None:
        """Keep what the limits granted; the call may have to wait until their ledger has answered."""
        self.grant = grant
        if not grant.ready:
            grant.waiter = self

    def client_left(self) -> None:
        """The client closed its side: free everything at once."""
        self.finish(Outcome.CALLER_LEFT)

    def departed(self) -> bool:
        """Return whether the client has closed behind bytes that were not read; then the call is over."""
        client = self.client
        if client is None or not client.departed:
            return False
        self.finish(Outcome.CALLER_LEFT)
        client.abort()
        return True

    def stopping(self) -> None:
        """Refuse the call, because the gateway is about to end, unless it was sent."""
        if self.state in (COLLECT, QUEUED) or (self.state == SENDING and not self.sent_s):
            self.refuse(stopping())

    def end_unsent(self, status: int, outcome: Outcome = _ANSWERED, error: str = "") -> None:
        """End a call that was answered, or whose connection refused the rest of it, without being sent."""
        self.status = status
        self.finish(outcome, error)

    def displaced(self) -> None:
        """End the call: another one took its place, its bytes or its slot (`oriel_policies.waiting.shares`)."""
        self.refuse(displaced(self.gate.retry_after_s()))

    def release_permit_for_slot(self, now: float) -> None:
        """The call has a stream slot now: release its permit."""
        self.gate.release_permit(self.target.counted, now - self.permit_s, True)

    def unread(self) -> None:
        """End the call: its client does not read, and no stream slot became free."""
        self.refuse_full("the client did not read its answer while the pool had no slot for a stream")

    def refuse_full(self, message: str) -> None:
        """End the call, because there is too little of something in its pool."""
        self.refuse(Refused(Outcome.QUEUE_FULL, message, retry_after_s=self.gate.retry_after_s()))

    # The call's part of its pool's budgets ----------------------------------------------------------------------

    def adopt_bytes(self, holding: Holding) -> None:
        """Take over what was put on the pool's byte budget before the call began."""
        self.holding, holding.payload = holding, self

    def reserve_bytes(self) -> bool:
        """Put what has come of the body on the byte budget of the pool; False: there are not enough bytes."""
        if self.bytes_in and self.holding is None:
            self.holding = holding_of(self.tenant, self)
        holding = self.holding
        return holding is None or self.gate.reserve_bytes(holding, max(0, self.bytes_in - holding.units))

    def as_stream(self) -> StreamSlot:
        """Return the call's stream slot, made now if it has none: it is a streaming call from now on."""
        slot = self.stream_slot
        if slot is None:
            slot = self.stream_slot = StreamSlot(self.gate.streams, self, holding_of(self.tenant))
            if self.permit_s:
                slot.begin_work(self.permit_s)
        return slot

    # Deadlines while no server is there (see `pools.cold_start`) ------------------------------------------------

    def hold(self) -> None:
        """Wait for the first server of the pool for as long as the documents say. Raises Refused."""
        cold = self.gate.cold_start
        if cold is None or self.client is None:
            return
        until = cold.until(self.endpoints, self.tenant, self.received_s, self.side.requested_until(self), monotonic())
        if until is not None and until != self.deadline:
            self._last_until(until)

    def end_hold(self, now: float) -> bool:
        """A server is there: the call has its tier's time or the rest of its hold. False: it was not held."""
        scaling = self.gate.pool.scaling
        if self.client is None or scaling is None or scaling.hold_for(self.tenant.tier.name) is None:
            return False
        self._last_until(max(min(now + self.tenant.tier.give_up_s, self.side.requested_until(self)), self.deadline))
        return True

    def shorten_hold(self, now: float) -> None:
        """A server is there: the call has the time of its tier from now on, if it was given more to wait for one."""
        until = now + self.tenant.tier.give_up_s
        if self.deadline > until:
            self._last_until(until)

    def _last_until(self, deadline: float) -> None:
        self.deadline = deadline
        self.watch_until(deadline)

    # Verbs, as `call.GatewayCall` fulfils them ------------------------------------------------------------------

    @property
    @abstractmethod
    def may_move(self) -> bool:
        """Return whether the body is still here and no server can have executed the call."""

    @abstractmethod
    def granted(self) -> None:
        """The ledger of the limits let the call through."""

    @abstractmethod
    def expired(self) -> None:
        """End the call, because its deadline passed, or because its stream was silent or went on for too long."""

    @abstractmethod
    def request_complete(self) -> None:
        """The body is complete."""

    @abstractmethod
    def acquire_permit(self, now: float = 0.0) -> None:
        """Acquire a permit or queue for one. now: 0.0 if the caller has not read the clock."""

    @abstractmethod
    def hold_timing(self) -> str:
        """Return the entry of `Server-Timing` about the call's wait for an endpoint; "" if it did not wait for one."""

    @abstractmethod
    def park(self) -> None:
        """Wait without a permit until an endpoint can be asked, or until the deadline; a permit is released."""

    @abstractmethod
    def send(self, now: float, endpoint: Any = None, fresh: bool = False) -> None:
        """Send to `endpoint`, or to the one that the pool picks. fresh: on a new connection."""

    @abstractmethod
    def drop(self, now: float) -> None:
        """Take back what was sent, or stop waiting for a connection or for a search."""

    @abstractmethod
    def move(self, target: Target, gate: PoolGate, now: float) -> bool:
        """Leave the pool for `gate`; `acquire_permit` comes next. False: its bytes or its other model forbid it."""

    @abstractmethod
    def response(self, head: Any, data: bytes, complete: bool) -> None:
        """The head of an answer came, with the body bytes that came with it."""

    @abstractmethod
    def response_data(self, data: bytes, complete: bool) -> None:
        """More of the answer came."""

    @abstractmethod
    def take_over(self, work: "Call") -> None:
        """Go on as if this call had been sent itself: with the permit, the times and the connection of `work`.

        `work` is over; its answer goes to this call's `response`.
        """

    @abstractmethod
    def failed(self, error: UpstreamError) -> None:
        """The server did not answer, or stopped in its answer."""

    @abstractmethod
    def refuse(self, refused: Refused) -> None:
        """End the call with an error; once the answer has begun, all that is left is to cut it."""

    @abstractmethod
    def finish(self, outcome: Outcome, error: str = "", now: float = 0.0) -> None:
        """End the call, once: record it and give back what it holds. now: 0.0 if the caller has not read the clock."""


class Client(Protocol):
    """The client that waits for a call's answer: a connection of HTTP/1.1, or a stream of HTTP/2.

    forwarded: header lines of the request under way, for the next hop.
    """

    forwarded: str

    def call_finished(self) -> None:
        """The call under way is over; it may have an answer or a refusal that is still to be written."""

    @property
    def http_version(self) -> str:
        """ "1.1" or "2"."""

    @property
    def departed(self) -> bool:
        """Return whether the client has closed behind bytes that were not read."""

    @property
    def keeps_up(self) -> bool:
        """Return whether the client takes what is written to it."""

    @property
    def must_close(self) -> bool:
        """Return whether the answer being written ends the connection."""

    def write_answer(self, call: Call, head: Any, data: bytes, complete: bool, now: float) -> bool:
        """Write the head of an upstream's answer and the beginning of its body, or all of it (`complete`).

        Sets `call.stream` if the answer goes on and is more than its bytes. Returns what `answered` is to be told.
        """

    def write_more(self, call: Call, data: bytes, complete: bool) -> None:
        """Write more of an answer whose head is written; `data` may be empty at its end."""

    def write_kept(self, lines: list[bytes], body: bytes) -> bool:
        """Write a whole answer that no upstream gave to this call.

        lines: status line and fields, without a length. Returns what `answered` is to be told.
        """

    def write_refusal(self, refused: Refused, mark: Mark, *, v2: bool, queued_s: float) -> None:
        """Write a whole error answer."""

    def cut_answer(self, call: Call, refused: Refused, *, v2: bool) -> None:
        """End an answer that has begun, so that nobody can take it for a whole one. v2: see `answers.refusal_body`.

        An answer of events reports the error as one more event if it is between two.
        """

    def answered(self, *, close: bool, now: float = 0.0) -> None:
        """The answer is written; close: it ends the connection."""

    def abort(self) -> None:
        """Drop the client: nobody is there any more."""

    def on_writable(self, writable: bool) -> None:
        """The client stopped or resumed taking bytes."""


class Receiver(Protocol):
    """Gets the answer of a call in place of its client: a flight, a shadow copy, the filter of a model list."""

    def response(self, call: Call, head: Any, data: bytes, complete: bool) -> bool:
        """The upstream's head came. False: the call passes the answer on to its client."""

    def response_data(self, call: Call, data: bytes, complete: bool) -> bool:
        """More of the answer came. False: the call passes it on to its client."""

    def refused(self, call: Call, refused: Refused) -> bool:
        """The call fails; who returns True has finished it. False: the client gets the error."""

    def finished(self, call: Call) -> None:
        """The call is over, however it ended. Called once."""


class RouteHooks(Protocol):
    """The addition of a special route to a client's call; a plain call has none.

    model: the name that the body gives, "" if it was not read.
    """

    model: str

    def before_queue(self, call: Call) -> bool:
        """The request is complete. False: the call does not queue, it is answered or waits for something else."""

    def pick(self, call: Call, now: float) -> Any:
        """Return the endpoint that the call is sent to, None if there is none."""

    def response(self, call: Call, head: Any, data: bytes, complete: bool) -> bytes:
        """The upstream's head is about to be passed on, and may be changed. Returns the data that is passed on."""

    def data(self, call: Call, data: bytes, complete: bool) -> bytes:
        """More of the answer is about to be passed on. Returns what is."""

    def cut_off(self, call: Call) -> None:
        """The call is about to end before its answer is complete."""

    def abandoned(self, call: Call, now: float) -> tuple[bool, float]:
        """Return whether a call that leaves its flight was executed, and the seconds it has to pay for that."""

    def finished(self, call: Call) -> None:
        """The call is over, however it ended, and recorded."""
