"""gRPC ingress: a generic pass-through for the v2 service that never decodes a tensor.

A call is identified by its metadata. Its first message is read as far as the name of the model; the name is authorised
and appended (see `oriel_wire.v2.grpc_names`), and the bytes are sent on. Waiting and deadlines are as over HTTP.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from oriel_gateway.call.grpc import GrpcCall, answer_metadata
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.ingress.grpc_compressed import decompress, is_compressed
from oriel_gateway.ingress.grpc_first_message import ReceiveTurns
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.grpc_errors import passed_on, refusal, reported_cost_us
from oriel_gateway.routing.targets import absent, check_model, chosen
from oriel_gateway.shared.grpc_special import GrpcSpecial
from oriel_policies.documents import ApiKey, Pool, Tenant
from oriel_wire.engine import grpc_drain
from oriel_wire.engine.large_messages import READ_AHEAD
from oriel_wire.engine.limits import GRPC_HEADERS
from oriel_wire.engine.process import connection_limit
from oriel_wire.engine.pulse import GrpcPulse
from oriel_wire.engine.tls import Certificates
from oriel_wire.errors import BadMessage
from oriel_wire.v2.grpc_names import append_model, append_schedule, peek_model

SERVICE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
_TIER = "x-request-tier"
_ALIVE = b"\x08\x01"  # boolean field 1 = true; also HealthCheckResponse{status: SERVING}
_MODEL_METHODS = frozenset({"ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"})
_OPERATOR_METHODS = frozenset(
    {"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"}
    | {f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")}
)
_UNARY_METHODS = _MODEL_METHODS | _OPERATOR_METHODS | {"ServerMetadata"}
_CODES = {
    Outcome.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Outcome.AMBIGUOUS_CREDENTIALS: grpc.StatusCode.INVALID_ARGUMENT,
    Outcome.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Outcome.IDENTITY_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Outcome.TIER_NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Outcome.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Outcome.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Outcome.METHOD_NOT_ALLOWED: grpc.StatusCode.UNIMPLEMENTED,
    Outcome.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.ENCODING_UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Outcome.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.CONCURRENCY_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.QUEUE_FULL: grpc.StatusCode.UNAVAILABLE,
    Outcome.DISPLACED: grpc.StatusCode.UNAVAILABLE,
    Outcome.UPSTREAM_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    Outcome.UPSTREAM_BROKEN: grpc.StatusCode.UNAVAILABLE,
    Outcome.INFEASIBLE: grpc.StatusCode.UNAVAILABLE,
    Outcome.DEADLINE_TOO_SHORT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Outcome.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Outcome.SERVER_STOPPING: grpc.StatusCode.UNAVAILABLE,
}
# Counters and logs use these HTTP statuses for an upstream's errors; any other error is the caller's mistake.
_STATUS = {
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_Failure = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]  # the arguments of `abort`
if TYPE_CHECKING:
    Context = aio.ServicerContext[bytes, bytes]
    _GenericHandler = grpc.GenericRpcHandler[bytes, bytes]
    _Handler = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
else:
    _GenericHandler = grpc.GenericRpcHandler


class GrpcLimits:
    """Bounds of the gRPC listener."""

    MAX_MESSAGE_BYTES = 64 * 1024 * 1024
    MAX_METADATA_BYTES = 16 * 1024
    MAX_STREAMS = 128
    MAX_CALLS = 4096
    FIRST_MESSAGE_S = 10.0
    HANDSHAKE_S = 10.0
    MAX_CONNECTIONS = 4096
    AGE_S = 15.0  # the age of a connection: see `grpc_drain`
    IDLE_S = 300.0  # the time of a connection without a call
    PACE_S = 1.0  # a message that is held back is checked again after this


async def serve_grpc(gateway: Gateway, sock: socket.socket, certificates: Certificates | None = None) -> "GrpcIngress":
    """Listen at the address of `sock`, over TLS with `certificates`; the socket is closed in favour of gRPC's own."""
    ingress = GrpcIngress(gateway)
    await ingress.open(sock, certificates)
    return ingress


class GrpcIngress(_GenericHandler):
    """The public gRPC service."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._special = GrpcSpecial(gateway, gateway.routing, self._forward)
        self._turns = ReceiveTurns()
        self._arrivals = grpc_drain.Arrivals()
        self._pulse = GrpcPulse(asyncio.get_running_loop())
        self._age_ms = int(GrpcLimits.AGE_S * 1000)
        self._server: aio.Server | None = None
        self.port = 0

    async def open(self, sock: socket.socket, certificates: Certificates | None = None) -> None:
        host, port = sock.getsockname()[:2]
        sock.close()
        self._server = aio.server(
            options=(
                ("grpc.max_receive_message_length", GrpcLimits.MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", -1),
                # Twice the accepted size, so that a refusal can give its reason. Beyond it gRPC answers by itself.
                ("grpc.max_metadata_size", 2 * GrpcLimits.MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", 2 * GrpcLimits.MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", GrpcLimits.MAX_STREAMS),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", int(GrpcLimits.HANDSHAKE_S * 1000)),
                # These are half of the connections that the HTTP port and its upstreams may have.
                ("grpc.max_allowed_incoming_connections", connection_limit(2 * GrpcLimits.MAX_CONNECTIONS) // 2),
                ("grpc.max_connection_idle_ms", int(GrpcLimits.IDLE_S * 1000)),
                (grpc_drain.MAX_AGE, self._age_ms),
                # An unread message is held back after 64 KiB; a message that is read gets a window of its size.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", 64 * 1024),
                READ_AHEAD,
                *GRPC_HEADERS,
                # Compressed messages arrive as they are: see `grpc_compressed`.
                ("grpc.per_message_decompression", 0),
            ),
            maximum_concurrent_rpcs=GrpcLimits.MAX_CALLS,
        )
        self._server.add_generic_rpc_handlers((self._arrivals, self))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if certificates is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, _credentials(certificates))
        await self._server.start()

    async def drain(self, grace_s: float) -> None:
        """Accept no new calls, let calls under way finish, and close: see `grpc_drain`."""
        if self._server is not None:
            await grpc_drain.drain(self._server, self.port, self._arrivals, grace_s=grace_s, age_ms=self._age_ms)
        self._pulse.close()
        await self._special.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Return the handler of a method.

        Every handler is a stream handler, which is the same on the wire: it starts at the headers, so that a caller is
        identified before a byte of its message is awaited.
        """
        service, _, method = handler_call_details.method.lstrip("/").rpartition("/")
        handler: _Handler
        if service == HEALTH and method == "Check":
            handler = self._alive
        elif service == SERVICE and method in ("ServerLive", "ServerReady"):
            handler = self._alive
        elif service == SERVICE and (method == "ModelStreamInfer" or method in _UNARY_METHODS):
            handler = self._handler(method)
        else:
            handler = self._unknown
        return grpc.stream_stream_rpc_method_handler(handler)

    async def _alive(self, _: AsyncIterator[bytes], context: "Context") -> None:
        mark = self._gateway.mark(None, None, None)
        context.set_trailing_metadata(answer_metadata(mark, 0.0, 0.0))
        await context.write(_ALIVE if self._gateway.ready else b"")

    async def _unknown(self, _: AsyncIterator[bytes], context: "Context") -> None:
        caller = self._arrived(context)
        refused = Refused(Outcome.NOT_FOUND, "this gRPC method is not served here")
        self._gateway.records.turned_away(
            refused, caller.mark, None, "", caller.received_s, protocol="grpc", status=404
        )
        await context.abort(*_refusal(refused, caller, None, grpc.StatusCode.UNIMPLEMENTED))

    def _handler(self, method: str) -> "_Handler":
        async def handle(_: AsyncIterator[bytes], context: "Context") -> None:
            # `abort` is called only here: its exception is kept for a while, with all that its frames hold, such as a
            # message.
            if (failure := await self._serve(context, method)) is not None:
                await context.abort(*failure)

        return handle

    async def _serve(self, context: "Context", method: str) -> _Failure | None:
        """Answer a call, or return how it has to be aborted."""
        caller = self._arrived(context)
        call: GrpcCall | None = None
        try:
            self._identify(caller, method)
            first = await self._first_message(caller, context)
            if is_compressed(first):
                first = await self._decompressed(caller, first)
            self._identify(caller, method)  # again: the key may have been revoked while the message was awaited
            call = self._begin(caller, method, first)
            if method == "ModelStreamInfer":
                await call.permit()
                path = f"/{SERVICE}/{method}"
                messages = self._authorised_stream(caller, call, first, context)
                async for answer in call.forward_stream(path, messages):
                    call.moved(answer)
                    await context.write(answer)
                context.set_trailing_metadata(call.answer_metadata())
            else:
                forward = self._special.unary if call.target.special else self._forward
                answer = await forward(call, first)
                context.set_trailing_metadata(call.answer_metadata())
                await context.write(answer)
            return None
        except Refused as refused:
            if call is not None:
                call.status = STATUS[refused.outcome]
                call.end(refused.outcome, refused.message)
            else:
                self._gateway.records.turned_away(
                    refused,
                    caller.mark,
                    caller.tenant,
                    method,
                    caller.received_s,
                    protocol="grpc",
                    status=STATUS[refused.outcome],
                )
            return _refusal(refused, caller, call)
        except aio.AioRpcError as error:
            assert call is not None
            if (lost := refusal(error)) is not None:
                call.status = STATUS[lost.outcome]
                call.end(lost.outcome, lost.message)
                return _refusal(lost, caller, call)
            call.cost_us = reported_cost_us(error.trailing_metadata())
            text, metadata = passed_on(error)
            call.status = _STATUS.get(error.code(), 400)
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            call.end(Outcome.DEADLINE_EXCEEDED if late else Outcome.ANSWERED, text)
            return error.code(), text, metadata + call.answer_metadata()
        finally:
            if call is not None:
                call.end(Outcome.CALLER_LEFT)  # without effect if it has ended before
                call.gate.release_bytes(call.size_bytes)
            self._gateway.bodies.ended(caller.size_bytes)

    async def _forward(self, call: GrpcCall, message: bytes) -> bytes:
        await call.permit()
        return await call.forward_unary(f"/{SERVICE}/{call.method}", self._authorised(call, message))

    async def _authorised_stream(
        self, caller: "_Caller", call: GrpcCall, first: bytes, context: "Context"
    ) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the messages, each with the model it is for."""
        yield call.target.name, self._authorised(call, first)
        try:
            while isinstance(message := await context.read(), bytes):
                if is_compressed(message):
                    message = await self._decompressed(caller, message)
                while (model := await self._judge(caller, call, message)) is None:
                    pass  # it was held back
                call.bytes_in += len(message)
                yield model, self._authorised(call, message)
        except Refused as refused:
            call.refuse(refused)

    async def _decompressed(self, caller: "_Caller", message: bytes) -> bytes:
        tenant = self._gateway.identify(caller.credentials).tenant
        return await decompress(self._gateway, tenant, message)

    async def _judge(self, caller: "_Caller", call: GrpcCall, message: bytes) -> str | None:
        """Return the model of a further message of a stream that may pass; None if it was held back. Raises Refused.

        A stream outlives keys, tokens and documents: a sender whose key was revoked sends no further message. And a
        stream must not get around the limits of requests, or of a model other than its first.
        """
        gateway = self._gateway
        caller.key = gateway.identify(caller.credentials)
        tenant = caller.key.tenant
        name, version = self._authorise(tenant, "ModelStreamInfer", message)
        _bounded(message, call.gate.pool)
        if not tenant.allowances and not gateway.targets.tiers_differ:
            call.moved(message, name)
            return name
        requested_tier = caller.metadata.get(_TIER)
        target = gateway.targets.of_method(tenant, "ModelStreamInfer", "model", name, version, requested_tier)
        if target.choices is not None:
            target = chosen(target, caller.metadata.get, caller.mark.request_id)
        # The tier of the first message's route today counts as well: new documents alone end no stream.
        tier, of_stream = (
            target.tenant.tier.name,
            gateway.targets.served(tenant, call.target.plan, requested_tier).tier.name,
        )
        if tier != of_stream:
            why = f"this stream is served by tier {of_stream!r}, model {name!r} by {tier!r}: open another for it"
            raise Refused(Outcome.INVALID_REQUEST, why)
        if not tenant.allowances:
            call.moved(message, name)
            return name
        wait_s = await call.further(tenant, target, len(message))
        if wait_s > 0.0:
            await asyncio.sleep(min(wait_s, GrpcLimits.PACE_S))
        return name if wait_s <= 0.0 else None

    def _arrived(self, context: "Context") -> "_Caller":
        received_s = now = monotonic()
        if now >= self._pulse.fresh_until:
            received_s -= self._pulse.call_age_s(context.peer(), now)
        given = context.invocation_metadata() or ()
        size_bytes = sum([len(key) + len(value) + 32 for key, value in given])  # counted as in RFC 9113, 6.5.2
        pairs = [(str(key), value) for key, value in given if isinstance(value, str)]
        metadata = dict(reversed(pairs))  # the first value of each name, as over HTTP
        mark = self._gateway.mark(metadata.get("x-request-id"), metadata.get("traceparent"), metadata.get("tracestate"))
        credentials = [pair for pair in pairs if pair[0] in ("authorization", "x-api-key")]
        return _Caller(metadata, size_bytes, credentials, mark, received_s, context.time_remaining())

    def _identify(self, caller: "_Caller", method: str) -> None:
        """Identify the caller and set the deadline, from the metadata alone. Raises Refused."""
        gateway = self._gateway
        if caller.metadata_bytes > GrpcLimits.MAX_METADATA_BYTES:
            raise Refused(Outcome.TOO_LARGE, f"the metadata is larger than {GrpcLimits.MAX_METADATA_BYTES} bytes")
        caller.key = gateway.identify(caller.credentials)
        caller.tenant = tenant = caller.key.tenant
        if method in _OPERATOR_METHODS and "operator" not in tenant.scopes:
            raise Refused(Outcome.METHOD_NOT_ALLOWED, f"{method} is not offered here")
        self._set_deadline(caller, tenant)

    def _set_deadline(self, caller: "_Caller", tenant: Tenant) -> None:
        timeout_ms = caller.metadata.get("x-request-timeout-ms")
        caller.deadline = self._gateway.deadline(tenant, caller.received_s, timeout_ms)
        if caller.remaining_s is not None:
            caller.deadline = min(caller.deadline, caller.received_s + caller.remaining_s)

    async def _first_message(self, caller: "_Caller", context: "Context") -> bytes:
        assert caller.tenant is not None
        wait_s = min(caller.deadline - monotonic(), GrpcLimits.FIRST_MESSAGE_S)
        try:
            async with asyncio.timeout(wait_s):
                turn = await self._turns.acquire(caller.tenant.name)
                try:
                    message = await context.read()
                finally:
                    self._turns.release(turn)
        except TimeoutError:
            raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while receiving the request") from None
        if not isinstance(message, bytes):
            raise Refused(Outcome.INVALID_REQUEST, "the call carries no message, or one that is larger than 64 MiB")
        caller.size_bytes = len(message)
        return message

    def _begin(self, caller: "_Caller", method: str, message: bytes) -> GrpcCall:
        """Authorise the model, route the call and apply its limits. Raises Refused."""
        gateway, tenant = self._gateway, caller.tenant
        assert tenant is not None
        model = method in _MODEL_METHODS or method == "ModelStreamInfer"
        name, version = self._authorise(tenant, method, message) if model else ("", "")
        requested_tier = caller.metadata.get(_TIER)
        target = gateway.targets.of_method(
            tenant, method, "model" if model else "server", name, version, requested_tier
        )
        if target.choices is not None:
            target = chosen(target, caller.metadata.get, caller.mark.request_id)
        if target.tenant is not tenant:
            caller.tenant = tenant = target.tenant
            self._set_deadline(caller, tenant)
        gate = gateway.pools[target.pool]
        if not gate.speaks_grpc:
            raise absent("model", name)
        if target.side:
            gateway.routing.took_side(target.plan.name, target.side)
        _bounded(message, gate.pool)
        if (left_s := caller.deadline - caller.received_s) < gate.slow_s and method != "ModelStreamInfer":
            gate.judge(target, len(message), left_s)
        size = len(message)
        if not gate.reserve_bytes(size, urgent=tenant.tier.band == gateway.top_band):
            retry_after_s = gate.admission.retry_after_s()
            raise Refused(Outcome.QUEUE_FULL, "too many bytes wait for this pool", retry_after_s=retry_after_s)
        try:
            grant = gateway.limiter.acquire(tenant, target, size, monotonic()) if target.allowances else None
        except Refused:
            gate.release_bytes(size)
            raise
        received_s, deadline = caller.received_s, caller.deadline
        return GrpcCall(
            gateway, gate, method, tenant, target, caller.mark, caller.metadata, size, received_s, deadline, grant
        )

    def _authorise(self, tenant: Tenant, method: str, message: bytes) -> tuple[str, str]:
        """Return the model and version that a message names, if this tenant may use it; "" only where that means all
        models.
        """
        try:
            name, version = peek_model(message)
        except BadMessage as error:
            raise Refused(Outcome.INVALID_REQUEST, error.message) from error
        if not name and method == "ModelStatistics" and "operator" in tenant.scopes:
            return name, version
        check_model(tenant, name, version)
        return name, version

    def _authorised(self, call: GrpcCall, message: bytes) -> bytes:
        """Return the message with the authorised model in force, and with the tier's priority where the pool maps
        it.
        """
        if call.target.kind != "model":
            return message
        name, version = peek_model(message)
        if not version and name == call.target.name:
            version = call.target.version  # the side of a split
        message = append_model(message, name, version)
        priorities = call.gate.pool.triton_priorities if call.infers else None
        if priorities and (priority := priorities.get(call.tenant.tier.name)) is not None:
            # The deadline of a stream bounds its first answer only.
            left_s = None if call.method == "ModelStreamInfer" else call.deadline - monotonic()
            message = append_schedule(message, priority, left_s)
        return message


def _bounded(message: bytes, pool: Pool) -> None:
    if len(message) > pool.max_body_bytes:
        raise Refused(Outcome.TOO_LARGE, f"the message is larger than {pool.max_body_bytes} bytes")


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that gRPC asks before each handshake, on a thread of its own; None keeps the present ones."""
    given = certificates.pem

    def configuration() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        chain, key = pem = certificates.pem
        if pem is given:
            return None
        given = pem
        return grpc.ssl_server_certificate_configuration([(key, chain)])

    first = grpc.ssl_server_certificate_configuration([(given[1], given[0])])
    return grpc.dynamic_ssl_server_credentials(first, configuration)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Caller:
    """What is known of a call before its message.

    remaining_s: the seconds until the caller's own deadline; None without one.
    size_bytes: the size of the first message, once it is here.
    """

    metadata: dict[str, str]
    metadata_bytes: int
    credentials: list[tuple[str, str]]
    mark: Mark
    received_s: float
    remaining_s: float | None
    size_bytes: int = 0
    tenant: Tenant | None = None
    key: ApiKey | None = None
    deadline: float = 0.0


def _refusal(refused: Refused, caller: _Caller, call: GrpcCall | None, code: grpc.StatusCode | None = None) -> _Failure:
    metadata = [("x-oriel-reason", refused.outcome.value)]
    if refused.retry_after_s is not None:
        metadata.append(("retry-after", str(refused.retry_after_s)))
    metadata += [(name, value) for name, value in refused.headers if name.startswith(("ratelimit", "www-auth"))]
    metadata += call.answer_metadata() if call is not None else answer_metadata(caller.mark, 0.0, 0.0)
    return code or _CODES[refused.outcome], refused.message, tuple(metadata)
