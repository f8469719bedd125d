"""A file that a handler reads while it arrives; it is in memory as a whole only if the handler asks for that."""

from collections.abc import AsyncIterator

from oriel_logic.errors import InputTooLarge


class Upload:
    """One file of a request. It can be read once.

    filename: the name that the client gave, "" if it did not; never open it as a path.
    content_type: its media type, "" if unknown.
    size_bytes: the declared size, None if there is none.
    limit_bytes: reading past it raises InputTooLarge.
    """

    __slots__ = ("_pieces", "content_type", "filename", "limit_bytes", "received_bytes", "size_bytes")

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        filename: str = "",
        content_type: str = "",
        size_bytes: int | None = None,
        limit_bytes: int,
    ) -> None:
        self._pieces = pieces
        self.filename = filename
        self.content_type = content_type
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        self.received_bytes = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece as it arrived. Raises InputTooLarge, or what reading the request raises."""
        piece = await anext(self._pieces)
        self.received_bytes += len(piece)
        if self.received_bytes > self.limit_bytes:
            raise InputTooLarge(f"the file is larger than the {self.limit_bytes} bytes this service reads")
        return piece

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """Read the rest, at most `limit_bytes`. Raises InputTooLarge."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self:
            pieces.append(piece)
            size += len(piece)
            if limit_bytes is not None and size > limit_bytes:
                raise InputTooLarge(f"the file is larger than {limit_bytes} bytes")
        return b"".join(pieces)
