"""Replicas of a simulated load that follow the `scaling` table of a pool, as KEDA and Kubernetes order them."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import ceil

from oriel_policies.documents import Snapshot
from oriel_policies.scaling.members import Members
from oriel_policies.scaling.planner import TOLERANCE, Planner, reported_value
from oriel_policies.scaling.records import PoolRecord
from oriel_policies.scaling.schedule import scheduled_minimum
from oriel_policies.scaling.wanted import TierScaling

PERIOD_S = 15
SETTLE_S = 60.0


class HorizontalPodAutoscaler:
    """One decision every PERIOD_S about an external metric of type AverageValue with target 1.

    The number may grow to its maximum in one period, and falls only to the largest one that was wanted within SETTLE_S.
    """

    def __init__(self, *, minimum: int, maximum: int) -> None:
        self._minimum = max(1, minimum)
        self._maximum = maximum
        self._wishes: deque[tuple[float, int]] = deque()

    def replicas(self, value: float, replicas: int, now: float) -> int:
        """Return the new number of replicas. value: the metric's value, in replicas."""
        wish = replicas if abs(1.0 - value / replicas) <= TOLERANCE else ceil(value)
        self._wishes.append((now, wish))
        while now - self._wishes[0][0] > SETTLE_S:
            self._wishes.popleft()
        if wish < replicas:
            wish = min(replicas, max(each for _, each in self._wishes))
        return max(self._minimum, min(self._maximum, wish))


class Autoscaled:
    """The replicas of one pool, of which at least one stays: calls without any are not simulated.

    A replica costs from its order, and serves after the pool's `start_ms`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        pool: str,
        *,
        begins_s: float,
        replicas: int,
        record: Callable[[float], PoolRecord],
        change: Callable[[int], None],
    ) -> None:
        """begins_s: wall clock at second 0, in epoch seconds. replicas: ready ones at the beginning.

        record: returns the demand that the gateway counts. change: adds a number of ready replicas, or removes them if
        it is negative.
        """
        table = snapshot.pools[pool].scaling
        assert table is not None
        scaling = replace(table, minimum=max(1, table.minimum))
        tiers = {
            name: TierScaling(band=tier.band, target_s=tier.target_s, weight=table.weights.get(name, 1.0))
            for name, tier in snapshot.tiers.items()
        }
        self.ready = replicas
        self._schedule = table.schedule
        self._begins_s = begins_s
        self._start_s = table.start_s
        self._record = record
        self._change = change
        self._starting: deque[float] = deque()
        self._members = Members(0.0)
        self._planner = Planner(scaling, tiers, 0.0)
        self._autoscaler = HorizontalPodAutoscaler(minimum=scaling.minimum, maximum=scaling.maximum)

    @property
    def replicas(self) -> int:
        """The number of the ready ones and of those that are starting."""
        return self.ready + len(self._starting)

    def second(self, number: int) -> None:
        """Make ready the replicas that have started by now, and decide anew. number: whole seconds of the clock."""
        now = float(number)
        while self._starting and self._starting[0] <= now:
            self._starting.popleft()
            self.ready += 1
            self._change(1)
        self._members.read({"": (self._record(now), 0.0)}, now)
        scheduled = scheduled_minimum(self._schedule, self._begins_s + now, self._start_s)
        plan = self._planner.plan(
            self._members.demand(now), now, replicas=self.replicas, ready=self.ready, scheduled=scheduled
        )
        # Its seconds are not multiples of its period, because loads change at such round times.
        if number % PERIOD_S == PERIOD_S // 2:
            wanted = reported_value(self.replicas, plan.wanted)
            self._scale(self._autoscaler.replicas(wanted, self.replicas, now), now)

    def _scale(self, replicas: int, now: float) -> None:
        """Order replicas, or stop some: first those that are starting."""
        while self.replicas < replicas:
            self._starting.append(now + self._start_s)
        while self.replicas > replicas and self._starting:
            self._starting.pop()
        if self.ready > replicas:
            self._change(replicas - self.ready)
            self.ready = replicas
