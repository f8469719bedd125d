"""Reads large bodies directly into memory of their full length, so that no piece is copied or joined later.

A connection that has sent a large body is read through `InPlace` until it sends a small one. Most of each further large
body is then read into its final memory, also the part that the kernel already holds when the head arrives.
"""

import asyncio
from collections.abc import Callable

_BETWEEN_BYTES = 8192


class InPlace(asyncio.BufferedProtocol):
    """Takes the place of `connection` as the transport's protocol, and passes all events on to it.

    room: returns the memory for the rest of the current body; None if no body is read in place.
    placed: called when a number of bytes (>= 1) was written into that memory.
    """

    def __init__(
        self, connection: asyncio.Protocol, room: Callable[[], memoryview | None], placed: Callable[[int], None]
    ) -> None:
        self._connection = connection
        self._room, self._placed = room, placed
        self._between = memoryview(bytearray(_BETWEEN_BYTES))
        self._in_body = False
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._room()
        self._in_body = room is not None
        return self._between if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        if self._in_body:
            self._placed(nbytes)
        else:
            self._connection.data_received(bytes(self._between[:nbytes]))
