"""Bounds the bytes of all answers that wait for clients to read them, and cuts the slowest clients beyond the bound.

A connection is noted once its transport holds more than NOTED_BYTES: below that it costs nothing. Up to READER_BYTES
are taken from the upstream for one that does not read, so that its permit comes back; a quarter of that, once half of
`max_bytes` is used. Past `max_bytes` whoever has read nothing for the longest is cut. Over TLS the transport below
holds up to 64 KiB more, and the last piece, uncounted. Single writer: the loop.
"""

from typing import Protocol

__all__ = ["NOTED_BYTES", "Unread"]

MAX_BYTES = 128 << 20
READER_BYTES = 256 << 10
NOTED_BYTES = 16 << 10


class Reader(Protocol):
    """A client: its connection, or its stream of one."""

    def abort(self) -> None:
        """Drop the client."""


class Unread:
    """The bytes that wait for clients that do not read. The slowest readers are cut when there are too many bytes.

    max_bytes: the bound on bytes for all readers together.
    bytes: bytes that wait now.
    cut: number of readers that were cut so far.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.cut = 0
        self._sizes: dict[Reader, int] = {}  # in the order in which they stopped reading

    def note(self, reader: Reader, size: int) -> bool:
        """Note that `size` bytes wait for a reader that does not read. True: take nothing more for it now."""
        self.bytes += size - self._sizes.get(reader, 0)
        self._sizes[reader] = size
        while self.bytes > self.max_bytes and self._sizes:
            slowest = next(iter(self._sizes))
            self.read(slowest)
            self.cut += 1
            slowest.abort()  # its call ends when the connection is lost
        return size > (READER_BYTES if 2 * self.bytes <= self.max_bytes else READER_BYTES // 4)

    def read(self, reader: Reader) -> int:
        """Forget a reader that reads again, or has gone. Returns the bytes that were noted for it."""
        size = self._sizes.pop(reader, 0)
        self.bytes -= size
        return size
