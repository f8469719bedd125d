"""gRPC ingress: a pass-through for the v2 service that never decodes a tensor. One `GrpcClient` is one call's stream.

A call is identified by its metadata, before a byte of its message is awaited. Its first message is read as far as the
name of the model; the name is authorised and appended (see `oriel_wire.v2.grpc_names`), and the bytes are sent on.
"""

import asyncio
from time import monotonic
from typing import Final

from oriel_gateway.call.grpc import GrpcCall, GrpcRequest, RpcLine
from oriel_gateway.call.grpc_stream import GrpcStreamCall
from oriel_gateway.call.lifecycle import DONE
from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.grpc_codes import CODES
from oriel_gateway.http_status import STATUS
from oriel_gateway.ingress.grpc_compressed import decompress
from oriel_gateway.ingress.grpc_health import HealthCall, answered_here
from oriel_gateway.ingress.grpc_incoming import Incoming
from oriel_gateway.ingress.grpc_rules import (
    METHODS,
    MODEL_PATHS,
    OPERATOR_METHODS,
    STREAMING,
    GrpcLimits,
    Message,
    bound_message,
    message_bytes,
    naming,
    no_message,
    too_much_metadata,
    unprefixed,
)
from oriel_gateway.ingress.grpc_stream import StreamIngress
from oriel_gateway.ingress.grpc_trailers import OK, answer_trailers, refusal
from oriel_gateway.ingress.grpc_web import GrpcWebOverH1, GrpcWebOverH2
from oriel_gateway.ingress.h2_connection import LIMITS, PublicConnection
from oriel_gateway.ingress.http2 import Http2Client
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.overload import too_busy
from oriel_gateway.pools.grpc_answers import GrpcAnswer
from oriel_gateway.pools.holding import judge_request
from oriel_gateway.routing.targets import Target, absent, check_model, chosen
from oriel_gateway.shared.special import attach
from oriel_policies.documents import Tenant
from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import Field
from oriel_wire.h2 import grpc
from oriel_wire.h2.frames import CANCEL
from oriel_wire.h2.grpc import HEAD, PREFIX_BYTES, RpcHead, prefix, read_head
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field as HeaderField
from oriel_wire.h2.streams import ENDED, Stream
from oriel_wire.v2.grpc_names import peek_model

__all__ = ["GrpcClient"]

_TOO_LARGE: Final = literal(b":status", b"431") + literal(b"content-type", b"application/grpc")
_JOINED: Final = 64 * 1024


class GrpcClient(Stream):
    """One call's stream at its client; the `contracts.Client` of its call.

    call: None until the first message is here, and after the end. other: handles what comes on a stream that is not of
    plain gRPC. forwarded: unused over gRPC.
    """

    http_version = "2"
    collecting = True  # while it is on the deadline clock
    __slots__ = (
        *("_deadline", "_incoming", "_line", "_mark", "_noted", "_received_s", "_rpc", "_slot", "_task"),
        *("_tenant", "_unknown", "call", "connection", "forwarded", "other"),
    )

    def __init__(self, connection: PublicConnection | GrpcWebOverH1) -> None:
        super().__init__()
        self.connection: PublicConnection | GrpcWebOverH1 | GrpcWebOverH2 = connection
        self.call: GrpcCall | None = None
        self.other: Http2Client | GrpcWebOverH2 | HealthCall | None = None
        self.forwarded = ""
        self._rpc: RpcHead | None = None
        self._line: RpcLine | None = None
        self._mark: Mark | None = None
        self._tenant: Tenant | None = None
        self._received_s = self._deadline = 0.0
        self._incoming: Incoming | None = None  # collects messages that do not come in one piece
        self._slot = 0  # its place on the deadline clock while there is no call
        self._noted = False
        self._unknown = False  # the request was refused and its sender is not known
        self._task: asyncio.Task[None] | None = None

    # From the client -------------------------------------------------------------------------------------------

    def began(self, fields: list[HeaderField], end: bool, credentials: list[Field] | None = None) -> None:
        """The call's metadata is here. credentials: those that are not among the fields."""
        connection = self.connection
        self._received_s = connection.arrived_s
        try:
            rpc = read_head(fields, connection.server.memo)
        except BadMessage as error:
            self.turn_away(Refused(Outcome.INVALID_REQUEST, error.message))
            return
        if credentials is not None:
            rpc.credentials = credentials
        self.judge(rpc, end)

    def judge(self, rpc: RpcHead, end: bool) -> None:
        """The metadata is understood: identify the caller, and turn away what cannot become a call."""
        connection = self.connection
        gateway = connection.gateway
        self._rpc, self._received_s = rpc, connection.arrived_s
        self._mark = gateway.mark(rpc.request_id, rpc.traceparent, rpc.tracestate)
        line = self._line = METHODS.get(rpc.path)
        if rpc.list_bytes > GrpcLimits.MAX_METADATA_BYTES:
            return self.turn_away(too_much_metadata())
        if line is None:
            if not answered_here(self, rpc.path, self._mark, end):
                self.turn_away(Refused(Outcome.NOT_FOUND, "this gRPC method is not served here"), grpc.UNIMPLEMENTED)
            return
        try:
            self._identify()
            connection.authenticated(self, None if self.other else rpc)
            if end:
                raise no_message()
            if connection.server.gate is not None and isinstance(connection, PublicConnection):
                if connection.refuses(self.tenant):
                    return self._refuse_later(connection)
        except Refused as refused:
            self.turn_away(refused)
            return
        if line is STREAMING and not connection.web:
            self._task = connection.server.loop.create_task(StreamIngress(self).serve())

    def _refuse_later(self, connection: PublicConnection) -> None:
        tenant, self._tenant = self._tenant, None  # without a tenant, no more of the call is read

        def refuse() -> None:
            self._tenant = tenant
            self.turn_away(too_busy())

        connection.refuse_later(self, refuse)

    def too_large(self) -> None:
        """The header list was larger than the limits of the connection, so nobody knows what kind of request it was."""
        self._received_s = self.connection.arrived_s
        self.turn_away(too_much_metadata(), head=_TOO_LARGE)

    def came(self, data: bytes | memoryview, end: bool) -> None:
        """Bytes of a message came."""
        connection = self.connection
        if self._tenant is None or self.sending == ENDED:
            connection.consumed(self, len(data))
            if self._unknown:
                connection.unwanted(len(data))
            return
        incoming, streaming = self._incoming, self._line is STREAMING and not connection.web
        try:
            if streaming:
                incoming = self.incoming
                incoming.complete = end
                if incoming.add(data):
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
                self._begin(message)
        except Refused as refused:
            self.turn_away(refused)

    def left(self) -> None:
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
        if self.call is None and self._tenant is not None and self.sending != ENDED and not self._slot:
            by_s = min(self._deadline, self._received_s + GrpcLimits.FIRST_MESSAGE_S)
            self._slot = self.connection.gateway.clock.watch(self, by_s, monotonic())

    def unwatch(self) -> None:
        slot, self._slot = self._slot, 0
        if slot:
            self.connection.gateway.clock.unwatch(self, slot)

    # Judging ---------------------------------------------------------------------------------------------------

    @property
    def incoming(self) -> Incoming:
        """The call's messages, as far as they did not come in one piece."""
        incoming = self._incoming
        if incoming is None:
            incoming = self._incoming = Incoming(self)
        return incoming

    def taken(self) -> None:
        """Let the client send as many bytes again as have come so far: they take no room any more."""
        self.connection.consumed(self, self.held_bytes)

    def taken_message(self, size: int) -> None:
        """Let the client send as many bytes again as one message of `size` bytes took."""
        self.connection.consumed(self, min(self.held_bytes, size + PREFIX_BYTES))

    def widen(self, size: int) -> None:
        """Let the client send `size` bytes ahead."""
        self.connection.widen(self, size)

    @property
    def rpc(self) -> RpcHead:
        """The call's metadata."""
        assert self._rpc is not None
        return self._rpc

    @property
    def tenant(self) -> Tenant:
        """The tenant who calls, by the tier that serves the call."""
        assert self._tenant is not None
        return self._tenant

    def _identify(self) -> None:
        """Identify the caller and set the deadline, from the metadata alone. Raises Refused."""
        line, connection = self._line, self.connection
        assert line is not None
        key = connection.gateway.identify_fields(self.rpc.credentials, connection.server.memo)
        tenant = self._tenant = key.tenant
        connection.gateway.judge_sample(self._mark, key)
        if line.method in OPERATOR_METHODS and "operator" not in tenant.scopes:
            raise Refused(Outcome.METHOD_NOT_ALLOWED, f"{line.method} is not offered here")
        self._set_deadline(tenant)

    def _set_deadline(self, tenant: Tenant) -> None:
        self._tenant, rpc = tenant, self.rpc
        self._deadline = self.connection.gateway.deadline(tenant, self._received_s, rpc.requested_ms)
        if rpc.timeout_s is not None:
            self._deadline = min(self._deadline, self._received_s + rpc.timeout_s)

    def identify_again(self) -> Tenant:
        """Return whose key it is now: it may have been revoked while a message was awaited. Raises Refused."""
        return self.connection.gateway.identify_fields(self.rpc.credentials, self.connection.server.memo).tenant

    def target(self, tenant: Tenant, name: str, version: str) -> Target:
        """Return what a message asks for. Raises Refused."""
        gateway, rpc, line = self.connection.gateway, self.rpc, self._line
        assert line is not None
        kind = "model" if rpc.path in MODEL_PATHS else "server"
        target = gateway.targets.of_method(tenant, line.method, kind, name, version, rpc.tier)  # type: ignore[arg-type]
        if target.choices is not None:
            assert self._mark is not None
            target = chosen(target, rpc.get, self._mark.own)
        return target

    def authorise(self, tenant: Tenant, message: Message) -> tuple[str, str]:
        """Return the model and version that a message names, if this tenant may use it; "" only where that means all
        models. Raises Refused.
        """
        if self.rpc.path not in MODEL_PATHS:
            return "", ""
        try:
            name, version = peek_model(message)
        except BadMessage as error:
            raise Refused(Outcome.INVALID_REQUEST, error.message) from error
        if not name and self.rpc.path.endswith(b"/ModelStatistics") and "operator" in tenant.scopes:
            return name, version
        check_model(tenant, name, version)
        return name, version

    def _begin(self, message: Message) -> None:
        """Authorise the model, route the call, apply its limits, and let it go. Raises Refused."""
        connection, line, tenant = self.connection, self._line, self.tenant
        gateway, now = connection.gateway, monotonic()
        assert line is not None and self._mark is not None
        if connection.arrived_s != self._received_s:  # otherwise the metadata has been judged in this turn of the loop
            tenant = self.identify_again()
        if tenant is not self._tenant:
            self._set_deadline(tenant)
        name, version = self.authorise(tenant, message)
        self.unwatch()
        target = self.target(tenant, name, version)
        if target.tenant is not tenant:
            tenant = target.tenant
            self._set_deadline(tenant)
        gate = gateway.pools[target.pool]
        if not gate.speaks_grpc:
            raise absent("model", name)
        size = message_bytes(message)
        bound_message(size, gate.pool)
        streaming = line is STREAMING
        if (left_s := self._deadline - self._received_s) < gate.slow_s and not (streaming or target.fallbacks):
            judge_request(gate, target, tenant, size, left_s)
        incoming = self._incoming
        grant = None if incoming is None else incoming.acquired(target, size, now)
        if grant is None and target.allowances:
            grant = gateway.limiter.acquire(tenant, target, size, now)
        head = GrpcRequest(line, self.rpc)
        make = GrpcStreamCall if streaming else GrpcCall
        self.call = call = make(gateway, self, gate, head, tenant, target, self._mark, self._received_s, self._deadline)
        if incoming is not None and (holding := incoming.hand_over(gate)) is not None:
            call.hold_already(holding)
        if grant is not None:
            call.limited(grant)
        if target.special:
            attach(call, gateway.routing, streaming=streaming)
        if target.kind == "model":
            message = naming(message, name, version or (target.version if name == target.name else ""))
        if streaming:
            assert isinstance(call, GrpcStreamCall)
            call.closing = connection.web or self.incoming.over
        call.whole(message, now)

    async def _decompressed(self, message: Message) -> None:
        try:
            whole = await self.decompress(message if isinstance(message, bytes) else b"".join(message))
            self._task = None
            self._begin(whole)
        except Refused as refused:
            self._task = None
            self.turn_away(refused)

    async def decompress(self, message: bytes) -> bytes:
        """Decompress a message within the bounds of its pool. Raises Refused."""
        if self.rpc.encoding not in (b"gzip", b"deflate"):
            raise Refused(Outcome.ENCODING_UNSUPPORTED, "messages can be compressed as gzip or deflate")
        return await decompress(self.connection.gateway, self.identify_again(), message)

    def begin_stream(self, message: bytes) -> GrpcStreamCall:
        """Begin the call of a stream by its first message. Raises Refused."""
        self._begin(message)
        call = self.call
        if call is None:
            raise asyncio.CancelledError  # the call was refused, and its client has the refusal
        assert isinstance(call, GrpcStreamCall)
        return call

    # To the client ---------------------------------------------------------------------------------------------

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
        if isinstance(web := self.other, GrpcWebOverH2):  # they refer to each other
            self.other, self.connection = None, web.connection
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

    def write_answer(self, call: GrpcCall, head: GrpcAnswer, data: bytes, complete: bool, now: float) -> bool:
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
        if complete and not call.streams and len(data) <= _JOINED and isinstance(connection, PublicConnection):
            connection.send_whole(self, HEAD, prefix(head.message_bytes) + data, answer_trailers(call, now))
            return False
        connection.send_headers(self, HEAD, False)
        if call.streams:
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

    def write_more(self, call: GrpcCall, data: bytes, complete: bool) -> None:
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
        self._write_refusal(refused, mark, CODES[refused.outcome], queued_s)

    def cut_answer(self, call: GrpcCall, refused: Refused, *, v2: bool) -> None:
        """See `contracts.Client`: the status says why the answer does not go on."""
        waited_s, took_s = call.permit_s - call.queued_s, monotonic() - call.sent_s
        block = refusal(refused, CODES[refused.outcome], call.mark, waited_s, took_s)
        if self.pending is not None and not self.connection.web:
            self.pending.clear()  # the client does not read it any more
            self.pending = None
        self.connection.send_headers(self, block, True)
        self.answered(close=False)

    def turn_away(self, refused: Refused, code: int = -1, head: bytes = HEAD) -> None:
        """Answer a request that does not become a call. code: the gRPC status, if it is not that of the refusal."""
        connection, gateway = self.connection, self.connection.gateway
        mark = self._mark or gateway.mark(None, None, None)
        method = self._line.method if self._line is not None else ""
        if (call := self.call) is not None and call.state != DONE:
            call.refuse(refused)
            return
        record = Record(mark, method, self._received_s, self._tenant, None, refused.outcome)
        record.protocol = "grpc"
        gateway.records.turned_away(refused, record, served_at=self.served_at)
        self._write_refusal(refused, mark, CODES[refused.outcome] if code < 0 else code, 0.0, head)
        self.answered(close=False)
        if self._tenant is None and STATUS[refused.outcome] < 500:  # otherwise the refusal is not the sender's fault
            self._unknown = True
            connection.unwanted(self._rpc.list_bytes if self._rpc is not None else LIMITS.max_header_list_bytes)

    def _write_refusal(self, refused: Refused, mark: Mark, code: int, queued_s: float, head: bytes = HEAD) -> None:
        self.connection.send_headers(self, head + refusal(refused, code, mark, queued_s), True)
