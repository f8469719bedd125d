"""The connections of the gRPC port: HTTP/2 by prior knowledge, one `GrpcCall` per stream.

Four times a second the server's sweep ends calls whose message is late or whose own deadline has passed.
"""

from oriel_inference.errors import Outcome
from oriel_inference.servers.grpc_call import GrpcCall, GrpcPort
from oriel_inference.servers.statuses import head_refusal
from oriel_wire.engine.h2_server import H2ServerConnection
from oriel_wire.engine.limits import reason_phrase
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.engine.server import ServerConnection
from oriel_wire.h1 import RequestHead
from oriel_wire.h2.grpc import RESOURCE_EXHAUSTED
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

_HTTP1 = "this port serves gRPC over HTTP/2, the HTTP port serves HTTP/1.1"


class GrpcConnection(H2ServerConnection):
    """One connection."""

    __slots__ = ("_plans", "_port")

    def __init__(self, server: HttpServer, port: GrpcPort, limits: H2Limits, *, trusted: bool) -> None:
        super().__init__(server, limits)
        self._port = port
        self._plans = port.plans[trusted]

    def new_stream(self, stream_id: int) -> GrpcCall:
        return GrpcCall(self, self._port, self._plans)

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        assert isinstance(stream, GrpcCall)
        if self._judged is not None:
            self.trust_fields()
        stream.begin(fields, self.arrived_s)
        if end:
            stream.received(b"", True)

    def on_too_large(self, stream: Stream, end: bool) -> None:
        assert isinstance(stream, GrpcCall)
        what = f"the metadata is larger than {self.limits.max_header_list_bytes} bytes"
        stream.end_with(RESOURCE_EXHAUSTED, what, Outcome.TOO_LARGE)

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, GrpcCall)
        stream.received(data, end)

    def on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        assert isinstance(stream, GrpcCall)
        stream.received(b"", True)

    def on_room(self, stream: Stream) -> None:
        assert isinstance(stream, GrpcCall)
        stream.room()

    def on_reset(self, stream: Stream, code: int) -> None:
        assert isinstance(stream, GrpcCall)
        stream.left()

    def sweep(self, now: float) -> None:
        super().sweep(now)
        if self.closed:
            return
        for stream in list(self.streams.values()):
            if isinstance(stream, GrpcCall) and now >= stream.ends_s:
                stream.give_up()


class Front(ServerConnection):
    """A connection of which nothing was read yet: it is handed over if it begins with HTTP/2, and refused if not."""

    __slots__ = ("_h2_limits", "_peers", "_port")

    def __init__(self, server: HttpServer, port: GrpcPort, peers: TrustedPeers, limits: H2Limits) -> None:
        super().__init__(server)
        self._h2_limits = limits
        self._port = port
        self._peers = peers

    def on_http2(self, data: bytes) -> bool:
        trusted = self.peer in self._peers
        taken = GrpcConnection(self.server, self._port, self._h2_limits, trusted=trusted)
        taken.take_over(self.transport, self.peer, self.peer_name, data)
        return True

    def on_head(self, head: RequestHead) -> None:
        self._refuse_http1(head, 400, _HTTP1)
        self.answered(close=True)

    def on_data(self, data: bytes | memoryview) -> None:
        """Do nothing: this is never called, because every head is refused."""

    def on_end(self) -> None:
        """Do nothing: this is never called, because every head is refused."""

    def on_lost(self) -> None:
        """Nothing is under way."""

    def on_refused(self, status: int, message: str) -> None:
        self._refuse_http1(self.head, status, message)

    def _refuse_http1(self, head: RequestHead | None, status: int, message: str) -> None:
        refusal = head_refusal(head, status, message)
        fields = "".join([f"{name}: {value}\r\n" for name, value in refusal.headers])
        start = f"HTTP/1.1 {status} {reason_phrase(status)}\r\nconnection: close\r\n{fields}"
        size = len(refusal.body)
        self.transport.write(f"{start}content-length: {size}\r\n\r\n".encode("latin-1") + refusal.body)
