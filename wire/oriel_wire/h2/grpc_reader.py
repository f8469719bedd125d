"""Takes the messages of a gRPC call out of the DATA of its stream. Pure.

A message that comes in one piece is a part of that piece. One that comes in several is copied once, into memory of its
own length, so that a call never holds more than its message. Its prefix alone allocates `FIRST_BYTES` at most; the
rest follows when that much has come.
"""

from collections import deque

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.h2.grpc import PREFIX_BYTES
from oriel_wire.memory import unwritten

FIRST_BYTES = 8 * 1024 * 1024


class MessageReader:
    """The messages of one direction of a call, in their order.

    taken_bytes: bytes given to `feed` that were read since the owner set it to 0; the others are still held.
    compressed: True if the last message of `next` is compressed.
    """

    __slots__ = ("_filled", "_max_bytes", "_memory", "_pieces", "_size", "compressed", "taken_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: deque[bytes | memoryview] = deque()
        self._size = -1  # size of the message whose prefix was read, -1 if there is none
        self._memory: memoryview | None = None
        self._filled = 0
        self.compressed = False
        self.taken_bytes = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes that have come; they must not change afterwards."""
        if data:
            self._pieces.append(data)

    @property
    def missing_bytes(self) -> int:
        """Bytes that are known to be missing of the message that is being read; 0 if none is."""
        return self._size - self._filled if self._size >= 0 else 0

    @property
    def empty(self) -> bool:
        """Return whether all that has come was returned as messages."""
        return self._size < 0 and not self._pieces

    def next(self) -> bytes | memoryview | None:
        """The next message; None if not all of it has come. Raises TooLarge, after which nothing may be read."""
        if self._size < 0 and not self._read_prefix():
            return None
        size, pieces = self._size, self._pieces
        if self._memory is None:
            if not size:
                return self._ended(b"")
            if not pieces:
                return None
            first = pieces[0]
            if len(first) > size:
                pieces[0] = first[size:] if isinstance(first, memoryview) else memoryview(first)[size:]
                self.taken_bytes += size
                return self._ended(first[:size])
            if len(first) == size:
                self.taken_bytes += size
                return self._ended(pieces.popleft())
            self._memory = unwritten(min(size, FIRST_BYTES))
        return self._fill(self._memory, size)

    def _fill(self, memory: memoryview, size: int) -> memoryview | None:
        """Copy what has come into the memory of a message."""
        pieces, filled = self._pieces, self._filled
        while pieces:
            if filled == len(memory):
                whole = unwritten(size)
                whole[:filled] = memory
                self._memory = memory = whole
            piece = pieces.popleft()
            count = min(len(piece), len(memory) - filled)
            if count < len(piece):
                pieces.appendleft(memoryview(piece)[count:])
                piece = memoryview(piece)[:count]
            memory[filled : filled + count] = piece
            filled += count
            self.taken_bytes += count
            if filled == size:
                self._filled = 0
                self._ended(b"")
                return memory.toreadonly()
        self._filled = filled
        return None

    def _read_prefix(self) -> bool:
        pieces = self._pieces
        if not pieces:
            return False
        first = pieces[0]
        if len(first) < PREFIX_BYTES:
            if sum(map(len, pieces)) < PREFIX_BYTES:
                return False
            first = b"".join(pieces)  # each piece but the last has less than five bytes
            pieces.clear()
            pieces.append(first)
        if first[0] > 1:
            raise BadMessage("the compressed flag of a message is neither 0 nor 1")
        size = int.from_bytes(first[1:PREFIX_BYTES], "big")
        if size > self._max_bytes:
            raise TooLarge(f"Received message larger than max ({size} vs. {self._max_bytes})")
        self.compressed = first[0] == 1
        self._size = size
        self.taken_bytes += PREFIX_BYTES
        if len(first) == PREFIX_BYTES:
            pieces.popleft()
        else:
            pieces[0] = first[PREFIX_BYTES:] if isinstance(first, memoryview) else memoryview(first)[PREFIX_BYTES:]
        return True

    def _ended(self, message: bytes | memoryview) -> bytes | memoryview:
        self._size = -1
        self._memory = None
        return message
