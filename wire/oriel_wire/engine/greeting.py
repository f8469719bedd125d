"""A TLS listener whose handshakes take places among its connections, and can be cut.

A loop's own TLS listener keeps them to itself until the handshake is done: whoever connects and says nothing would hold
a file for as long as a handshake may take, and enough of them all files there are.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from oriel_wire.context import new_request_id

if TYPE_CHECKING:
    from oriel_wire.engine.listener import HttpServer
    from oriel_wire.engine.server import ServerConnection

__all__ = ["Greeting", "SecureListener"]

SHUTDOWN_S = 5.0  # a TLS client's last word
ACCEPTED = 64  # per turn of the loop
LINGER_S = 1.0  # for a client without TLS to read its answer
MAX_IGNORED = 64 * 1024  # of what it sends meanwhile
CAPITALS = frozenset(bytes([letter]) for letter in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # a method begins so, TLS never
AGAIN_S = 0.25  # when there are no files for another connection


class Greeting:
    """One handshake under way. since: when the connection was accepted, monotonic seconds."""

    __slots__ = ("_accepted", "_task", "since")

    def __init__(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self.since = monotonic()
        self._accepted = accepted
        self._task = task

    def cut(self) -> None:
        """Make room for another client. Cancelling the task would leave the connection to its timeout."""
        with suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)


class SecureListener:
    """Accepts on a bound socket, which it owns; single writer: the loop. factory: the protocol above TLS."""

    def __init__(
        self,
        server: "HttpServer",
        sock: socket.socket,
        context: ssl.SSLContext,
        factory: "Callable[[], ServerConnection]",
    ) -> None:
        self._server = server
        self._socket = sock
        self._context = context
        self._factory = factory
        self._again: asyncio.TimerHandle | None = None

    def listen(self, backlog: int) -> None:
        """Start accepting."""
        self._socket.setblocking(False)
        self._socket.listen(backlog)
        self._server.loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop listening; whoever was accepted, or is in the listen queue at the very end, is let in."""
        self._server.loop.remove_reader(self._socket)
        while self._accept_one():
            pass
        if self._again is not None:
            self._again.cancel()
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
        except OSError:  # there are no files left: asking again at once would only spin
            loop.remove_reader(self._socket)
            self._again = loop.call_later(AGAIN_S, loop.add_reader, self._socket, self._accept)
            return False
        if not self._server.has_place():
            accepted.close()
            return True
        accepted.setblocking(False)
        task = loop.create_task(self._greet(accepted))
        greeting = Greeting(accepted, task)
        self._server.greetings[greeting] = None
        task.add_done_callback(lambda _: self._server.greeted(greeting))
        return True

    async def _greet(self, accepted: socket.socket) -> None:
        """Begin TLS, or answer a client that begins with HTTP as it is: it would only see its connection closed."""
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
        except OSError:  # no TLS, none in time, or it left: its connection is closed
            pass
        finally:
            if is_ours:
                accepted.close()

    async def _received(self, accepted: socket.socket, flags: int = 0, most: int = 1) -> bytes:
        """The next bytes, b"" at the end of the stream. Cancelled: the socket is as it was."""
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
        accepted.send(plain_http_answer())  # into an empty buffer: it fits, or the client has left
        accepted.shutdown(socket.SHUT_WR)
        # Closing with unread bytes would reset the connection before the client has read.
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                left = MAX_IGNORED
                while left > 0 and (piece := await self._received(accepted, most=left)):
                    left -= len(piece)


def plain_http_answer() -> bytes:
    """What a client gets that speaks HTTP without TLS to this port."""
    name = new_request_id()
    words = "this port speaks HTTPS only: the request came without TLS, use https:// in its URL"
    body = b'{"error":{"message":"%s","reason":"bad_request","request_id":"%s"}}' % (words.encode(), name.encode())
    return (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n%s" % (name.encode(), len(body), body)
    )


def _set(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)
