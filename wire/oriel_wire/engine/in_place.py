"""Reads large bodies directly into memory of their full length, so that no piece is copied or joined later.

A connection that has sent a large body is read through `InPlace` until it sends a small one. Most of each further large
body is then read into its final memory, also the part that the kernel already holds when the head arrives.
"""

import asyncio
from typing import Protocol

_BETWEEN_BYTES = 8192


class _Placing(Protocol):
    """The connection whose body is read."""

    def room(self) -> memoryview | None:
        """The memory for the rest of the current body; None if no body is being read in place."""

    def placed(self, size: int) -> None:
        """`size` bytes (>= 1) were written into the buffer."""

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class InPlace(asyncio.BufferedProtocol):
    """Takes the place of `connection` as the transport's protocol, and passes all events on to it."""

    def __init__(self, connection: _Placing) -> None:
        self._connection = connection
        self._between = memoryview(bytearray(_BETWEEN_BYTES))
        self._in_body = False
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._connection.room()
        self._in_body = room is not None
        return self._between if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        if self._in_body:
            self._connection.placed(nbytes)
        else:
            self._connection.data_received(bytes(self._between[:nbytes]))
