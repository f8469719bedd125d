"""Asks the kernel about a connection: whether its peer has closed behind unread bytes, and when its latest bytes
arrived.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol

__all__ = ["Arrival", "PeerSockets", "arrival", "closed_behind_unread"]

_GONE = (7, 8)  # of tcpi_state: CLOSE, CLOSE_WAIT
_LAST_DATA = slice(52, 56)  # tcpi_last_data_recv: milliseconds
_GRAIN_S = 0.01  # the kernel counts in ticks, of 10 ms at most


@dataclass(frozen=True, slots=True)
class Arrival:
    """The state of a connection's input.

    gone: whether the peer has closed.
    age_s: seconds since its latest bytes arrived, rounded down so that nothing is judged older than it is.
    """

    gone: bool
    age_s: float


class _Socket(Protocol):
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


def arrival(transport: asyncio.BaseTransport) -> Arrival | None:
    """The arrival for the connection of `transport`; None if it cannot be known (not Linux, no TCP)."""
    found: _Socket | None = transport.get_extra_info("socket")
    return _arrival(found) if found is not None else None


def _arrival(sock: _Socket) -> Arrival | None:
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.stop)
    except OSError:
        return None
    last = info[_LAST_DATA]
    if len(last) < 4:
        return None
    return Arrival(info[0] in _GONE, max(0.0, int.from_bytes(last, sys.byteorder) / 1e3 - _GRAIN_S))


def closed_behind_unread(transport: asyncio.Transport) -> bool:
    """Whether the peer of a paused transport has closed; False if it cannot be known (not Linux, no TCP)."""
    found = arrival(transport)
    return found is not None and found.gone


class PeerSockets:
    """Finds the connections of this process by their peers' addresses, for a server that does not give its sockets.

    For an unknown peer all descriptors are listed, at most every `again_s` seconds.
    """

    def __init__(self, *, again_s: float = 0.1) -> None:
        self._again_s = again_s
        self._listed_at = -inf
        self._descriptors: dict[tuple[str, int], int] = {}

    def arrival(self, host: str, port: int, now: float) -> Arrival | None:
        """The arrival for the connection from `host`:`port`; None if it is not found or cannot be known."""
        peer = (host, port)
        if peer not in self._descriptors:
            if now - self._listed_at < self._again_s:
                return None
            self._listed_at = now
            self._descriptors = dict(_connections())
        descriptor = self._descriptors.get(peer)
        if descriptor is None:
            return None
        with suppress(OSError), _borrowed(descriptor) as sock:
            if _peer(sock) == peer:  # else the descriptor belongs to another connection by now
                return _arrival(sock)
        del self._descriptors[peer]
        return None


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor of another owner, which stays open. Raises OSError if it is no socket."""
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def _peer(sock: socket.socket) -> tuple[str, int] | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = sock.getpeername()[:2]
    return str(host).removeprefix("::ffff:"), int(port)


def _connections() -> Iterator[tuple[tuple[str, int], int]]:
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), _borrowed(int(name)) as sock:  # not a socket, without a peer, or closed meanwhile
            if (peer := _peer(sock)) is not None:
                yield peer, int(name)
