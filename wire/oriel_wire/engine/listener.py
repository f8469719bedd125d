"""A listening socket and the connections it accepted: opening, sweeping, draining."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import formatdate
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING

from oriel_wire.engine.greeting import Greeting, SecureListener
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.pulse import Pulse
from oriel_wire.h1 import LineMemo

if TYPE_CHECKING:
    from oriel_wire.engine.server import ServerConnection

__all__ = ["HttpServer"]

LAME_DUCK_S = 0.4
LINGER_S = 0.2
ACCEPT_SHARE = 0.7
_LOOK_S = 0.05
BACKLOG = 2048
_SWEEP_S = 0.25
_LATE = 2048
_GREETING_S = 0.5  # a TLS handshake that takes longer makes room before others
_EVICTION_SAMPLE = 64
_EVICTION_SEARCH = 1024  # if none of the sample can go


class HttpServer:
    """A listening socket and its connections. Build with `open`, end with `drain`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.memo = LineMemo()
        self.connections: set[ServerConnection] = set()
        self.greetings: dict[Greeting, None] = {}  # TLS handshakes under way, the oldest first
        self.kept_bytes = 0  # read from clients beyond their current requests, where that is more than a head
        self.draining = False
        self.secure = False
        self.accepting = True
        self.finishing = False  # while it drains: whether requests from before are still under way
        self.emptied = asyncio.Event()  # set when the last connection of a draining server has gone
        self.date = self.date_line = b""  # without and with its CRLF
        self.port = 0
        self.loop = asyncio.get_running_loop()
        self.pulse = Pulse(self.loop)
        self.joiner = ThreadPoolExecutor(1, thread_name_prefix="oriel-bodies")  # has no thread until it is used
        self._server: asyncio.Server | None = None
        self._factory: Callable[[], asyncio.Protocol]
        self._socket: socket.socket | None = None
        self._secure: SecureListener | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(
        self,
        factory: "Callable[[], ServerConnection]",
        sock: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Start accepting on `sock` (bound, not yet listening), which the server owns from here on.

        With `tls` a connection begins when its handshake is done, within head_timeout_s.
        """
        self._tick()
        if hasattr(socket, "TCP_USER_TIMEOUT") and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Connections inherit it: what the kernel has taken and the client does not read stalls a write as well.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.limits.write_stall_s * 1000))
        self.secure = tls is not None
        self._factory, self._socket = factory, sock
        if tls is not None:
            self._secure = SecureListener(self, sock, tls, factory)
            self._secure.listen(BACKLOG)
        else:
            self._server = await self.loop.create_server(factory, sock=sock, backlog=BACKLOG)
        name = sock.getsockname()
        self.port = name[1] if isinstance(name, tuple) else 0

    def has_place(self) -> bool:
        """Whether there is one for another client; a handshake that goes on for long, or an idle client, makes it."""
        if len(self.connections) + len(self.greetings) < self.limits.max_connections:
            return True
        oldest = next(iter(self.greetings), None)
        stalled = oldest is not None and monotonic() - oldest.since > _GREETING_S
        if not stalled and self.evict_idle():
            return True
        if oldest is None:
            return False
        self.greetings.pop(oldest)
        oldest.cut()
        return True

    def greeted(self, greeting: Greeting) -> None:
        """Its handshake is over, well or not."""
        self.greetings.pop(greeting, None)
        self.note_empty()

    def note_empty(self) -> None:
        """A connection or a handshake has gone: a draining server may be waiting for the last one."""
        if self.draining and not self.connections and not self.greetings:
            self.emptied.set()

    def evict_idle(self) -> bool:
        """All places are taken: close one of some connections that have no request under way, if there is one.

        The idlest of those between two requests goes first, then the oldest head that is still incomplete.
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
        """The set of valid credentials has changed: no head and no credential is recognised without a new judgement."""
        self.memo.forget_credentials()
        for connection in self.connections:
            connection.forget_head()

    @property
    def under_way(self) -> int:
        """Requests that have begun and are not answered."""
        return sum(connection.under_way for connection in self.connections)

    async def drain(self, grace_s: float, beside: "asyncio.Future[None] | None" = None) -> None:
        """Let requests in flight finish (at most `grace_s`), then close everything.

        Answers say `Connection: close` from now on. Connections are still accepted and requests answered for
        `LAME_DUCK_S`, so that whoever asks whether the server is ready hears that it is not, and until the last request
        from that time and `beside`, what else the unit has to end, have ended; at most for `ACCEPT_SHARE` of the grace.
        Then nobody is let in any more, and for `LINGER_S` connections between two requests stay open, also those that
        have not sent one: their clients may be sending already, and a request that arrives is still answered.
        Cancelling it leaves the server closed to new connections with the rest still open.
        """
        ends_s = monotonic() + grace_s
        self.draining = self.finishing = True
        try:
            await asyncio.sleep(max(0.0, min(grace_s, LAME_DUCK_S)))
            await self._finished(monotonic() + ACCEPT_SHARE * grace_s - LAME_DUCK_S, beside)
        finally:
            self.accepting = self.finishing = False
            late = self._close_listener()
        for accepted in late:
            with suppress(OSError):  # it has left already
                await self.loop.connect_accepted_socket(self._factory, accepted)
        for _ in range(3):  # what was accepted before becomes a connection in a later turn of the loop
            await asyncio.sleep(0)
        self.emptied.clear()
        await self._emptied_within(min(LINGER_S, ends_s - monotonic()))
        for connection in list(self.connections):
            connection.close_if_idle()
        await self._emptied_within(ends_s - monotonic())
        for greeting in list(self.greetings):
            greeting.cut()
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
            await asyncio.sleep(_LOOK_S)

    def _close_listener(self) -> list[socket.socket]:
        """Stop listening; whoever is in the listen queue at the very end, and would be reset, is let in."""
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
        if (self.connections or self.greetings) and seconds > 0.0:
            self.emptied.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.emptied.wait()

    def _tick(self) -> None:
        self._timer = self.loop.call_later(_SWEEP_S, self._tick)
        now = monotonic()
        self.date = b"date: " + formatdate(usegmt=True).encode("ascii")
        self.date_line = self.date + b"\r\n"
        for connection in list(self.connections):
            connection.sweep(now)
