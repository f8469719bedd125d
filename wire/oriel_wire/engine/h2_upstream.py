"""Multiplexed HTTP/2 connections to one upstream endpoint, driven by callbacks; `upstream` does the same for HTTP/1.1.

Ownership: an `H2Endpoint` owns its connections. A request borrows a stream with `begin`, sends on it at once, and gets
its answer through the hooks of its `UpstreamStream`. The borrower may `abandon` it at any time; then no further
callback comes and the stream is reset, so that the upstream notices. Exactly one of these ends a borrowing: `complete`,
which a subclass calls at the answer's end, `failed`, or `abandon`.

A connection takes streams from its upstream's SETTINGS on, as many as they allow; beyond that another one is opened, up
to `max_connections`, and then requests wait. A connection whose upstream has sent GOAWAY takes no new streams, and is
closed with its last one. The kernel ends a connection whose peer has vanished.

An error says whether the request may have been executed. `UpstreamUnreachable`: no connection was made, nothing was
sent. `UpstreamUnread`: the upstream refused the stream or left it out of its GOAWAY, or the connection ended before the
request was written. `UpstreamBroken`: everything else.
"""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from mypy_extensions import mypyc_attr

from oriel_wire.engine.h2_transport import H2Transport
from oriel_wire.engine.kernel import watch_peers
from oriel_wire.engine.pulse import connecting_within
from oriel_wire.errors import UpstreamBroken, UpstreamError, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h2.frames import CANCEL, CODES, NO_ERROR, REFUSED_STREAM
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field as HeaderField
from oriel_wire.h2.known_fields import FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

_VANISHED_S: Final = 25.0  # without an acknowledgement of what was sent, or of the kernel's probes
RETRY_S: Final = 1.0  # after a failed attempt to open another connection beside one that works
_WAITING: Final = 256 * 1024
LIMITS: Final = H2Limits(
    stream_window_bytes=256 * 1024, connection_window_bytes=4 * 1024 * 1024, max_header_list_bytes=64 * 1024
)
_UNREACHABLE: Final = "the upstream does not accept connections"
_NO_STREAMS: Final = "the upstream accepts connections, but takes no streams of HTTP/2 on them"


@mypyc_attr(allow_interpreted_subclasses=True)
class UpstreamStream(Stream):
    """One request to an upstream. A subclass receives the answer with `head`, `data` and `trailers_came`, and calls
    `complete` at its end.

    sink: the borrower; None once the borrowing has ended. kept: answer bytes that are not yet given back to the
    upstream's window, because the borrower has paused.
    """

    __slots__ = ("_paused", "connection", "endpoint", "kept", "sink")

    def __init__(self, endpoint: "H2Endpoint", connection: "H2Upstream", sink: Any) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.connection = connection
        self.sink = sink
        self.kept = 0
        self._paused = False

    # The answer, as a subclass gets it -------------------------------------------------------------------------

    def head(self, fields: list[HeaderField], end: bool) -> None:
        """The header list of the final answer."""
        raise NotImplementedError

    def data(self, data: bytes | memoryview, end: bool) -> None:
        """Bytes of the body; they have been counted by `received`."""
        raise NotImplementedError

    def trailers_came(self, fields: list[HeaderField]) -> None:
        """Take the trailers, which end the answer."""
        raise NotImplementedError

    def room(self) -> None:
        """Everything that was sent on the stream has left."""

    # Methods for the sender ------------------------------------------------------------------------------------

    def send(self, block: bytes, data: bytes | memoryview | list[Any], end: bool) -> bool:
        """Send the head of the request, and the first or all of its body. Returns whether more may follow at once."""
        connection = self.connection
        if not data:
            connection.send_headers(self, block, end)
            return True
        connection.send_headers(self, block, False)
        if isinstance(data, list):
            return connection.send_pieces(self, data, end)
        return connection.send_data(self, data, end)

    def send_whole(self, block: bytes, data: bytes) -> None:
        """Send the head and the whole body of the request, which is not empty."""
        self.connection.send_whole(self, block, data)

    def send_more(self, data: bytes | memoryview, end: bool) -> bool:
        """Send more of the body; see `H2Connection.send_data`."""
        return self.connection.send_data(self, data, end)

    def pause(self) -> None:
        """Let the upstream send no more than its window, because nobody takes the answer now."""
        self._paused = True

    def resume(self) -> None:
        """Go on reading."""
        self._paused = False
        kept, self.kept = self.kept, 0
        if kept:
            self.connection.consumed(self, kept)

    def abandon(self) -> None:
        """End the borrowing: reset the stream. No callback comes any more."""
        if self.sink is not None:
            self.sink = None
            self._give_back(CANCEL)

    def complete(self) -> None:
        """End the borrowing: the answer is complete. A request that goes on is told to stop."""
        if self.sink is not None:
            self.sink = None
            self._give_back(NO_ERROR)

    def fail(self, error: UpstreamError) -> None:
        """End the borrowing: no answer comes, or no more of it."""
        sink, self.sink = self.sink, None
        if sink is not None:
            self._give_back(CANCEL)
            sink.failed(error)

    def _give_back(self, code: int) -> None:
        connection = self.connection
        if self.held_bytes and self.closed:
            connection.consumed(self, self.held_bytes)
        elif not self.closed:
            connection.send_reset(self, code)
        self.endpoint.stream_ended(connection)

    def received(self, size: int) -> None:
        """Count bytes of the body, and let the upstream send as many more unless the borrower has paused."""
        if self._paused:
            self.kept += size
        else:
            self.connection.consumed(self, size)


@mypyc_attr(allow_interpreted_subclasses=True)
class H2Upstream(H2Transport):
    """One connection to an endpoint. ready: True if it takes streams, once that is known."""

    __slots__ = (
        "_flushed_id",
        "_idle_since",
        "_tidied_id",
        "endpoint",
        "ready",
    )

    def __init__(self, endpoint: "H2Endpoint") -> None:
        loop = asyncio.get_running_loop()
        super().__init__(loop, client=True, limits=endpoint.limits, memo=endpoint.fields)
        self.endpoint = endpoint
        self.ready: asyncio.Future[bool] = loop.create_future()
        self._flushed_id = self._tidied_id = 0  # last stream that was written, that was open at the last `tidy`
        self._idle_since = monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's class is not registered
        self.transport.set_write_buffer_limits(high=_WAITING)
        self.open()
        self._flush()

    def data_received(self, data: bytes) -> None:
        self.endpoint.heard = True
        self.receive(data, monotonic())
        if self.out:
            self._write()
        if self.peer_leaves and not self.streams:
            self.close_unused()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.out = []
        self._end("the upstream closed the connection before its answer was complete")

    def _end(self, message: str) -> None:
        """Fail every stream that is open."""
        if not self.ready.done():
            self.ready.set_result(False)
        self.endpoint.lost(self)
        for stream in self._end_streams():
            assert isinstance(stream, UpstreamStream)
            if stream.id > self._flushed_id:
                stream.fail(UpstreamUnread("the upstream closed the connection before the request was written"))
            else:
                stream.fail(UpstreamBroken(message))

    def tidy(self, now: float, max_idle_s: float) -> None:
        """Close a connection that has been idle for too long."""
        if self.streams or self._next_id != self._tidied_id:
            self._tidied_id = self._next_id
            self._idle_since = now
        elif now - self._idle_since > max_idle_s:
            self.close_unused()

    def close_unused(self) -> None:
        """Close a connection that has no stream."""
        self.endpoint.lost(self)
        self.drain()
        self._flush()
        self.transport.close()

    # Hooks of the codec ----------------------------------------------------------------------------------------

    def _write(self) -> None:
        if not self.transport.is_closing():
            self._flushed_id = self._next_id - 2
        super()._write()

    def on_headers(self, stream: Stream, fields: list[HeaderField], end: bool) -> None:
        assert isinstance(stream, UpstreamStream)
        if self._judged is not None:
            self.trust_fields()
        if stream.sink is not None:
            stream.head(fields, end)

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, UpstreamStream)
        if stream.sink is not None:
            stream.data(data, end)
        else:
            self.consumed(stream, len(data))

    def on_trailers(self, stream: Stream, fields: list[HeaderField]) -> None:
        assert isinstance(stream, UpstreamStream)
        if self._judged is not None:
            self.trust_fields()
        if stream.sink is not None:
            stream.trailers_came(fields)

    def on_reset(self, stream: Stream, code: int) -> None:
        assert isinstance(stream, UpstreamStream)
        if code == REFUSED_STREAM:
            stream.fail(UpstreamUnread("the upstream refused the stream before it looked at the request"))
        else:
            stream.fail(UpstreamBroken(f"the upstream reset the stream: {CODES[code] if code < len(CODES) else code}"))

    def on_stream_error(self, stream: Stream, code: int, message: str) -> None:
        assert isinstance(stream, UpstreamStream)
        stream.fail(UpstreamBroken(f"the upstream's answer cannot be read: {message}"))

    def on_room(self, stream: Stream) -> None:
        assert isinstance(stream, UpstreamStream)
        if stream.sink is not None:
            stream.room()

    def on_settings(self) -> None:
        if not self.ready.done():
            self.ready.set_result(True)
        else:
            self.endpoint.serve()  # it may take more streams now

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        self.endpoint.lost(self)

    def connection_error(self, code: int, message: str) -> None:
        self._flush()
        self._end(f"the upstream breaks HTTP/2: {message}")
        self.transport.abort()


@mypyc_attr(allow_interpreted_subclasses=True)
class H2Endpoint:
    """One upstream address that speaks HTTP/2 with prior knowledge. outstanding: requests begun and not ended.

    host, port: TCP address. make: the stream of a request. connect_timeout_s bounds an attempt to connect, up to the
    upstream's settings; a connection without a stream is closed after max_idle_s. heard: bytes have come since it was
    last cleared. connect_s: the longest time that connecting took. Call `close_stale` about once a second.
    """

    def __init__(
        self,
        host: str,
        port: int,
        make: Callable[["H2Endpoint", H2Upstream, Any], UpstreamStream],
        *,
        connect_timeout_s: float = 2.0,
        max_idle_s: float = 300.0,
        max_connections: int = 8,
        limits: H2Limits = LIMITS,
    ) -> None:
        self.host = host
        self.port = port
        self.connect_timeout_s = connect_timeout_s
        self.max_idle_s = max_idle_s
        self.max_connections = max_connections
        self.limits = limits
        self.fields = FieldMemo()
        self.heard = False
        self.closed = False
        self.outstanding = 0
        self.connect_s = 0.0
        self.authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.authority_block = literal(b":authority", self.authority.encode())
        self._make = make
        self._connections: list[H2Upstream] = []  # connections that take new streams
        self._waiting: dict[Any, bool] = {}  # sinks without a stream, the oldest first; whether they send HEAD
        self._connecting: dict[asyncio.Task[None], float] = {}  # since when
        self._retry_at = 0.0

    def begin(
        self, sink: Any, now: float, head_only: bool = False, fresh: bool = False, large: bool = False
    ) -> UpstreamStream | None:
        """Borrow a stream, on which the caller sends at once.

        sink: the borrower. If this returns None, its `connected` is called when a stream is ready, or its `failed`; and
        `failed` also if the answer breaks off. Both are called on the loop and must not raise.
        head_only: the request is HEAD, whose answer has no body. fresh, large: as for `upstream.Endpoint.begin`, and
        without a meaning here: a stream that was refused is tried on whatever connection takes it.
        """
        self.outstanding += 1
        if not self._waiting:
            for connection in self._connections:
                if connection.can_open():
                    stream = self._make(self, connection, sink)
                    stream.head_only = head_only
                    return stream
        self._waiting[sink] = head_only
        if self.closed:
            asyncio.get_running_loop().call_soon(self._fail_waiting, _UNREACHABLE)
        else:
            self._connect_if_needed(now)
        return None

    @property
    def connected(self) -> bool:
        """Return whether there is a connection that takes streams."""
        return bool(self._connections)

    def borrower_left(self, sink: Any) -> None:
        """The borrower left while it waited; no callback comes. The attempt to connect goes on."""
        if self._waiting.pop(sink, None) is not None:
            self.outstanding -= 1

    def connecting_for_s(self, now: float) -> float:
        """Return how long the oldest attempt to connect has taken so far; 0.0 if there is none."""
        return now - next(iter(self._connecting.values())) if self._connecting else 0.0

    def give_up_connecting(self) -> None:
        """Stop attempts to connect. Requests fail that wait for them; those that wait for a stream go on waiting."""
        attempts, self._connecting = self._connecting, {}
        for task in attempts:
            task.cancel()
        if attempts:
            self._not_connected(_UNREACHABLE)

    def lost(self, connection: H2Upstream) -> None:
        """A connection takes no new streams."""
        if connection in self._connections:
            self._connections.remove(connection)
        self.serve()

    def stream_ended(self, connection: H2Upstream) -> None:
        """The borrower of a stream has it no longer: a request that waits may begin."""
        self.outstanding -= 1
        if self._waiting:
            self.serve()
        if not connection.streams and connection not in self._connections and not connection.closed:
            connection.close_unused()

    def close_stale(self, now: float) -> None:
        """Close idle connections."""
        for connection in list(self._connections):
            connection.tidy(now, self.max_idle_s)

    def serve(self) -> None:
        """Give streams to those that wait, and connect if they need a connection."""
        if not self._waiting:
            return
        for connection in list(self._connections):
            while self._waiting and connection.can_open():
                sink = next(iter(self._waiting))
                stream = self._make(self, connection, sink)
                stream.head_only = self._waiting.pop(sink)
                sink.connected(stream)
        if self._waiting:
            self._connect_if_needed(monotonic())

    def _connect_if_needed(self, now: float) -> None:
        """Open a connection for those that wait, one at a time."""
        count = len(self._connections)
        if self._connecting or self.closed or count >= self.max_connections or (count and now < self._retry_at):
            return
        self._connecting[asyncio.get_running_loop().create_task(self._connect())] = now

    def _not_connected(self, message: str) -> None:
        """An attempt to connect has failed. While there is another connection, those that wait get its streams."""
        if self._connections:
            self._retry_at = monotonic() + RETRY_S
        else:
            self._fail_waiting(message)

    def _fail_waiting(self, message: str) -> None:
        for sink in list(self._waiting):
            if self._waiting.pop(sink, None) is not None:  # else forgotten by what another one has done
                self.outstanding -= 1
                sink.failed(UpstreamUnreachable(message))

    async def _connect(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        made: H2Upstream | None = None
        ready = False
        try:
            async with connecting_within(self.connect_timeout_s):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: H2Upstream(self), self.host, self.port
                )  # type: ignore[type-var]
                watch_peers(made.transport.get_extra_info("socket"), _VANISHED_S)
                ready = await made.ready and made.can_open()
        except (OSError, TimeoutError):
            pass
        finally:
            began_s = self._connecting.pop(task, None)
            if made is not None and (not ready or began_s is None):
                made.transport.abort()
        if began_s is None:
            return
        if made is None or not ready:
            self._not_connected(_UNREACHABLE if made is None else _NO_STREAMS)
            return
        self.connect_s = max(self.connect_s, monotonic() - began_s)
        self._connections.append(made)
        self.serve()

    async def close(self) -> None:
        """Close idle connections and give up attempts to connect. Streams that are open belong to their borrowers;
        their connections are closed with the last one."""
        self.closed = True
        tasks = list(self._connecting)
        self._connecting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_waiting(_UNREACHABLE)
        for connection in list(self._connections):
            self.lost(connection)
            if not connection.streams:
                connection.close_unused()
