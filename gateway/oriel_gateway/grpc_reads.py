"""Whose turn it is to send a first message over gRPC: only so many are received at once.

How large a message is, and which pool's budget it belongs to, is known when it is here; until then gRPC holds it two or
three times over. So calls take turns to be read, tenant after tenant, and the flow control of HTTP/2 holds the others
back at 64 KiB each. A turn ends with its message. One that lasts longer than `turn_s` while others wait counts no more:
who sends slowly fills no memory quickly, and must not hold up those who wait.
"""

import asyncio
from collections import deque
from time import monotonic

__all__ = ["Reads"]

TURNS = 24
TURN_S = 0.1


class Turn:
    """Leave to receive one message."""

    __slots__ = ()


class Reads:
    """turns: at once. Single writer: the loop."""

    def __init__(self, turns: int = TURNS, turn_s: float = TURN_S) -> None:
        self._max = turns
        self._turn_s = turn_s
        self._turns: dict[Turn, float] = {}  # when they began, oldest first
        self._waiting: dict[str, deque[asyncio.Future[Turn]]] = {}  # by tenant, the one that is next first
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, tenant: str) -> Turn:
        """Wait for a turn; cancelled, none is held. Give it to `over`."""
        if len(self._turns) < self._max and not self._waiting:
            return self._begin()
        mine: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._next()
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.over(mine.result())
            raise

    def over(self, turn: Turn) -> None:
        """The message is here, or its sender has gone."""
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
