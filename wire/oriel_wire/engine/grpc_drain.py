"""The end of a gRPC server that fails no call.

`aio.Server.stop` closes the listening sockets and tells clients to go (GOAWAY), but from that moment on it cancels
every call that has just come and every one that comes on a connection whose client has not read the GOAWAY yet: under
load one in a hundred of a second's. So it is called once no call can come:

1. For `LAME_DUCK_S` everything goes on, as over HTTP, while readiness says no.
2. The listening sockets are closed, the server runs. gRPC offers no call for that: see `close_listeners`.
3. Connections have a maximum age, all the time. One that has reached it is closed in the way that loses nothing: its
   client is told, calls that cross with that are served, calls under way finish, however long they take, and the client
   makes another connection, now elsewhere. So after an age there is no connection left that can bring a call.
4. Where none has come for `QUIET_S`, as before the stop on an idle server, none is likely to be on its way, and nobody
   waits for the rest of the age.

Then `stop`, which lets what is under way finish.
"""

import asyncio
import os
import socket
from contextlib import suppress
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from oriel_wire.engine import listener

__all__ = ["MAX_AGE", "Arrivals", "close_listeners", "drain", "max_age_ms"]

MAX_AGE = "grpc.max_connection_age_ms"  # of the server's options
QUIET_S = 5.0
AGE_SHARE = 0.6
ENDLESS_MS = 2**31 - 1  # as gRPC says it
_LEAST_GRACE_S = 2.0
_LATEST_SHARE = 0.7
_JITTER = 1.1  # gRPC spreads ages by a tenth in both directions
_SLOW_S = 5.0  # until the slowest client has heard it
_LOOK_S = 0.05

if TYPE_CHECKING:
    _GenericHandler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _GenericHandler = grpc.GenericRpcHandler


class Arrivals(_GenericHandler):
    """Knows when the latest call of a server came, to be registered before its handlers; takes none."""

    def __init__(self) -> None:
        self.latest_s = -inf

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """Called by gRPC once for each call."""
        self.latest_s = monotonic()


def max_age_ms(grace_s: float) -> int:
    """Of connections to a server that has `grace_s` to drain, so that a call that comes last has some of it left. Where
    that is too short to drain anything, connections do not age."""
    return min(int(AGE_SHARE * grace_s * 1e3), ENDLESS_MS) if grace_s >= _LEAST_GRACE_S else ENDLESS_MS


async def drain(server: aio.Server, port: int, arrivals: Arrivals, *, grace_s: float, age_ms: int) -> None:
    """Let in no more connections, serve what comes on those that are there, stop.

    age_ms: the maximum age that connections to `server` have. Calls that still run after `grace_s` are cancelled.
    Cancelled itself, it cancels them at once.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + grace_s
    try:
        announce_s = max(0.0, min(grace_s, listener.LAME_DUCK_S))
        await asyncio.sleep(announce_s)
        if grace_s > announce_s:
            await asyncio.to_thread(close_listeners, port)
            aged_s = age_ms / 1e3 * _JITTER + _SLOW_S
            await _until_none_comes(arrivals, monotonic() + min(aged_s, _LATEST_SHARE * grace_s))
        await server.stop(max(0.0, ends_s - loop.time()))
    except asyncio.CancelledError:
        await server.stop(0.0)
        raise


async def _until_none_comes(arrivals: Arrivals, ends_s: float) -> None:
    while True:
        now = monotonic()
        if now >= ends_s or now - arrivals.latest_s >= QUIET_S:
            return
        await asyncio.sleep(min(_LOOK_S, QUIET_S))


def close_listeners(port: int) -> int:
    """Close this process's listening TCP sockets on `port` under whoever owns them; how many.

    The owner is not told and keeps the descriptors: behind each there is then a socket that nobody can reach and that
    is never readable. Where a system does not list a process's descriptors, nothing happens.
    """
    closed = 0
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):
                closed += _close_if_listening(int(name), port)
    return closed


def _close_if_listening(descriptor: int, port: int) -> bool:
    sock = socket.socket(fileno=descriptor)  # raises OSError for what is none
    try:
        family = sock.family
        if family not in (socket.AF_INET, socket.AF_INET6) or not sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return False
        if sock.getsockname()[1] != port:
            return False
    finally:
        sock.detach()
    with socket.socket(family, socket.SOCK_STREAM) as nobody:
        nobody.setblocking(False)
        os.dup2(nobody.fileno(), descriptor, inheritable=False)
    return True
