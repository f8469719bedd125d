"""Per-connection cache of parsed request heads, found by all their bytes or by the lines that do not vary.

Clients that keep a connection open send the same head again and again, or heads that differ in their ids and their
length only. Such a head is not parsed again, and the server may keep its decision about it. The cache holds a parsed
head and 64-bit fingerprints keyed by this process's secret. It does not hold the bytes, because they contain a key; a
collision would only confuse two heads of the same client. A head of more than 4 KiB is recognised only if all its bytes
are the same.
"""

from typing import Final

from oriel_wire.h1 import RequestHead
from oriel_wire.h1_similar import HeadPattern

__all__ = ["Recognition"]

_MAX_PATTERN: Final = 4096


class Recognition:
    """The cache of one connection.

    head: the parsed head that an authenticated sender has sent twice in a row, or None.
    size, fingerprint: of the head's bytes with the empty line.
    length: of the body, -1 if only parsing the request can tell.
    """

    __slots__ = ("_before", "_block", "_latest", "_pattern", "_size", "fingerprint", "head", "length", "size")

    def __init__(self) -> None:
        self.head: RequestHead | None = None
        self.fingerprint = self.size = self.length = 0
        self._latest = self._size = 0  # of the current request's head
        self._before = 0  # fingerprint of the latest head found by its pattern
        self._block = b""  # its bytes if it was not found, until they are used or the next head arrives
        self._pattern: HeadPattern | None = None

    def again(self) -> None:
        """Note that the cached head was sent again."""
        self._latest = self.fingerprint

    def find(self, data: bytes, start: int, stop: int) -> RequestHead | None:
        """The head between `start` and the empty line at `stop` if it is in the cache."""
        self._size = stop + 4 - start
        self._latest = latest = hash(data[start : stop + 4])
        if latest == self.fingerprint and self.head is not None:
            return self.head
        block = data[start:stop]
        if self._pattern is not None and (found := self._pattern.read(block)) is not None:
            if latest == self._before:  # twice in a row: the client repeats it now
                self.fingerprint, self.head, self.size = latest, found, self._size
                self.length = found.content_length or 0
            self._before = latest
            return found
        self._block = block if len(block) <= _MAX_PATTERN else b""
        return None

    def authenticated(self, head: RequestHead) -> bool:
        """Note that the sender of `head`, the latest one, is authenticated. True if a decision about it may be kept
        for heads like it.
        """
        block, self._block = self._block, b""
        if self._latest != self.fingerprint:
            if head.known:
                return True
            self.fingerprint = self._latest
            self.head = None
            self._pattern = HeadPattern.of(head, block)
            return False
        if not head.known:
            self._pattern = HeadPattern.of(head, block)
        self.head = head
        head.known = True
        self.size = self._size
        plain = not head.chunked and not head.expect_continue
        self.length = (head.content_length or 0) if plain else -1
        return True

    def forget(self) -> None:
        """Clear the cache: the next head is parsed again."""
        self.head = self._pattern = None
