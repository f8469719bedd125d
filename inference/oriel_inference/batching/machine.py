"""The means that all models of one server share; and which of them may compute: running instances times their threads
stay within the cores of the machine.

Single writer: the loop. A run takes as many units as it has threads and returns them afterwards. When there are not
enough, the model waits here, and the most urgent first call of all waiting models gets the next units. No model
overtakes the most urgent one, not even with a run that would fit where that one does not: a model with many threads
could otherwise starve.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

from oriel_inference.batching.device import Devices
from oriel_inference.batching.service_times import INLINE_S
from oriel_inference.batching.workers import Workers
from oriel_inference.clock import Clock


@dataclass(slots=True, eq=False)
class Contender:
    """A model that wants to compute.

    units: threads of one of its runs, at most the total.
    urgency: returns (band, deadline) of the call that it would run next; None if it has nothing to run.
    granted: uses the units, which are taken already, or returns them with `release`.
    """

    units: int
    urgency: Callable[[], tuple[int, float] | None]
    granted: Callable[[], None]


class Cores:
    """The units of the machine. `acquire` never waits; a refused contender is called back through `granted`."""

    def __init__(self, total: int) -> None:
        self.total = max(1, total)
        self.free = self.total
        self._waiting: list[Contender] = []
        self._granting = False

    def acquire(self, contender: Contender) -> bool:
        """Take the contender's units now, or put it on the waiting list."""
        if contender in self._waiting:
            return False
        if not self._waiting and self.free >= contender.units:
            self.free -= contender.units
            return True
        self._waiting.append(contender)
        if not self._granting:
            self._grant()  # a waiting model may have nothing to run any more
        return False

    def release(self, units: int) -> None:
        """Return units and grant them to the most urgent waiting models."""
        self.free += units
        if self._waiting and not self._granting:
            self._grant()

    def _grant(self) -> None:
        self._granting = True
        try:
            while self._waiting:
                chosen = self._most_urgent()
                if chosen is None or chosen.units > self.free:
                    return
                self._waiting.remove(chosen)
                self.free -= chosen.units
                chosen.granted()
        finally:
            self._granting = False

    def _most_urgent(self) -> Contender | None:
        ranked = [(urgency, each) for each in self._waiting if (urgency := each.urgency()) is not None]
        if len(ranked) != len(self._waiting):
            self._waiting = [each for _, each in ranked]
        return min(ranked, key=itemgetter(0))[1] if ranked else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as a model's scheduler sees it.

    clock: time and timers of the event loop.
    cores: the cores, which executions take while they run.
    workers: the threads in which executions run.
    devices: the host and the GPUs, which count their busy time.
    max_items, max_bytes: bounds of the calls, and of their input bytes, that wait for one model.
    max_batch_bytes: input bytes of one execution; a single call may have more.
    inline_s: executions of at most this many seconds run on the loop.
    """

    clock: Clock
    cores: Cores
    workers: Workers
    devices: Devices = field(default_factory=Devices)
    max_items: int = 10_000
    max_bytes: int = 256 << 20
    max_batch_bytes: int = 64 << 20
    inline_s: float = INLINE_S
