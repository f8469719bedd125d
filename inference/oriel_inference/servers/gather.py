"""Collects calls that arrive one by one while the loop is busy, and passes them to their batcher together.

grpc.aio delivers one event at a time, and a request consists of about five events. Under load each call of a short
model would therefore run as a batch of its own, on the loop, while the next ones wait to be read. So such calls wait as
long as the turns of the loop bring other work, but for at most MAX_S and MAX_CALLS. A few turns in a row without other
work (one event may be just behind the other) end the waiting: for a call that arrives alone that is some ten
microseconds.

Only for models whose batches run on the loop; for others it is better to queue a call at once.
"""

from collections.abc import Callable

from oriel_inference.batching.call import Call
from oriel_inference.lifecycle import ServingModel

MAX_CALLS = 16
MAX_S = 0.001
IDLE_TURNS = 3
IDLE_TURN_S = 0.000_008


class Gather:
    """Collects calls. Single writer: the loop.

    now: returns monotonic seconds.
    call_soon: the method of the loop.
    """

    __slots__ = ("_began_s", "_call_soon", "_idle_turns", "_now", "_turned_s", "_waiting")

    def __init__(self, now: Callable[[], float], call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._now = now
        self._call_soon = call_soon
        self._waiting: list[tuple[ServingModel, Call]] = []
        self._began_s = 0.0
        self._turned_s = 0.0
        self._idle_turns = 0

    def submit(self, serving: ServingModel, call: Call) -> None:
        """Submit `call` to `serving` now or soon; not at all if it is finished by then because its caller left."""
        if not serving.batcher.is_short:
            serving.batcher.submit(call)
            return
        serving.holds += 1  # a version that is replaced meanwhile stays open until this call has reached it
        self._waiting.append((serving, call))
        if len(self._waiting) == 1:
            self._idle_turns = 0
            self._began_s = self._turned_s = self._now()
            self._call_soon(self._turn)

    def _turn(self) -> None:
        now = self._now()
        self._idle_turns = 0 if now - self._turned_s > IDLE_TURN_S else self._idle_turns + 1
        if self._idle_turns < IDLE_TURNS and len(self._waiting) < MAX_CALLS and now - self._began_s < MAX_S:
            self._turned_s = self._now()
            self._call_soon(self._turn)
            return
        waiting, self._waiting = self._waiting, []
        for serving, call in waiting:
            serving.holds -= 1
            if not call.finished:
                serving.batcher.submit(call)
