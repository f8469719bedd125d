"""`grpc.health.v1.Health`: the empty name or the service's name means the whole server, other names mean models."""

from functools import partial

from oriel_inference.errors import ServerStopping, UnknownModel
from oriel_inference.servers.grpc_call import Body, GrpcCall
from oriel_inference.servers.surface import Surface
from oriel_wire.engine.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, Watch, Watches
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import health_pb2
from oriel_wire.v2.proto_cost import parse


def is_serving(surface: Surface, service: str) -> bool:
    """Return whether the server or a model serves. Raises UnknownModel."""
    return surface.readiness()[0] if service in ("", SERVICE) else surface.model_ready(service, "")


class HealthWatch:
    """The method `Watch`."""

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
        call.on_leave, call.on_room = watch.leave, watch.resume

    def _status(self, service: str) -> int:
        try:
            return SERVING if is_serving(self._surface, service) else NOT_SERVING
        except UnknownModel:
            return SERVICE_UNKNOWN
