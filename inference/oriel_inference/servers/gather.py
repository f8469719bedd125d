"""Calls that come one by one while the loop is busy are handed to their batcher together.

grpc.aio hands over one event at a time, and a request is about five of them: under load each call of a short model
would run as a batch of its own, on the loop, while the next ones wait to be read. So such calls wait as long as each
turn of the loop brings other work, but for at most MAX_S and MAX_CALLS. A turn that brings none ends the waiting: a
call that comes alone waits for one turn.

Only for models whose batches run on the loop; for others a call is worth more in the queue at once.
"""

from collections.abc import Callable

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Call

__all__ = ["Gather"]

MAX_CALLS = 16
MAX_S = 0.0005
IDLE_S = 0.000_008


class Gather:
    """now: monotonic seconds; call_soon: of the loop. Single writer: the loop."""

    __slots__ = ("_began_s", "_call_soon", "_now", "_turned_s", "_waiting")

    def __init__(self, now: Callable[[], float], call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._now = now
        self._call_soon = call_soon
        self._waiting: list[tuple[Batcher, Call]] = []
        self._began_s = 0.0
        self._turned_s = 0.0

    def submit(self, batcher: Batcher, call: Call) -> None:
        """Submit `call` to `batcher` now or soon; not at all if it is finished meanwhile (its caller left)."""
        if not batcher.is_short:
            batcher.submit(call)
            return
        self._waiting.append((batcher, call))
        if len(self._waiting) == 1:
            self._began_s = self._turned_s = self._now()
            self._call_soon(self._turn)

    def _turn(self) -> None:
        now = self._now()
        busy = now - self._turned_s > IDLE_S
        if busy and len(self._waiting) < MAX_CALLS and now - self._began_s < MAX_S:
            self._turned_s = self._now()
            self._call_soon(self._turn)
            return
        waiting, self._waiting = self._waiting, []
        for batcher, call in waiting:
            if not call.finished:
                batcher.submit(call)
