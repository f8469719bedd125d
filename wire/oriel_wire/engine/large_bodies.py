"""The rest of a large body is read from the socket into the memory in which it waits.

What a protocol is given as bytes was copied out of the loop's own buffer before: of 600 KB a third of what the gateway
does for them. While the rest of a large body comes in, a `LargeBody` stands in for the connection's protocol and hands
the transport room to read into. A piece of room is at most as large as what the sender has sent of this body already
(`ServerConnection.room` is asked before), so bodies under way never take more than twice the bytes that have come.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oriel_wire.engine.server import ServerConnection

__all__ = ["LARGE_BYTES", "LargeBody"]

LARGE_BYTES = 64 * 1024
_MOST_BYTES = 512 * 1024


def _make_room() -> Callable[[int], bytearray]:
    """`bytearray(size)` without filling it with zeros, which would cost as much as the copy it saves."""
    try:
        make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    except AttributeError:  # another interpreter than CPython
        return bytearray
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    return lambda size: make(None, size)


_room = _make_room()


class LargeBody(asyncio.BufferedProtocol):
    """In the place of `connection` until `left` bytes have come, or the connection is no longer interested."""

    __slots__ = ("_at", "_connection", "_left", "_received", "_view")

    def __init__(self, connection: "ServerConnection", received: int, left: int) -> None:
        self._connection = connection
        self._received = received
        self._left = left
        self._view = memoryview(b"")
        self._at = 0

    def begin(self) -> None:
        """Take the connection's place, if there is memory."""
        if self._more():
            _swap(self._connection.transport, self)

    def _more(self) -> bool:
        size = min(self._left, self._received, _MOST_BYTES)
        if not self._connection.room(size):
            return False
        self._view = memoryview(_room(size))
        self._at = 0
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        connection, begin = self._connection, self._at
        self._at = end = begin + nbytes
        self._received += nbytes
        self._left -= nbytes
        wanted = connection.large_data(self._view[begin:end])
        if not wanted or not self._left or (end == len(self._view) and not self._more()):
            _swap(connection.transport, connection)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


def _swap(transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
    """Who is asked where to read to is settled when reading begins."""
    if transport.is_closing():
        transport.set_protocol(protocol)
        return
    transport.pause_reading()
    transport.set_protocol(protocol)
    transport.resume_reading()
