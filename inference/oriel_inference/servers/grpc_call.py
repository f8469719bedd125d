"""One gRPC call on a stream of HTTP/2: its messages, its answer, and its one end.

A method takes one message (`OneMessage`) or a stream of them (any other `Messages`). It answers through the call, at
once or later, on the loop: there is no task per call. Whatever ends a call (its answer, a refusal, the client that
leaves) ends it once, and clears `on_client_left` and `on_room`, which refer to the method's own objects.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf
from time import monotonic
from typing import Final, Protocol

from oriel_inference.errors import (
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    NotSupported,
    Outcome,
    RequestTooLarge,
    Restricted,
    UnknownModel,
)
from oriel_inference.servers.encoding import Encodings
from oriel_inference.servers.grpc_plans import CallPlan, CallPlans
from oriel_inference.servers.restrictions import Restriction
from oriel_inference.servers.statuses import as_inference_error, grpc_status, head_refusal
from oriel_wire.context import CallContext
from oriel_wire.engine.grpc_port import PortCall, PortConnection
from oriel_wire.engine.h2_server import H2ServerConnection
from oriel_wire.engine.limits import inflated_limit, reason_phrase
from oriel_wire.engine.listener import HttpServer
from oriel_wire.errors import TooLarge
from oriel_wire.h1.request import RequestHead
from oriel_wire.h2.grpc import HEAD, PREFIX_BYTES, RESOURCE_EXHAUSTED, encode_text, prefix
from oriel_wire.h2.grpc_reader import MessageReader
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import ENDED, Stream

Body = bytes | memoryview
Fields = Iterable[tuple[str, str]]

JOINED_BYTES: Final = 64 * 1024  # an answer up to this size is joined to its prefix
WIDEST_BYTES: Final = 1 << 20
MAX_CALLS = 4096
ENCODINGS: Final = frozenset({"", "gzip", "deflate"})
_ACCEPTED: Final = (("grpc-accept-encoding", "identity, deflate, gzip"),)
_NO_GRPC: Final = literal(b":status", b"415")
OK: Final = literal(b"grpc-status", b"0")


class Messages(Protocol):
    """Takes the messages of one call. Both methods may raise InferenceError and BadMessage, which end the call."""

    @property
    def has_room(self) -> bool:
        """Return whether the next message is wanted now; `GrpcCall.read_on` is called when it is wanted again."""

    def message(self, data: Body, received_s: float) -> None:
        """Take a message that was received at monotonic `received_s`."""

    def request_complete(self) -> None:
        """Called once the client has sent its last message, and all of them were taken."""


class OneMessage:
    """Takes the one message of a call and has it answered by `start`."""

    __slots__ = ("_call", "_data", "_start")
    has_room: Final = True

    def __init__(self, call: "GrpcCall", start: Callable[["GrpcCall", Body], None]) -> None:
        self._call = call
        self._start = start
        self._data: Body | None = None

    def message(self, data: Body, received_s: float) -> None:
        if self._data is not None:
            raise NotSupported("the method takes exactly one message")
        self._data = data

    def request_complete(self) -> None:
        data, self._data = self._data, None
        if data is None:
            raise NotSupported("the method takes exactly one message")
        self._call.ends_s = inf
        self._start(self._call, data)


@dataclass(frozen=True, slots=True)
class Method:
    """A method; one of `start` and `open` is set. start: answers its one message. open: gets the head of a stream of
    messages. restriction: the secret that callers need.
    """

    start: "Callable[[GrpcCall, Body], None] | None" = None
    open: "Callable[[GrpcCall], Messages] | None" = None
    restriction: Restriction | None = None


@dataclass(slots=True, kw_only=True)
class GrpcPort:
    """The state that all connections of one port share.

    plans: the plans for the calls of trusted peers (True) and of other peers (False).
    calls: number of calls under way now.
    """

    methods: Mapping[bytes, Method]
    plans: Mapping[bool, CallPlans]
    encodings: Encodings
    max_message_bytes: int
    max_calls: int = MAX_CALLS
    calls: int = 0


class GrpcCall(PortCall):
    """One call. Single writer: the loop.

    plan, own, timeout_s: its metadata, see `CallPlans.read`. arrived_s: the monotonic time when its head arrived.
    ends_s: the time when the port gives the call up, because its message is late or its own deadline has passed; inf
    where its method judges that.
    on_client_left: called once if the client leaves, or is given up, before the answer has ended.
    on_room: called when an answer that `send` could not pass on has gone.
    """

    __slots__ = (
        "_all_came",
        "_began",
        "_connection",
        "_counted_bytes",
        "_decompressing",
        "_messages",
        "_over",
        "_plans",
        "_port",
        "_reader",
        "_reading",
        "arrived_s",
        "method",
        "on_client_left",
        "on_room",
        "own",
        "plan",
        "timeout_s",
    )

    method: Method
    plan: CallPlan

    def __init__(self, connection: H2ServerConnection, port: GrpcPort, plans: CallPlans) -> None:
        super().__init__()
        self._connection = connection
        self._port = port
        self._plans = plans
        port.calls += 1
        self._reader: MessageReader | None = None
        self._messages: Messages | None = None
        self._began = False  # the head of the answer is sent
        self._over = False
        self._reading = False
        self._all_came = False  # the client sends nothing else
        self._decompressing = False
        self._counted_bytes = 0  # bytes of an incomplete message that came since `ends_s` was put off
        self.own: dict[str, str] = {}
        self.arrived_s = 0.0
        self.timeout_s: float | None = None
        self.on_client_left: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None

    # For methods -----------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Return whether the answer has ended, or the client has left."""
        return self._over

    @property
    def own_deadline_s(self) -> float:
        """Return the monotonic second at which `grpc-timeout` ends; inf without one."""
        return inf if self.timeout_s is None else self.arrived_s + self.timeout_s

    def context(self) -> tuple[CallContext, int]:
        """Make the context of the call, whose deadline counts from its arrival; with it the caller's span or 0."""
        name = self._connection.peer_name
        return self._plans.context(self.plan, self.own, self.arrived_s, self.timeout_s, name)

    # Messages --------------------------------------------------------------------------------------------------

    def begin(self, fields: list[Field], now: float) -> None:
        """Begin the call with its metadata, which arrived at `now`."""
        port = self._port
        self.arrived_s = now
        self.plan, self.own, self.timeout_s = self._plans.read(fields)
        plan = self.plan
        method = port.methods.get(plan.path)
        if not plan.is_grpc:
            self._end(_NO_GRPC)
        elif port.calls > port.max_calls:
            self.end_with(RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", Outcome.QUEUE_FULL)
        elif method is None:
            self.refuse(NotSupported("Method not found!"))
        elif method.restriction is not None and method.restriction not in plan.secrets:
            header = method.restriction.header
            self.refuse(Restricted(f"This protocol is restricted, expecting header '{header}'"))
        elif plan.encoding not in ENCODINGS:
            self.refuse(NotSupported("messages are accepted as they are, or as gzip or deflate"), _ACCEPTED)
        else:
            self.method = method
            self.ends_s = self.own_deadline_s
            if method.open is None:
                self.ends_s = min(now + self._connection.server.limits.body_timeout_s, self.ends_s)
                return
            try:
                self._messages = method.open(self)
            except Exception as failure:
                self.refuse(as_inference_error(failure))

    def received(self, data: Body, end: bool) -> None:
        """Take what has come on the stream."""
        connection = self._connection
        size = len(data)
        if self._over:
            connection.consumed(self, size)
            return
        self._all_came = end
        reader = self._reader
        if reader is None:
            start = self.method.start
            if start is not None:
                # Nearly every call has one message, which comes in one piece.
                whole = size - PREFIX_BYTES
                if end and whole >= 0 and not data[0] and int.from_bytes(data[1:PREFIX_BYTES], "big") == whole:
                    connection.consumed(self, size)
                    self.ends_s = inf
                    self._run(start, data[PREFIX_BYTES:])
                    return
                self._messages = OneMessage(self, start)
            self._reader = reader = MessageReader(self._port.max_message_bytes)
        reader.feed(data)
        self._read(connection.arrived_s)
        if self._over or end:
            return
        if self.method.start is not None:
            # A message that comes slowly is given up only if it does not come on.
            connection.widen(self, min(reader.missing_bytes, WIDEST_BYTES))
            self._counted_bytes += size
            limits = connection.server.limits
            if self._counted_bytes >= limits.body_min_bytes:
                self._counted_bytes = 0
                self.ends_s = min(monotonic() + limits.body_timeout_s, self.own_deadline_s)

    def read_on(self) -> None:
        """Take messages that had to wait for room."""
        if not self._over and not self._reading and self._reader is not None:
            self._read(monotonic())

    def _run(self, start: "Callable[[GrpcCall, Body], None]", data: Body) -> None:
        try:
            start(self, data)
        except Exception as failure:
            self.refuse(as_inference_error(failure))

    def _read(self, received_s: float) -> None:
        """Take messages as long as there is room for them, and return the credit of their bytes to the client."""
        reader, messages = self._reader, self._messages
        assert reader is not None and messages is not None
        self._reading = True
        try:
            while messages.has_room and not self._decompressing and not self._over:
                try:
                    data = reader.next()
                except TooLarge as refusal:
                    raise RequestTooLarge(refusal.message) from None
                if data is None:
                    break
                if reader.compressed:
                    self._decompress(data, received_s)
                else:
                    messages.message(data, received_s)
                    del data
            if self._all_came and not self._decompressing and not self._over and messages.has_room:
                if not reader.empty:
                    raise InvalidRequest("the call ends within a message")
                self._reader = None
                messages.request_complete()
        except Exception as failure:
            self.refuse(as_inference_error(failure))
        self._reading = False
        if reader.taken_bytes:
            self._connection.consumed(self, reader.taken_bytes)
            reader.taken_bytes = 0

    def _decompress(self, data: Body, received_s: float) -> None:
        if not self.plan.encoding:
            raise InvalidRequest("a message is compressed, and the call names no grpc-encoding: add the header")
        port = self._port
        self._decompressing = True

        def then(body: bytes | InferenceError) -> None:
            self._decompressing = False
            if self._over or self._messages is None:
                return
            if isinstance(body, RequestTooLarge):
                most = inflated_limit(len(data), port.max_message_bytes)
                self.refuse(RequestTooLarge(f"Decompressed message larger than max ({most} bytes)"))
            elif isinstance(body, InferenceError):
                self.refuse(InvalidRequest(f"a message is not what its grpc-encoding {self.plan.encoding!r} says"))
            else:
                try:
                    self._messages.message(body, received_s)
                except Exception as failure:
                    self.refuse(as_inference_error(failure))
                if not self._over and not self._reading:
                    self._read(received_s)

        port.encodings.decompress(data, then)

    # The answer ------------------------------------------------------------------------------------------------

    def answer(self, message: bytes, trailers: bytes = OK) -> None:
        """Answer with one message. trailers: an encoded block with the status."""
        if not self._over:
            self.send(message)
            self._end(trailers)

    def send(self, message: bytes) -> bool:
        """Send one message of the answer. False: the client has to read first; `on_room` is called when it has."""
        connection = self._connection
        if not self._began:
            self._began = True
            connection.send_headers(self, HEAD, False)
        size = len(message)
        if size <= JOINED_BYTES:
            return connection.send_data(self, prefix(size) + message, False)
        connection.send_data(self, prefix(size), False)
        return connection.send_data(self, message, False)

    def finish(self, fields: Fields = ()) -> None:
        """End the answer with the status OK."""
        block = OK + encode_fields(fields)
        self._end(block if self._began else HEAD + block)

    def refuse(self, error: InferenceError, fields: Fields = ()) -> None:
        """End the call with the status of a refusal, its text and its reason.

        An unknown model's near name is left out for a tenant's call: over gRPC nothing shows which names the tenant may
        know.
        """
        if isinstance(error, UnknownModel) and not self.plan.of_tenant:
            error = error.with_near_name(lambda name: True)
        # The frames of the traceback hold the message.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        if error.retry_s > 1.0:
            fields = (*fields, ("retry-after", str(ceil(error.retry_s))))
        self.end_with(grpc_status(error), error.message, error.outcome, fields)

    def end_with(self, status: int, text: str, reason: Outcome, fields: Fields = ()) -> None:
        """End the call with a status."""
        parts = (
            b"" if self._began else HEAD,
            literal(b"grpc-status", b"%d" % status),
            literal(b"grpc-message", encode_text(text)),
            encode_fields(fields),
            literal(b"x-oriel-reason", reason.value.encode()),
        )
        self._end(b"".join(parts))

    def _end(self, block: bytes) -> None:
        if self._over:
            return
        connection = self._connection
        self._forget()
        connection.send_headers(self, block, True)
        if self.receiving != ENDED:
            connection.linger(self)
            if self.held_bytes:
                connection.consumed(self, self.held_bytes)

    # Client events ---------------------------------------------------------------------------------------------

    def too_large(self, message: str) -> None:
        self.end_with(RESOURCE_EXHAUSTED, message, Outcome.TOO_LARGE)

    def room(self) -> None:
        """The client has read what `send` could not pass on."""
        if self.on_room is not None:
            self.on_room()

    def client_left(self) -> None:
        """The client has reset the call, or its connection is lost."""
        if not self._over:
            on_client_left = self.on_client_left
            self._forget()
            if on_client_left is not None:
                on_client_left()

    def give_up(self) -> None:
        """End a call that is past `ends_s`."""
        on_client_left = self.on_client_left
        arriving = self.method.start is not None and not self._all_came
        self.refuse(DeadlineExceeded("arrival" if arriving else "progress"))
        if on_client_left is not None:
            on_client_left()

    def _forget(self) -> None:
        self._over = True
        self.ends_s = inf
        self.on_client_left = self.on_room = None
        self._reader = self._messages = None
        self._port.calls -= 1


def encode_fields(fields: Fields) -> bytes:
    """Encode trailing metadata."""
    return b"".join([literal(name.encode(), value.encode("latin-1")) for name, value in fields])


class GrpcConnection(PortConnection):
    """One connection of the port, with one `GrpcCall` per stream."""

    __slots__ = ("_plans", "_port")

    def __init__(self, server: HttpServer, port: GrpcPort, limits: H2Limits, *, trusted: bool) -> None:
        super().__init__(server, limits)
        self._port = port
        self._plans = port.plans[trusted]

    def new_stream(self, stream_id: int) -> GrpcCall:
        return GrpcCall(self, self._port, self._plans)

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        if self._judged is not None:
            self.trust_fields()
        super().on_headers(stream, fields, end)


def refuse_http1(head: RequestHead | None, status: int, message: str) -> bytes:
    """Return a whole answer to a client that speaks HTTP/1.1."""
    refusal = head_refusal(head, status, message)
    fields = "".join([f"{name}: {value}\r\n" for name, value in refusal.headers])
    start = f"HTTP/1.1 {status} {reason_phrase(status)}\r\nconnection: close\r\n{fields}"
    return f"{start}content-length: {len(refusal.body)}\r\n\r\n".encode("latin-1") + refusal.body
