"""Tracks which bytes of one object are missing and which reader fetches them. Pure; single writer: the loop.

An object is cut into blocks of BLOCK_BYTES, the unit in which progress is recorded on disk. A run is a range of missing
bytes that one request reads from its beginning to its end. To add a reader, the longest run is split at the block in
its middle: its present reader then stops there, and the new one reads the second half.
"""

from collections.abc import Collection

BLOCK_BYTES = 8 << 20


class Run:
    """The bytes [pos, end). pos: written by its reader. end: moved down by `Work.more`."""

    __slots__ = ("end", "pos")

    def __init__(self, pos: int, end: int) -> None:
        self.pos = pos
        self.end = end

    @property
    def left(self) -> int:
        return self.end - self.pos

    def __repr__(self) -> str:
        return f"Run({self.pos}, {self.end})"


class Work:
    """The missing bytes of one object. have: blocks that are here already."""

    def __init__(self, size: int, have: Collection[int] = (), *, block_bytes: int = BLOCK_BYTES) -> None:
        self._block = block_bytes
        self._waiting: list[Run] = []
        self._active: list[Run] = []
        for block in range(-(-size // block_bytes)):
            start, end = block * block_bytes, min((block + 1) * block_bytes, size)
            if block in have:
                continue
            if self._waiting and self._waiting[-1].end == start:
                self._waiting[-1].end = end
            else:
                self._waiting.append(Run(start, end))
        self._size = size

    @property
    def left(self) -> int:
        """Return the number of missing bytes."""
        return sum(run.left for run in (*self._waiting, *self._active))

    @property
    def frontier(self) -> int:
        """Return the position before which every byte is here."""
        return min((run.pos for run in (*self._waiting, *self._active) if run.left), default=self._size)

    def next(self) -> Run | None:
        """Return the first run that has no reader."""
        if not self._waiting:
            return None
        self._active.append(self._waiting.pop(0))
        return self._active[-1]

    def more(self) -> Run | None:
        """Return a run for another reader: one without a reader, or the second half of the longest run that is being
        read. None if no run can be split.
        """
        if self._waiting:
            return self.next()
        longest = max(self._active, key=lambda run: run.left, default=None)
        if longest is None:
            return None
        middle = -(-(longest.pos + longest.left // 2) // self._block) * self._block
        # At least two blocks for each reader.
        if longest.left < 4 * self._block:
            return None
        half = Run(middle, longest.end)
        longest.end = middle
        self._active.append(half)
        return half

    def done(self, run: Run) -> None:
        """Report that the reader of a run has come to its end."""
        self._active.remove(run)
