"""gRPC ingress: a generic pass-through for the v2 service that never decodes a tensor.

A call is identified by its metadata, its first message is read as far as the model's name, the name is authorised and
appended (see `grpc_model`), and the bytes travel on. Waiting, deadlines and permits are the same as over HTTP.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from oriel_gateway.answers import STATUS
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.grpc_call import GrpcCall, GrpcUpstreams, answer_metadata
from oriel_gateway.grpc_model import append_model, append_schedule, peek_model
from oriel_gateway.identity import still_valid
from oriel_gateway.targets import Target, valid_name
from oriel_gateway.tracing import Mark
from oriel_policies.documents import ApiKey, Tenant
from oriel_wire.errors import BadMessage

__all__ = ["GrpcLimits", "serve_grpc"]

SERVICE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
_ALIVE = b"\x08\x01"  # bool field 1 = true; also HealthCheckResponse{status: SERVING}
_MODEL_METHODS = frozenset({"ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"})
_OPERATOR_METHODS = frozenset(
    {"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"}
    | {f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")}
)
_UNARY_METHODS = _MODEL_METHODS | _OPERATOR_METHODS | {"ServerMetadata"}
_CODES = {
    Outcome.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Outcome.AMBIGUOUS_CREDENTIALS: grpc.StatusCode.INVALID_ARGUMENT,
    Outcome.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Outcome.IDENTITY_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Outcome.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Outcome.METHOD_NOT_ALLOWED: grpc.StatusCode.UNIMPLEMENTED,
    Outcome.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.CONCURRENCY_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Outcome.QUEUE_FULL: grpc.StatusCode.UNAVAILABLE,
    Outcome.DISPLACED: grpc.StatusCode.UNAVAILABLE,
    Outcome.UPSTREAM_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    Outcome.UPSTREAM_BROKEN: grpc.StatusCode.UNAVAILABLE,
    Outcome.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# Of an upstream's errors, as counters and logs say them: the HTTP counterpart; the rest is the caller's doing.
_STATUS = {
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
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


async def serve_grpc(gateway: Gateway, sock: socket.socket) -> "GrpcIngress":
    """Listen where `sock` is bound; the socket is closed in favour of gRPC's own."""
    ingress = GrpcIngress(gateway)
    await ingress.open(sock)
    return ingress


class GrpcIngress(_GenericHandler):
    """The public gRPC service."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._upstreams = GrpcUpstreams()
        self._server: aio.Server | None = None
        self.port = 0

    async def open(self, sock: socket.socket) -> None:
        host, port = sock.getsockname()[:2]
        sock.close()
        self._server = aio.server(
            options=(
                ("grpc.max_receive_message_length", GrpcLimits.MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", GrpcLimits.MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", GrpcLimits.MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", GrpcLimits.MAX_STREAMS),
                ("grpc.so_reuseport", 0),
                # Identity only: a compressed message is UNIMPLEMENTED, so none can unfold into more than it weighs.
                ("grpc.compression_enabled_algorithms_bitset", 1),
            ),
            maximum_concurrent_rpcs=GrpcLimits.MAX_CALLS,
        )
        self._server.add_generic_rpc_handlers((self,))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.port = self._server.add_insecure_port(address)
        await self._server.start()

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let those in flight finish, close."""
        if self._server is not None:
            await self._server.stop(grace_s)
        await self._upstreams.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Pick the handler of a method; None is UNIMPLEMENTED.

        Every handler is a stream handler, which on the wire is the same: it starts at the headers, so that a caller
        is identified before a byte of its message is awaited.
        """
        service, _, method = handler_call_details.method.lstrip("/").rpartition("/")
        handler: _Handler
        if service == HEALTH and method == "Check":
            handler = self._alive
        elif service != SERVICE:
            return None
        elif method in ("ServerLive", "ServerReady"):
            handler = self._alive
        elif method == "ModelStreamInfer" or method in _UNARY_METHODS:
            handler = self._handler(method)
        else:
            return None
        return grpc.stream_stream_rpc_method_handler(handler)

    async def _alive(self, _: AsyncIterator[bytes], context: "Context") -> None:
        mark = self._gateway.mark(None, None, None)
        context.set_trailing_metadata(answer_metadata(mark, 0.0, 0.0))
        await context.write(b"" if self._gateway.draining else _ALIVE)

    def _handler(self, method: str) -> "_Handler":
        async def handle(_: AsyncIterator[bytes], context: "Context") -> None:
            caller: _Caller | None = None
            call: GrpcCall | None = None
            try:
                caller = self._arrived(context)
                self._identify(caller, method)
                first = await _first_message(caller, context)
                call = self._begin(caller, method, first)
                await call.permit()
                path = f"/{SERVICE}/{method}"
                if method == "ModelStreamInfer":
                    messages = self._authorised_stream(caller, call, first, context)
                    async for answer in call.forward_stream(self._upstreams, path, messages):
                        call.moved(answer)
                        await context.write(answer)
                    context.set_trailing_metadata(call.answer_metadata())
                else:
                    answer = await call.forward_unary(self._upstreams, path, self._authorised(call, first))
                    context.set_trailing_metadata(call.answer_metadata())
                    await context.write(answer)
            except Refused as refused:
                if call is not None:
                    call.status = STATUS[refused.outcome]
                    call.end(refused.outcome, refused.message)
                elif caller is not None:
                    self._gateway.turned_away(
                        refused,
                        caller.mark,
                        caller.tenant,
                        method,
                        caller.received_s,
                        protocol="grpc",
                        status=STATUS[refused.outcome],
                    )
                await _abort(context, refused, caller, call)
            except aio.AioRpcError as error:
                assert call is not None
                call.status = _STATUS.get(error.code(), 400)
                call.end(_outcome(error), error.details() or "")
                await context.abort(error.code(), error.details() or "", call.answer_metadata())
            finally:
                if call is not None:
                    call.end(Outcome.CLIENT_LEFT)  # nothing if it has ended before

        return handle

    async def _authorised_stream(
        self, caller: "_Caller", call: GrpcCall, first: bytes, context: "Context"
    ) -> AsyncIterator[bytes]:
        yield self._authorised(call, first)
        snapshot = self._gateway.snapshot
        tenant = call.tenant
        while isinstance(message := await context.read(), bytes):
            try:
                # A stream outlives keys, tokens and documents: a revoked sender sends no further message.
                if snapshot is not self._gateway.snapshot:
                    snapshot = self._gateway.snapshot
                    caller.key = self._gateway.identify(caller.credentials)
                    tenant = caller.key.tenant
                elif caller.key is not None:
                    still_valid(caller.key)
                self._authorise(tenant, message)
                authorised = self._authorised(call, message)
                call.heard(message)
            except Refused as refused:
                call.refuse(refused)
                return
            yield authorised

    def _arrived(self, context: "Context") -> "_Caller":
        received_s = monotonic()
        pairs = [(str(key), value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        metadata = dict(pairs)
        mark = self._gateway.mark(metadata.get("x-request-id"), metadata.get("traceparent"), metadata.get("tracestate"))
        credentials = [pair for pair in pairs if pair[0] in ("authorization", "x-api-key")]
        return _Caller(metadata, credentials, mark, received_s, context.time_remaining())

    def _identify(self, caller: "_Caller", method: str) -> None:
        """identify and deadline, from the metadata alone; raises Refused."""
        gateway = self._gateway
        caller.key = gateway.identify(caller.credentials)
        caller.tenant = tenant = caller.key.tenant
        if method in _OPERATOR_METHODS and "operator" not in tenant.scopes:
            raise Refused(Outcome.METHOD_NOT_ALLOWED, f"{method} is not offered here")
        caller.deadline = gateway.deadline(tenant, caller.received_s, caller.metadata.get("x-request-timeout-ms"))
        if caller.remaining_s is not None:
            caller.deadline = min(caller.deadline, caller.received_s + caller.remaining_s)

    def _begin(self, caller: "_Caller", method: str, message: bytes) -> GrpcCall:
        """Authorise the model, route and limit; raises Refused."""
        gateway, tenant = self._gateway, caller.tenant
        assert tenant is not None
        model = method in _MODEL_METHODS or method == "ModelStreamInfer"
        name, version = self._authorise(tenant, message) if model else ("", "")
        route = gateway.snapshot.route_for_model(name, version)
        if route is None or not gateway.pools[route.pool].pool.grpc_endpoints:
            raise Refused(Outcome.NOT_FOUND, f"there is no model {name!r} here for this key")
        target = Target(
            kind="model" if model else "server",
            name=name,
            pool=route.pool,
            plan=route,
            line=b"",
            route=f"model:{name}" if model else "server",
            head_only=False,
            allowances=tenant.allowances_for("model" if model else "server", name, route.name),
        )
        grant = gateway.limiter.take(tenant, target, len(message), monotonic()) if target.allowances else None
        return GrpcCall(
            gateway,
            method,
            tenant,
            target,
            caller.mark,
            caller.metadata,
            len(message),
            caller.received_s,
            caller.deadline,
            grant,
        )

    def _authorise(self, tenant: Tenant, message: bytes) -> tuple[str, str]:
        """The model and version a message names, if this tenant may use it."""
        try:
            name, version = peek_model(message)
        except BadMessage as error:
            raise Refused(Outcome.BAD_REQUEST, error.message) from error
        if not name and "operator" in tenant.scopes:
            return name, version
        if not valid_name(name) or not tenant.may_use_model(name) or (version and not version.isdigit()):
            raise Refused(Outcome.NOT_FOUND, f"there is no model {name[:128]!r} here for this key")
        return name, version

    def _authorised(self, call: GrpcCall, message: bytes) -> bytes:
        """The message with what was authorised in force: the model, and the tier's priority where the pool maps it."""
        if call.target.kind != "model":
            return message
        message = append_model(message, *peek_model(message))
        priorities = call.pool.triton_priorities if call.infers else None
        if priorities and (priority := priorities.get(call.tenant.tier.name)) is not None:
            # A stream's deadline bounds its first answer only.
            left_s = None if call.method == "ModelStreamInfer" else call.deadline - monotonic()
            message = append_schedule(message, priority, left_s)
        return message


@dataclass(slots=True)
class _Caller:
    """What is known of a call before its message. remaining_s: of the caller's own deadline."""

    metadata: dict[str, str]
    credentials: list[tuple[str, str]]
    mark: Mark
    received_s: float
    remaining_s: float | None
    tenant: Tenant | None = None
    key: ApiKey | None = None
    deadline: float = 0.0


async def _first_message(caller: _Caller, context: "Context") -> bytes:
    wait_s = min(caller.deadline - monotonic(), GrpcLimits.FIRST_MESSAGE_S)
    try:
        async with asyncio.timeout(wait_s):
            message = await context.read()
    except TimeoutError:
        raise Refused(Outcome.DEADLINE_EXCEEDED, "the deadline passed while receiving the request") from None
    if not isinstance(message, bytes):
        raise Refused(Outcome.BAD_REQUEST, "the call carries no message")
    return message


async def _abort(context: "Context", refused: Refused, caller: _Caller | None, call: GrpcCall | None) -> None:
    metadata = [("x-oriel-reason", refused.outcome.value)]
    if refused.retry_after_s is not None:
        metadata.append(("retry-after", str(refused.retry_after_s)))
    metadata += [(name, value) for name, value in refused.headers if name.startswith("ratelimit")]
    if call is not None:
        metadata += call.answer_metadata()
    elif caller is not None:
        metadata += answer_metadata(caller.mark, 0.0, 0.0)
    await context.abort(_CODES[refused.outcome], refused.message, tuple(metadata))


def _outcome(error: aio.AioRpcError) -> Outcome:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Outcome.DEADLINE_EXCEEDED
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return Outcome.UPSTREAM_UNREACHABLE
    return Outcome.ANSWERED
