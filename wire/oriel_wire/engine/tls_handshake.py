"""Accepts TLS connections, counting each handshake as a connection of the server that can be aborted.

The event loop's own TLS listener hides a connection until its handshake is done. A client that connects and sends
nothing would then hold a file descriptor for the whole handshake timeout, and many such clients would hold all of them.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Protocol

from oriel_wire.context import new_request_id
from oriel_wire.engine.limits import HttpLimits

SHUTDOWN_S = 5.0  # for the client's close_notify
ACCEPTED = 64  # connections accepted per turn of the event loop
LINGER_S = 1.0  # for a client without TLS to read its answer
MAX_IGNORED = 64 * 1024  # bytes read from such a client meanwhile
CAPITALS = frozenset(bytes([letter]) for letter in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # first byte of HTTP, never of TLS
RETRY_S = 0.25  # pause after the process has run out of file descriptors


class Server(Protocol):
    """The server whose connections the handshakes become."""

    loop: asyncio.AbstractEventLoop
    limits: HttpLimits
    handshakes: "dict[TlsHandshake, None]"

    def has_place(self) -> bool: ...
    def handshake_ended(self, handshake: "TlsHandshake") -> None: ...


class TlsHandshake:
    """A handshake in progress. since: when the connection was accepted, in monotonic seconds."""

    __slots__ = ("_accepted", "_task", "since")

    def __init__(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self.since = monotonic()
        self._accepted = accepted
        self._task = task

    def cut(self) -> None:
        """Abort it to make room for another client. Cancelling the task would keep the connection until its timeout."""
        with suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)


class TlsListener:
    """Accepts connections on a bound socket, which it owns. Single writer: the loop.

    factory: makes the protocol that reads and writes above TLS.
    """

    def __init__(
        self,
        server: Server,
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
        for _ in range(ACCEPTED):
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
            self._retry = loop.call_later(RETRY_S, loop.add_reader, self._socket, self._accept)
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
                if first in CAPITALS:
                    await self._refuse_plain_http(accepted)
                    return
            is_ours = False
            await loop.connect_accepted_socket(
                self._factory,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=max(0.1, due - monotonic()),
                ssl_shutdown_timeout=SHUTDOWN_S,
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
        accepted.send(plain_http_answer())  # the socket's buffer is empty: it fits, or the client has left
        accepted.shutdown(socket.SHUT_WR)
        # Closing with unread bytes would reset the connection before the client has read the answer.
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                left = MAX_IGNORED
                while left > 0 and (piece := await self._received(accepted, most=left)):
                    left -= len(piece)


def negotiated_http2(transport: asyncio.BaseTransport) -> bool:
    """Return whether the handshake of a TLS connection has chosen HTTP/2 (RFC 7301)."""
    connection: ssl.SSLObject = transport.get_extra_info("ssl_object")
    return connection.selected_alpn_protocol() == "h2"


def plain_http_answer() -> bytes:
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
