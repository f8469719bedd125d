"""Stops a gRPC server without failing a call.

`aio.Server.stop` closes the listening sockets and asks clients to leave (GOAWAY). From then on it cancels every call
that has just arrived, and every call on a connection whose client has not read the GOAWAY yet: under load, about one in
a hundred of a second's calls. `drain` therefore calls it only when no further call is expected:

1. For `LAME_DUCK_S`, and until the calls that were under way have ended, the server goes on as before while readiness
   probes fail. HTTP does the same.
2. The listening sockets are closed while the server keeps running. gRPC has no function for that: see
   `close_listeners`.
3. Connections always have a maximum age. gRPC closes an old connection without losing a call: its client gets a GOAWAY,
   calls that were sent before the client read it are served, calls under way finish however long they take, and the
   client connects again, now to another server. So one maximum age later no connection is left that can bring a call.
4. The drain ends earlier if no further call is likely: after `QUIET_S` without a call, which has already passed on an
   idle server. It waits for twice the time between the last two calls if they came at most `SELDOM_S` apart, and until
   `SELDOM_S` have passed without a call if calls have come since the stop began. Health probes do not count: a
   cancelled probe tells its sender the same as a failed one.

Then `drain` calls `stop`, which lets the calls under way finish.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from oriel_wire.engine import listener

__all__ = ["MAX_AGE", "Arrivals", "UnderWay", "close_listeners", "drain", "max_age_ms"]

MAX_AGE = "grpc.max_connection_age_ms"  # name of the server option
QUIET_S = 0.5
SELDOM_S = 5.0
AGE_SHARE = 0.6
ENDLESS_MS = 2**31 - 1  # gRPC's value for no limit
_LEAST_GRACE_S = 2.0
_LATEST_SHARE = 0.7
_FINISH_SHARE = 0.5
_JITTER = 1.1  # gRPC spreads ages by a tenth in both directions
_SLOW_S = 5.0  # time for the slowest client to read a GOAWAY
_POLL_S = 0.05

if TYPE_CHECKING:
    _GenericHandler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _GenericHandler = grpc.GenericRpcHandler


PROBES = frozenset(
    (
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
        "/inference.GRPCInferenceService/ModelReady",
    )
)


class Arrivals(_GenericHandler):
    """A handler that records the arrival times of a server's latest calls and handles none. Register it before the
    others.
    """

    def __init__(self) -> None:
        self.latest_s = -inf
        self.before_s = -inf

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """Called by gRPC once for each call."""
        if handler_call_details.method not in PROBES:
            self.before_s, self.latest_s = self.latest_s, monotonic()

    def quiet_from_s(self, stopped_s: float) -> float:
        """The time from which no further call is expected, if none arrives before; -inf if there was none at all.

        stopped_s: when the stop began.
        """
        if self.latest_s > stopped_s:
            return self.latest_s + SELDOM_S
        apart_s = self.latest_s - self.before_s  # NaN before the first call: the comparison is false then
        return self.latest_s + (max(QUIET_S, min(2.0 * apart_s, SELDOM_S)) if apart_s <= SELDOM_S else QUIET_S)


class UnderWay:
    """Counts the calls under way, and those of them that began before `mark`."""

    __slots__ = ("_counts", "_generation")

    def __init__(self) -> None:
        self._generation = 0
        self._counts = [0, 0]

    def begin(self) -> int:
        """Count a new call; pass the result to `end`."""
        self._counts[self._generation] += 1
        return self._generation

    def end(self, generation: int) -> None:
        """Count the end of a call."""
        self._counts[generation] -= 1

    def mark(self) -> None:
        """From now on count new calls separately."""
        self._generation = 1

    @property
    def all(self) -> int:
        """Number of calls under way."""
        return sum(self._counts)

    @property
    def old(self) -> int:
        """Number of calls under way that began before the mark."""
        return self._counts[0]


def max_age_ms(grace_s: float) -> int:
    """The maximum age of connections to a server that has `grace_s` to drain, in milliseconds.

    It is shorter than the grace, so that even the last call has time to finish. If the grace is too short to drain
    anything, connections do not age.
    """
    return min(int(AGE_SHARE * grace_s * 1e3), ENDLESS_MS) if grace_s >= _LEAST_GRACE_S else ENDLESS_MS


async def drain(
    server: aio.Server,
    port: int,
    arrivals: Arrivals,
    *,
    grace_s: float,
    age_ms: int,
    finishing: Callable[[], bool] = lambda: False,
) -> None:
    """Accept no more connections, serve the calls on the existing ones, then stop.

    age_ms: the maximum age of connections to `server`.
    finishing: returns whether calls that began before the stop are still under way. Connections are accepted that long,
    but at most for half of the grace, because closing aged connections needs the rest.
    Calls that still run after `grace_s` are cancelled. Cancelling `drain` cancels them at once.
    """
    loop = asyncio.get_running_loop()
    ends_s, stopped_s = loop.time() + grace_s, monotonic()
    try:
        announce_s = max(0.0, min(grace_s, listener.LAME_DUCK_S))
        await asyncio.sleep(announce_s)
        await _until_finished(finishing, monotonic() + _FINISH_SHARE * grace_s - announce_s)
        if grace_s > announce_s:
            await asyncio.to_thread(close_listeners, port)
            aged_s = age_ms / 1e3 * _JITTER + _SLOW_S
            latest_s = ends_s - loop.time() - (1.0 - _LATEST_SHARE) * grace_s
            await _until_none_comes(arrivals, stopped_s, monotonic() + min(aged_s, latest_s))
        await server.stop(max(0.0, ends_s - loop.time()))
    except asyncio.CancelledError:
        await server.stop(0.0)
        raise


async def _until_finished(finishing: Callable[[], bool], ends_s: float) -> None:
    while True:
        if not finishing() or monotonic() >= ends_s:
            return
        await asyncio.sleep(_POLL_S)


async def _until_none_comes(arrivals: Arrivals, stopped_s: float, ends_s: float) -> None:
    while True:
        now = monotonic()
        if now >= ends_s or now >= arrivals.quiet_from_s(stopped_s):
            return
        await asyncio.sleep(min(_POLL_S, QUIET_S))


def close_listeners(port: int) -> int:
    """Close this process's listening TCP sockets on `port` behind their owner's back, and return their number.

    The owner keeps its descriptors: each of them now refers to an unconnected socket that is never readable. Does
    nothing on systems that do not list a process's descriptors in /dev/fd.
    """
    closed = 0
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):
                closed += _close_if_listening(int(name), port)
    return closed


def _close_if_listening(descriptor: int, port: int) -> bool:
    sock = socket.socket(fileno=descriptor)  # raises OSError if it is not a socket
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
