"""HTTP/1.1 server connections on `asyncio.Protocol`: heads, bodies, keep-alive, time limits.

`ServerConnection` handles framing only; a subclass handles the requests through four hooks: `on_head` (decides before
the body), `on_data`, `on_end`, `on_lost`. The gateway streams with it; `buffered` collects bodies with it.

Theory of operation. A connection is in one of five states:

    HEAD   collecting a head (head_timeout_s from its first byte; idle_timeout_s before that)
    BODY   reading the body of the current request (body_timeout_s for every body_min_bytes)
    WAIT   the request is complete and its answer is not: bytes of the next request are kept, up to the size of one
           head, and then reading pauses
    DRAIN  the answer was sent before the body ended: the rest is read and dropped, within bounds, so that the client
           sees the answer instead of a connection reset
    CLOSED the last answer is in the transport; a client that does not read it is cut

While a client does not read its answers, no further request of it is read. There is no timer per connection: the server
sweeps all connections four times a second and closes those that are past their `due`.
The subclass calls `answered(close=...)` exactly once per request, when the last byte of the answer is written.
"""

import asyncio
from time import monotonic
from typing import Final, cast

from mypy_extensions import mypyc_attr

from oriel_wire.engine.hooks import ServerHooks
from oriel_wire.engine.kernel import arrival, closed_behind_unread, has_input
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.peers import negotiated_http2, peer_names
from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.h1.chunked import ChunkedDecoder
from oriel_wire.h1.request import RequestHead

HEAD: Final = 0
BODY: Final = 1
WAIT: Final = 2
DRAIN: Final = 3
CLOSED: Final = 4
_DRAIN_S: Final = 1.0
_LARGE: Final = 64 * 1024
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\n"


@mypyc_attr(allow_interpreted_subclasses=True)
class ServerConnection(ServerHooks):
    """One client connection; the module's docstring describes its states and hooks."""

    __slots__ = (
        "_body_since_due",
        *("_buffer", "_searched"),
        "_decoder",
        "_drained",
        "_kept",
        "_left",
        "_new",
        "_paused",
        "_pulse",
        "_stalled_at",
        "_start",
        "_whole",
        "arrived_s",
        "due",
        "head",
        "late_s",
        "limits",
        "memo",
        "peer",
        "peer_name",
        "server",
        "state",
        "transport",
    )
    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.limits, self.memo, self._pulse = server.limits, server.memo, server.pulse
        self.state, self.due = HEAD, 0.0
        self.arrived_s = 0.0  # arrival of the last bytes of the current head, monotonic
        self.late_s = 0.0  # seconds for which they lay unread because the loop did not poll
        self.head: RequestHead | None = None
        self.peer = self.peer_name = ""
        self._buffer: bytes | bytearray = b""  # bytes of the next request, from `_start` on
        self._searched = 0  # bytes of `_buffer` that are a head without an end so far
        self._new = True  # no head has been read
        self._kept = 0  # bytes of `_buffer` that the server counts
        self._start = self._left = self._body_since_due = self._drained = 0
        self._decoder: ChunkedDecoder | None = None
        self._paused, self._stalled_at = False, 0.0
        self._whole = False  # the current request's body arrived together with its head

    # Optional hooks --------------------------------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        """Called instead of on_data and on_end when the whole body arrived with its head."""
        self.on_data(data)
        if self.state == WAIT:
            self.on_end()

    def on_request(self, head: RequestHead, data: bytes) -> None:
        """Called instead of on_head, on_data and on_end when a whole request has arrived; the state is WAIT."""
        if not data:
            self.on_head(head)
            if self.state == WAIT and self.head is head:
                self.on_end()
            return
        self.state = BODY
        self._whole = True
        self.on_head(head)
        if self.state == BODY and self.head is head:
            self._whole = False
            self.state = WAIT
            self.on_body(data)

    # asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is not registered
        server = self.server
        if len(server.connections) >= self.limits.max_connections and not server.evict_idle():
            self.state = CLOSED
            self.transport.abort()
            return
        server.connections.add(self)
        self.peer, self.peer_name = peer_names(self.transport)
        self.due = monotonic() + self.limits.idle_timeout_s
        if server.secure and negotiated_http2(self.transport):
            self._hand_over(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        waiting = self.state in (BODY, WAIT)
        self.state = CLOSED
        server = self.server
        if self._kept:
            self._count_kept(0)
        server.connections.discard(self)
        if server.draining:
            server.note_empty()
        if waiting:
            self.on_lost()
        self.head = None

    def pause_writing(self) -> None:
        self._stalled_at = monotonic()
        self.on_writable(False)

    def resume_writing(self) -> None:
        self._stalled_at = 0.0
        self.on_writable(True)
        if self.state == HEAD:
            self.listen()

    def data_received(self, data: bytes) -> None:
        state = self.state
        if state == HEAD and not self._stalled_at:
            self.arrived_s = now = monotonic()
            self.late_s = 0.0
            if now >= self._pulse.fresh_until and not self._judge_age(now):
                return
            if self._buffer:
                if self._searched and self._goes_on(data):
                    return
                data = bytes(self._buffer[self._start :]) + data
                self._buffer, self._searched = b"", 0
            self._read_head(data, 0)
        elif state == BODY:
            self._read_body(data)
        elif state == WAIT or state == HEAD:
            self._hold(data)
        elif state == DRAIN:
            self._drained += len(data)
            if self._drained > self.limits.drain_bytes:
                self.transport.abort()

    def _judge_age(self, now: float) -> bool:
        """Correct the arrival time of the data just read, after a pause of the loop.

        Returns False if its sender has left."""
        if (found := arrival(self.transport)) is not None and found.gone:
            self.evict()
            return False
        self.late_s = self._pulse.age_s(found, now)
        self.arrived_s -= self.late_s
        return True

    # For subclasses --------------------------------------------------------------------------------------------

    def answered(self, *, close: bool, now: float = 0.0) -> None:
        """Note that the answer is written, at monotonic `now`. `close` ends the connection after it."""
        state = self.state
        if state == CLOSED:
            return
        head = self.head
        if state == BODY:
            if not self._whole:
                self._drain()
                return
            self._whole = False
        self.head = None
        if close or head is None or head.close or self.server.draining:
            self._close()
            return
        self.state = HEAD
        self.due = (now or monotonic()) + self.limits.idle_timeout_s
        if self._buffer or self._paused or self.server.gate is not None:
            self.listen()

    def listen(self) -> None:
        """Go on to the next request, unless the client has yet to read its answers."""
        if self._stalled_at:
            return
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        if self._buffer:
            # Not from this stack: a pipelining client would otherwise recurse once per request.
            self.server.loop.call_soon(self._next)

    def _close(self) -> None:
        """Close once the answer is out; a client that does not read it has `write_stall_s`."""
        self.state = CLOSED
        self.transport.close()
        self.due = monotonic() + self.limits.write_stall_s if self.transport.get_write_buffer_size() else 0.0

    @property
    def keeps_up(self) -> bool:
        """Return whether the client reads what is written to it."""
        return not self._stalled_at

    @property
    def departed(self) -> bool:
        """Return whether the client has closed behind unread bytes, according to the kernel (Linux only)."""
        return (self._paused or monotonic() >= self._pulse.fresh_until) and closed_behind_unread(self.transport)

    @property
    def must_close(self) -> bool:
        """Return whether the answer being written has to say `Connection: close`."""
        head = self.head
        return head is None or head.close or self.server.draining or (self.state == BODY and not self._whole)

    def unwanted(self, head: RequestHead, answer_bytes: int = 0) -> None:
        """Count a request of a sender that is not known and its answer; `drain_bytes` bounds the sum per connection."""
        head_bytes = sum([len(name) + len(value) for name, value in head.items()])
        self._drained += answer_bytes + (head.content_length or 0) + head_bytes
        if self._drained + len(self._buffer) - self._start > self.limits.drain_bytes // 2:
            head.close = True

    # Framing ---------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self.state == HEAD and self._buffer and not self._stalled_at:
            data, self._buffer, self._searched = bytes(self._buffer), b"", 0
            self.arrived_s, self.late_s = monotonic(), 0.0
            if self._kept:
                self._count_kept(0)
            self._read_head(data, self._start)

    def _goes_on(self, data: bytes) -> bool:
        """Add to a head that has begun, looking at each byte once; False: it may end with `data`, or is wrong."""
        joined = bytes(self._buffer[-3:]) + data
        bare = b"\n" in data and b"\n" in joined.lstrip(b"\n").replace(b"\r\n", b"")
        if bare or b"\r\n\r\n" in joined or self._searched + len(data) > self.limits.max_head_bytes:
            return False
        self._buffer += data
        self._searched += len(data)
        return True

    def _read_head(self, data: bytes, start: int) -> None:
        """Parse the head that begins at `start`; the bytes behind it stay in `data`, uncopied."""
        while data.startswith(b"\r\n", start):
            start += 2  # RFC 9112 section 2.2: empty lines before a request are ignored
        stop = data.find(b"\r\n\r\n", start)
        limits = self.limits
        if stop < 0 or stop - start > limits.max_head_bytes:
            data = data[start:]
            self._buffer, self._start, self._searched = bytearray(data), 0, len(data)
            if len(data) > limits.max_head_bytes + 3:  # the last three may belong to its end
                line = data.find(b"\r\n", 0, limits.max_target_bytes + 64)
                self._refuse(414 if line < 0 else 431, "the request head is too long")
                return
            if b"\n" in data and b"\n" in data.replace(b"\r\n", b""):
                self._refuse(400, "lines end with CRLF")
                return
            if data:
                self.due = min(self.due, monotonic() + limits.head_timeout_s)
            return
        if self._new and data.startswith(_PREFACE) and not self.server.secure and self._hand_over(data):
            return
        self._new = False
        try:
            head = self.server.heads.read(data[start:stop], limits.max_fields)
        except BadMessage as error:
            self._refuse(431 if isinstance(error, TooLarge) else 400, error.message, data[start:stop])
            return
        if stop - start > limits.max_target_bytes:
            if len(head.line.line) - len(head.line.method) - len("  HTTP/1.1") > limits.max_target_bytes:
                self._refuse(414, f"the target is longer than {limits.max_target_bytes} bytes", data[start:stop])
                return
        self.head = head
        self.due = 0.0
        stop += 4
        length = head.content_length
        if length:
            if length > limits.max_body_bytes:
                self._refuse(413, f"the body is larger than {limits.max_body_bytes} bytes")
                return
            self._left = length
            self.state = BODY
            end = stop + length
            if len(data) >= end:
                self.state = WAIT
                self._keep_rest(data, end)
                self.on_request(head, data[stop:end])
                return
        elif head.chunked:
            self._decoder = ChunkedDecoder()
            self._left = limits.max_body_bytes
            self.state = BODY
        else:
            self.state = WAIT
            self._keep_rest(data, stop)
            self.on_request(head, b"")
            return
        self.on_head(head)
        if len(data) - stop > _LARGE and self.state == BODY and self._decoder is None:
            self._left -= len(data) - stop
            self._came(len(data) - stop)
            self.on_data(memoryview(data)[stop:])  # incomplete, and not copied
        elif len(data) > stop:
            self.data_received(data[stop:])
        elif self.state == BODY:
            self._came(0)

    def _hand_over(self, data: bytes) -> bool:
        if self.on_http2(data):
            self.state = CLOSED
            self.server.connections.discard(self)
        return self.state == CLOSED

    def _keep_rest(self, data: bytes, start: int) -> None:
        """Keep the bytes behind the current request for the next one."""
        if len(data) > start:
            self._buffer, self._start = data, start
            if len(data) > self.limits.max_head_bytes:
                self._count_kept(len(data))

    def _count_kept(self, size: int) -> None:
        """Count bytes read beyond a head of the next request, which the server bounds. Above the bound they are
        dropped and the connection ends after the current answer, as HTTP allows (RFC 9112 section 9.3.2)."""
        server = self.server
        server.kept_bytes += size - self._kept
        self._kept = size
        if size and server.kept_bytes > self.limits.max_kept_bytes:
            self._buffer = b""
            self._count_kept(0)
            if self.head is None:  # between two requests no bytes may be dropped
                self.transport.abort()
            else:
                self.head.close = True

    def continue_body(self) -> None:
        """Answer `Expect: 100-continue`; called once the head is accepted."""
        if self.state == BODY and self.head is not None and self.head.expect_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _came(self, size: int) -> None:
        self._body_since_due += size
        if self.due == 0.0 or self._body_since_due >= self.limits.body_min_bytes:
            self._body_since_due = 0
            self.due = monotonic() + self.limits.body_timeout_s

    def _read_body(self, data: bytes) -> None:
        if self._decoder is not None:
            self._read_chunks(self._decoder, data)
            return
        size, left = len(data), self._left
        if size < left:
            self._left = left - size
            self._came(size)
            self.on_data(data)
            return
        if size > left:
            self._keep_rest(data, left)
            data = data[:left]
        self._left = 0
        self._body_ended(data)

    def _read_chunks(self, decoder: ChunkedDecoder, data: bytes) -> None:
        try:
            pieces = decoder.feed(data)
            self._left -= sum(map(len, pieces))
            if self._left < 0:
                raise TooLarge(f"the body is larger than {self.limits.max_body_bytes} bytes")
        except BadMessage as error:
            self._refuse(413 if isinstance(error, TooLarge) else 400, error.message)
            return
        self._came(len(data))
        body = b"".join(pieces) if len(pieces) > 1 else pieces[0] if pieces else b""
        if decoder.done:
            self._decoder = None
            self._keep_rest(decoder.rest, 0)
            self._body_ended(body)
        elif body:
            self.on_data(body)

    def _body_ended(self, data: bytes) -> None:
        head = self.head
        self.state = WAIT
        self.due = 0.0
        if data:
            self.on_data(data)
        if self.state == WAIT and self.head is head:
            self.on_end()

    def _hold(self, data: bytes) -> None:
        if self._start or not isinstance(self._buffer, bytearray):
            self._buffer, self._start = bytearray(self._buffer[self._start :]), 0
        self._buffer += data
        self._searched = 0
        if len(self._buffer) > self.limits.max_head_bytes and not self._paused:
            self._paused = True
            self.transport.pause_reading()
            self._count_kept(len(self._buffer))

    def _refuse(self, status: int, message: str, begun: bytes = b"") -> None:
        self._buffer = begun or self._buffer  # the request's first bytes, which decide the answer's form
        self.state = BODY  # bytes that arrive later are no request any more
        self._whole = False
        self.on_refused(status, message)
        self._drain()

    def _drain(self) -> None:
        """Read a little more of an incomplete body whose answer is sent, then close."""
        self.state = DRAIN
        self.head = self._decoder = None
        self._buffer = b""
        self._count_kept(0)
        self.due = monotonic() + _DRAIN_S
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    @property
    def under_way(self) -> bool:
        """Return whether a request has begun and is not answered."""
        return self.state in (BODY, WAIT)

    def close_if_idle(self) -> None:
        """Close an idle connection as the server drains. Half a head, or a request not read yet, has a second more."""
        if self.idle and not has_input(self.transport):
            self._close()
        elif self.state == HEAD:
            self.due = min(self.due, monotonic() + _DRAIN_S)

    @property
    def waits_for_head(self) -> bool:
        """Return whether no request of this client is under way."""
        return self.state == HEAD

    def evict(self) -> None:
        """Close this connection to make room for another client."""
        self.state = CLOSED
        self.transport.abort()

    @property
    def idle(self) -> bool:
        """Return whether the connection is between two requests and has no byte of the next one."""
        return self.state == HEAD and not self._buffer

    def sweep(self, now: float) -> None:
        """Close this connection if one of its time limits has passed."""
        limits = self.limits
        if self._stalled_at and now - self._stalled_at > limits.write_stall_s:
            self.transport.abort()
        elif self.due and now >= self.due:
            if self.state == BODY or (self.state == HEAD and self._buffer):
                self._refuse(408, f"the request {'body' if self.state == BODY else 'head'} did not arrive in time")
            elif self.state == HEAD:
                self._close()
            else:
                self.transport.abort()
        elif self.state == HEAD and not self._buffer and self.due - now < limits.idle_timeout_s - limits.write_stall_s:
            if self.transport.get_write_buffer_size():  # an unread answer below the high-water mark
                self.transport.abort()
