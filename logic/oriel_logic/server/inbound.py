"""One request as it arrives: its head, and a body that may still be arriving."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from oriel_logic.errors import InputTooLarge, LogicError, Saturated

AHEAD_BYTES = 256 * 1024


def no_pause(paused: bool) -> None:
    """Ignore pauses: the body is complete."""


def no_bound(size_bytes: int) -> bool:
    """Accept any size: the body is not counted."""
    return True


class Body:
    """The bytes of one request's body, fed by the connection and read once by the code that serves the request.

    The bytes read ahead of `pieces` are bounded: past AHEAD_BYTES `pause(True)` is called, and `pause(False)` when they
    have been taken. `fail` ends the body early: reading it raises that error.
    hold: reserves room for more bytes of a body that is read as a whole; returns whether there was room.
    """

    __slots__ = ("_error", "_hold", "_parts", "_pause", "_paused", "_waiter", "_whole", "ahead_bytes", "complete")

    def __init__(
        self,
        whole: bytes | None = None,
        *,
        pause: Callable[[bool], None] = no_pause,
        hold: Callable[[int], bool] = no_bound,
    ) -> None:
        self.complete = whole is not None
        self._whole = whole
        self._parts: deque[bytes] = deque()
        self.ahead_bytes = 0
        self._pause = pause
        self._hold = hold
        self._paused = False
        self._error: LogicError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def whole(self) -> bytes | None:
        """The complete body if it came with the head, else None."""
        return self._whole if self._error is None else None

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._parts.append(data)
        self.ahead_bytes += len(data)
        if self.ahead_bytes > AHEAD_BYTES and not self._paused:
            self._paused = True
            self._pause(True)
        self._wake()

    def request_complete(self) -> None:
        """Mark the body as complete."""
        self.complete = True
        self._wake()

    def fail(self, error: LogicError) -> None:
        """Mark the body as broken: no more bytes will come."""
        self._error = error
        self._wake()

    async def read(self, limit_bytes: int, size_bytes: int | None = None) -> bytes:
        """Read the whole body. size_bytes: the declared size.

        Raises InputTooLarge past `limit_bytes`, Saturated if the server has no room for it, or the error given to
        `fail`.
        """
        if self._error is not None:
            raise self._error
        whole = self._whole
        if whole is None:
            if size_bytes is not None and not self._hold(size_bytes):
                raise full()
            parts: list[bytes] = []
            size = 0
            async for piece in self.pieces():
                size += len(piece)
                if size > limit_bytes:
                    raise too_large(limit_bytes)
                if size_bytes is None and not self._hold(len(piece)):
                    raise full()
                parts.append(piece)
            whole = self._whole = b"".join(parts) if len(parts) != 1 else parts[0]
        if len(whole) > limit_bytes:
            raise too_large(limit_bytes)
        return whole

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they arrive; no piece is empty. Raises the error given to `fail`."""
        whole = self._whole
        if whole is not None:
            if whole:
                yield whole
            return
        while True:
            if self._error is not None:
                raise self._error
            if self._parts:
                piece = self._parts.popleft()
                self.ahead_bytes -= len(piece)
                if self._paused and self.ahead_bytes <= AHEAD_BYTES // 2:
                    self._paused = False
                    self._pause(False)
                yield piece
            elif self.complete:
                return
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def full() -> Saturated:
    return Saturated("this server holds as many request bodies as it may: try again later", retry_after_s=1.0)


def too_large(limit_bytes: int) -> InputTooLarge:
    return InputTooLarge(f"the body is larger than the {limit_bytes} bytes that are read here")


class Inbound(msgspec.Struct, kw_only=True):
    """One request.

    headers: lower-case names, the first value of each.
    size_bytes: the declared length, None if there is none.
    path: the path as sent, not percent-decoded.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    size_bytes: int | None = None
    body: Body = msgspec.field(default_factory=lambda: Body(b""))

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body. Raises InputTooLarge, without reading if the declared length is too large."""
        if self.size_bytes is not None and self.size_bytes > limit_bytes:
            raise too_large(limit_bytes)
        return await self.body.read(limit_bytes, self.size_bytes)

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        return self.body.pieces()
