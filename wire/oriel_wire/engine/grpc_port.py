"""The server's side of a port that serves gRPC alone: HTTP/2 by prior knowledge, one `PortCall` per stream.

Four times a second the server's sweep gives up the calls that are past `ends_s`.
"""

from collections.abc import Callable
from math import inf

from mypy_extensions import mypyc_attr

from oriel_wire.engine.h2_server import H2ServerConnection
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.server import ServerConnection
from oriel_wire.h1.request import RequestHead
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.streams import Stream


@mypyc_attr(allow_interpreted_subclasses=True)
class PortCall(Stream):
    """One call. ends_s: the monotonic time when the port gives it up; inf where nothing has to come any more."""

    __slots__ = ("ends_s",)

    def __init__(self) -> None:
        super().__init__()
        self.ends_s = inf

    def begin(self, fields: list[Field], now: float) -> None:
        """Begin the call with its metadata, which arrived at `now`."""

    def received(self, data: bytes | memoryview, end: bool) -> None:
        """Take what has come on the stream."""

    def too_large(self, message: str) -> None:
        """Refuse the call for the size of its metadata."""

    def room(self) -> None:
        """The client has read what could not be passed on."""

    def client_left(self) -> None:
        """The client has reset the call, or its connection is lost."""

    def give_up(self) -> None:
        """End a call that is past `ends_s`."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PortConnection(H2ServerConnection):
    """One connection, whose streams are `PortCall`s."""

    __slots__ = ()

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        assert isinstance(stream, PortCall)
        stream.begin(fields, self.arrived_s)
        if end:
            stream.received(b"", True)

    def on_too_large(self, stream: Stream, end: bool) -> None:
        assert isinstance(stream, PortCall)
        stream.too_large(f"the metadata is larger than {self.limits.max_header_list_bytes} bytes")

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, PortCall)
        stream.received(data, end)

    def on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        assert isinstance(stream, PortCall)
        stream.received(b"", True)

    def on_room(self, stream: Stream) -> None:
        assert isinstance(stream, PortCall)
        stream.room()

    def on_reset(self, stream: Stream, code: int) -> None:
        assert isinstance(stream, PortCall)
        stream.client_left()

    def sweep(self, now: float) -> None:
        super().sweep(now)
        if self.closed:
            return
        for stream in list(self.streams.values()):
            if isinstance(stream, PortCall) and now >= stream.ends_s:
                stream.give_up()


class Http2Front(ServerConnection):
    """A connection of which nothing was read yet: it is handed over if it begins with HTTP/2, and refused if not.

    connection: makes the one that takes over. refusal: returns a whole answer over HTTP/1.1 to a head, as far as it was
    read, with this status and reason.
    """

    __slots__ = ("_connection", "_refusal")

    def __init__(
        self,
        server: HttpServer,
        connection: Callable[["Http2Front"], H2ServerConnection],
        refusal: Callable[[RequestHead | None, int, str], bytes],
    ) -> None:
        super().__init__(server)
        self._connection = connection
        self._refusal = refusal

    def on_http2(self, data: bytes) -> bool:
        self._connection(self).take_over(self.transport, self.peer, self.peer_name, data)
        return True

    def on_head(self, head: RequestHead) -> None:
        message = "this port serves gRPC over HTTP/2, the HTTP port serves HTTP/1.1"
        self.transport.write(self._refusal(head, 400, message))
        self.answered(close=True)

    def on_data(self, data: bytes | memoryview) -> None:
        """Do nothing: this is never called, because every head is refused."""

    def on_end(self) -> None:
        """Do nothing: this is never called, because every head is refused."""

    def on_lost(self) -> None:
        """Nothing is under way."""

    def on_refused(self, status: int, message: str) -> None:
        self.transport.write(self._refusal(self.head, status, message))
