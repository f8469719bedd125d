"""Serves HTTP/1.1 to handlers that get each request with its whole body and answer at once or in pieces."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from oriel_wire.engine.in_place import InPlace
from oriel_wire.engine.limits import HttpLimits, reason_phrase
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.server import BODY, WAIT, ServerConnection
from oriel_wire.h1.chunked import chunk, last_chunk
from oriel_wire.h1.request import RequestHead
from oriel_wire.memory import unwritten

Headers = Sequence[tuple[str, str]] | str
Handler = Callable[["Exchange"], None]
Refuse = Callable[[RequestHead], "Refusal | None"]
Explain = Callable[[RequestHead | None, int, str], "Refusal"]
Views = Callable[[RequestHead], bool]
Body = bytes | memoryview
_INLINE_BYTES = 64 * 1024
_INLINE_PARTS = 32  # parts of at most 256 KiB each
_IN_PLACE_LEAST = 64 * 1024
_IN_PLACE_MOST = 8 * 1024 * 1024  # a head alone does not allocate more


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is given after the head, before the body is read."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


def explain(head: RequestHead | None, status: int, message: str) -> Refusal:
    """`{"error": sentence}`: the default answer to wrong framing."""
    return Refusal(status, [("content-type", "application/json")], msgspec.json.encode({"error": message}))


class Exchange:
    """One request whose body has fully arrived, and the one answer to it: `respond`, or `start`, `write`s and `end`.

    body: the whole body, read-only; a view only if `serve` was given `views`. received_s: monotonic
    seconds at which its head was complete. on_abort: called once if the client leaves before the answer has ended;
    `aborted` is set then. on_writable: called when a client that was slow to read what is written has caught up.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "aborted",
        "body",
        "head",
        "on_abort",
        "on_writable",
        "peer",
        "received_s",
        "started",
    )

    def __init__(self, connection: "BufferedConnection", head: RequestHead, body: Body, received_s: float) -> None:
        self._connection: BufferedConnection | None = connection
        self.head = head
        self.body = body
        self.peer = connection.peer
        self.received_s = received_s
        self.on_abort: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.aborted = False
        self.started = False

    @property
    def connection(self) -> str:
        """A name of the client's connection, unique among open ones; "" once the answer has ended."""
        return self._connection.peer_name if self._connection is not None else ""

    def respond(self, status: int, headers: Headers, body: bytes | Sequence[bytes | memoryview] = b"") -> None:
        """Answer, exactly once, from the loop's thread. Without effect if the client has left.

        headers: names and values, or lines that are written already, each with its CRLF.
        """
        connection = self._connection
        if connection is None:
            if self.aborted:
                return
            raise RuntimeError("this request was answered before")
        if self.started:
            raise RuntimeError("this answer has begun: only `write` and `end` are possible now")
        self._connection = self.on_abort = self.on_writable = None
        connection.write_answer(status, headers, body, head_only=self.head.line.method == "HEAD")

    def start(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        """Begin an answer whose length is not known; its body follows with `write`, its end with `end`.

        Call it on the loop's thread, like `respond`. Without effect if the client has left.
        """
        if self._connection is not None and not self.started:
            self.started = True
            self._chunked = self.head.line.minor > 0
            self._connection.start_answer(status, headers, chunked=self._chunked)

    def write(self, data: bytes) -> None:
        """Send a piece (not empty) of a started answer at once. It is buffered for a slow client: check `writable`."""
        if self._connection is not None:
            self._connection.transport.write(chunk(data) if self._chunked else data)

    def end(self, trailers: str = "") -> None:
        """Complete the started answer. trailers: lines, each with its CRLF, for a client that understands chunks."""
        connection, self._connection = self._connection, None
        self.on_abort = self.on_writable = None
        if connection is not None:
            connection.end_answer(last_chunk(trailers) if self._chunked else b"")

    @property
    def writable(self) -> bool:
        """Return whether the client keeps up.

        If not, `on_writable` is called when it does. The connection of a client that never does is closed.
        """
        return self._connection is not None and self._connection.keeps_up

    def abort(self) -> None:
        """Called by the connection when the client has left."""
        if self._connection is None:
            return
        self._connection = None
        self.aborted = True
        callback, self.on_abort, self.on_writable = self.on_abort, None, None
        if callback is not None:
            callback()


class BufferedConnection(ServerConnection):
    """A connection whose requests reach a handler with their whole bodies."""

    __slots__ = (
        "_body",
        "_exchange",
        "_explain",
        "_handler",
        "_in_place",
        "_parts",
        "_refuse_head",
        "_views",
    )

    def __init__(
        self, server: HttpServer, handler: Handler, refuse: Refuse | None, explain: Explain, views: Views | None
    ) -> None:
        super().__init__(server)
        self._views = views
        self._body: memoryview | None = None  # a large body whose rest is read in place
        self._in_place: InPlace | None = None
        self._handler = handler
        self._refuse_head = refuse
        self._explain = explain
        self._parts: list[bytes | memoryview] = []
        self._exchange: Exchange | None = None

    def on_head(self, head: RequestHead) -> None:
        if self._refuse_head is not None:
            refusal = self._refuse_head(head)
            if refusal is not None:
                self._write(refusal.status, refusal.headers, refusal.body, self.must_close, head.method == "HEAD")
                self.answered(close=False)
                return
        self.server.heads.authenticated(head)
        if not self._whole:
            self._make_room(head)
        if head.expect_continue:
            self.continue_body()

    def on_body(self, data: Body) -> None:
        head = self.head
        assert head is not None
        self._exchange = exchange = Exchange(self, head, data, self.arrived_s)
        self._handler(exchange)

    def _make_room(self, head: RequestHead) -> None:
        """Prepare for the rest of a body: a large one is read directly into its final memory."""
        views = self._views
        if views is None or self.server.secure:
            return
        length = head.content_length or 0
        large = _IN_PLACE_LEAST <= length <= _IN_PLACE_MOST and views(head)
        if large:
            self._body = unwritten(length)
        if large is (self._in_place is None) and not self.transport.is_closing():
            self._in_place = InPlace(self, self._room, self._placed) if large else None
            self.transport.set_protocol(self._in_place or self)
            self.transport.pause_reading()  # the way of reading is chosen when reading resumes
            self.transport.resume_reading()

    def _room(self) -> memoryview | None:
        """Return the memory for the rest of the current body; None if no body is being read in place."""
        body = self._body
        return body[-self._left :] if body is not None and self.state == BODY else None

    def _placed(self, size: int) -> None:
        """Note that `size` bytes (>= 1) were written into that memory."""
        self._left -= size
        if self._left:
            self._came(size)
        else:
            self._body_ended(b"")

    def on_data(self, data: bytes | memoryview) -> None:
        body = self._body
        if body is None:
            self._parts.append(data)
        else:
            end = len(body) - self._left
            body[end - len(data) : end] = data

    def on_end(self) -> None:
        parts, self._parts = self._parts, []
        head = self.head
        assert head is not None
        if self._body is not None:
            placed, self._body = self._body, None
            self.on_body(placed.toreadonly())
        elif len(parts) > _INLINE_PARTS:
            self._join_apart(head, parts)
        else:
            self.on_body(b"".join(parts) if len(parts) > 1 else bytes(parts[0]) if parts else b"")

    def _join_apart(self, head: RequestHead, parts: list[bytes | memoryview]) -> None:
        """Join the pieces of a large body in a thread: joining releases the interpreter lock, and the page faults of
        the new memory cost more than the copy.
        """

        def join() -> bytes:
            body = b"".join(parts)
            parts.clear()
            return body

        def joined(done: "asyncio.Future[bytes]") -> None:
            # The client may have left meanwhile, or the server cut it.
            if not done.cancelled() and self.state == WAIT and self.head is head:
                self.on_body(done.result())

        self.server.loop.run_in_executor(self.server.joiner, join).add_done_callback(joined)

    def on_lost(self) -> None:
        self._parts, self._body = [], None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abort()

    def on_writable(self, writable: bool) -> None:
        if writable and self._exchange is not None and self._exchange.on_writable is not None:
            self._exchange.on_writable()

    def on_refused(self, status: int, message: str) -> None:
        self._parts, self._body = [], None
        refusal = self._explain(self.head, status, message)
        head_only = self.head is not None and self.head.method == "HEAD"
        self._write(refusal.status, refusal.headers, refusal.body, self.must_close, head_only)

    def write_answer(
        self,
        status: int,
        headers: Headers,
        body: bytes | Sequence[bytes | memoryview],
        head_only: bool,
    ) -> None:
        self._exchange = None
        close = self.must_close
        self._write(status, headers, body, close, head_only)
        self.answered(close=close)

    def start_answer(self, status: int, headers: Sequence[tuple[str, str]], *, chunked: bool) -> None:
        lines = [f"HTTP/1.1 {status} {reason_phrase(status)}\r\n"]
        lines.extend([f"{name}: {value}\r\n" for name, value in headers])
        if chunked:
            lines.append("transfer-encoding: chunked\r\n")
        if self.must_close:
            lines.append("connection: close\r\n")
        self.transport.write("".join(lines).encode("latin-1") + self.server.date + b"\r\n\r\n")

    def end_answer(self, last: bytes) -> None:
        self._exchange = None
        if last:
            self.transport.write(last)
        self.answered(close=self.must_close)

    def _write(
        self,
        status: int,
        headers: Headers,
        body: bytes | Sequence[bytes | memoryview],
        close: bool,
        head_only: bool,
    ) -> None:
        if isinstance(body, bytes):
            parts: Sequence[bytes | memoryview] = (body,)
            size = len(body)
        else:
            parts = body
            size = sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])
        fields = headers if isinstance(headers, str) else "".join([f"{name}: {value}\r\n" for name, value in headers])
        closing = "connection: close\r\n" if close else ""
        start = f"HTTP/1.1 {status} {reason_phrase(status)}\r\ncontent-length: {size}\r\n{fields}{closing}"
        head = b"%b%b\r\n\r\n" % (start.encode("latin-1"), self.server.date)
        if head_only:
            self.transport.write(head)
        elif size <= _INLINE_BYTES:
            self.transport.write(b"".join((head, *parts)))
        else:
            self.transport.writelines((head, *parts))


async def serve(
    handler: Handler,
    sock: socket.socket,
    *,
    limits: HttpLimits | None = None,
    refuse: Refuse | None = None,
    explain: Explain = explain,
    views: Views | None = None,
) -> HttpServer:
    """Serve whole requests on `sock`.

    handler: a plain function, called on the loop when a body is complete; it answers at once or keeps the Exchange.
    refuse: judges a head before its body is read. explain: makes the body for a framing error (head: None if it
    could not be read).
    views: says of a head if its body may come as a memoryview.
    """
    server: HttpServer = HttpServer(limits or HttpLimits())
    await server.open(lambda: BufferedConnection(server, handler, refuse, explain, views), sock)
    return server
