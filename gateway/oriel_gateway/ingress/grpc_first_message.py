"""Bound how many first messages are received over gRPC at once.

How large a message is, and which pool's byte budget it belongs to, is known only when it is here; until then gRPC holds
it two or three times over. So calls take turns to receive, tenant after tenant, and the flow control of HTTP/2 holds
the others back at 64 KiB each. A turn ends with its message. A turn that lasts longer than `turn_s` while others wait
is not counted any more: a slow sender fills no memory quickly, and must not hold up those who wait.
"""

import asyncio
from collections import deque
from time import monotonic

TURNS = 24
TURN_S = 0.1


class Turn:
    """Permission to receive one message."""

    __slots__ = ()


class ReceiveTurns:
    """The turns of one listener. turns: how many there are at once. Single writer: the loop."""

    def __init__(self, turns: int = TURNS, turn_s: float = TURN_S) -> None:
        self._max = turns
        self._turn_s = turn_s
        self._turns: dict[Turn, float] = {}  # when they began, oldest first
        self._waiting: dict[str, deque[asyncio.Future[Turn]]] = {}  # by tenant; the next tenant comes first
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, tenant: str) -> Turn:
        """Wait for a turn and return it, to be released. If this is cancelled, no turn is held."""
        if len(self._turns) < self._max and not self._waiting:
            return self._begin()
        mine: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._next()
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.release(mine.result())
            raise

    def release(self, turn: Turn) -> None:
        """End a turn: its message is here, or its sender has left."""
        self._turns.pop(turn, None)
        if self._waiting:
            self._next()

    def _begin(self) -> Turn:
        turn = Turn()
        self._turns[turn] = monotonic()
        return turn

    def _next(self) -> None:
        while self._waiting and len(self._turns) < self._max:
            tenant = next(iter(self._waiting))
            line = self._waiting.pop(tenant)
            first = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not first.done():
                first.set_result(self._begin())
        if self._waiting and self._timer is None:
            left_s = next(iter(self._turns.values())) + self._turn_s - monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._late)

    def _late(self) -> None:
        self._timer = None
        oldest = monotonic() - self._turn_s
        while self._turns and next(iter(self._turns.values())) <= oldest:
            del self._turns[next(iter(self._turns))]
        self._next()
