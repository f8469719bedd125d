"""The gRPC methods that need no key: `grpc.health.v1.Health`, and `ServerLive` and `ServerReady` of the v2 service.

Only the gateway itself is a service here: which models there are is not told without a key.
"""

from asyncio import get_running_loop
from typing import Final

from google.protobuf.message import DecodeError

from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.http_status import CODES
from oriel_gateway.ingress.grpc_rules import HEALTH_METHODS, unprefixed
from oriel_gateway.ingress.grpc_trailers import OK, about, refusal
from oriel_gateway.ingress.grpc_view import GrpcView
from oriel_gateway.ingress.h2_connection import PublicConnection
from oriel_wire.engine.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, Watch, status_message
from oriel_wire.h2.grpc import HEAD, prefix
from oriel_wire.h2.streams import Stream
from oriel_wire.v2.grpc_names import SERVICE
from oriel_wire.v2.proto.health_pb2 import HealthCheckRequest

__all__ = ["MAX_REQUEST_BYTES", "MAX_WATCHES", "HealthCall", "answer_here"]

_TRUE: Final = b"\x08\x01"  # boolean field 1 = true; also HealthCheckResponse{status: SERVING}
MAX_REQUEST_BYTES: Final = 1024
MAX_WATCHES: Final = 1024  # watches per gateway at once; bounded because a watch needs no key
MAX_OF_A_CONNECTION: Final = 4
MESSAGE_S: Final = 10.0  # for the request's message to come


def answer_here(view: GrpcView) -> "HealthCall | None":
    """Answer a method that needs no key, or return what answers it when its message is here."""
    path = view.rpc.path
    # gRPC-Web is for pages: none of them watches, and `Check` is about the gateway whatever it names.
    if path not in HEALTH_METHODS or view.connection.web:
        _answer(view, _TRUE if view.gateway.ready else b"")
        return None
    call = HealthCall(view, path.endswith(b"Watch"))
    if view.ends:
        call.came(b"", True)
    return call


class HealthCall:
    """One call of `Check` or `Watch`: handles what comes on its stream until it is over."""

    __slots__ = ("_view", "_data", "_late", "_service", "_watch", "_watches")

    def __init__(self, view: GrpcView, watches: bool) -> None:
        self._view = view
        self._watches = watches
        self._data = b""
        self._service = ""
        self._watch: Watch | None = None
        self._late = get_running_loop().call_later(MESSAGE_S, self._give_up)

    def _give_up(self) -> None:
        self._stop()
        message = f"the message of a health check did not come within {MESSAGE_S:g} s"
        self._view.refuse(Refused(Outcome.DEADLINE_EXCEEDED, message))

    def came(self, data: bytes | memoryview, end: bool) -> None:
        """Bytes of the request came."""
        view = self._view
        view.connection.consumed(_stream(view), len(data))
        self._data += data
        try:
            if len(self._data) > MAX_REQUEST_BYTES:
                raise Refused(Outcome.TOO_LARGE, f"a health check may have at most {MAX_REQUEST_BYTES} bytes")
            if end:
                self._begin()
        except (Refused, DecodeError) as error:
            self._stop()
            broken = Refused(Outcome.INVALID_REQUEST, "the message is no HealthCheckRequest")
            view.refuse(error if isinstance(error, Refused) else broken)

    def _begin(self) -> None:
        view, gateway = self._view, self._view.gateway
        message, compressed = unprefixed(self._data) if self._data else (b"", False)
        assert isinstance(message, bytes)
        if compressed:
            raise Refused(Outcome.ENCODING_UNSUPPORTED, "send a health check without compression")
        self._service = HealthCheckRequest.FromString(message).service
        if self._watches:
            connection = view.connection
            assert isinstance(connection, PublicConnection)
            if connection.watches >= MAX_OF_A_CONNECTION:
                raise Refused(Outcome.QUEUE_FULL, f"a connection may have at most {MAX_OF_A_CONNECTION} health watches")
            if len(gateway.health_watches.open) >= MAX_WATCHES:
                raise Refused(Outcome.QUEUE_FULL, f"{MAX_WATCHES} watch the health of this gateway already")
            self._late.cancel()
            connection.watches += 1
            connection.send_headers(_stream(view), HEAD, False)
            self._watch = Watch(gateway.health_watches, self._status, self._send, self._end)
        elif (status := self._status()) == SERVICE_UNKNOWN:
            self._stop()
            view.refuse(Refused(Outcome.NOT_FOUND, "the gateway has no service of this name"))
        else:
            self._stop()
            _answer(view, status_message(status))

    def _status(self) -> int:
        gateway = self._view.gateway
        if gateway.draining and not gateway.health_watches.stopping:
            get_running_loop().call_soon(gateway.health_watches.stop)
        if self._service not in ("", SERVICE):
            return SERVICE_UNKNOWN
        return SERVING if gateway.ready else NOT_SERVING

    def _send(self, message: bytes) -> bool:
        stream = _stream(self._view)
        self._view.connection.send_data(stream, prefix(len(message)) + message, False)
        return stream.pending is None

    def _end(self) -> None:
        view, refused = self._view, stopping()
        assert view.client is not None
        self._stop()
        block = refusal(refused, CODES[refused.outcome], view.mark, 0.0)
        view.connection.send_headers(_stream(view), block, True)
        view.client.answered(close=False)

    def on_writable(self, writable: bool) -> None:
        """The client has read what was sent."""
        if writable and self._watch is not None:
            self._watch.resume()

    def client_left(self) -> None:
        """The client has left."""
        self._stop()
        self._view.over()

    def _stop(self) -> None:
        self._late.cancel()
        if self._watch is not None:
            self._watch.finished()
            self._watch = None
            assert isinstance(self._view.connection, PublicConnection)
            self._view.connection.watches -= 1


def _answer(view: GrpcView, message: bytes) -> None:
    connection, stream = view.connection, _stream(view)
    assert view.client is not None
    connection.send_headers(stream, HEAD, False)
    connection.send_data(stream, prefix(len(message)) + message, False)
    connection.send_headers(stream, OK + about(view.mark, 0.0, 0.0), True)
    view.client.answered(close=False)


def _stream(view: GrpcView) -> Stream:
    assert view.stream is not None
    return view.stream
