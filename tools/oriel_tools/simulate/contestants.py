"""The policies that are compared. Each sees the cluster once a second and orders replicas."""

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Protocol

from oriel_policies.scaling import (
    Members,
    Planner,
    PoolRecord,
    PoolScaling,
    TierScaling,
    Window,
    reported_value,
    scheduled_minimum,
)
from oriel_tools.simulate.autoscaler import PERIOD_S, Activation, HorizontalPodAutoscaler
from oriel_tools.simulate.cluster import Cluster

UTILISATION = 0.7


class Counter(Protocol):
    """The demand that one gateway counts."""

    def record(self, now: float, /) -> PoolRecord: ...


class Scalable(Protocol):
    """Replicas that can be ordered. replicas: the ready ones and those that are starting."""

    @property
    def counters(self) -> Sequence[Counter]: ...

    @property
    def replicas(self) -> int: ...

    @property
    def ready(self) -> int: ...

    def scale(self, replicas: int, /) -> None: ...


class Contestant(Protocol):
    """A policy of scaling. `second` is called after each second of virtual time."""

    name: str

    def second(self, cluster: Cluster, number: int) -> None: ...


def is_decision(number: int) -> bool:
    """Return whether a HorizontalPodAutoscaler decides in this second.

    Its seconds are not multiples of its period, because loads change at such round times.
    """
    return number % PERIOD_S == PERIOD_S // 2


class ByDeadline:
    """Oriel's rules, through KEDA's external scaler and a HorizontalPodAutoscaler."""

    name = "oriel"

    def __init__(
        self, pool: PoolScaling, tiers: dict[str, TierScaling], schedule: Sequence[Window] = (), begins_s: float = 0.0
    ) -> None:
        """schedule: of the pool. begins_s: what the wall clock shows at second 0."""
        self._pool = pool
        self._schedule = schedule
        self._begins_s = begins_s
        self._members = Members(0.0)
        self._planner = Planner(pool, tiers, 0.0)
        self._autoscaler = HorizontalPodAutoscaler(
            minimum=pool.minimum, maximum=pool.maximum, up_percent=100, up_pods=pool.maximum, settle_s=60.0
        )
        self._activation = Activation()

    def second(self, cluster: Scalable, number: int) -> None:
        now = float(number)
        records = {str(index): (each.record(now), 0.0) for index, each in enumerate(cluster.counters)}
        self._members.read(records, now)
        replicas = cluster.replicas
        scheduled = scheduled_minimum(self._schedule, self._begins_s + now, self._pool.start_s)
        plan = self._planner.plan(
            self._members.demand(now), now, replicas=replicas, ready=cluster.ready, scheduled=scheduled
        )
        if not self._pool.minimum:
            replicas = self._activation.replicas(plan.active, replicas, number)
        if replicas and is_decision(number):
            replicas = self._autoscaler.by_average_value(reported_value(replicas, plan.wanted), replicas, now)
        cluster.scale(replicas)


class ByRate:
    """KEDA on the rate of a minute: as many replicas as run at 70 % with it. The autoscaler's default behaviour."""

    name = "rate / 0.7"

    def __init__(self, pool: PoolScaling) -> None:
        self._pool = pool
        self._seconds: deque[int] = deque(maxlen=60)
        self._before = 0
        self._autoscaler = defaults(pool)
        self._activation = Activation(cooldown_s=300.0)

    def second(self, cluster: Cluster, number: int) -> None:
        self._seconds.append(cluster.arrived - self._before)
        self._before = cluster.arrived
        wanted = sum(self._seconds) / len(self._seconds) * cluster.service_s / UTILISATION
        replicas = cluster.replicas
        if not self._pool.minimum:
            replicas = self._activation.replicas(wanted > 0.0, replicas, number)
        if replicas and is_decision(number):
            replicas = self._autoscaler.by_average_value(wanted, replicas, float(number))
        cluster.scale(replicas)


class ByConcurrency:
    """Knative's autoscaler (KPA): 0.7 calls at once per replica, as a mean of 60 s, or of 6 s in panic.

    Panic begins when the short window wants twice the ready replicas and lasts a minute beyond that; in it the number
    never falls. It decides every 2 s, falls to half at most, and to none after 30 s.
    """

    name = "concurrency (KPA)"
    GRACE_S = 30

    def __init__(self, pool: PoolScaling) -> None:
        self._pool = pool
        self._areas: deque[float] = deque(maxlen=61)
        self._panic_until = -1
        self._most = 0
        self._idle_since = 0

    def second(self, cluster: Cluster, number: int) -> None:
        self._areas.append(cluster.area)
        if number % 2 or len(self._areas) < 2:
            return
        ready = max(1, cluster.ready)
        stable = self._concurrency(60) / UTILISATION
        panic = self._concurrency(6) / UTILISATION
        wanted = max(ceil(stable - 1e-9), ready // 2)
        urgent = ceil(panic - 1e-9)
        if urgent >= 2 * ready:
            if number > self._panic_until:
                self._most = 0
            self._panic_until = number + 60
        if number <= self._panic_until:
            self._most = max(self._most, cluster.ready, urgent, wanted)
            wanted = self._most
        if stable > 0.0:
            self._idle_since = number
            wanted = max(1, wanted)
        elif number - self._idle_since < self.GRACE_S:
            wanted = max(1, wanted)
        elif not self._pool.minimum:
            wanted = 0
        cluster.scale(max(self._pool.minimum, min(self._pool.maximum, wanted)))

    def _concurrency(self, seconds: int) -> float:
        seconds = min(seconds, len(self._areas) - 1)
        return (self._areas[-1] - self._areas[-1 - seconds]) / seconds


class ByProcessor:
    """A HorizontalPodAutoscaler at 70 % of the CPU, where a replica that serves is busy. It cannot go to none."""

    name = "CPU 70 %"

    def __init__(self, pool: PoolScaling) -> None:
        self._autoscaler = defaults(pool)
        self._before_s = 0.0

    def second(self, cluster: Cluster, number: int) -> None:
        if not is_decision(number):
            return
        busy = (cluster.busy_s - self._before_s) / min(PERIOD_S, number)
        self._before_s = cluster.busy_s
        replicas = max(1, cluster.replicas)
        cluster.scale(self._autoscaler.by_utilisation(busy, UTILISATION, cluster.ready, replicas, float(number)))


def defaults(pool: PoolScaling) -> HorizontalPodAutoscaler:
    """Return a HorizontalPodAutoscaler with the default `behavior`."""
    return HorizontalPodAutoscaler(
        minimum=pool.minimum, maximum=pool.maximum, up_percent=100, up_pods=4, settle_s=300.0
    )
