"""The gRPC methods that need no key: `grpc.health.v1.Health`, and `ServerLive` and `ServerReady` of the v2 service.

Only the gateway itself is a service here: which models there are is not told without a key.
"""

from asyncio import get_running_loop
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError

from oriel_gateway.errors import Outcome, Refused, stopping
from oriel_gateway.grpc_codes import CODES
from oriel_gateway.ingress.grpc_rules import ALIVE_METHODS, HEALTH_METHODS, unprefixed
from oriel_gateway.ingress.grpc_trailers import OK, about, refusal
from oriel_gateway.ingress.grpc_web import GrpcWebOverH1, GrpcWebOverH2
from oriel_gateway.ingress.h2_connection import PublicConnection
from oriel_gateway.observe.tracing import Mark
from oriel_wire.engine.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, Watch, status_message
from oriel_wire.h2.grpc import HEAD, prefix
from oriel_wire.h2.streams import Stream
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto.health_pb2 import HealthCheckRequest

__all__ = ["MAX_REQUEST_BYTES", "MAX_WATCHES", "HealthCall", "answered_here"]

_TRUE: Final = b"\x08\x01"  # boolean field 1 = true; also HealthCheckResponse{status: SERVING}
MAX_REQUEST_BYTES: Final = 1024
MAX_WATCHES: Final = 1024  # of one gateway at once, since nobody needs a key for one
MAX_OF_A_CONNECTION: Final = 4
MESSAGE_S: Final = 10.0  # for the request's message to come


class Caller(Protocol):
    """The stream of the call, a `grpc.GrpcClient`. other: who handles what comes on it."""

    connection: PublicConnection | GrpcWebOverH1 | GrpcWebOverH2
    other: Any

    def turn_away(self, refused: Refused, code: int = -1) -> None:
        """Answer with an error."""

    def answered(self, *, close: bool) -> None:
        """The call is over."""


def answered_here(caller: Caller, path: bytes, mark: Mark, end: bool) -> bool:
    """Begin to answer a method that needs no key; False: it is none. end: no message comes."""
    web = caller.connection.web
    if path in HEALTH_METHODS and not web:
        caller.other = call = HealthCall(caller, path.endswith(b"Watch"), mark)
        if end:
            call.came(b"", True)
        return True
    if path not in ALIVE_METHODS and not path.endswith(b"Health/Check"):
        return False
    # gRPC-Web is for pages: none of them watches, and `Check` is about the gateway whatever it names.
    _answer(caller, _TRUE if caller.connection.gateway.ready else b"", mark)
    return True


class HealthCall:
    """One call of `Check` or `Watch`: handles what comes on the stream of `caller` until it is over."""

    __slots__ = ("_caller", "_data", "_late", "_mark", "_service", "_watch", "_watches")

    def __init__(self, caller: Caller, watches: bool, mark: Mark) -> None:
        self._caller = caller
        self._watches = watches
        self._mark = mark
        self._data = b""
        self._service = ""
        self._watch: Watch | None = None
        self._late = get_running_loop().call_later(MESSAGE_S, self._give_up)

    def _give_up(self) -> None:
        self.left()
        message = f"the message of a health check did not come within {MESSAGE_S:g} s"
        self._caller.turn_away(Refused(Outcome.DEADLINE_EXCEEDED, message))

    def came(self, data: bytes | memoryview, end: bool) -> None:
        """Bytes of the request came."""
        caller = self._caller
        caller.connection.consumed(_stream(caller), len(data))
        self._data += data
        try:
            if len(self._data) > MAX_REQUEST_BYTES:
                raise Refused(Outcome.TOO_LARGE, f"a health check has at most {MAX_REQUEST_BYTES} bytes")
            if end:
                self._begin()
        except (Refused, DecodeError) as error:
            self.left()
            broken = Refused(Outcome.INVALID_REQUEST, "the message is no HealthCheckRequest")
            caller.turn_away(error if isinstance(error, Refused) else broken)

    def _begin(self) -> None:
        caller, gateway = self._caller, self._caller.connection.gateway
        message, compressed = unprefixed(self._data) if self._data else (b"", False)
        assert isinstance(message, bytes)
        if compressed:
            raise Refused(Outcome.ENCODING_UNSUPPORTED, "send a health check without compression")
        self._service = HealthCheckRequest.FromString(message).service
        if self._watches:
            connection = caller.connection
            assert isinstance(connection, PublicConnection)
            if connection.watches >= MAX_OF_A_CONNECTION:
                raise Refused(Outcome.QUEUE_FULL, f"a connection has at most {MAX_OF_A_CONNECTION} health watches")
            if len(gateway.health_watches.open) >= MAX_WATCHES:
                raise Refused(Outcome.QUEUE_FULL, f"{MAX_WATCHES} watch the health of this gateway already")
            self._late.cancel()
            connection.watches += 1
            caller.connection.send_headers(_stream(caller), HEAD, False)
            self._watch = Watch(gateway.health_watches, self._status, self._send, self._end)
        elif (status := self._status()) == SERVICE_UNKNOWN:
            self.left()
            caller.turn_away(Refused(Outcome.NOT_FOUND, "the gateway has no service of this name"))
        else:
            self.left()
            _answer(caller, status_message(status), self._mark)

    def _status(self) -> int:
        gateway = self._caller.connection.gateway
        if gateway.draining and not gateway.health_watches.stopping:
            get_running_loop().call_soon(gateway.health_watches.stop)
        if self._service not in ("", SERVICE):
            return SERVICE_UNKNOWN
        return SERVING if gateway.ready else NOT_SERVING

    def _send(self, message: bytes) -> bool:
        stream = _stream(self._caller)
        self._caller.connection.send_data(stream, prefix(len(message)) + message, False)
        return stream.pending is None

    def _end(self) -> None:
        caller = self._caller
        self.left()
        refused = stopping()
        caller.connection.send_headers(_stream(caller), refusal(refused, CODES[refused.outcome], self._mark, 0.0), True)
        caller.answered(close=False)

    def on_writable(self, writable: bool) -> None:
        """The client has read what was sent."""
        if writable and self._watch is not None:
            self._watch.resume()

    def left(self) -> None:
        """The call is over: whatever still comes on the stream is ignored."""
        self._caller.other = None
        self._late.cancel()
        if self._watch is not None:
            self._watch.leave()
            self._watch = None
            assert isinstance(self._caller.connection, PublicConnection)
            self._caller.connection.watches -= 1


def _answer(caller: Caller, message: bytes, mark: Mark) -> None:
    connection, stream = caller.connection, _stream(caller)
    connection.send_headers(stream, HEAD, False)
    connection.send_data(stream, prefix(len(message)) + message, False)
    connection.send_headers(stream, OK + about(mark, 0.0, 0.0), True)
    caller.answered(close=False)


def _stream(caller: Caller) -> Stream:
    assert isinstance(caller, Stream)
    return caller
