"""Asks the kernel about a connection: whether its peer has closed behind unread bytes or vanished, and when its latest
bytes arrived; and how long a thread has had something to do.
"""

import asyncio
import select
import socket
import sys
import time
from dataclasses import dataclass

_GONE = (7, 8)  # values of tcpi_state: CLOSE, CLOSE_WAIT
_LAST_DATA = slice(52, 56)  # tcpi_last_data_recv: milliseconds
_GRAIN_S = 0.01  # the kernel counts in ticks, of 10 ms at most


@dataclass(frozen=True, slots=True)
class Arrival:
    """The state of a connection's input.

    gone: True if the peer has closed.
    age_s: seconds since its latest bytes arrived, rounded down so that nothing is judged older than it is.
    """

    gone: bool
    age_s: float


def arrival(transport: asyncio.BaseTransport) -> Arrival | None:
    """The arrival for the connection of `transport`; None if it cannot be known (not Linux, no TCP)."""
    found: socket.socket | None = transport.get_extra_info("socket")  # uvloop's own class has the same methods
    if found is None or sys.platform != "linux":
        return None
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.stop)
    except OSError:
        return None
    last = info[_LAST_DATA]
    if len(last) < 4:
        return None
    return Arrival(info[0] in _GONE, max(0.0, int.from_bytes(last, sys.byteorder) / 1e3 - _GRAIN_S))


def closed_behind_unread(transport: asyncio.Transport) -> bool:
    """Return whether the peer of a paused transport has closed; False if it cannot be known (not Linux, no TCP)."""
    found = arrival(transport)
    return found is not None and found.gone


def has_input(transport: asyncio.BaseTransport) -> bool:
    """Return whether bytes of the peer wait to be read, or its end of the connection."""
    try:
        fd: int = transport.get_extra_info("socket").fileno()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        return bool(ready.poll(0))
    except (OSError, AttributeError, ValueError):
        return False


def watch_peers(sock: socket.socket, stall_s: float) -> None:
    """Let the kernel end connections whose peer has taken nothing for `stall_s`. Accepted connections inherit it.

    Bytes that the kernel holds and the client does not read count as a stalled write. A client that is silent is
    probed several times within that time. So a balancer does not forget the connection of a call that waits, which it
    does after four minutes without packets, and a client that has vanished keeps no place.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(stall_s * 2 / 3))),
        ("TCP_KEEPINTVL", max(1, int(stall_s / 10))),
        ("TCP_USER_TIMEOUT", int(stall_s * 1000)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def thread_busy_s() -> float:
    """Return for how many seconds the calling thread has run or waited for a core. If the kernel does not tell how
    long it waited (not Linux), for how many it has run.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran, waited, _ = map(int, file.read().split())
    except (OSError, ValueError):
        ran = waited = 0  # not Linux
    return (ran + waited) / 1e9 if ran else time.thread_time()
