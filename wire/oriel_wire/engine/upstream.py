"""Keep-alive connections to one upstream endpoint, driven by callbacks.

Ownership: an `Endpoint` owns its connections. A request borrows one with `begin`, writes to it, and gets its answer
through its `ResponseSink`; the connection returns to the endpoint by itself after the last byte. The borrower may
`abandon` it at any time before that; then no further callback comes and the connection is closed, so that the upstream
notices. Exactly one of these ends a borrowing: a callback with `complete=True`, `failed`, or
`abandon`.
"""

import asyncio
import struct
import sys
from time import monotonic
from typing import Final, Protocol, cast

from mypy_extensions import mypyc_attr

from oriel_wire.engine.kernel import has_input
from oriel_wire.engine.pulse import connecting_within
from oriel_wire.errors import (
    BadMessage,
    UpstreamBroken,
    UpstreamError,
    UpstreamHungUp,
    UpstreamUnreachable,
    UpstreamUnread,
)
from oriel_wire.h1.chunked import ChunkedDecoder
from oriel_wire.h1.response import ResponseHead, ResponseMemo, parse_response_head, read_cost

_MAX_HEAD: Final = 64 * 1024
_MAX_INTERIM: Final = 8
_VERSION: Final = b"HTTP/1."
_WHOLE_ERROR: Final = 4096  # largest body of an error that is delivered as a whole
_UNTIL_CLOSE: Final = 1 << 62
_NOBODY = (None, 0.0)
_SIOCOUTQ = 0x5411  # Linux: bytes of a socket that its peer has not acknowledged


class ResponseSink(Protocol):
    """The receiver of an answer. Called on the loop; must not raise."""

    def connected(self, connection: "UpstreamConnection") -> None:
        """Called when a connection is ready for the request, and only if `begin` returned None."""

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        """Called with the head and the body bytes that arrived with it."""

    def response_data(self, data: bytes, complete: bool) -> None:
        """Called with each further piece of the body, chunk framing removed; `data` may be empty when `complete`."""

    def failed(self, error: UpstreamError) -> None:
        """Called when the answer did not come, or broke off."""

    def upstream_writable(self, writable: bool) -> None:
        """Called when the upstream has stopped or resumed reading the request."""


class UpstreamConnection(asyncio.Protocol):
    """One connection. Its borrower sets `request_done` when the request's last byte is written.

    reported: the cost in the trailers of the answer, see `read_cost`; None if there is none, or not yet.
    """

    __slots__ = (
        *("_buffer", "_wanted"),
        "_decoder",
        "_head_only",
        "_in_body",
        "_interim",
        "_left",
        "_reusable",
        "_unread",
        "endpoint",
        "idle_since",
        "request_bytes",
        "request_done",
        "reported",
        "sink",
        "transport",
    )
    transport: asyncio.Transport

    def __init__(self, endpoint: "Endpoint") -> None:
        self.endpoint = endpoint
        self.sink: ResponseSink | None = None
        self.request_done = True
        self.reported: tuple[int, str] | None = None
        # Bytes of the written request, if the borrower needs to know whether it was read; -1: many.
        self.request_bytes = 0
        self.idle_since = 0.0
        self._unread = False
        self._buffer: bytes | bytearray = b""  # an answer that has begun: its head, or a short error
        self._wanted = 0  # bytes of this error; 0: the head has not ended
        self._in_body = False
        self._interim = 0
        self._left = 0
        self._decoder: ChunkedDecoder | None = None
        self._head_only = False
        self._reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such

    def abandon(self) -> None:
        """Close the connection, as the borrower needs no answer any more, so that the upstream notices."""
        if self.sink is not None:
            self.sink = None
            self.endpoint.outstanding -= 1
            self.transport.abort()

    def pause(self) -> None:
        """Stop reading: nobody takes the answer now."""
        self.transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.sink is not None:
            self.sink.upstream_writable(False)

    def resume_writing(self) -> None:
        if self.sink is not None:
            self.sink.upstream_writable(True)

    def eof_received(self) -> bool:
        if self.sink is not None and self.idle_since and not self._in_body and not self._buffer:
            self._unread = 0 < self.request_bytes <= self._unacknowledged()
        return False

    def _unacknowledged(self) -> int:
        """Bytes the peer's kernel has not taken, -1 if that cannot be known.

        Asked after the peer's FIN: bytes it has not acknowledged by then can no longer be read by a program there.
        """
        if sys.platform != "linux":
            return -1
        import fcntl

        try:
            unsent = self.transport.get_write_buffer_size()
            fd: int = self.transport.get_extra_info("socket").fileno()
            (unread,) = struct.unpack("i", fcntl.ioctl(fd, _SIOCOUTQ, b"\0\0\0\0"))
        except (OSError, AttributeError, ValueError):
            return -1
        return unsent + int(unread)

    def data_received(self, data: bytes) -> None:
        self.endpoint.heard = True
        if self._in_body:
            self._body(data)
            return
        sink = self.sink
        if sink is None:  # an upstream that sends without a request is out of step
            self.transport.abort()
            return
        if buffer := self._buffer:
            ends = max(0, len(buffer) - 3)  # before it no head ends
            buffer += data
            incomplete = len(buffer) < self._wanted if self._wanted else buffer.find(b"\r\n\r\n", ends) < 0
            if incomplete and len(buffer) <= _MAX_HEAD and _VERSION.startswith(bytes(buffer[: len(_VERSION)])):
                return
            data, self._buffer, self._wanted = bytes(buffer), b"", 0
        while True:
            stop = data.find(b"\r\n\r\n")
            if stop < 0 or stop > _MAX_HEAD:
                if len(data) > _MAX_HEAD:
                    self._break("the upstream's response head is too long")
                    return
                if not _VERSION.startswith(data[: len(_VERSION)]):  # the bytes so far cannot become HTTP/1
                    self._break("the upstream does not speak HTTP/1")
                    return
                self._buffer = bytearray(data)
                return
            memo, block = self.endpoint.memo, data[:stop]
            try:
                head: ResponseHead = memo.heads.get(block) or parse_response_head(block, memo)
            except BadMessage as error:
                self._break(f"the upstream's answer cannot be read: {error.message}")
                return
            rest = data[stop + 4 :]
            if head.status >= 200:
                break
            self._interim += 1
            if head.status == 101 or self._interim > _MAX_INTERIM:
                self._break("the upstream sends interim answers without end")
                return
            data = rest
        if head.close:
            self._reusable = False
        length = head.content_length
        if length is not None and length > self.endpoint.max_response_bytes and not self._head_only:
            self._too_large()
            return
        if self._head_only or head.status == 204 or head.status == 304:
            length = 0
        elif head.chunked:
            self._decoder = ChunkedDecoder()
            self._in_body = True
            self._left = _UNTIL_CLOSE
            self._chunks(self._decoder, rest, head)
            return
        elif length is None:
            self._reusable = False
            length = _UNTIL_CLOSE
        size = len(rest)
        if size >= length:
            if size > length:  # surplus bytes: they must never become part of another answer
                rest = rest[:length]
                self._reusable = False
            self._finish()
            sink.response(head, rest, True)
            return
        if head.status >= 400 and length <= _WHOLE_ERROR:
            # the receiver needs the reason in the body as well, which often comes in a later packet
            self._buffer, self._wanted = bytearray(data), stop + 4 + length
            return
        self._left = length - size
        self._in_body = True
        sink.response(head, rest, False)

    def _body(self, data: bytes) -> None:
        sink = self.sink
        if sink is None:
            return
        if self._decoder is not None:
            self._chunks(self._decoder, data, None)
            return
        left = self._left - len(data)
        if left > 0:
            self._left = left
            if _UNTIL_CLOSE > left + self.endpoint.max_response_bytes > _UNTIL_CLOSE >> 1:
                self._too_large()
                return
            sink.response_data(data, False)
            return
        if left < 0:
            data = data[:left]
            self._reusable = False
        self._finish()
        sink.response_data(data, True)

    def _chunks(self, decoder: ChunkedDecoder, data: bytes, head: ResponseHead | None) -> None:
        sink = self.sink
        assert sink is not None
        try:
            pieces = decoder.feed(data)
        except BadMessage as error:
            self._break(f"the upstream's answer cannot be read: {error.message}")
            return
        body = b"".join(pieces)
        self._left -= len(body)
        if _UNTIL_CLOSE > self._left + self.endpoint.max_response_bytes:
            self._too_large()
            return
        complete = decoder.done
        if complete:
            if decoder.rest:
                self._reusable = False
            if decoder.trailers and (reported := read_cost(decoder.trailers)) != (-1, ""):
                self.reported = reported
            self._finish()
            if head is not None and self.reported is not None:
                head = head.copy()
                head.cost_us, head.used = self.reported
        if head is not None:
            sink.response(head, body, complete)
        elif body or complete:
            sink.response_data(body, complete)

    def _finish(self) -> None:
        """Return the connection to its endpoint after the last byte of an answer, or close it if it is not reusable."""
        self.sink = None
        self._in_body = False
        self._interim = 0
        self._decoder = None
        endpoint = self.endpoint
        endpoint.outstanding -= 1
        # An answer can be complete before its request is. `begin` checks whether the connection is closing.
        taken = self.request_bytes >= 0 or self._unacknowledged() <= 0
        if self._reusable and self.request_done and taken and not endpoint.closed:
            self.idle_since = monotonic()
            endpoint.idle.append(self)
        else:
            self.transport.close()

    def _too_large(self) -> None:
        self._break(f"the upstream's answer is larger than {self.endpoint.max_response_bytes} bytes")

    def _break(self, message: str) -> None:
        sink, self.sink = self.sink, None
        self.transport.abort()
        if sink is not None:
            self.endpoint.outstanding -= 1
            sink.failed(UpstreamBroken(message))

    def connection_lost(self, exc: Exception | None) -> None:
        sink, self.sink = self.sink, None
        if sink is None:
            if self in self.endpoint.idle:
                self.endpoint.idle.remove(self)
            return
        self.endpoint.outstanding -= 1
        if self._in_body and self._decoder is None and self._left > _UNTIL_CLOSE >> 1 and exc is None:
            sink.response_data(b"", True)  # an answer without a length ends with its connection
        elif self._unread:
            sink.failed(UpstreamUnread("the upstream closed a kept connection before the request reached it"))
        elif self.idle_since and not self._in_body and not self._buffer:
            sink.failed(UpstreamHungUp("the upstream closed a kept connection instead of answering"))
        else:
            sink.failed(UpstreamBroken("the upstream closed the connection before its answer was complete"))


@mypyc_attr(allow_interpreted_subclasses=True)
class Endpoint:
    """One upstream address. `outstanding`: requests that were begun and have not ended.

    host, port: TCP address. connect_timeout_s bounds a connection attempt; idle connections older than max_idle_s are
    not used again (keep it below the upstream's own idle limit, or a request may meet a closing connection).
    max_response_bytes: the most bytes of one body; a larger one fails. heard: True if bytes have come since it was last
    cleared.
    memo: the cache of header lines of answers; shared by endpoints with similar answers.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout_s: float = 2.0,
        max_idle_s: float = 45.0,
        max_response_bytes: int = 1 << 40,
        memo: ResponseMemo | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.connect_timeout_s = connect_timeout_s
        self.max_idle_s = max_idle_s
        self.max_response_bytes = max_response_bytes
        self.heard = False
        name = f"[{host}]" if ":" in host else host
        self.host_line = f"host: {name}:{port}".encode("ascii")
        self.idle: list[UpstreamConnection] = []
        self.outstanding = 0
        self.closed = False  # keeps no connections any more
        self.memo = memo or ResponseMemo()
        self.connect_s = 0.0  # longest time that connecting took
        # The waiting sink and its start; None if the borrower left: the attempt's result still matters.
        self._connecting: dict[asyncio.Task[None], tuple[ResponseSink | None, float]] = {}

    def begin(
        self, sink: ResponseSink, now: float, head_only: bool = False, fresh: bool = False, large: bool = False
    ) -> UpstreamConnection | None:
        """Borrow a connection at monotonic time `now`. Returns None if one has to be opened first: `sink.connected` or
        `sink.failed` will then be called.

        fresh: open a new connection instead of using a kept one.
        large: the request cannot be sent twice, so check whether the peer has just closed the kept connection.
        """
        self.outstanding += 1
        idle = self.idle
        if idle and not fresh:
            oldest_allowed = now - self.max_idle_s
            while idle:
                connection = idle.pop()
                if (
                    connection.idle_since >= oldest_allowed
                    and not connection.transport.is_closing()
                    and not (large and has_input(connection.transport))
                ):
                    connection.sink = sink
                    connection.reported = None
                    connection._head_only = head_only
                    connection.request_done = False
                    return connection
                connection.transport.close()
        task = asyncio.get_running_loop().create_task(self._connect(head_only))
        self._connecting[task] = sink, now
        task.add_done_callback(self._connecting_done)
        return None

    def borrower_left(self, sink: ResponseSink) -> None:
        """Drop a borrower that left while its connection was being opened; it gets no callback.

        One attempt to connect continues: its connection is kept, and its duration shows whether the endpoint can be
        reached.
        """
        alone = any(waiting is None for waiting, _ in self._connecting.values())
        for task, (waiting, began_s) in self._connecting.items():
            if waiting is sink:
                self.outstanding -= 1
                if alone:
                    del self._connecting[task]
                    task.cancel()
                else:
                    self._connecting[task] = None, began_s
                return

    def connecting_for_s(self, now: float) -> float:
        """Return how long the oldest attempt to connect has taken so far; 0.0 if there is none."""
        return now - next(iter(self._connecting.values()))[1] if self._connecting else 0.0

    def give_up_connecting(self) -> None:
        """Fail the requests that wait for a connection."""
        attempts, self._connecting = self._connecting, {}
        for task, (sink, _) in attempts.items():
            task.cancel()
            if sink is not None:
                self.outstanding -= 1
                sink.failed(UpstreamUnreachable("the upstream does not accept connections"))

    def close_stale(self, now: float) -> None:
        """Close idle connections that are too old to be used again."""
        idle, oldest_allowed = self.idle, now - self.max_idle_s
        while idle and idle[0].idle_since < oldest_allowed:
            idle.pop(0).transport.close()

    async def _connect(self, head_only: bool) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        try:
            async with connecting_within(self.connect_timeout_s):
                transport, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self.port
                )
        except (OSError, TimeoutError):
            sink, _ = self._connecting.pop(task, _NOBODY)
            if sink is not None:
                self.outstanding -= 1
                sink.failed(UpstreamUnreachable("the upstream does not accept connections"))
            return
        if task not in self._connecting:
            transport.close()
            return
        sink, began_s = self._connecting.pop(task)
        self.connect_s = max(self.connect_s, monotonic() - began_s)
        if sink is None:
            transport.set_write_buffer_limits(high=256 * 1024)
            connection.idle_since = monotonic()
            self.idle.append(connection)
            return
        if transport.is_closing():  # it had no sink yet that could be called
            self.outstanding -= 1
            sink.failed(UpstreamBroken("the upstream closed the connection before the request was sent"))
            return
        transport.set_write_buffer_limits(high=256 * 1024)
        connection.sink = sink
        connection._head_only = head_only
        connection.request_done = False
        sink.connected(connection)

    def _connecting_done(self, task: asyncio.Task[None]) -> None:
        self._connecting.pop(task, None)

    async def close(self) -> None:
        """Close idle connections and give up attempts to connect; borrowed ones belong to their borrowers, and are
        closed when they are returned."""
        self.closed = True
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self.idle:
            connection.transport.close()
        self.idle.clear()
