"""`grpc.health.v1.Health`: the empty name or the service's name means the whole server, other names mean models."""

import asyncio

from oriel_inference.errors import ServerStopping, UnknownModel
from oriel_inference.servers.grpc_call import Body, GrpcCall
from oriel_inference.servers.surface import Surface
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import health_pb2
from oriel_wire.v2.proto_cost import parse

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
        self._stopping = False
        self._watches: set[_Watch] = set()

    def start(self, call: GrpcCall, data: Body) -> None:
        """Begin to watch. Raises BadMessage."""
        watch = _Watch(self._surface, call, parse(health_pb2.HealthCheckRequest, data).service, self._watches)
        watch.poll()
        if self._stopping:
            watch.stop()

    def stop(self) -> None:
        """End the streams because the server drains: every watcher gets the state, then its stream ends."""
        self._stopping = True
        for watch in list(self._watches):
            watch.stop()


class _Watch:
    """One watcher. open_: all of them; it is among them until its call ends."""

    def __init__(self, surface: Surface, call: GrpcCall, service: str, open_: "set[_Watch]") -> None:
        self._surface = surface
        self._call = call
        self._service = service
        self._open = open_
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reported: health_pb2.HealthCheckResponse.ServingStatus | None = None
        self._may_send = True
        open_.add(self)
        call.ends_s = call.own_deadline_s
        call.on_leave = self._leave
        call.on_room = self._resume

    def poll(self) -> None:
        """Report the state if it has changed, and look again later."""
        self._timer = self._loop.call_later(POLL_S, self.poll)
        status = self._status()
        if status != self._reported and self._may_send:
            self._reported = status
            self._may_send = self._call.send(_Response(status=status).SerializeToString())

    def stop(self) -> None:
        """Report the state and end the stream."""
        self._cancel()
        self.poll()
        self._cancel()
        # Clients built on gRPC's core may drop a message that arrives together with the end of its stream.
        self._timer = self._loop.call_later(LAST_WORD_S, self._end)

    def _end(self) -> None:
        self._leave()
        self._call.refuse(ServerStopping())

    def _resume(self) -> None:
        self._may_send = True

    def _leave(self) -> None:
        self._cancel()
        self._open.discard(self)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _status(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        try:
            return _Response.SERVING if is_serving(self._surface, self._service) else _Response.NOT_SERVING
        except UnknownModel:
            return _Response.SERVICE_UNKNOWN
