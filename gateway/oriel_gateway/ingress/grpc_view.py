"""The view of a gRPC call until it is one: judged by its metadata, and again when its first message is here.

While a message comes in pieces, limits and the byte budget of its pool have to let it in before all of it is here: what
they have granted ahead is kept here until the call takes it over.
"""

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Final

from oriel_gateway.call.call import GatewayCall
from oriel_gateway.call.contracts import DONE, Client
from oriel_gateway.call.grpc import GRPC
from oriel_gateway.call.grpc_head import GrpcRequest, RpcLine
from oriel_gateway.call.grpc_stream import GrpcStreamSide
from oriel_gateway.clock import requested_until
from oriel_gateway.errors import Outcome, Refused, displaced
from oriel_gateway.http_status import CODES
from oriel_gateway.ingress.grpc_compressed import compressed_model, decompress
from oriel_gateway.ingress.grpc_rules import (
    METHODS,
    MODEL_PATHS,
    OPERATOR_METHODS,
    STREAMING,
    GrpcLimits,
    Message,
    answered_without_key,
    bound_message,
    message_bytes,
    no_message,
    too_much_metadata,
)
from oriel_gateway.ingress.grpc_trailers import refusal
from oriel_gateway.ingress.grpc_web import GrpcWebOverH1, GrpcWebOverH2
from oriel_gateway.ingress.h2_connection import LIMITS, PublicConnection
from oriel_gateway.ingress.judging import View, turn_away
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Kind, Target, absent, check_model, chosen
from oriel_policies.documents import ApiKey, Tenant
from oriel_policies.waiting.shares import Holding
from oriel_wire.errors import BadMessage
from oriel_wire.h2 import grpc
from oriel_wire.h2.grpc import HEAD, RpcHead
from oriel_wire.h2.streams import Stream
from oriel_wire.v2.grpc_names import peek_model

__all__ = ["NO_METADATA", "GrpcView", "GrpcConnection"]

GrpcConnection = PublicConnection | GrpcWebOverH1 | GrpcWebOverH2
NO_METADATA: Final = RpcHead(None)


class GrpcView(View):
    """A gRPC call on its way to become one.

    call: the call that it has become. rpc: its metadata, `NO_METADATA` before they were read. line: the line of its
    method, None if it is not served. ends: no message comes after the metadata. message: the first one without its
    prefix, None until it is here.
    name, version: the name and version of the model that it names. deadline: 0.0 until the sender is known.
    answer_code,
    answer_head: the status and the head of its refusal, if they are not those of every refusal. unknown: it was refused
    and its sender is not known.
    gate, holding: the pool whose byte budget holds the message before there is a call, and its part of it. sought,
    granted_bytes: the answer of limits that were asked ahead, and the bytes it is for.
    """

    protocol = "grpc"
    __slots__ = (
        *("_by", "_key", "_watch", "answer_code", "answer_head", "call", "connection", "deadline", "ends", "gate"),
        *("granted_bytes", "holding", "line", "message", "name", "rpc", "sought", "stream", "unknown", "version"),
    )

    def __init__(
        self,
        connection: GrpcConnection,
        stream: Stream,
        client: Client,
        rpc: RpcHead,
        ends: bool,
        watch: Callable[[], None],
    ) -> None:
        mark = connection.gateway.marks.of(rpc.request_id, rpc.traceparent, rpc.tracestate)
        super().__init__(connection.gateway, client, mark, connection.arrived_s, GRPC)
        self.connection = connection
        self.stream: Stream | None = stream
        self.rpc = rpc
        self.ends = ends
        self.call: GatewayCall | None = None
        self._watch: Callable[[], None] | None = watch
        self.line: RpcLine | None = METHODS.get(rpc.path)
        self.streams = self.line is STREAMING
        self.timeout_ms, self.timeout_s = rpc.requested_ms, rpc.timeout_s
        self.deadline = 0.0
        self.message: Message | None = None
        self.name = self.version = ""
        self.answer_code = -1
        self.answer_head = HEAD
        self.unknown = False
        self.gate: PoolGate | None = None
        self.holding: Holding | None = None
        self.sought: Target | None = None
        self.granted_bytes = 0
        self._key: ApiKey | None = None
        self._by: Tenant | None = None  # the tenant whose deadline it is

    def note_message(self, message: Message) -> None:
        """Note the call's first message, without its prefix."""
        self.message, self.size_bytes = message, message_bytes(message)
        self.whole, self.now_s = True, monotonic()
        assert self.line is not None
        self.head = GrpcRequest(self.line, self.rpc, self.connection.server.address)
        if self.streams:
            self.side = GrpcStreamSide()

    def identify_again(self) -> Tenant:
        """Return whose key it is now: it may have been revoked while a message was awaited. Raises Refused."""
        return self.gateway.callers.identify(self.rpc.credentials, self.connection.server.memo).tenant

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

    def target_of(self, tenant: Tenant, name: str, version: str) -> Target:
        """Return the target of a message that names this model. Raises Refused."""
        target = self._resolved(tenant, name, version)
        return target if target.choices is None else chosen(target, self.header, self.mark.own)

    def _resolved(self, tenant: Tenant, name: str, version: str) -> Target:
        rpc = self.rpc
        kind: Kind = "model" if rpc.path in MODEL_PATHS else "server"
        return self.gateway.targets.of_method(tenant, self.method, kind, name, version, rpc.tier)

    async def decompress(self, message: bytes) -> bytes:
        """Decompress a message within the bounds of its pool. Raises Refused."""
        if self.rpc.encoding not in (b"gzip", b"deflate"):
            raise Refused(Outcome.ENCODING_UNSUPPORTED, "messages can only be compressed as gzip or deflate")
        tenant, (name, version) = self.identify_again(), compressed_model(message)
        check_model(tenant, name, version)
        gate = self.gateway.pools[self.target_of(tenant, name, version).pool]
        return await decompress(gate, tenant, (name, version), message)

    # The order of judging --------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        return "" if self.line is None else self.line.method

    @property
    def served_at(self) -> tuple[str, int]:
        return self.connection.server.address

    def answers_itself(self) -> bool:
        rpc = self.rpc
        if rpc.list_bytes > GrpcLimits.MAX_METADATA_BYTES:
            raise too_much_metadata()
        if self.line is None and not answered_without_key(rpc.path):
            self.answer_code = grpc.UNIMPLEMENTED
            raise Refused(Outcome.NOT_FOUND, "this gRPC method is not served here")
        return self.line is None

    def identify(self) -> ApiKey:
        key, rpc, connection = self._key, self.rpc, self.connection
        if key is None:
            key = self._key = self.gateway.callers.identify(rpc.credentials, connection.server.memo)
            assert self._watch is not None
            connection.authenticated(self._watch, None if connection.web else rpc)
        elif connection.arrived_s != self.received_s:  # otherwise the key was found in this turn of the loop
            key = self._key = self.gateway.callers.identify(rpc.credentials, connection.server.memo)
        return key

    def find(self, key: ApiKey) -> Target | None:
        message, tenant = self.message, key.tenant
        if message is not None:
            self.name, self.version = name, version = self.authorise(tenant, message)
            return self._resolved(tenant, name, version)
        line = self.line
        if line is not None and line.method in OPERATOR_METHODS and "operator" not in tenant.scopes:
            raise Refused(Outcome.METHOD_NOT_ALLOWED, f"{line.method} is not offered here")
        self.until(tenant)
        if self.ends:
            raise no_message()
        return None

    def until(self, tenant: Tenant) -> float:
        if self._by is not tenant:
            self._by, self.deadline = tenant, super().until(tenant)
        return self.deadline

    def header(self, name: str) -> str | None:
        return self.rpc.get(name)

    def crowds(self, tenant: Tenant) -> bool:
        if self.message is None:  # afterwards it would be in vain that it was received
            self.later = self.connection.refuses(tenant)
        return self.later

    def fits(self, gate: PoolGate, target: Target) -> None:
        if not gate.speaks_grpc:
            raise absent("model", self.name)
        bound_message(self.size_bytes, gate.pool)
        grant = self.grant
        if grant is None:
            return
        if self.sought is not target:
            self.grant = None
            grant.settle(0, False, self.now_s)
        elif self.size_bytes > self.granted_bytes:  # it was compressed
            grant.move(self.size_bytes - self.granted_bytes, self.now_s)

    def hand_over(self, call: GatewayCall) -> None:
        """Give the call what was reserved for it while its message came."""
        self.call, self.message = call, None
        if self.gate is not None and self.gate is not call.gate:
            self.release()
        holding, self.holding, self.gate, self.grant = self.holding, None, None, None
        if holding is not None:
            call.adopt_bytes(holding)

    # Refusals --------------------------------------------------------------------------------------------------

    def refuse(self, refused: Refused) -> None:
        """Refuse the call, or what has not become one."""
        call = self.call
        if self.client is None:
            return
        if call is not None and call.state != DONE:
            call.refuse(refused)
        else:
            turn_away(self, refused)

    def count_unknown(self, *, at_fault: bool) -> None:
        """Count its metadata, and from now on its message."""
        self.unknown = self.unknown or at_fault

    def answer_refusal(self, refused: Refused, mark: Mark, status: int) -> None:
        code = CODES[refused.outcome] if self.answer_code < 0 else self.answer_code
        client, stream, connection, rpc = self.client, self.stream, self.connection, self.rpc
        assert client is not None and stream is not None
        connection.send_headers(stream, self.answer_head + refusal(refused, code, mark, 0.0), True)
        client.answered(close=False)
        if self.unknown:
            connection.unwanted(LIMITS.max_header_list_bytes if rpc is NO_METADATA else rpc.list_bytes)

    # The reservation ahead of the call -------------------------------------------------------------------------

    def reserve(self, tenant: Tenant, target: Target, size_bytes: int) -> PoolGate:
        """Return the pool of a message whose beginning is here, if the limits let it in. Raises Refused."""
        gateway, rpc = self.gateway, self.rpc
        gate, now = gateway.pools[target.pool], monotonic()
        if target.allowances:
            self.sought, self.granted_bytes = target, size_bytes
            self.grant = grant = gateway.limiter.acquire(tenant, target, size_bytes, now)
            if grant is not None and not grant.ready:
                grant.waiter = self
        # the pool may have no server: refuse now if waiting for one is in vain, before the rest is read
        if gate.slow_s == inf and not target.fallbacks:
            gate.hold_until(gate.grpc, tenant, now, requested_until(now, rpc.requested_ms, rpc.timeout_s))
        return gate

    def displaced(self) -> None:
        """Another call got the bytes of the message."""
        assert self.gate is not None
        self.refuse(displaced(self.gate.retry_after_s()))

    def granted(self) -> None:
        """The limits let the call through that the message will be."""

    def release(self) -> None:
        """Give back what the byte budget holds."""
        gate, holding = self.gate, self.holding
        self.gate = self.holding = None
        if gate is not None and holding is not None:
            gate.bytes.release(holding)
            self.gateway.bodies.freed(holding.units)

    def over(self) -> None:
        """Hold nothing any more. Let go of the stream as well, because they refer to each other."""
        if self.holding is not None:
            self.release()
        if (grant := self.grant) is not None:
            self.grant = None
            grant.settle(0, False, monotonic())
        self.client = self.stream = self.message = self.call = self._watch = None
        if self.connection.web and isinstance(connection := self.connection, GrpcWebOverH2):
            self.connection = connection.connection
