"""gRPC-Web: the gRPC calls of browsers, over HTTP/1.1 and HTTP/2.

A page sends one body and cannot read trailers, so a call has one message, and its trailers are in the body of the
answer (`oriel_wire.h2.grpc_web`). To its `GrpcClient` such a call is like all others: in place of its connection it has
one of these, which offer what a call uses of a `PublicConnection`, and translate.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import ClassVar, Final, Protocol

from oriel_gateway.call.cors import cors_lines
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.ingress.h2_connection import PublicConnection
from oriel_policies.documents import Tenant
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.server import ServerConnection
from oriel_wire.errors import BadMessage
from oriel_wire.h1.chunked import LAST_CHUNK, chunk
from oriel_wire.h1.request import RequestHead
from oriel_wire.h2.frames import INTERNAL_ERROR
from oriel_wire.h2.grpc import HEAD, PREFIX_BYTES, RpcHead
from oriel_wire.h2.grpc_web import BINARY, TEXT, TextReader, encode_piece, metadata, trailer_frame
from oriel_wire.h2.hpack import Decoder, literal
from oriel_wire.h2.known_fields import Field as HeaderField
from oriel_wire.h2.streams import ENDED, Stream

__all__ = ["GrpcWebOverH1", "GrpcWebOverH2"]

# Reads the header blocks that calls write. They use no table: nothing is kept from one to the next.
_BLOCKS: Final = Decoder(max_list_bytes=256 * 1024, max_fields=1024)
_OF_HEAD: Final = (b":status", b"content-type")


class Caller(Protocol):
    """The call: `ingress.grpc.GrpcClient`, which describes these."""

    sending: int
    pending: deque[bytes | memoryview] | None

    def came(self, data: bytes | memoryview, end: bool) -> None: ...
    def client_left(self) -> None: ...
    def turn_away(self, refused: Refused) -> None: ...
    def on_writable(self, writable: bool) -> None: ...


class _GrpcWeb(ABC):
    """The part of the translation that HTTP/1.1 and HTTP/2 have in common.

    call: set by its maker. metadata: the fields that belong to the call.
    """

    web: ClassVar[bool] = True

    __slots__ = ("_encodes", "_lines", "_missing", "_reader", "call", "gateway", "metadata", "server")

    def __init__(self, gateway: Gateway, server: HttpServer, fields: list[HeaderField]) -> None:
        self.call: Caller
        self.gateway = gateway
        self.server = server
        self.metadata = metadata(fields)
        self._missing = 0  # bytes of the answer's current message that are still to be sent
        sent = dict(fields)
        kind, accepted = sent[b"content-type"].lower(), sent.get(b"accept", b"").lower()
        self._reader = TextReader() if kind.startswith(TEXT) else None
        self._encodes = accepted.startswith(TEXT) or (self._reader is not None and not accepted.startswith(BINARY))
        self._lines = [b"content-type: %b+proto" % (TEXT if self._encodes else BINARY), server.date]
        if origins := gateway.snapshot.http.cors_origins:
            self._lines += cors_lines(sent.get(b"origin", b"").decode("latin-1"), origins).split(b"\r\n")

    def came(self, data: bytes | memoryview, end: bool) -> None:
        """Bytes of the body came."""
        call = self.call
        if self._reader is not None and call.sending != ENDED:
            try:
                data = self._reader.feed(data, end)
            except BadMessage as error:
                call.turn_away(Refused(Outcome.INVALID_REQUEST, error.message))
                return
        if data or end:
            call.came(data, end)

    def send_headers(self, stream: Stream, block: bytes, end: bool) -> None:
        """Send the head of an answer, its trailers, or both as its head."""
        if stream.sending == ENDED:
            return
        fields = [field for field in _BLOCKS.decode(block) if field[0] not in _OF_HEAD]
        if block.startswith(HEAD):
            self.send_head([*self._lines, *[b"%b: %b" % field for field in fields]], end)
        elif self._missing:
            self.send_reset(stream, INTERNAL_ERROR)  # the trailers would be taken for the rest of a message
        else:
            self._send(trailer_frame(fields), True)

    def send_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        """Send messages or a part of one; where one begins, its whole prefix is there."""
        if not self._missing:
            self._missing = PREFIX_BYTES + int.from_bytes(data[1:PREFIX_BYTES], "big")
        self._missing -= len(data)
        self._send(data, False)

    def _send(self, data: bytes | memoryview, end: bool) -> None:
        self.send_body(encode_piece(data) if self._encodes else data, end)

    @abstractmethod
    def send_head(self, lines: list[bytes], end: bool) -> None:
        """Send the head of the answer, whose fields are written as for HTTP/1.1."""

    @abstractmethod
    def send_body(self, data: bytes | memoryview, end: bool) -> None:
        """Send more of its body."""

    @abstractmethod
    def send_reset(self, stream: Stream, code: int) -> None:
        """End the call so that nobody can take its answer for a whole one."""


class GrpcWebOverH2(_GrpcWeb):
    """A call on a stream of HTTP/2. Whatever is not translated goes to its connection."""

    __slots__ = (
        *("authenticated", "connection", "linger", "refuse_later", "refuses", "stream", "unread_bytes", "unwanted"),
    )

    def __init__(self, connection: PublicConnection, stream: Stream, fields: list[HeaderField]) -> None:
        super().__init__(connection.gateway, connection.server, fields)
        self.connection = connection
        self.stream = stream
        self.authenticated: Callable[[Callable[[], None], RpcHead | None], None] = connection.authenticated
        self.linger: Callable[[Stream], None] = connection.linger
        self.unread_bytes: Callable[[Stream], int] = connection.unread_bytes
        self.unwanted: Callable[[int], None] = connection.unwanted
        self.refuses: Callable[[Tenant], bool] = connection.refuses
        self.refuse_later: Callable[[Stream, Callable[[], None]], None] = connection.refuse_later

    @property
    def arrived_s(self) -> float:
        """The time at which the latest bytes of the connection came."""
        return self.connection.arrived_s

    @property
    def departed(self) -> bool:
        """Return whether the client has closed behind bytes that were not read."""
        return self.connection.departed

    def consumed(self, stream: Stream, size: int) -> None:
        """Give credit for `size` bytes of the message back to the client; for a body of base64 text, for all that
        came.
        """
        self.connection.consumed(stream, size if self._reader is None else stream.held_bytes)

    def widen(self, stream: Stream, size: int) -> None:
        """Let the client send a message of this size ahead."""
        self.connection.widen(stream, size if self._reader is None else (size + 2) // 3 * 4)

    def client_left(self) -> None:
        """The client reset the stream, or its connection is lost."""
        self.call.client_left()

    def on_writable(self, writable: bool) -> None:
        """The client reads again."""
        self.call.on_writable(writable)

    def send_head(self, lines: list[bytes], end: bool) -> None:
        pairs = [line.partition(b": ") for line in lines]
        block = b"".join([literal(name, value) for name, _, value in pairs])
        self.connection.send_headers(self.stream, b"\x88" + block, end)

    def send_body(self, data: bytes | memoryview, end: bool) -> None:
        self.connection.send_data(self.stream, data, end)

    def send_reset(self, stream: Stream, code: int) -> None:
        self.connection.send_reset(stream, code)


class GrpcWebOverH1(_GrpcWeb):
    """A call that is a request of HTTP/1.1; its stream is none of a connection.

    crowds, strike: the connection's own ones (`ingress.http.ClientConnection`).
    over: callback for the end of the call.
    arrived_s: monotonic time of the latest bytes of its body, those that came with the head left out.
    """

    __slots__ = ("_close", "_over", "_start", "_strike", "arrived_s", "authentic", "connection", "head", "refuses")

    def __init__(
        self,
        connection: ServerConnection,
        gateway: Gateway,
        head: RequestHead,
        crowds: Callable[[Tenant], bool],
        strike: Callable[[RequestHead, bool], None],
        over: Callable[[], None],
    ) -> None:
        own = {
            **{":path": head.target, "x-request-id": head.request_id, "traceparent": head.traceparent},
            **{"tracestate": head.tracestate, "x-request-timeout-ms": head.timeout, "x-request-tier": head.tier},
        }
        pairs = [*head.sent_on(), *[(name, value) for name, value in own.items() if value is not None]]
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        super().__init__(gateway, connection.server, fields)
        self.connection = connection
        self.head = head
        self.refuses = crowds
        self._strike = strike
        self._over = over
        self.arrived_s = connection.arrived_s
        self.authentic = False
        self._start = b""  # the beginning of the answer, until more of it is there
        self._close = False  # True if the answer ends the connection

    def authenticated(self, watch: Callable[[], None], rpc: RpcHead | None) -> None:
        """The sender of the head is known. watch: bounds the wait for the message."""
        self.authentic = True
        self.server.memo.keep(self.head.fresh)
        self.server.loop.call_soon(watch)
        if self.head.expect_continue:
            self.connection.continue_body()

    def refuse_later(self, stream: Stream, refuse: Callable[[], None]) -> None:
        """Call `refuse` now: the connection is not read until its turn has come."""
        refuse()

    def more(self, data: bytes | memoryview) -> None:
        """Bytes of the body came, and not all of it with the head."""
        self.arrived_s = monotonic()
        self.came(data, False)

    @property
    def departed(self) -> bool:
        """Return whether the client has closed behind bytes that were not read."""
        return self.connection.departed

    def consumed(self, stream: Stream, size: int = 0) -> None:
        """Do nothing, because HTTP/1.1 has no windows."""

    widen = linger = consumed

    def unwanted(self, size: int) -> None:
        """Do nothing: bytes of unknown senders are counted with the requests that brought them."""

    def client_left(self) -> None:
        """End the call, because the client has left or what it sends is not a valid body."""
        self._end()
        self.call.client_left()

    def on_writable(self, writable: bool) -> None:
        """Note that the client stopped or resumed reading."""
        # the bytes that wait are in the transport; `pending` only says that there are some
        self.call.pending = None if writable else deque()
        self.call.on_writable(writable)

    def unread_bytes(self, stream: Stream) -> int:
        """Return how many bytes wait for the client."""
        return int(self.connection.transport.get_write_buffer_size())

    def send_head(self, lines: list[bytes], end: bool) -> None:
        connection, chunks = self.connection, self.head.line.minor > 0
        if not self.authentic:
            self._strike(self.head, end)
        self._close = connection.must_close or not (chunks or end)
        if end:
            lines.append(b"content-length: 0")
        elif chunks:
            lines.append(b"transfer-encoding: chunked")
        if self._close:
            lines.append(b"connection: close")
        self._start = b"\r\n".join((b"HTTP/1.1 200 OK", *lines, b"\r\n"))
        if end:
            self._write((), True)

    def send_body(self, data: bytes | memoryview, end: bool) -> None:
        if not self.head.line.minor:
            self._write((data,), end)
        else:
            self._write((chunk(data), LAST_CHUNK) if end else (chunk(data),), end)

    def _write(self, pieces: tuple[bytes | memoryview, ...], end: bool) -> None:
        connection, start = self.connection, self._start
        self._start = b""
        connection.transport.write(b"".join((start, *pieces)))
        if end:
            self._end()
            if not connection.keeps_up:
                connection.on_writable(False)  # waiting bytes are the connection's from now on, not the call's
            connection.answered(close=self._close)

    def _end(self) -> None:
        self._over()
        self.call.sending, self.call.pending = ENDED, None

    def send_reset(self, stream: Stream, code: int) -> None:
        self.connection.transport.abort()
