"""gRPC ingress: a pass-through for the v2 service that never decodes a tensor. One `GrpcClient` is one call's stream.

A call is identified by its metadata, before a byte of its message is awaited. Its first message is read as far as the
name of the model; the name is authorised and appended (see `oriel_wire.v2.grpc_names`), and the bytes are sent on.
"""

import asyncio
from functools import partial
from time import monotonic
from typing import Final

from oriel_gateway.call.call import GatewayCall
from oriel_gateway.call.contracts import Call
from oriel_gateway.call.grpc_stream import GrpcStreamSide
from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.http_status import CODES
from oriel_gateway.ingress.grpc_health import HealthCall, answer_here
from oriel_gateway.ingress.grpc_incoming import Incoming
from oriel_gateway.ingress.grpc_rules import GrpcLimits, Message, naming, too_much_metadata, unprefixed
from oriel_gateway.ingress.grpc_stream import StreamIngress
from oriel_gateway.ingress.grpc_trailers import OK, answer_trailers, refusal
from oriel_gateway.ingress.grpc_view import NO_METADATA, GrpcConnection, GrpcView
from oriel_gateway.ingress.grpc_web import GrpcWebOverH1, GrpcWebOverH2
from oriel_gateway.ingress.h2_connection import PublicConnection
from oriel_gateway.ingress.http2 import Http2Client
from oriel_gateway.ingress.judging import judge
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.grpc_answers import GrpcAnswer
from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import Field
from oriel_wire.h2.frames import CANCEL
from oriel_wire.h2.grpc import HEAD, RpcHead, prefix, read_head
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field as HeaderField
from oriel_wire.h2.streams import ENDED, Stream

__all__ = ["GrpcClient"]

_TOO_LARGE: Final = literal(b":status", b"431") + literal(b"content-type", b"application/grpc")
_JOINED: Final = 64 * 1024


class GrpcClient(Stream):
    """One call's stream at its client; the `contracts.Client` of its call.

    view: the call until it is one, None before its metadata are here. call: None until the first message is here, and
    after the end. other: handles what comes on a stream that is not of plain gRPC. forwarded: unused over gRPC.
    """

    http_version = "2"
    collecting = True  # while it is on the deadline clock
    __slots__ = ("_incoming", "_noted", "_slot", "_task", "view", "call", "connection", "forwarded", "other")

    def __init__(self, connection: PublicConnection | GrpcWebOverH1) -> None:
        super().__init__()
        self.connection: GrpcConnection = connection
        self.view: GrpcView | None = None
        self.call: GatewayCall | None = None
        self.other: Http2Client | GrpcWebOverH2 | HealthCall | None = None
        self.forwarded = ""
        self._incoming: Incoming | None = None  # collects messages that do not come in one piece
        self._slot = 0  # its place on the deadline clock while there is no call
        self._noted = False
        self._task: asyncio.Task[None] | None = None

    # Callbacks of the client -----------------------------------------------------------------------------------

    def began(self, fields: list[HeaderField], end: bool, credentials: list[Field] | None = None) -> None:
        """The call's metadata is here. credentials: the credentials that are not among the fields."""
        try:
            rpc = read_head(fields, self.connection.server.memo)
        except BadMessage as error:
            self.turn_away(Refused(Outcome.INVALID_REQUEST, error.message))
            return
        if credentials is not None:
            rpc.credentials = credentials
        self.judge(rpc, end)

    def judge(self, rpc: RpcHead, end: bool) -> None:
        """The metadata is understood: identify the caller, and turn away what cannot become a call."""
        connection = self.connection
        view = self.view = GrpcView(connection, self, self, rpc, end, self.watch)
        try:
            judge(view)
        except Refused as refused:
            if view.later:
                connection.refuse_later(self, partial(self.turn_away, refused))
            else:
                self.turn_away(refused)
            return
        if view.tenant is None:
            self.other = answer_here(view) or self.other
        elif view.streams and not connection.web:
            self._task = connection.server.loop.create_task(StreamIngress(view, self.incoming, self._stream).serve())

    def too_large(self) -> None:
        """The header list was larger than the limits of the connection, so nobody knows what kind of request it was."""
        view = self.view = GrpcView(self.connection, self, self, NO_METADATA, False, self.watch)
        view.answer_head = _TOO_LARGE
        self.turn_away(too_much_metadata())

    def came(self, data: bytes | memoryview, end: bool) -> None:
        """Bytes of a message came."""
        connection, view = self.connection, self.view
        if view is None or view.tenant is None or view.later or self.sending == ENDED:
            connection.consumed(self, len(data))
            if view is not None and view.unknown:
                connection.unwanted(len(data))
            return
        incoming = self._incoming
        try:
            if view.streams and not connection.web:
                incoming = self.incoming
                incoming.complete = end
                if incoming.feed(data):
                    self.unwatch()
                return
            if not end:
                (incoming or self.incoming).keep(data)
                return
            connection.consumed(self, self.held_bytes)
            self.unwatch()
            message, compressed = unprefixed(bytes(data) if incoming is None else incoming.pieces(data))
            if compressed:
                self._task = connection.server.loop.create_task(self._decompressed(message))
            else:
                self._begin(view, message)
        except Refused as refused:
            self.turn_away(refused)

    def client_left(self) -> None:
        """The client reset the stream, or its connection is lost."""
        call = self.call
        self._end()
        if call is not None:
            call.client_left()

    def expired(self) -> None:
        """The first message did not come in time."""
        self._slot = 0
        self.turn_away(Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while receiving the request"))

    def stopping(self) -> None:
        """Refuse the call, because the gateway is about to end."""
        self.unwatch()
        self.turn_away(stopping())

    def watch(self) -> None:
        """Bound the wait for the first message, if it did not come together with the metadata."""
        view = self.view
        assert view is not None
        if self.call is None and not view.later and self.sending != ENDED and not self._slot:
            by_s = min(view.deadline, view.received_s + GrpcLimits.FIRST_MESSAGE_S)
            self._slot = self.connection.gateway.clock.watch(self, by_s, monotonic())

    def unwatch(self) -> None:
        slot, self._slot = self._slot, 0
        if slot:
            self.connection.gateway.clock.unwatch(self, slot)

    @property
    def incoming(self) -> Incoming:
        """The call's messages, as far as they did not come in one piece."""
        incoming = self._incoming
        if incoming is None:
            assert self.view is not None
            incoming = self._incoming = Incoming(self.view, self)
        return incoming

    def _begin(self, view: GrpcView, message: Message) -> None:
        """Judge the call by its first message, and let it go. Raises Refused."""
        view.note_message(message)
        call = judge(view)
        assert call is not None
        view.hand_over(call)
        self.call, target, name = call, call.target, view.name
        if target.kind == "model":
            message = naming(message, name, view.version or (target.version if name == target.name else ""))
        if isinstance(side := call.side, GrpcStreamSide):
            side.closing = self.connection.web or self.incoming.over
        call.whole(message, view.now_s)

    async def _decompressed(self, message: Message) -> None:
        view = self.view
        assert view is not None
        try:
            whole = await view.decompress(message if isinstance(message, bytes) else b"".join(message))
            self._task = None
            self._begin(view, whole)
        except Refused as refused:
            self._task = None
            self.turn_away(refused)

    def _stream(self, message: bytes) -> GatewayCall:
        """Begin the call of a stream by its first message. Raises Refused."""
        assert self.view is not None
        self._begin(self.view, message)
        call = self.call
        if call is None:
            raise asyncio.CancelledError  # the call was refused, and its client has the refusal
        return call

    # Answering the client --------------------------------------------------------------------------------------

    @property
    def departed(self) -> bool:
        """See `contracts.Client`."""
        return self.connection.departed

    @property
    def served_at(self) -> tuple[str, int]:
        """The address and the port of the listener."""
        return self.connection.server.address

    @property
    def keeps_up(self) -> bool:
        """See `contracts.Client`."""
        return self.pending is None

    @property
    def must_close(self) -> bool:
        """See `contracts.Client`: an answer never ends a connection that other calls use."""
        return False

    def answered(self, *, close: bool, now: float = 0.0) -> None:
        """See `contracts.Client`."""
        self._end()
        if self.receiving != ENDED:
            self.connection.linger(self)

    def abort(self) -> None:
        """See `contracts.Client`."""
        self._end()
        self.connection.send_reset(self, CANCEL)

    def _end(self) -> None:
        """Let go of everything but what waits to be read."""
        self.call = None
        self.unwatch()
        if self._incoming is not None:
            self._incoming.drop()
            self._incoming = None
        if self.view is not None:
            self.view.over()
        if (other := self.other) is not None:
            self.other = None
            if isinstance(other, GrpcWebOverH2):  # they refer to each other
                self.connection = other.connection
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if self._noted and self.pending is None:
            self._noted = False
            self.connection.gateway.unread.read(self)

    def on_writable(self, writable: bool) -> None:
        """See `contracts.Client`."""
        unread = self.connection.gateway.unread
        if writable:
            self._noted = False
            unread.read(self)
        else:
            self._noted = True
            if not unread.note(self, self.connection.unread_bytes(self)):
                return
        if self.call is not None:
            self.call.client_writable(writable)

    def call_finished(self) -> None:
        """See `contracts.Client`."""
        self.call = None

    def write_answer(self, call: Call, head: GrpcAnswer, data: bytes, complete: bool, now: float) -> bool:
        """See `contracts.Client`."""
        if call.extras is not None:
            head = head.copy()
            call.extras.response(call, head, data, complete)
            if complete:
                call.answer = head
        connection = self.connection
        if complete and head.code:
            connection.send_headers(self, HEAD + answer_trailers(call, now), True)
            return False
        if complete and not call.side.streams and len(data) <= _JOINED and isinstance(connection, PublicConnection):
            connection.send_whole(self, HEAD, prefix(head.message_bytes) + data, answer_trailers(call, now))
            return False
        connection.send_headers(self, HEAD, False)
        if call.side.streams:
            if data:
                connection.send_data(self, data, False)
        elif len(data) <= _JOINED:
            connection.send_data(self, prefix(head.message_bytes) + data, False)
        else:
            connection.send_data(self, prefix(head.message_bytes), False)
            connection.send_data(self, data, False)
        if complete:
            connection.send_headers(self, answer_trailers(call, now), True)
        return False

    def write_more(self, call: Call, data: bytes, complete: bool) -> None:
        """See `contracts.Client`."""
        if data:
            self.connection.send_data(self, data, False)
        if complete:
            self.connection.send_headers(self, answer_trailers(call, monotonic()), True)

    def write_kept(self, lines: list[bytes], body: bytes) -> bool:
        """See `contracts.Client`. The fields become trailers, as those of every answer."""
        connection = self.connection
        connection.send_headers(self, HEAD, False)
        connection.send_data(self, prefix(len(body)) + body, False)
        pairs = [line.partition(b":") for line in lines]
        trailers = b"".join([literal(name.lower(), value.strip()) for name, _, value in pairs])
        connection.send_headers(self, OK + trailers, True)
        return False

    def write_refusal(self, refused: Refused, mark: Mark, *, v2: bool, queued_s: float) -> None:
        """See `contracts.Client`."""
        self.connection.send_headers(self, HEAD + refusal(refused, CODES[refused.outcome], mark, queued_s), True)

    def cut_answer(self, call: Call, refused: Refused, *, v2: bool) -> None:
        """See `contracts.Client`: the status says why the answer does not go on."""
        waited_s, took_s = call.permit_s - call.queued_s, monotonic() - call.sent_s
        block = refusal(refused, CODES[refused.outcome], call.mark, waited_s, took_s)
        if self.pending is not None and not self.connection.web:
            self.pending.clear()  # the client does not read it any more
            self.pending = None
        self.connection.send_headers(self, block, True)
        self.answered(close=False)

    def turn_away(self, refused: Refused) -> None:
        """Refuse the call, or what has not become one."""
        view = self.view
        if view is None:
            view = self.view = GrpcView(self.connection, self, self, NO_METADATA, False, self.watch)
        view.refuse(refused)
