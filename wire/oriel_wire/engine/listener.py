"""A listening socket and the connections it accepted: opening, sweeping, draining."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import formatdate
from itertools import islice
from time import monotonic
from typing import Protocol

from oriel_wire.context import new_request_id
from oriel_wire.engine.kernel import watch_peers
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.pulse import Pulse
from oriel_wire.h1.request import LineMemo
from oriel_wire.h1.similar import SimilarHeads
from oriel_wire.h2.known_fields import FieldMemo

LAME_DUCK_S = 0.4
LAME_DUCK_VARIABLE = "ORIEL_LAME_DUCK_S"  # set by `oriel up` for servers that nobody probes when they stop
LINGER_S = 0.2
ACCEPT_SHARE = 0.7
_POLL_S = 0.05
BACKLOG = 2048
_SWEEP_S = 0.25
_LATE = 2048
_HANDSHAKE_S = 0.5  # a TLS handshake that takes longer is the first to make room
_EVICTION_SAMPLE = 64
_EVICTION_SEARCH = 1024  # connections searched if none of the sample can be closed
_SHUTDOWN_S = 5.0  # for the client's close_notify
_ACCEPTED = 64  # connections accepted per turn of the event loop
_PLAIN_LINGER_S = 1.0  # for a client without TLS to read its answer
_MAX_IGNORED = 64 * 1024  # bytes read from such a client meanwhile
_CAPITALS = frozenset(bytes([letter]) for letter in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # first byte of HTTP, never of TLS
_RETRY_S = 0.25  # pause after the process has run out of file descriptors


class Connection(Protocol):
    """The methods of a connection that its server calls; `ServerConnection` has them."""

    transport: asyncio.Transport
    due: float

    @property
    def idle(self) -> bool: ...
    @property
    def under_way(self) -> int: ...
    @property
    def waits_for_head(self) -> bool: ...
    def evict(self) -> None: ...
    def close_if_idle(self) -> None: ...
    def sweep(self, now: float) -> None: ...


def served_at(sock: socket.socket) -> tuple[str, int]:
    """Return a listening socket's address, or the machine's name if it takes all, and its port, for spans.

    For a Unix socket its path and 0.
    """
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return str(name), 0
    host, port = name[:2]
    return socket.gethostname() if host in ("0.0.0.0", "::") else host, port


class TlsHandshake:
    """A handshake in progress. since: the time when the connection was accepted, in monotonic seconds."""

    __slots__ = ("_accepted", "_task", "since")

    def __init__(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self.since = monotonic()
        self._accepted = accepted
        self._task = task

    def cut(self) -> None:
        """Abort it to make room for another client. Cancelling the task would keep the connection until its timeout."""
        with suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """A listening socket and its connections. Build with `open`, end with `drain`.

    lame_duck_s, accept_share, linger_s: see `drain`.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.memo = LineMemo()
        self.heads = SimilarHeads(self.memo)
        self.fields = FieldMemo()  # fields of HTTP/2
        self.connections: set[Connection] = set()
        self.handshakes: dict[TlsHandshake, None] = {}  # TLS handshakes under way, the oldest first
        self.requests_open = 0  # requests under way at the last sweep
        self.kept_bytes = 0  # read beyond current requests, counted where it exceeds a head
        self.draining = False
        self.secure = False
        self.lame_duck_s = float(os.environ.get(LAME_DUCK_VARIABLE, LAME_DUCK_S))
        self.accept_share = ACCEPT_SHARE
        self.linger_s = LINGER_S
        self.accepting = True
        self.finishing = False  # while draining: whether requests from before are under way
        self.emptied = asyncio.Event()  # set when the last connection of a draining server has gone
        self.date = self.date_line = b""  # without and with its CRLF
        self.address = ("", 0)  # see `served_at`
        self.port = 0
        self.loop = asyncio.get_running_loop()
        self.pulse = Pulse(self.loop)
        # While the loop is behind: calls a function in a later turn of it, after those of a lower rank.
        self.gate: Callable[[int, Callable[[], None]], None] | None = None
        self.joiner = ThreadPoolExecutor(1, thread_name_prefix="oriel-bodies")  # starts its thread on first use
        self._server: asyncio.Server | None = None
        self._factory: Callable[[], asyncio.Protocol]
        self._socket: socket.socket | None = None
        self._secure: TlsListener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = monotonic()
        self._spared = False  # True if the last tick cut nobody because the loop had stood still

    async def open(
        self,
        factory: Callable[[], asyncio.Protocol],
        sock: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Start accepting on `sock` (bound, not yet listening), which the server owns from here on.

        With `tls` a connection begins when its handshake is done, within head_timeout_s.
        """
        self._tick()
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            watch_peers(sock, self.limits.write_stall_s)
        self.secure = tls is not None
        self._factory, self._socket = factory, sock
        if tls is not None:
            self._secure = TlsListener(self, sock, tls, factory)
            self._secure.listen(BACKLOG)
        else:
            self._server = await self.loop.create_server(factory, sock=sock, backlog=BACKLOG)
        self.address = served_at(sock)
        self.port = self.address[1]

    def has_place(self) -> bool:
        """Return whether another client can be accepted; a slow handshake or an idle client is closed to make room."""
        if len(self.connections) + len(self.handshakes) < self.limits.max_connections:
            return True
        oldest = next(iter(self.handshakes), None)
        stalled = oldest is not None and monotonic() - oldest.since > _HANDSHAKE_S
        if not stalled and self.evict_idle():
            return True
        if oldest is None:
            return False
        self.handshakes.pop(oldest)
        oldest.cut()
        return True

    def handshake_ended(self, handshake: TlsHandshake) -> None:
        """Forget a handshake that has succeeded or failed."""
        self.handshakes.pop(handshake, None)
        self.note_empty()

    def note_empty(self) -> None:
        """Note that a connection or a handshake has ended; a draining server waits for the last one."""
        if self.draining and not self.connections and not self.handshakes:
            self.emptied.set()

    def evict_idle(self) -> bool:
        """Close a connection that has no request under way, to make room for a new one. Only a sample is searched.

        The connection that has been idle for longest goes first, then the one whose incomplete head is oldest.
        """
        some = [connection for connection in islice(self.connections, _EVICTION_SAMPLE) if connection.waits_for_head]
        if not some:
            rest = islice(self.connections, _EVICTION_SAMPLE, _EVICTION_SEARCH)
            some = [connection for connection in rest if connection.waits_for_head][:_EVICTION_SAMPLE]
        if not some:
            return False
        min(some, key=lambda connection: (not connection.idle, connection.due)).evict()
        return True

    def forget_credentials(self) -> None:
        """Drop everything that was recognised by credentials, because the set of valid ones has changed."""
        self.memo.forget_credentials()
        self.heads.forget_decisions()

    @property
    def under_way(self) -> int:
        """Requests that have begun and are not answered."""
        return sum(connection.under_way for connection in self.connections)

    async def drain(self, grace_s: float, beside: "asyncio.Future[None] | None" = None) -> None:
        """Let requests in flight finish (at most `grace_s`), then close everything.

        1. From now on answers carry `Connection: close`.
        2. Connections are accepted and requests answered for another `lame_duck_s`, so that readiness probes see that
           the server is not ready. This goes on until the requests that were under way and `beside`, other work of the
           unit, have ended, but for at most `accept_share` of the grace.
        3. Then no connection is accepted. Idle connections stay open for another `linger_s`, also those that have not
           sent a request yet, because their clients may be sending one already: it is still answered.

        Cancelling `drain` leaves the server closed to new connections, and the existing ones open.
        """
        ends_s = monotonic() + grace_s
        self.draining = self.finishing = True
        try:
            await asyncio.sleep(max(0.0, min(grace_s, self.lame_duck_s)))
            await self._finished(monotonic() + self.accept_share * grace_s - self.lame_duck_s, beside)
        finally:
            self.accepting = self.finishing = False
            late = self._close_listener()
        for accepted in late:
            with suppress(OSError):  # the client has left already
                await self.loop.connect_accepted_socket(self._factory, accepted)
        for _ in range(3):  # accepted sockets become connections in a later turn of the loop
            await asyncio.sleep(0)
        self.emptied.clear()
        await self._emptied_within(min(self.linger_s, ends_s - monotonic()))
        for connection in list(self.connections):
            connection.close_if_idle()
        await self._emptied_within(min(_HANDSHAKE_S, ends_s - monotonic()))
        for handshake in list(self.handshakes):
            handshake.cut()
        await self._emptied_within(ends_s - monotonic())
        for connection in list(self.connections):
            connection.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        self.pulse.close()
        self.joiner.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)

    async def _finished(self, ends_s: float, beside: "asyncio.Future[None] | None") -> None:
        """Wait for the requests that are under way now, and for `beside`."""
        begun = [connection for connection in self.connections if connection.under_way]
        while monotonic() < ends_s:
            begun = [connection for connection in begun if connection.under_way]
            self.finishing = bool(begun)
            if not begun and (beside is None or beside.done()):
                return
            await asyncio.sleep(_POLL_S)

    def _close_listener(self) -> list[socket.socket]:
        """Stop listening, and return the sockets that are still in the listen queue, so that they are not reset."""
        late: list[socket.socket] = []
        if self._secure is not None:
            self._secure.close()
        if self._server is None or self._socket is None:
            return late
        with suppress(OSError), self._socket.dup() as queue:
            queue.setblocking(False)
            self._server.close()
            while len(late) < _LATE:
                late.append(queue.accept()[0])
        self._server.close()
        return late

    async def _emptied_within(self, seconds: float) -> None:
        if (self.connections or self.handshakes) and seconds > 0.0:
            self.emptied.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.emptied.wait()

    def _tick(self) -> None:
        self._timer = self.loop.call_later(_SWEEP_S, self._tick)
        now = monotonic()
        stood_still, self._ticked_s = now - self._ticked_s > 2.0 * _SWEEP_S, now
        self.date = b"date: " + formatdate(usegmt=True).encode("ascii")
        self.date_line = self.date + b"\r\n"
        self._spared = stood_still and not self._spared
        if self._spared:
            return  # bytes that clients sent meanwhile are not read yet: no client is cut for silence
        under_way = 0
        for connection in list(self.connections):
            connection.sweep(now)
            under_way += connection.under_way
        self.requests_open = under_way


class TlsListener:
    """Accepts TLS connections on a bound socket, which it owns. Single writer: the loop.

    Each handshake counts as a connection of the server, and can be aborted. The event loop's own listener hides a
    connection until its handshake is done: a client that connects and sends nothing would hold a file descriptor for
    the whole handshake timeout, and many such clients would hold all of them.

    factory: makes the protocol that reads and writes above TLS.
    """

    def __init__(
        self,
        server: "HttpServer",
        sock: socket.socket,
        context: ssl.SSLContext,
        factory: Callable[[], asyncio.Protocol],
    ) -> None:
        self._server = server
        self._socket = sock
        self._context = context
        self._factory = factory
        self._retry: asyncio.TimerHandle | None = None

    def listen(self, backlog: int) -> None:
        """Start accepting."""
        self._socket.setblocking(False)
        self._socket.listen(backlog)
        self._server.loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop listening. Connections that are already in the listen queue are still served."""
        self._server.loop.remove_reader(self._socket)
        while self._accept_one():
            pass
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        loop = self._server.loop
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError:  # no file descriptor is free: an immediate retry would only spin
            loop.remove_reader(self._socket)
            self._retry = loop.call_later(_RETRY_S, loop.add_reader, self._socket, self._accept)
            return False
        if not self._server.has_place():
            accepted.close()
            return True
        accepted.setblocking(False)
        task = loop.create_task(self._handshake(accepted))
        handshake = TlsHandshake(accepted, task)
        self._server.handshakes[handshake] = None
        task.add_done_callback(lambda _: self._server.handshake_ended(handshake))
        return True

    async def _handshake(self, accepted: socket.socket) -> None:
        """Start TLS. A client that speaks HTTP without TLS gets an HTTP error, as it could not read a TLS alert."""
        loop, due = self._server.loop, monotonic() + self._server.limits.head_timeout_s
        is_ours = True
        try:
            async with asyncio.timeout_at(loop.time() + self._server.limits.head_timeout_s):
                first = await self._received(accepted, socket.MSG_PEEK)
                if not first:
                    return
                if first in _CAPITALS:
                    await self._refuse_plain_http(accepted)
                    return
            is_ours = False
            await loop.connect_accepted_socket(
                self._factory,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=max(0.1, due - monotonic()),
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # the handshake failed or timed out, or the client left: the connection is closed
            pass
        finally:
            if is_ours:
                accepted.close()

    async def _received(self, accepted: socket.socket, flags: int = 0, most: int = 1) -> bytes:
        """The next bytes, b"" at the end of the stream. Cancellation leaves the socket unchanged."""
        loop = self._server.loop
        while True:
            with suppress(BlockingIOError):
                return accepted.recv(most, flags)
            readable = loop.create_future()
            loop.add_reader(accepted, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(accepted)

    async def _refuse_plain_http(self, accepted: socket.socket) -> None:
        accepted.send(_plain_http_answer())  # the socket's buffer is empty: it fits, or the client has left
        accepted.shutdown(socket.SHUT_WR)
        # Closing with unread bytes would reset the connection before the client has read the answer.
        with suppress(TimeoutError):
            async with asyncio.timeout(_PLAIN_LINGER_S):
                left = _MAX_IGNORED
                while left > 0 and (piece := await self._received(accepted, most=left)):
                    left -= len(piece)


def _plain_http_answer() -> bytes:
    """The answer to a client that speaks HTTP without TLS on this port."""
    name = new_request_id()
    text = "this port speaks HTTPS only: the request came without TLS, use https:// in its URL"
    body = b'{"error":{"message":"%s","reason":"bad_request","request_id":"%s"}}' % (text.encode(), name.encode())
    return (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n%s" % (name.encode(), len(body), body)
    )


def _set(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)
