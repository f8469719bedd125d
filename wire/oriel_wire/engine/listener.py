"""A listening socket and the connections it accepted: opening, sweeping, draining."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING

from oriel_wire.engine.limits import HttpLimits
from oriel_wire.h1 import LineMemo

if TYPE_CHECKING:
    from oriel_wire.engine.server import ServerConnection

__all__ = ["HttpServer"]

LAME_DUCK_S = 0.5
_SWEEP_S = 0.25
_EVICTION_SAMPLE = 64


class HttpServer:
    """A listening socket and its connections. Build with `open`, end with `drain`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.memo = LineMemo()
        self.connections: set[ServerConnection] = set()
        self.draining = False
        self.accepting = True
        self.emptied = asyncio.Event()  # set when the last connection of a draining server has gone
        self.date = b""
        self.port = 0
        self.loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, factory: "Callable[[], ServerConnection]", sock: socket.socket) -> None:
        """Start accepting on `sock` (bound, not yet listening), which the server owns from here on."""
        self._tick()
        self._server = await self.loop.create_server(factory, sock=sock, backlog=2048)
        name = sock.getsockname()
        self.port = name[1] if isinstance(name, tuple) else 0

    def evict_idle(self) -> bool:
        """All places are taken: close the idlest of some connections between two requests, if there is one."""
        idle = [connection for connection in islice(self.connections, _EVICTION_SAMPLE) if connection.idle]
        if not idle:
            return False
        min(idle, key=lambda connection: connection.due).transport.abort()
        return True

    async def drain(self, grace_s: float) -> None:
        """Let requests in flight finish (at most `grace_s`), stop accepting, close everything.

        Answers say `Connection: close` from now on. For `LAME_DUCK_S`, or until there is no connection, clients may
        still be sending on kept connections, and connecting: who was let into the listen queue would be reset if it
        were closed at once. Cancelling it leaves the server closed to new connections with the rest still open.
        """
        self.draining = True
        try:
            await asyncio.sleep(0)  # who waits in the listen queue is let in first
            await self._emptied_within(min(grace_s, LAME_DUCK_S))
        finally:
            self.accepting = False
            if self._server is not None:
                self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        await self._emptied_within(grace_s - LAME_DUCK_S)
        for connection in list(self.connections):
            connection.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.sleep(0)

    async def _emptied_within(self, seconds: float) -> None:
        if self.connections and seconds > 0.0:
            self.emptied.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.emptied.wait()

    def _tick(self) -> None:
        self._timer = self.loop.call_later(_SWEEP_S, self._tick)
        now = monotonic()
        self.date = b"date: " + formatdate(usegmt=True).encode("ascii")
        for connection in list(self.connections):
            connection.sweep(now)
