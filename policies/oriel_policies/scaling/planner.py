"""The wanted number of replicas over time: up at once, down later, and to none only after a keep-alive.

Up: `replicas_wanted` for the forecast of this moment. Down: to the number that the largest forecast of the last
max(15 s, 3/4 of a start) needs with a margin of MARGIN standard deviations of the minute's mean. Without that memory
the number would follow every fluctuation, and without the margin a load whose need lies at the edge of a whole number
would swing about it; to stop and start a replica again costs as much as one that idles for a start. While a record is
missing, while the history is too short, or while no service time is known, the number never falls. Until the first
answer the service time is the one of the documents (`call_ms`), if they name one.

The floor is the largest of the pool's minimum, that of a window of its schedule, and what an operator asked for. While
the pool is in use, `spare` replicas are added to those that its calls need.

To none: nothing waits, runs or has arrived for the keep-alive (`keep_alive`), and the floor is 0. As long as
nobody has seen a call since gateways were started, replicas that are there are kept for that time, and none is started.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from math import ceil, inf, sqrt
from typing import Final

from oriel_policies.scaling.forecast import DELAY_S, expected_rate, growth
from oriel_policies.scaling.keep_alive import IdleGaps
from oriel_policies.scaling.members import Demand, State
from oriel_policies.scaling.records import CLASSES, WINDOW_S
from oriel_policies.scaling.wanted import Scaling, ServiceTime, TierLoad, TierScaling, replicas_wanted, service_time

HISTORY_S: Final = 15.0
HISTORY_STARTS: Final = 0.75
MARGIN: Final = 4.0
TOLERANCE: Final = 0.1  # relative change that a HorizontalPodAutoscaler ignores
_BEYOND: Final = 0.01  # the metric is kept to 1/1000
_SLOT_S: Final = 2.5
_NOTHING: Final[list[float]] = [0.0] * CLASSES


@dataclass(slots=True, eq=False, repr=False)
class Plan:
    """wanted: replicas, within the pool's bounds. active: the pool needs at least one (KEDA's IsActive). available:
    False if the records cannot be read: answer UNAVAILABLE, so that nothing is scaled. floor: the smallest number at
    this moment, whatever the calls need. keep_alive_s: time for which an idle pool stays active now. rates: calls
    per second that are planned for, by tier. work: device-seconds per second of it, by tier; empty while unknown.
    grows_until_s: monotonic seconds at which the replicas are there that were wanted last, if the autoscaler orders
    them within 15 s; 0.0 if none is missing."""

    wanted: int
    _: KW_ONLY
    active: bool
    available: bool
    floor: int
    keep_alive_s: float
    rates: dict[str, float]
    work: dict[str, float]
    grows_until_s: float


class _Largest:
    """The largest rate per tier in a sliding time, in slots of _SLOT_S."""

    __slots__ = ("_keep_s", "_slots", "since_s")

    def __init__(self, keep_s: float, now: float) -> None:
        self._keep_s = keep_s
        self._slots: deque[tuple[float, dict[str, float]]] = deque()
        self.since_s = now

    def observe(self, rates: Mapping[str, float], now: float) -> None:
        slots = self._slots
        if not slots or now - slots[-1][0] >= _SLOT_S:
            slots.append((now, dict(rates)))
        else:
            latest = slots[-1][1]
            for name, rate in rates.items():
                latest[name] = max(rate, latest.get(name, 0.0))
        while slots and now - slots[0][0] > self._keep_s + _SLOT_S:
            slots.popleft()

    def full(self, now: float) -> bool:
        return now - self.since_s >= self._keep_s

    def rates(self) -> dict[str, float]:
        largest: dict[str, float] = {}
        for _, rates in self._slots:
            for name, rate in rates.items():
                largest[name] = max(rate, largest.get(name, 0.0))
        return largest


class Planner:
    """See the module's docstring. Single writer; `plan` is to be called about once a second, and at edges.

    tiers: the tiers by the names that the records use; calls of other tiers are planned for like those of the least
    urgent one.
    """

    def __init__(self, pool: Scaling, tiers: Mapping[str, TierScaling], now: float) -> None:
        if not tiers:
            raise ValueError("there must be at least one tier")
        self.pool = pool
        self.tiers = dict(tiers)
        self._other_name = _least_urgent(self.tiers)
        self._other = self.tiers[self._other_name]
        self._largest = _Largest(max(HISTORY_S, HISTORY_STARTS * pool.start_s), now)
        self._gaps = IdleGaps(pool.start_s)
        self._wanted = -1
        self._grows_until_s = 0.0

    def plan(
        self,
        demand: Demand,
        now: float,
        *,
        replicas: int,
        ready: int,
        scheduled: int = 0,
        model_replicas: float = 0.0,
    ) -> Plan:
        """Return the plan for this moment.

        replicas: addresses of the pool that are not terminating; ready: the number of replicas that serve.
        scheduled: the minimum of the windows that are open, see `scheduled_minimum`.
        model_replicas: the number of replicas whose memory the models in use fill.
        """
        pool, total = self.pool, demand.total
        if self._wanted < 0:
            self._wanted = max(pool.minimum, min(pool.maximum, replicas))
        rates = self._rates(demand)
        self._largest.observe(rates, now)
        floor = max(pool.minimum, min(pool.maximum, max(scheduled, total.woken)))
        in_use = self._active(demand, replicas)
        # A floor that holds only for a while (a schedule, an operator) wakes the pool as a call does.
        active, spare = in_use or floor > pool.minimum, pool.spare if in_use else 0
        services = self._services(total.curve)
        model_replicas = model_replicas if in_use else 0.0
        complete = demand.state is State.COMPLETE
        needed = self._wanted
        if services and demand.state is not State.UNAVAILABLE:
            needed = replicas_wanted(
                pool, self._loads(demand, rates, services), (ready + replicas) / 2, model_replicas, spare=spare
            )
        needed, before = max(needed, floor, 1 if active else 0), self._wanted
        if needed > self._wanted:
            self._wanted = needed
        elif complete and not active and not floor:
            self._wanted = 0
        elif complete and needed < self._wanted and self._largest.full(now):
            largest = self._largest.rates()
            calls = WINDOW_S * sum(largest.values())
            more = 1.0 + MARGIN / sqrt(calls) if calls else 1.0
            loads = self._loads(demand, {name: rate * more for name, rate in largest.items()}, services)
            least = replicas_wanted(pool, loads, min(ready, self._wanted - 1), model_replicas, spare=spare)
            self._wanted = min(self._wanted, max(needed, least))
        if self._wanted <= ready:
            self._grows_until_s = 0.0
        elif self._wanted > before:
            self._grows_until_s = now + DELAY_S + pool.start_s
        return Plan(
            self._wanted,
            active=active or (self._wanted > 0 and not complete),
            available=demand.state is not State.UNAVAILABLE,
            floor=floor,
            keep_alive_s=self._gaps.keep_alive_s(pool.keep_alive_s),
            rates=rates,
            work={name: rates[name] * service.device_s for name, service in services.items() if name in rates},
            grows_until_s=self._grows_until_s,
        )

    def _active(self, demand: Demand, replicas: int) -> bool:
        """Return whether a call waits or is served, did so a short while ago, or is expected."""
        total = demand.total
        if total.idle_s < inf:
            self._gaps.observe(total.idle_s)
        if total.held > 0.0 or total.in_flight > 0.0:
            return True
        if total.idle_s == inf:
            return replicas > 0 and total.observed_s < self.pool.keep_alive_s
        keep_s = self._gaps.keep_alive_s(self.pool.keep_alive_s)
        return total.idle_s < keep_s or self._gaps.expects_call(self.pool.start_s)

    def _rates(self, demand: Demand) -> dict[str, float]:
        total, start_s = demand.total, self.pool.start_s
        grown = 1.0
        if demand.continuous and total.tiers:
            grown = growth(
                [sum(each) for each in zip(*[t.arrivals for t in total.tiers.values()], strict=True)], start_s
            )
        return {
            name: expected_rate(
                tier.arrivals,
                observed_s=total.observed_s,
                grown=grown,
                target_s=self.tiers.get(name, self._other).target_s,
                start_s=start_s,
            )
            for name, tier in total.tiers.items()
        }

    def _services(self, curve: Mapping[int, tuple[float, float]]) -> dict[str, ServiceTime]:
        """Return the service times by tier; empty while no execution is known."""
        services, call_s = {}, self.pool.call_s
        for name, tier in self.tiers.items():
            found = service_time(curve, tier.target_s)
            if found is None and call_s is not None:
                found = ServiceTime(call_s, call_s)
            if found is not None:
                services[name] = found
        return services

    def _loads(self, demand: Demand, rates: Mapping[str, float], services: Mapping[str, ServiceTime]) -> list[TierLoad]:
        loads = []
        for name, rate in rates.items():
            record = demand.total.tiers.get(name)
            known = name if name in self.tiers else self._other_name
            backlog = record.backlog if record is not None else _NOTHING
            loads.append(TierLoad(self.tiers[known], services[known], backlog, rate))
        return loads


def _least_urgent(tiers: Mapping[str, TierScaling]) -> str:
    return max(tiers, key=lambda name: tiers[name].band)


def reported_value(replicas: int, wanted: int) -> float:
    """Return the value of an external metric (AverageValue, target 1) with which an autoscaler acts on `wanted`.

    replicas: addresses of the pool that are not terminating. The HorizontalPodAutoscaler changes nothing while the
    value is within a tenth of the present number. So a smaller change is reported as just beyond the tolerance. A rise
    may then start one replica in ten more than wanted; a fall that would leave fewer than wanted is not reported.
    Exactly a tenth is within the tolerance here; versions of Kubernetes differ in it.
    """
    change = wanted - replicas
    if replicas <= 0 or not change or abs(change) > TOLERANCE * replicas + 1e-9:
        return float(wanted)
    if change > 0:
        return (1.0 + TOLERANCE) * replicas + _BEYOND
    least = (1.0 - TOLERANCE) * replicas - _BEYOND
    return least if ceil(least) >= wanted else float(replicas)
