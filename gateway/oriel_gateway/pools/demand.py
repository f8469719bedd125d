"""Counts what one gateway sees of the demand for one pool that scales: see `oriel_policies.scaling`."""

from collections import defaultdict
from collections.abc import Callable
from math import floor
from time import monotonic

from oriel_policies.scaling.counter import DemandCounter
from oriel_policies.scaling.records import PoolRecord


class PoolDemand:
    """The demand for one pool; a pool that does not scale has none. Single writer: the gateway's loop.

    active: True if the latest plan has a use for a replica. capacity: devices of one replica.
    plan_soon: called when the plan may not wait for its turn, because a call came to a pool that is not active, or is
    the first that waits for an endpoint.
    clock: monotonic seconds; another one than the machine's in simulations.
    """

    def __init__(self, now: float, plan_soon: Callable[[], None], *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._counter = DemandCounter(now)
        self._arrivals: dict[str, int] = defaultdict(int)  # arrivals in the second that ends at _next_s
        self._next_s = 0.0
        self._answers = 0
        self._seconds = 0.0
        self.active = False
        self.capacity = 1.0
        self.plan_soon = plan_soon

    def arrived(self, tier: str, now: float) -> None:
        """A call within its tenant's limits wants a permit."""
        if now >= self._next_s:
            self._note_arrivals(now)
            self._next_s = floor(now) + 1.0
        self._arrivals[tier] += 1
        if not self.active:
            self.plan_soon()

    def _note_arrivals(self, now: float) -> None:
        """Count the calls of a second that is over, or of the current one so far."""
        for tier, calls in self._arrivals.items():
            self._counter.arrived(tier, min(self._next_s - 0.5, now), calls)
        self._arrivals.clear()

    def refused(self, tier: str) -> None:
        """A call that has arrived is refused for want of capacity."""
        self._counter.refused(tier, self._clock())

    def turned_away(self, tier: str) -> None:
        """A call within its tenant's limits is refused for want of capacity before it can arrive."""
        self.arrived(tier, self._clock())
        self.refused(tier)

    def queued(self, tier: str, due_s: float) -> None:
        """A call waits for a permit or an endpoint, and should be answered by `due_s`."""
        self._counter.queued(tier, due_s)

    def left_queue(self, tier: str, due_s: float) -> None:
        """A call that was `queued` with this tier and time waits no more."""
        self._counter.left_queue(tier, due_s)

    def wake(self, replicas: int, until_s: float) -> None:
        """Note that an operator wants `replicas` replicas until then."""
        self._counter.wake(replicas, until_s)

    def note_work(self, device_s: float) -> None:
        """A call was answered. device_s: the time that it took of its server's device."""
        self._answers += 1
        self._seconds += device_s

    def record(self, in_flight: int, now: float) -> PoolRecord:
        """Return the gateway's share of the demand. in_flight: calls of the pool that have begun and do not wait."""
        counter = self._counter
        self._note_arrivals(now)
        if self._answers:
            # The time of a call is its share of a batch already: the curve has one point, of one call.
            counter.executed(1, self._seconds, now, self._answers)
            self._answers, self._seconds = 0, 0.0
        counter.running(in_flight, now)
        return counter.record(now)
