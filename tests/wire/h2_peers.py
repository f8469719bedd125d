"""HTTP/2 peers over loopback: a server of ours that echoes or holds, borrowers of our endpoint, the `h2` library."""

import asyncio
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import h2.settings

from oriel_wire.engine.h2_server import H2ServerConnection
from oriel_wire.engine.h2_upstream import H2Endpoint, H2Upstream, UpstreamStream
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.server import ServerConnection
from oriel_wire.errors import UpstreamError
from oriel_wire.h1.request import RequestHead
from oriel_wire.h2.hpack import Field
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

from .engine_client import bound
from .h2.recorders import TRAILERS, Recorder, block

ANSWER: list[Field] = [(b":status", b"200"), (b"content-type", b"text/plain")]
GRPC_ANSWER: list[Field] = [(b":status", b"200"), (b"content-type", b"application/grpc")]
HTTP1_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nh1"


def request(path: bytes) -> list[Field]:
    return [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]


# A server of ours ----------------------------------------------------------------------------------------------------


class Call(Stream):
    """One request at the server, with what came on it."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__()
        self.connection = connection
        self.path = b""
        self.head = ANSWER
        self.body = bytearray()
        self.ended = False
        self.reset: int | None = None
        self.arrived_s = self.late_s = 0.0

    def answer(self, body: bytes = b"") -> None:
        self.connection.send_headers(self, block(self.head), False)
        self.connection.send_data(self, body, False)
        self.connection.send_headers(self, block(TRAILERS), True)


class App:
    """What the connections of a server share. calls: all that began; connections: all that were taken over."""

    def __init__(self, limits: H2Limits) -> None:
        self.limits = limits
        self.calls: list[Call] = []
        self.connections: list[Connection] = []

    def __getitem__(self, path: bytes) -> Call:
        """The last call of this path."""
        return next(call for call in reversed(self.calls) if call.path == path)


class Connection(H2ServerConnection):
    """/echo answers with the whole request; /chat with each piece; /keep consumes nothing; /refuse has a large head and
    no body; /early answers before the request has ended. Other paths are held.
    """

    def __init__(self, server: HttpServer, app: App) -> None:
        super().__init__(server, app.limits)
        self.app = app
        app.connections.append(self)

    def new_stream(self, stream_id: int) -> Stream:
        return Call(self)

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        assert isinstance(stream, Call)
        stream.path = dict(fields)[b":path"]
        if (b"content-type", b"application/grpc") in fields:
            stream.head = GRPC_ANSWER
        stream.arrived_s, stream.late_s = self.arrived_s, self.late_s
        self.app.calls.append(stream)
        if stream.path == b"/chat":
            self.send_headers(stream, block(stream.head), False)
        elif stream.path == b"/refuse":
            self.send_headers(stream, block([(b":status", b"403"), (b"x-why", b"w" * 15_000)]), True)
        elif stream.path == b"/early":
            stream.answer(b"enough")
            self.linger(stream)
        if end:
            self._ended(stream)

    def on_too_large(self, stream: Stream, end: bool) -> None:
        self.send_headers(stream, block([(b":status", b"431")]), True)

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, Call)
        stream.body += data
        if stream.path == b"/chat":
            self.send_data(stream, bytes(data), False)
        if stream.path != b"/keep":
            self.consumed(stream, len(data))
        if end:
            self._ended(stream)

    def on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        assert isinstance(stream, Call)
        self._ended(stream)

    def _ended(self, stream: Call) -> None:
        stream.ended = True
        if stream.path == b"/echo":
            stream.answer(bytes(stream.body))
        elif stream.path == b"/chat":
            self.send_headers(stream, block(TRAILERS), True)

    def on_reset(self, stream: Stream, code: int) -> None:
        assert isinstance(stream, Call) and stream.reset is None
        stream.reset = code


class Front(ServerConnection):
    """Answers HTTP/1.1 by `HTTP1_ANSWER`, and hands HTTP/2 over."""

    def __init__(self, server: HttpServer, app: App) -> None:
        super().__init__(server)
        self.app = app

    def on_head(self, head: RequestHead) -> None: ...
    def on_data(self, data: bytes | memoryview) -> None: ...
    def on_lost(self) -> None: ...

    def on_end(self) -> None:
        self.transport.write(HTTP1_ANSWER)
        self.answered(close=False)

    def on_refused(self, status: int, message: str) -> None:
        self.transport.write(b"HTTP/1.1 %d refused\r\ncontent-length: 0\r\n\r\n" % status)

    def on_http2(self, data: bytes) -> bool:
        Connection(self.server, self.app).take_over(self.transport, self.peer, self.peer_name, data)
        return True


async def serve(limits: HttpLimits | None = None, **h2_limits: Any) -> tuple[HttpServer, App]:
    app = App(H2Limits(**h2_limits))
    server = HttpServer(limits or HttpLimits())
    await server.open(lambda: Front(server, app), bound())
    return server, app


# A client of ours ----------------------------------------------------------------------------------------------------


class Answer(UpstreamStream):
    """Writes down what comes in its borrower."""

    def head(self, fields: list[Field], end: bool) -> None:
        self.sink.fields = fields
        self._ended(end)

    def data(self, data: bytes | memoryview, end: bool) -> None:
        self.received(len(data))
        self.sink.body += data
        self._ended(end)

    def trailers_came(self, fields: list[Field]) -> None:
        self.sink.trailers = fields
        self._ended(True)

    def room(self) -> None:
        self.sink.rooms += 1

    def _ended(self, end: bool) -> None:
        if end:
            sink = self.sink
            self.complete()
            sink.complete = True
            sink.done.set()


class Borrower:
    """Borrows one stream and sends one request. done: set by the answer's end or by `failed`."""

    def __init__(
        self, endpoint: H2Endpoint, path: bytes = b"/echo", body: bytes = b"", *, end: bool = True, paused: bool = False
    ) -> None:
        self.endpoint = endpoint
        self.path = path
        self.to_send = body
        self.end = end
        self.paused = paused
        self.stream: UpstreamStream | None = None
        self.fields: list[Field] = []
        self.body = bytearray()
        self.trailers: list[Field] = []
        self.rooms = 0
        self.complete = False
        self.error: UpstreamError | None = None
        self.done = asyncio.Event()
        stream = endpoint.begin(self, asyncio.get_running_loop().time())
        if stream is not None:
            self.connected(stream)

    def connected(self, connection: UpstreamStream) -> None:
        assert self.stream is None and self.error is None
        self.stream = connection
        if self.paused:
            connection.pause()
        connection.send(block(request(self.path)), self.to_send, self.end)

    def failed(self, error: UpstreamError) -> None:
        assert self.error is None and not self.complete
        self.error = error
        self.done.set()

    async def answer(self) -> bytes:
        """The body, once the answer is complete."""
        async with asyncio.timeout(240):
            await self.done.wait()
        if self.error is not None:
            raise self.error
        return bytes(self.body)


def endpoint_of(port: int, **options: Any) -> H2Endpoint:
    return H2Endpoint("127.0.0.1", port, Answer, connect_timeout_s=options.pop("connect_timeout_s", 120.0), **options)


def connections_of(endpoint: H2Endpoint) -> list[H2Upstream]:
    """Return those that take streams."""
    return list(endpoint._connections)


# The library ---------------------------------------------------------------------------------------------------------


class Library(asyncio.Protocol):
    """A peer made of the `h2` library. As a server it echoes what it is sent, but for /hold.

    acknowledges: returns credit as data comes. mute: sends nothing, not even acknowledgements, once it is set.
    """

    def __init__(self, *, client: bool, window: int = 65535, max_streams: int = 100) -> None:
        self.codec = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=client, header_encoding=False, validate_inbound_headers=True)
        )
        names = h2.settings.SettingCodes
        values = {names.INITIAL_WINDOW_SIZE: window, names.MAX_CONCURRENT_STREAMS: max_streams}
        self.codec.local_settings = h2.settings.Settings(client=client, initial_values=values)
        self.client = client
        self.acknowledges = True
        self.mute = False
        self.transport: asyncio.Transport
        self.fields: dict[int, list[Field]] = {}
        self.bodies: dict[int, bytearray] = {}
        self.trailers: dict[int, list[Field]] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goaways: list[tuple[int, int]] = []
        self.pings = 0
        self.settled = False  # the peer has acknowledged our settings
        self.lost = False
        self._to_send: dict[int, tuple[bytearray, list[Field] | None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is not registered
        self.codec.initiate_connection()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def flush(self) -> None:
        data = self.codec.data_to_send()
        if data and not self.mute:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        for event in self.codec.receive_data(data):
            match event:
                case h2.events.RequestReceived() | h2.events.ResponseReceived():
                    self.fields[event.stream_id] = [(bytes(n), bytes(v)) for n, v in event.headers]
                    self.bodies[event.stream_id] = bytearray()
                case h2.events.DataReceived():
                    self.bodies[event.stream_id] += event.data
                    if self.acknowledges:
                        self.codec.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    if not self.client and dict(self.fields[event.stream_id])[b":path"] == b"/chat":
                        self.send(event.stream_id, event.data, None)
                case h2.events.TrailersReceived():
                    self.trailers[event.stream_id] = [(bytes(n), bytes(v)) for n, v in event.headers]
                case h2.events.StreamEnded():
                    self.ended.add(event.stream_id)
                    if not self.client:
                        self._answer(event.stream_id)
                case h2.events.StreamReset():
                    self.resets[event.stream_id] = int(event.error_code)
                case h2.events.ConnectionTerminated():
                    self.goaways.append((event.last_stream_id, int(event.error_code)))
                case h2.events.PingReceived():
                    self.pings += 1
                case h2.events.SettingsAcknowledged():
                    self.settled = True
                case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                    for stream_id in list(self._to_send):
                        self._pump(stream_id)
        self.flush()

    def _answer(self, stream_id: int) -> None:
        path = dict(self.fields[stream_id])[b":path"]
        if path == b"/chat":
            self.send(stream_id, b"", TRAILERS)
        elif path == b"/echo":
            self.send(stream_id, bytes(self.bodies[stream_id]), TRAILERS)

    def send(self, stream_id: int, data: bytes, trailers: list[Field] | None) -> None:
        """Send data as the windows allow, the head of an answer before it, and trailers behind it."""
        if stream_id not in self._to_send:
            if not self.client:
                self.codec.send_headers(stream_id, ANSWER)
            self._to_send[stream_id] = (bytearray(), None)
        waiting = self._to_send[stream_id][0]
        waiting += data
        self._to_send[stream_id] = (waiting, trailers)
        self._pump(stream_id)
        self.flush()

    def _pump(self, stream_id: int) -> None:
        waiting, trailers = self._to_send[stream_id]
        while waiting:
            room = min(self.codec.local_flow_control_window(stream_id), self.codec.max_outbound_frame_size)
            if room <= 0:
                return
            self.codec.send_data(stream_id, bytes(waiting[:room]))
            del waiting[:room]
        if trailers is not None:
            self.codec.send_headers(stream_id, trailers, end_stream=True)
            del self._to_send[stream_id]

    def begin(self, path: bytes, *, end: bool = False) -> int:
        """Open a stream of a client."""
        stream_id: int = self.codec.get_next_available_stream_id()
        self.codec.send_headers(stream_id, request(path), end_stream=end)
        self.flush()
        return stream_id

    def has(self, stream_id: int, body: bytes) -> bool:
        """Whether this has come on the stream, and nothing else."""
        return self.bodies.get(stream_id) == body

    def raw(self, data: bytes) -> None:
        """Send bytes of which the library knows nothing."""
        self.transport.write(data)


class OurCodec(asyncio.Protocol):
    """A client made of our codec alone: the library takes no frame behind a GOAWAY."""

    def __init__(self) -> None:
        self.codec = Recorder(client=True)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.codec.receive(data, 0.0)
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.codec.taken())


async def library_client(port: int, **options: Any) -> Library:
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(lambda: Library(client=True, **options), "127.0.0.1", port)
    return made


class LibraryServer:
    """A listening socket whose connections are `Library` servers."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.connections: list[Library] = []
        self.port = 0
        self._server: asyncio.Server

    def _made(self) -> Library:
        made = Library(client=False, **self._options)
        self.connections.append(made)
        return made

    async def __aenter__(self) -> "LibraryServer":
        sock = bound()
        self._server = await asyncio.get_running_loop().create_server(self._made, sock=sock)
        self.port = sock.getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self.connections:
            connection.transport.abort()
        await asyncio.sleep(0)
