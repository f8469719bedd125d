"""The v2 protocol over gRPC: generic handlers under the service's wire names, on grpc.aio."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from oriel_inference.errors import BackendFailed, InferenceError, UnknownModel
from oriel_inference.servers.grpc_call import Context, abort
from oriel_inference.servers.grpc_infer import GrpcInfer
from oriel_inference.servers.health import HealthWatch, is_serving
from oriel_inference.servers.not_served import METHODS_NOT_SERVED, refusing
from oriel_inference.servers.repository_api import GrpcRepository
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.stream import StreamFrontend
from oriel_inference.servers.surface import EXTENSIONS, SERVER_VERSION, Surface
from oriel_wire.engine import grpc_drain
from oriel_wire.engine.large_messages import LargeMessages
from oriel_wire.engine.limits import GRPC_HEADERS
from oriel_wire.engine.pulse import GrpcPulse
from oriel_wire.errors import BadMessage, StartFailed
from oriel_wire.v2.grpc import HEALTH_METHODS, HEALTH_SERVICE, METHODS, SERVICE
from oriel_wire.v2.metadata import metadata_message
from oriel_wire.v2.proto import health_pb2, v2_pb2
from oriel_wire.v2.proto_cost import parse

_log = logging.getLogger(__name__)

MAX_STREAMS = 128
MAX_METADATA_BYTES = 16 * 1024
MAX_CALLS = 4096
MIN_PING_INTERVAL_MS = 10_000

_Handler = Callable[[Any, Context], Awaitable[Message]]


class GrpcFrontend:
    """The methods of the service. They raise InferenceError or BadMessage, which `_guarded` reports to the client.
    pulse: closed by its owner.
    """

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self.pulse = GrpcPulse(asyncio.get_running_loop())
        self._large = LargeMessages()
        self._streams = StreamFrontend(surface, self._large, self.pulse)
        self._watch = HealthWatch(surface)
        self._infer = GrpcInfer(surface, self._large, self.pulse)

    def handlers(self) -> list["grpc.GenericRpcHandler[Any, Any]"]:
        """Return everything to register with a server."""
        service: dict[str, _Handler] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "LogSettings": self._log_settings,
            **GrpcRepository(self._surface).handlers(),
            **{name: refusing(why) for name, why in METHODS_NOT_SERVED.items()},
        }
        # This method takes and returns bytes: its messages are large and alike.
        infer = grpc.unary_unary_rpc_method_handler(self._infer.handle)
        return [
            grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": infer}),
            _generic(SERVICE, service, METHODS, self._large),
            self._streams.handler(),
            self._watch.handler(),
            _generic(HEALTH_SERVICE, {"Check": self._check}, HEALTH_METHODS, self._large),
        ]

    @property
    def under_way(self) -> grpc_drain.UnderWay:
        """Return the calls of ModelInfer in progress."""
        return self._infer.under_way

    def stop(self, drain_s: float) -> None:
        """End the streams that would stay open for ever; the server drains within `drain_s`."""
        self._streams.stop(drain_s)
        self._watch.stop()

    async def _server_live(self, request: Message, context: Context) -> Message:
        return v2_pb2.ServerLiveResponse(live=True)

    async def _server_ready(self, request: Message, context: Context) -> Message:
        return v2_pb2.ServerReadyResponse(ready=self._surface.readiness()[0])

    async def _model_ready(self, request: v2_pb2.ModelReadyRequest, context: Context) -> Message:
        try:
            ready = self._surface.model_ready(request.name, request.version)
        except UnknownModel:
            ready = False  # as in Triton: clients poll until a model exists
        return v2_pb2.ModelReadyResponse(ready=ready)

    async def _server_metadata(self, request: Message, context: Context) -> Message:
        name = self._surface.server_id
        return v2_pb2.ServerMetadataResponse(name=name, version=SERVER_VERSION, extensions=EXTENSIONS)

    async def _model_metadata(self, request: v2_pb2.ModelMetadataRequest, context: Context) -> Message:
        catalog = self._surface.catalog
        return metadata_message(catalog.metadata(catalog.get(request.name, request.version)))

    async def _model_config(self, request: v2_pb2.ModelConfigRequest, context: Context) -> Message:
        return v2_pb2.ModelConfigResponse(config=self._surface.catalog.config(request.name, request.version))

    async def _model_statistics(self, request: v2_pb2.ModelStatisticsRequest, context: Context) -> Message:
        return self._surface.statistics(request.name, request.version)

    async def _check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Message:
        serving = is_serving(self._surface, request.service)
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    async def _log_settings(self, request: v2_pb2.LogSettingsRequest, context: Context) -> Message:
        log = self._surface.log
        given = {name: (each.WhichOneof("parameter_choice"), each) for name, each in request.settings.items()}
        log.change({name: getattr(each, choice) if choice else None for name, (choice, each) in given.items()})
        response = v2_pb2.LogSettingsResponse()
        for name, value in log.shown().items():
            if isinstance(value, bool):
                response.settings[name].bool_param = value
            elif isinstance(value, int):
                response.settings[name].uint32_param = value
            else:
                response.settings[name].string_param = value
        return response


class GrpcServer:
    """A started server. Created by `open_grpc`, ended by `drain`."""

    def __init__(
        self, server: grpc.aio.Server, port: int, arrivals: grpc_drain.Arrivals, age_ms: int, pulse: GrpcPulse
    ) -> None:
        self.port = port
        self._pulse = pulse
        self._server = server
        self._arrivals = arrivals
        self._age_ms = age_ms

    async def drain(self, grace_s: float, finishing: Callable[[], bool]) -> None:
        """Refuse new calls, let calls in flight finish, and close, see `grpc_drain`."""
        try:
            await grpc_drain.drain(
                self._server, self.port, self._arrivals, grace_s=grace_s, age_ms=self._age_ms, finishing=finishing
            )
        finally:
            self._pulse.close()


async def open_grpc(
    frontend: GrpcFrontend,
    host: str,
    port: int,
    *,
    max_message_bytes: int,
    drain_s: float,
    options: Sequence[tuple[str, int]] = (),
) -> GrpcServer:
    """Start a server. Raises StartFailed if it cannot open the port.

    drain_s: the drain time that its end will have.
    options: gRPC's own options, which replace the server's.
    """
    settings = {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.max_send_message_length": -1,
        "grpc.max_concurrent_streams": MAX_STREAMS,
        "grpc.max_metadata_size": MAX_METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES + MAX_METADATA_BYTES // 4,
        "grpc.http2.min_ping_interval_without_data_ms": MIN_PING_INTERVAL_MS,
        "grpc.so_reuseport": 0,
        **dict(GRPC_HEADERS),
        grpc_drain.MAX_AGE: grpc_drain.max_age_ms(drain_s),
        **dict(options),
    }
    arrivals = grpc_drain.Arrivals()
    server = grpc.aio.server(
        handlers=[arrivals, *frontend.handlers()],
        maximum_concurrent_rpcs=MAX_CALLS,
        options=list(settings.items()),
    )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartFailed(
            f"port {port} on {host} cannot be opened (inference gRPC): free it or pass --grpc-port N"
        ) from error
    await server.start()
    return GrpcServer(server, bound, arrivals, settings[grpc_drain.MAX_AGE], frontend.pulse)


def _generic(
    service: str,
    methods: Mapping[str, _Handler],
    classes: Mapping[str, tuple[type[Message], type[Message]]],
    large: LargeMessages,
) -> "grpc.GenericRpcHandler[Any, Any]":
    # No request_deserializer: the error of grpc.aio for bytes that are no message has neither a proper status nor a
    # sentence.
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(
                _guarded(handler, classes[name][0], large), response_serializer=classes[name][1].SerializeToString
            )
            for name, handler in methods.items()
        },
    )


def _parsed(request_class: type[Message], data: bytes) -> Any:
    try:
        return parse(request_class, data)
    except BadMessage as bad:
        return as_inference_error(bad)


def _guarded(
    handler: _Handler, request_class: type[Message], large: LargeMessages
) -> Callable[[bytes, Context], Awaitable[Message]]:
    async def call(data: bytes, context: Context) -> Message:
        request = _parsed(request_class, data)
        large.ended(len(data))
        del data
        error: InferenceError
        if isinstance(request, InferenceError):
            error = request
        else:
            try:
                return await handler(request, context)
            except (InferenceError, BadMessage) as refusal:
                error = as_inference_error(refusal)
            except Exception:
                # An unexpected error in one call must not affect others, and its text must not show internals to the
                # client.
                _log.exception("a call failed unexpectedly")
                error = BackendFailed("the server failed on this request")
        # An aborted call stays in memory with this frame until the garbage collector runs, so it must not hold the
        # message.
        del request
        return await abort(context, error)

    return call
