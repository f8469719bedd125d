"""The request head that a client sends again and again, found by all its bytes.

A head that was sent twice in a row is not parsed again while the client repeats it. It is found by a 64-bit fingerprint
keyed by this process's secret, not by its bytes, because they contain a key; a collision would only confuse two heads
of one connection. `oriel_wire.h1_similar` recognises the heads that differ.
"""

from oriel_wire.h1 import RequestHead

__all__ = ["Recognition"]


class Recognition:
    """The latest head of one connection.

    head: the parsed head if it came twice in a row, else None. size, fingerprint: of its bytes with the empty line.
    length: of the body, -1 if only parsing the request can tell. repeated: the head that `find` has not found is the
    same as the one before.
    """

    __slots__ = ("fingerprint", "head", "length", "repeated", "size")

    def __init__(self) -> None:
        self.head: RequestHead | None = None
        self.fingerprint = self.size = self.length = 0
        self.repeated = False

    def find(self, data: bytes, start: int, stop: int) -> RequestHead | None:
        """The head between `start` and the empty line at `stop`, if it is the one that came twice."""
        latest = hash(data[start : stop + 4])
        self.repeated = latest == self.fingerprint
        if not self.repeated:
            self.fingerprint = latest
            self.head = None
        return self.head

    def keep(self, head: RequestHead, size: int) -> None:
        """Keep a head that is `repeated`."""
        self.head = head
        self.size = size
        plain = not head.chunked and not head.expect_continue
        self.length = (head.content_length or 0) if plain else -1

    def forget(self) -> None:
        """The next head is parsed again."""
        self.head = None
        self.fingerprint = 0
