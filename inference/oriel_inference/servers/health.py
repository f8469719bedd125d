"""`grpc.health.v1.Health`: the empty name or the service's name means the whole server, other names mean models."""

import asyncio

import grpc
from google.protobuf.message import DecodeError

from oriel_inference.errors import InvalidRequest, ServerStopping, UnknownModel
from oriel_inference.servers.grpc_call import Context, abort
from oriel_inference.servers.surface import Surface
from oriel_wire.v2.grpc import HEALTH_SERVICE, SERVICE
from oriel_wire.v2.proto import health_pb2

POLL_S = 0.5
LAST_WORD_S = 0.2

_Response = health_pb2.HealthCheckResponse


def is_serving(surface: Surface, service: str) -> bool:
    """Return whether the server or a model serves. Raises UnknownModel."""
    return surface.readiness()[0] if service in ("", SERVICE) else surface.model_ready(service, "")


class HealthWatch:
    """The method `Watch`: sends the state now, and every change within POLL_S, until one of both sides ends."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._stopping = asyncio.Event()

    def handler(self) -> "grpc.GenericRpcHandler[object, object]":
        """Return the handler to register with a server."""
        method = grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=_Response.SerializeToString)
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Watch": method})

    def stop(self) -> None:
        """End the streams because the server drains: every watcher gets the state, then its stream ends."""
        self._stopping.set()

    async def _watch(self, data: bytes, context: Context) -> None:
        try:
            service = health_pb2.HealthCheckRequest.FromString(data).service
        except DecodeError:
            await abort(context, InvalidRequest("the message is not what this method takes"))
        reported = None
        while True:
            status = self._status(service)
            if status != reported:
                await context.write(_Response(status=status))
                reported = status
            if self._stopping.is_set():
                # Clients built on gRPC's core may drop a message that arrives together with the end of its stream.
                await asyncio.sleep(LAST_WORD_S)
                await abort(context, ServerStopping())
            try:
                async with asyncio.timeout(POLL_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        try:
            return _Response.SERVING if is_serving(self._surface, service) else _Response.NOT_SERVING
        except UnknownModel:
            return _Response.SERVICE_UNKNOWN
