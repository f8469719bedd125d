"""`grpc.reflection.v1` and `v1alpha`: tools such as grpcurl learn the services of the port from the port itself."""

from time import monotonic
from typing import Final
from weakref import WeakSet

from oriel_inference.errors import RequestTooLarge, ServerStopping
from oriel_inference.servers.grpc_call import Body, GrpcCall, Method
from oriel_wire.v2.proto import reflection_pb2
from oriel_wire.v2.proto_cost import parse
from oriel_wire.v2.reflection import MAX_REQUEST_BYTES, REFLECTION_SERVICES, answer

__all__ = ["SILENT_S", "Reflection"]

SILENT_S: Final = 30.0


class Reflection:
    """The method, and all streams that are open."""

    def __init__(self) -> None:
        self._open: WeakSet[_Stream] = WeakSet()
        self._stopping = False

    def methods(self) -> dict[bytes, Method]:
        """Return the method of both versions by its paths."""
        method = Method(open=self._begin)
        return {f"/{service}/ServerReflectionInfo".encode(): method for service in REFLECTION_SERVICES}

    def stop(self) -> None:
        """End the streams because the server drains."""
        self._stopping = True
        for stream in list(self._open):
            stream.stop()

    def _begin(self, call: GrpcCall) -> "_Stream":
        stream = _Stream(call)
        self._open.add(stream)
        if self._stopping:
            stream.stop()
        return stream


class _Stream:
    """One stream: each request is answered before the next one is read."""

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self.has_room = True
        call.on_room = self._resume
        self._expect()

    def message(self, data: Body, received_s: float) -> None:
        """See `Messages`."""
        if len(data) > MAX_REQUEST_BYTES:
            raise RequestTooLarge(f"the request has more than {MAX_REQUEST_BYTES} bytes")
        request = parse(reflection_pb2.ServerReflectionRequest, data)
        self._expect()
        self.has_room = self._call.send(answer(request).SerializeToString())

    def request_complete(self) -> None:
        """See `Messages`."""
        self._call.finish()

    def stop(self) -> None:
        """End the stream, if it is open, because the server drains."""
        self._call.refuse(ServerStopping())

    def _expect(self) -> None:
        self._call.ends_s = min(monotonic() + SILENT_S, self._call.own_deadline_s)

    def _resume(self) -> None:
        self.has_room = True
        self._call.read_on()
