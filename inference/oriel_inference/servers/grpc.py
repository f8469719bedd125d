"""The v2 protocol over gRPC: the methods of the port and their answers, on calls of the HTTP/2 engine."""

import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from google.protobuf.message import Message

from oriel_inference.errors import InvalidRequest, NotSupported, ServerStopping, UnknownModel
from oriel_inference.servers.encoding import Encodings
from oriel_inference.servers.grpc_call import MAX_CALLS, Body, GrpcCall, GrpcConnection, GrpcPort, Method, refuse_http1
from oriel_inference.servers.grpc_infer import GrpcInfer
from oriel_inference.servers.grpc_plans import CallPlans
from oriel_inference.servers.not_served import METHODS_NOT_SERVED, SHARED_MEMORY
from oriel_inference.servers.reflection import Reflection
from oriel_inference.servers.region_api import grpc_handlers
from oriel_inference.servers.repository_api import GrpcRepository
from oriel_inference.servers.request_record import keep_traces
from oriel_inference.servers.restrictions import NOT_RESTRICTED, Restriction
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.stream import StreamFrontend
from oriel_inference.servers.surface import SERVER_VERSION, Surface
from oriel_wire.engine.grpc_port import Http2Front
from oriel_wire.engine.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, Watch, Watches
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.limits import H2Limits
from oriel_wire.observe.recall import KEEP_METHOD
from oriel_wire.observe.unsampled import MAX_TRACES
from oriel_wire.v2.grpc import HEALTH_METHODS, HEALTH_SERVICE, METHODS, SERVICE
from oriel_wire.v2.metadata import metadata_message
from oriel_wire.v2.proto import health_pb2, v2_pb2
from oriel_wire.v2.proto_cost import parse

_Handler = Callable[[Any], Message]
_Slow = Callable[[Any], Coroutine[Any, Any, Message]]


class GrpcFrontend:
    """The methods of the port. Those that answer with a message raise InferenceError or BadMessage for a refusal."""

    def __init__(self, surface: Surface, restricted: Mapping[str, Restriction] = NOT_RESTRICTED) -> None:
        """restricted: methods that need a secret."""
        self.restricted = restricted
        self._surface = surface
        self._streams = StreamFrontend(surface)
        self._watch = HealthWatch(surface)
        self._reflection = Reflection()
        self._infer = GrpcInfer(surface)

    def methods(self) -> dict[bytes, Method]:
        """Return all methods by their paths."""
        plain: dict[str, _Handler] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "LogSettings": self._log_settings,
            "TraceSetting": self._trace_setting,
        }
        found = {name: self._answered(handler, METHODS[name][0]) for name, handler in plain.items()}
        later = {"ModelStatistics": self._model_statistics, **GrpcRepository(self._surface).handlers()}
        for name, slow in later.items():
            found[name] = self._answered_later(slow, METHODS[name][0])
        for name, why in METHODS_NOT_SERVED.items():
            found[name] = Method(start=partial(_refuse, why))
        for kind, why in SHARED_MEMORY.items():
            status = partial(_no_regions, why)
            found[f"{kind}Status"] = self._answered(status, METHODS[f"{kind}Status"][0])
            found[f"{kind}Unregister"] = Method(start=lambda call, data: call.answer(b""))
        if (regions := self._surface.regions) is not None:
            for name, handler in grpc_handlers(regions).items():
                found[name] = _unless_of_tenant(self._answered(handler, METHODS[name][0]), found[name])
        found["ServerMetadata"] = Method(start=self._server_metadata)
        found["ModelInfer"] = Method(start=self._infer.start)
        found["ModelStreamInfer"] = Method(open=self._streams.open)
        health = {
            "Check": self._answered(self._check, HEALTH_METHODS["Check"][0]),
            "Watch": Method(start=self._watch.start),
        }
        return {
            **{f"/{SERVICE}/{name}".encode(): self._limited(name, method) for name, method in found.items()},
            **{f"/{HEALTH_SERVICE}/{name}".encode(): self._limited(name, method) for name, method in health.items()},
            KEEP_METHOD: Method(start=self._keep),
            **self._reflection.methods(),
        }

    def _limited(self, name: str, method: Method) -> Method:
        return replace(method, restriction=self.restricted.get(name))

    def stop(self, drain_s: float) -> None:
        """End the streams that would stay open for ever; the server drains within `drain_s`."""
        self._streams.stop(drain_s)
        self._watch.stop()
        self._reflection.stop()

    def _keep(self, call: GrpcCall, data: Body) -> None:
        """Send the spans of traces that a server in front asks for. Other senders find no such method."""
        if not call.plan.context.trusted:
            raise NotSupported("Method not found!")
        kept = keep_traces(self._surface, bytes(data))
        if kept is None:
            raise InvalidRequest(f"send up to {MAX_TRACES} trace ids, one a line")
        call.answer(kept)

    def _answered(self, handler: _Handler, request_class: type[Message]) -> Method:
        """Return a method whose answer is the handler's."""

        def start(call: GrpcCall, data: Body) -> None:
            call.answer(handler(parse(request_class, data)).SerializeToString())

        return Method(start=start)

    def _answered_later(self, handler: _Slow, request_class: type[Message]) -> Method:
        """Return a method whose handler takes its time, in a task that ends when the caller leaves."""

        async def run(call: GrpcCall, request: Message) -> None:
            try:
                answer = await handler(request)
            except Exception as failure:
                call.refuse(as_inference_error(failure))
            else:
                call.answer(answer.SerializeToString())

        def start(call: GrpcCall, data: Body) -> None:
            task = self._surface.control.spawn(run(call, parse(request_class, data)))
            call.ends_s = call.own_deadline_s
            call.on_client_left = task.cancel  # type: ignore[assignment]  # what it returns is not needed

        return Method(start=start)

    def _server_live(self, request: Message) -> Message:
        return v2_pb2.ServerLiveResponse(live=True)

    def _server_ready(self, request: Message) -> Message:
        return v2_pb2.ServerReadyResponse(ready=self._surface.readiness()[0])

    def _model_ready(self, request: v2_pb2.ModelReadyRequest) -> Message:
        try:
            ready = self._surface.model_ready(request.name, request.version)
        except UnknownModel:
            ready = False  # as in Triton: clients poll until a model exists
        return v2_pb2.ModelReadyResponse(ready=ready)

    def _server_metadata(self, call: GrpcCall, data: Body) -> None:
        parse(v2_pb2.ServerMetadataRequest, data)
        name, listed = self._surface.server_id, self._surface.extensions(of_tenant=call.plan.of_tenant)
        answer = v2_pb2.ServerMetadataResponse(name=name, version=SERVER_VERSION, extensions=listed)
        call.answer(answer.SerializeToString())

    def _model_metadata(self, request: v2_pb2.ModelMetadataRequest) -> Message:
        catalog = self._surface.catalog
        return metadata_message(catalog.metadata(request.name, request.version))

    def _model_config(self, request: v2_pb2.ModelConfigRequest) -> Message:
        return v2_pb2.ModelConfigResponse(config=self._surface.catalog.config(request.name, request.version))

    async def _model_statistics(self, request: v2_pb2.ModelStatisticsRequest) -> Message:
        found = [each async for each in self._surface.statistics(request.name, request.version)]
        return v2_pb2.ModelStatisticsResponse(model_stats=found)

    def _check(self, request: health_pb2.HealthCheckRequest) -> Message:
        serving = is_serving(self._surface, request.service)
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    def _log_settings(self, request: v2_pb2.LogSettingsRequest) -> Message:
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

    def _trace_setting(self, request: v2_pb2.TraceSettingRequest) -> Message:
        traces = self._surface.traces
        traces.change(request.model_name, {name: list(each.value) for name, each in request.settings.items()})
        response = v2_pb2.TraceSettingResponse()
        for name, texts in traces.shown(request.model_name).items():
            response.settings[name].value.extend(texts)
        return response


def is_serving(surface: Surface, service: str) -> bool:
    """Return whether the server serves ("" and the name of v2's service), or the model of that name. Raises
    UnknownModel.
    """
    return surface.readiness()[0] if service in ("", SERVICE) else surface.model_ready(service, "")


class HealthWatch:
    """The method `Watch` of `grpc.health.v1.Health`."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._watches = Watches()
        self.stop = self._watches.stop

    def start(self, call: GrpcCall, data: Body) -> None:
        """Begin to watch. Raises BadMessage."""
        service = parse(health_pb2.HealthCheckRequest, data).service
        call.ends_s = call.own_deadline_s
        end = partial(call.refuse, ServerStopping())
        watch = Watch(self._watches, partial(self._status, service), call.send, end)
        call.on_client_left, call.on_room = watch.finished, watch.resume

    def _status(self, service: str) -> int:
        try:
            return SERVING if is_serving(self._surface, service) else NOT_SERVING
        except UnknownModel:
            return SERVICE_UNKNOWN


def _refuse(why: str, call: GrpcCall, data: Body) -> None:
    call.refuse(NotSupported(why))


async def serve_grpc(
    frontend: GrpcFrontend,
    sock: socket.socket,
    surface: Surface,
    encodings: Encodings,
    *,
    max_message_bytes: int,
    max_age_s: float = inf,
    max_calls: int = MAX_CALLS,
    tls: ssl.SSLContext | None = None,
) -> HttpServer:
    """Serve the methods on `sock`.

    max_age_s: seconds of a connection, inf for no limit. max_calls: the most calls that are under way at once, over all
    connections.
    """
    restrictions = list(dict.fromkeys(frontend.restricted.values()))
    timeout_s, sampling = surface.default_timeout_s, surface.sink.sampling
    plans = {
        each: CallPlans(trusted=each, default_timeout_s=timeout_s, sampling=sampling, restrictions=restrictions)
        for each in (True, False)
    }
    port = GrpcPort(
        methods=frontend.methods(),
        plans=plans,
        encodings=encodings,
        max_message_bytes=max_message_bytes,
        max_calls=max_calls,
    )
    server = HttpServer(HttpLimits())
    limits = H2Limits(max_age_s=max_age_s)

    def connection(front: Http2Front) -> GrpcConnection:
        return GrpcConnection(server, port, limits, trusted=front.peer in surface.peers)

    await server.open(lambda: Http2Front(server, connection, refuse_http1), sock, tls=tls)
    return server


def _unless_of_tenant(method: Method, otherwise: Method) -> Method:
    """Return a method that calls `otherwise` for a call that a gateway sent for a tenant."""

    def start(call: GrpcCall, data: Body) -> None:
        chosen = otherwise.start if call.plan.of_tenant else method.start
        assert chosen is not None
        chosen(call, data)

    return Method(start=start)


def _no_regions(why: str, request: Any) -> Message:
    """Answer that there are no regions of shared memory; refuse to answer about a certain one."""
    if request.name:
        raise NotSupported(why)
    return v2_pb2.SystemSharedMemoryStatusResponse()
