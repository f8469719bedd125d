"""Answers that wait for their readers: how many bytes they are in all, and who is cut when they are too many.

A connection is noted once its transport holds more than NOTED_BYTES: below that nobody is asked. Up to READER_BYTES are
taken from the upstream for one that does not read, so that its permit comes back; a quarter of that, once half of
`max_bytes` is used. Past `max_bytes` whoever has read nothing for the longest is cut. Over TLS the transport below
holds up to 64 KiB more, and the last piece, uncounted. Single writer: the loop.
"""

import asyncio
from typing import Protocol

__all__ = ["NOTED_BYTES", "Unread"]

MAX_BYTES = 128 << 20
READER_BYTES = 256 << 10
NOTED_BYTES = 16 << 10


class Reader(Protocol):
    """A client's connection."""

    transport: asyncio.Transport


class Unread:
    """max_bytes: of all readers. bytes: what is noted now. cut: readers that were."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.cut = 0
        self._sizes: dict[Reader, int] = {}  # by since when they have not read

    def note(self, reader: Reader, size: int) -> bool:
        """`reader` does not read and `size` bytes wait for it; whether nothing more should be taken for it now."""
        self.bytes += size - self._sizes.get(reader, 0)
        self._sizes[reader] = size
        while self.bytes > self.max_bytes and self._sizes:
            slowest = next(iter(self._sizes))
            self.read(slowest)
            self.cut += 1
            slowest.transport.abort()  # its call ends when the connection says that it is lost
        return size > (READER_BYTES if 2 * self.bytes <= self.max_bytes else READER_BYTES // 4)

    def read(self, reader: Reader) -> int:
        """It reads again, or has gone; how much was noted of it."""
        size = self._sizes.pop(reader, 0)
        self.bytes -= size
        return size
