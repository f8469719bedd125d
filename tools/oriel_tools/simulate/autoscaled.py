"""Replicas of a simulated load, as KEDA and Kubernetes order them by the gateway's plan of a pool."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from math import ceil
from random import Random

from oriel_policies.documents import Snapshot
from oriel_policies.scaling.members import Members
from oriel_policies.scaling.planner import TOLERANCE, Planner, reported_value
from oriel_policies.scaling.records import PoolRecord
from oriel_policies.scaling.schedule import scheduled_minimum
from oriel_policies.scaling.wanted import Scaling, TierScaling

PERIOD_S = 15
SETTLE_S = 60.0  # of a pool of more than MOST_EXACT replicas, whose small changes the tolerance hides
MOST_EXACT = 9
POLL_S = 5
COOLDOWN_S = 30.0


class Rule(ABC):
    """A rule of scaling. grows_until_s: when the wanted replicas are there, as the gateway assumes; see `PoolGate`."""

    grows_until_s = 0.0

    @abstractmethod
    def __call__(self, record: PoolRecord, second: int, replicas: int, ready: int) -> int:
        """Return the number of replicas that there are to be; asked once a second.

        record: the demand. replicas: the present ones, those that start among them. ready: those that serve.
        """


class Keda:
    """KEDA and the HorizontalPodAutoscaler that it makes, for an external metric of type AverageValue with target 1.

    A pool without a replica gets one as soon as it is active; an idle one has none left at the first poll COOLDOWN_S
    later. In between the autoscaler decides every PERIOD_S: the number may grow to its maximum in one period, and falls
    to the largest one that was wanted within `settle_s`.

    first: replicas with which an active pool begins. looks_at: the second of each period in which the autoscaler
    decides; not 0, because loads change at such round times.
    """

    def __init__(
        self, *, minimum: int, maximum: int, first: int = 1, settle_s: float = 0.0, looks_at: int = PERIOD_S // 2
    ) -> None:
        self._minimum = minimum
        self._first = first
        self._looks_at = looks_at
        self._maximum = maximum
        self._settle_s = settle_s
        self._active_s = 0.0
        self._wishes: deque[tuple[float, int]] = deque()

    def replicas(self, active: bool, value: float, replicas: int, second: int) -> int:
        """Return the new number of replicas. value: the metric's value, in replicas."""
        if active:
            self._active_s = second
        if not replicas:
            return min(self._first, self._maximum) if active else 0
        if not self._minimum and second % POLL_S == 0 and second - self._active_s >= COOLDOWN_S:
            self._wishes.clear()
            return 0
        return self._looked(value, replicas, second) if second % PERIOD_S == self._looks_at else replicas

    def _looked(self, value: float, replicas: int, second: int) -> int:
        wish = replicas if abs(1.0 - value / replicas) <= TOLERANCE else ceil(value)
        self._wishes.append((second, wish))
        while second - self._wishes[0][0] > self._settle_s:
            self._wishes.popleft()
        if wish < replicas:
            wish = min(replicas, max(each for _, each in self._wishes))
        return max(self._minimum, min(self._maximum, max(self._first, wish)))


class Planned(Rule):
    """The rule of a pool with a `scaling` table: the gateway's plan, through KEDA.

    begins_s: wall clock at second 0, in epoch seconds, for the pool's schedule. looks_at: see `Keda`.
    """

    def __init__(self, snapshot: Snapshot, pool: str, *, begins_s: float = 0.0, looks_at: int = PERIOD_S // 2) -> None:
        scaling = scaling_of(snapshot, pool)
        tiers = {
            name: TierScaling(band=tier.band, target_s=tier.target_s, weight=scaling.weights.get(name, 1.0))
            for name, tier in snapshot.tiers.items()
        }
        self._scaling = scaling
        self._begins_s = begins_s
        self._tiers = tiers
        self._counting: tuple[Members, Planner] | None = None  # from the first second on
        settle_s = SETTLE_S if scaling.maximum > MOST_EXACT else 0.0
        self._keda = Keda(
            minimum=scaling.minimum,
            maximum=scaling.maximum,
            first=1 + scaling.spare,
            settle_s=settle_s,
            looks_at=looks_at,
        )

    def __call__(self, record: PoolRecord, second: int, replicas: int, ready: int) -> int:
        now = float(second)
        if self._counting is None:
            self._counting = Members(now), Planner(self._scaling, self._tiers, now)
        members, planner = self._counting
        members.read({"": (record, 0.0)}, now)
        scheduled = scheduled_minimum(self._scaling.schedule, self._begins_s + now, self._scaling.start_s)
        plan = planner.plan(members.demand(now), now, replicas=replicas, ready=ready, scheduled=scheduled)
        self.grows_until_s = plan.grows_until_s
        return self._keda.replicas(plan.active, reported_value(replicas, plan.wanted), replicas, second)


class Autoscaled:
    """The replicas of one pool, which follow a rule. A replica costs from its order, and serves after its start.

    replicas: ready ones at the beginning. start_s: bounds of the time that a replica takes to start.
    record: returns the demand that the gateway counts.
    change: sets the number of ready replicas, and when the last of those that start will be ready.
    crashes: seconds at which a ready replica is lost; another one starts in its place.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        replicas: int,
        start_s: tuple[float, float],
        record: Callable[[float], PoolRecord],
        change: Callable[[int, float], None],
        crashes: tuple[int, ...] = (),
    ) -> None:
        self.ready = replicas
        self._rule = rule
        self._start_s = start_s
        self._chance = Random(1)
        self._record = record
        self._change = change
        self._crashes = crashes
        self._starting: list[float] = []

    @property
    def replicas(self) -> int:
        """The number of the ready ones and of those that are starting."""
        return self.ready + len(self._starting)

    def second(self, number: int) -> None:
        """Make ready the replicas that have started by now, and decide anew. number: whole seconds of the clock."""
        started = [each for each in self._starting if each <= number]
        self._starting = self._starting[len(started) :]
        self._set_ready(self.ready + len(started))
        if number in self._crashes and self.ready:
            self._set_ready(self.ready - 1)
            self._order(number)
        wanted = self._rule(self._record(float(number)), number, self.replicas, self.ready)
        while self.replicas < wanted:
            self._order(number)
        while self.replicas > wanted and self._starting:
            self._starting.pop()
        self._set_ready(min(self.ready, wanted))

    def _order(self, number: int) -> None:
        self._starting.append(number + self._chance.uniform(*self._start_s))
        self._starting.sort()

    def _set_ready(self, ready: int) -> None:
        self.ready = ready
        self._change(ready, max(self._rule.grows_until_s, self._starting[-1] if self._starting else 0.0))


def scaling_of(snapshot: Snapshot, pool: str) -> Scaling:
    """Return the `scaling` table of a pool that has one."""
    table = snapshot.pools[pool].scaling
    assert table is not None
    return table
