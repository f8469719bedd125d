"""One client connection of the service port: requests in, replies out, whole or streamed; and the server that opens it.

Every request is one task, made when its head is complete, so that a handler may read a body that still arrives. A
client that leaves cancels it.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from time import monotonic

from oriel_logic.errors import BadRequest, CallerLeft, InputTooLarge
from oriel_logic.server.envelope import Envelope
from oriel_logic.server.failures import close as close_pieces
from oriel_logic.server.inbound import Body, Inbound, full
from oriel_logic.server.replies import Reply
from oriel_logic.server.visit import Visit
from oriel_wire.engine.limits import HttpLimits, reason_phrase
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.peers import TrustedPeers, is_loopback, page_refusal
from oriel_wire.engine.server import BODY, ServerConnection
from oriel_wire.h1.chunked import chunk, last_chunk
from oriel_wire.h1.request import RequestHead

_log = logging.getLogger(__name__)
INLINE_BYTES = 64 * 1024
SMALL_BYTES = 16 * 1024  # bodies this small that come with their head are not counted


class BodyBudget:
    """The bytes of request bodies that may be in memory at a time. Single writer: the loop."""

    __slots__ = ("held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def acquire(self, size_bytes: int) -> bool:
        """Count `size_bytes` more if there is room; return whether there was. `release` undoes it."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            return False
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Uncount bytes that have left memory."""
        self.held_bytes -= size_bytes


class ServiceConnection(ServerConnection):
    """One connection. Its methods called `on_...` are called by the engine."""

    __slots__ = ("_body", "_budget", "_drained_event", "_envelope", "_held", "_local", "_peers", "_task")

    def __init__(
        self, server: HttpServer, envelope: Envelope, peers: TrustedPeers, budget: BodyBudget, *, local: bool
    ) -> None:
        super().__init__(server)
        self._local = local
        self._envelope = envelope
        self._peers = peers
        self._budget = budget
        self._held = 0
        self._body: Body | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained_event: asyncio.Event | None = None  # set once a slow client has caught up

    # Callbacks of the engine -----------------------------------------------------------------------------------------

    def on_request(self, head: RequestHead, data: bytes) -> None:
        body = Body(data)
        if len(data) > SMALL_BYTES and not self._hold_bytes(len(data)):
            body.fail(full())
        self._begin(head, body)

    def on_head(self, head: RequestHead) -> None:
        if head.content_length is None and not head.chunked:
            self._begin(head, Body(b""))
            return
        self._body = body = Body(pause=self._pause_body, hold=self._hold_bytes)
        self._begin(head, body)
        if head.expect_continue:
            self.continue_body()

    def on_data(self, data: bytes | memoryview) -> None:
        body = self._body
        if body is not None:
            body.feed(data if isinstance(data, bytes) else bytes(data))

    def on_end(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.request_complete()

    def on_lost(self) -> None:
        self._forget()

    def on_refused(self, status: int, message: str) -> None:
        started = self._forget()
        if started:
            return  # an answer that has begun can only be cut off
        envelope, head = self._envelope, self.head
        fields = head.by_name() if head is not None else {}
        visit = envelope.visit(envelope.plan(fields, trusted=self.peer in self._peers), monotonic())
        error = InputTooLarge(message) if status == 413 else BadRequest(message)
        self._write(envelope.refuse(visit, error, status), close=True)

    def on_writable(self, writable: bool) -> None:
        event = self._drained_event
        if event is not None:
            if writable:
                event.set()
            else:
                event.clear()

    # The request -----------------------------------------------------------------------------------------------------

    def _begin(self, head: RequestHead, body: Body) -> None:
        envelope = self._envelope
        headers = head.by_name()
        self.server.heads.authenticated(head)
        visit = envelope.visit(envelope.plan(headers, trusted=self.peer in self._peers), self.arrived_s)
        if self._local and (why := page_refusal(headers.get)):
            self._body = None
            self.unwanted(head)
            self._write(envelope.refuse(visit, BadRequest(why), 400), close=self.must_close)
            self.answered(close=False)
            return
        line, size = head.line, head.content_length
        inbound = Inbound(
            method=line.method,
            path=line.path,
            query=line.query,
            headers=headers,
            size_bytes=None if head.chunked else size or 0,
            body=body,
        )
        # Not through the loop's task factory: handlers are contained where they are called.
        self._task = asyncio.Task(self._serve(inbound, visit), loop=self.server.loop)

    async def _serve(self, inbound: Inbound, visit: Visit) -> None:
        task = self._task
        try:
            reply = await self._envelope.answer(inbound, visit)
            if self._task is not task:  # the connection refused it meanwhile
                if reply.pieces is not None:
                    await close_pieces(reply.pieces)
            elif reply.pieces is None:
                self._release()
                close = self.must_close
                self._write(reply, close=close, head_only=inbound.method == "HEAD")
                self.answered(close=close)
            else:
                await self._stream(reply, visit)
        except CallerLeft:
            self.transport.abort()
        except asyncio.CancelledError:
            raise
        except Exception:
            # The edge of a request's task: an unexpected error cuts off this answer only.
            about = visit.call.log_fields(visit.service)
            _log.exception("request %s failed unexpectedly", visit.call.request_id, extra=about)
            self.transport.abort()
        finally:
            if self._task is task:
                self._task = self._body = None
                self._release()
            task = None  # a task keeps the traceback of its cancellation, which keeps this frame

    async def _stream(self, reply: Reply, visit: Visit) -> None:
        assert reply.pieces is not None
        chunked = self.head is not None and self.head.line.minor > 0
        close = self.must_close or not chunked
        framing = b"transfer-encoding: chunked\r\n" if chunked else b""
        self.transport.write(head_bytes(reply, close) + framing + self.server.date_line + b"\r\n")
        self._drained_event = event = asyncio.Event()
        if self.keeps_up:
            event.set()

        def write(make: Callable[[], bytes]) -> bool:
            if self._task is None or not self.keeps_up:  # the client may have left in this turn of the loop
                return False
            piece = make()
            visit.bytes_out += len(piece)
            self.transport.write(chunk(piece) if chunked else piece)
            return True

        try:
            async for piece in reply.pieces:
                if piece:
                    self.transport.write(chunk(piece) if chunked else piece)
                visit.write = write
                if not event.is_set():
                    await event.wait()
        finally:
            visit.write = None
            await close_pieces(reply.pieces)
            self._drained_event = None
        self._release()
        if chunked:
            trailers = reply.trailers() if reply.trailers is not None else ()
            self.transport.write(last_chunk("".join([f"{name}: {value}\r\n" for name, value in trailers])))
        self.answered(close=close)

    def _write(self, reply: Reply, *, close: bool, head_only: bool = False) -> None:
        body = reply.body
        length = b"content-length: %d\r\n" % len(body)
        head = head_bytes(reply, close) + length + self.server.date_line + b"\r\n"
        if head_only:
            self.transport.write(head)
        elif len(body) <= INLINE_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    # Its body --------------------------------------------------------------------------------------------------------

    def _pause_body(self, paused: bool) -> None:
        """Pause or resume reading while the handler is slower than the client; the body timeout is off meanwhile."""
        if self.state != BODY:
            return
        if paused:
            self.due = 0.0
            self.transport.pause_reading()
        else:
            self.due = monotonic() + self.limits.body_timeout_s
            self.transport.resume_reading()

    def _hold_bytes(self, size: int) -> bool:
        if not self._budget.acquire(size):
            return False
        self._held += size
        return True

    def _release(self) -> None:
        held, self._held = self._held, 0
        self._budget.release(held)

    def _forget(self) -> bool:
        """Drop the request, because the client left or gets another answer; return whether an answer had begun."""
        body, self._body = self._body, None
        if body is not None:
            body.fail(CallerLeft())
        task, self._task = self._task, None
        self._release()
        if task is not None:
            task.cancel()
        return self._drained_event is not None


def head_bytes(reply: Reply, close: bool) -> bytes:
    """Write the status line and fields; length, date and the empty line follow."""
    status = reply.status
    fields = "".join([f"{name}: {value}\r\n" for name, value in reply.headers])
    closing = "connection: close\r\n" if close else ""
    start = f"HTTP/1.1 {status} {reason_phrase(status)}\r\ncontent-type: {reply.content_type}\r\n{fields}{closing}"
    return start.encode("latin-1", "replace")


# Each service has its own limit, which `Dispatch` checks before the body is read; an unread body is not kept.
MAX_BODY_BYTES = 1 << 40
# A gateway that is still sending when it is refused can read the reason.
DRAIN_BYTES = 64 << 20


async def open_server(
    envelope: Envelope, sock: socket.socket, *, peers: TrustedPeers, max_held_bytes: int
) -> HttpServer:
    """Serve on `sock`, which is bound but not listening yet.

    max_held_bytes: bound on the bytes of all request bodies together.
    """
    server = HttpServer(HttpLimits(max_body_bytes=MAX_BODY_BYTES, drain_bytes=DRAIN_BYTES))
    budget = BodyBudget(max_held_bytes)
    local = is_loopback(str(sock.getsockname()[0]))
    await server.open(lambda: ServiceConnection(server, envelope, peers, budget, local=local), sock)
    return server
