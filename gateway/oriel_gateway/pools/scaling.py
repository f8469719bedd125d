"""Plans how many replicas the pools need whose documents have a `scaling` table.

The rules are in `oriel_policies.scaling`, the counts in `pools.demand`. A plan is made once a second, and at once when
a call comes to a pool that was idle or waits because no endpoint is usable. Gateways with a ledger exchange their
records through it at the same moments, and each plans from the sum of all. A change that cannot wait for the others'
next second is an edge: the ledger tells them of it at once, and they read. KEDA asks for the plan and listens for the
moment when a first replica is needed (`admin.external_scaler`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from time import monotonic, time
from typing import Any, Final

from oriel_gateway.limits.ledger import Ledger, LedgerLost
from oriel_gateway.pools.demand import PoolDemand
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.pool import PoolGate
from oriel_policies.bounds.calendar import CalendarClock
from oriel_policies.documents import Scaling, Snapshot, Tier
from oriel_policies.errors import UnreadableRecords
from oriel_policies.scaling.members import Members
from oriel_policies.scaling.planner import Planner, reported_value
from oriel_policies.scaling.published import pack, unpack
from oriel_policies.scaling.records import PoolRecord
from oriel_policies.scaling.schedule import scheduled_minimum
from oriel_policies.scaling.wanted import TierScaling

PLAN_EVERY_S: Final = 1.0
# the least time between two notifications about one pool: each of them costs requests to Kubernetes
_AGAIN_S: Final = 0.5
_EXCHANGE_S: Final = 2.0
_REST_S: Final = 0.05  # the least time between two exchanges, however many edges there are
LISTEN_AGAIN_S: Final = 2.0
_OWN: Final = ""  # the name of this gateway's own record: no holder of a ledger has an empty name

_log = logging.getLogger(__name__)


class PoolPlan:
    """The plan for one pool.

    edge: called when other gateways should know at once.
    replicas: addresses of the pool that do not terminate; of fixed ones, those that accept connections.
    ready: the number of servers that get calls.
    latest, demand: the counts and the demand of the latest update.
    model_replicas: the number of replicas whose memory the models in use fill; 0.0 while models are not placed.
    listeners: called whenever the pool needs a replica at once, and at the end; they must not change the set at once.
    over: True once this plan has ended.
    """

    def __init__(
        self,
        gate: PoolGate,
        scaling: Scaling,
        tiers: Mapping[str, Tier],
        now: float,
        calendar: CalendarClock,
        edge: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._calendar = calendar
        self._edge = edge
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        self._members = Members(now)
        self._noticed_s = now - _AGAIN_S
        self.counts = PoolDemand(now, self._plan_soon)
        self.listeners: set[Callable[[], None]] = set()
        self.model_replicas = 0.0
        self.over = False
        self.adopt(scaling, tiers, now)
        gate.count_demand(self.counts)
        self.update(now)

    def adopt(self, scaling: Scaling, tiers: Mapping[str, Tier], now: float) -> None:
        """Plan by these documents from now on; the counts stay."""
        self.scaling = scaling
        self.counts.capacity = scaling.capacity
        self.tiers = dict(tiers)
        targets = {
            name: TierScaling(band=tier.band, target_s=tier.target_s, weight=scaling.weights.get(name, 1.0))
            for name, tier in tiers.items()
        }
        self._planner = Planner(scaling, targets, now)

    @property
    def starved(self) -> bool:
        """Return whether no endpoint is usable although calls wait, a schedule asks for one, or an operator does."""
        if self.ready:
            return False
        return self.demand.total.held > 0.0 or (self.latest.floor > self.scaling.minimum and not self.replicas)

    def holds_beside(self, own: PoolGate) -> bool:
        """Return whether this is another pool than `own`, without a usable server."""
        return self._gate is not own and not (self._gate.endpoints.usable or self._gate.grpc.usable)

    @property
    def value(self) -> float:
        """The value of the metric `replicas` for a HorizontalPodAutoscaler."""
        return reported_value(self.replicas, self.latest.wanted)

    def record(self, now: float) -> PoolRecord:
        """Return this gateway's share of the demand."""
        gate = self._gate
        waiting = len(gate.admission.queue) + gate.endpoints.parked + gate.grpc.parked
        return self.counts.record(max(0, gate.calls - waiting), now)

    def read(self, others: Mapping[str, tuple[PoolRecord, float]], now: float) -> None:
        """Take the records of the other gateways, with their ages."""
        self._members.read({**others, _OWN: (self.record(now), 0.0)}, now)

    def wake(self, replicas: int, for_s: float) -> None:
        """Plan for at least this number of replicas for a while. A later call replaces an earlier one."""
        now = monotonic()
        self.counts.wake(replicas, now + for_s)
        self.update(now)
        self._edge()

    def update(self, now: float) -> bool:
        """Plan for this moment, and notify the listeners if a replica is needed at once. Returns whether it did."""
        gate, counts = self._gate, self.counts
        self.replicas = max(len(each) if found else _listening(each) for each, found in _endpoints(gate))
        self.ready = max(len(gate.endpoints.usable), len(gate.grpc.usable))
        self._members.note_own(_OWN, self.record(now), now)
        self.demand = self._members.demand(now)
        schedule, scheduled = self.scaling.schedule, 0
        if schedule:
            scheduled = scheduled_minimum(schedule, self._calendar.epoch(now), self.scaling.start_s)
        self.latest = latest = self._planner.plan(
            self.demand,
            now,
            replicas=self.replicas,
            ready=self.ready,
            scheduled=scheduled,
            model_replicas=self.model_replicas,
        )
        gate.grows_until_s = latest.grows_until_s
        began = latest.active and not counts.active
        counts.active = latest.active
        if not (began or self.starved) or now - self._noticed_s < _AGAIN_S:
            return False
        self._noticed_s = now
        for listener in self.listeners:
            listener()
        return True

    def close(self) -> None:
        """Stop: the pool does not scale any more, or is gone."""
        self.over = True
        self._gate.count_demand(None)
        if self._soon is not None:
            self._soon.cancel()
        for listener in self.listeners:
            listener()

    def _plan_soon(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._plan_now)

    def _plan_now(self) -> None:
        self._soon = None
        if self.update(monotonic()):
            self._edge()


class ScaledPools:
    """The plans of a gateway, by pool. Single writer: the gateway's loop.

    wall: reads epoch seconds, for the schedules.
    followed: True if there is a scaler that follows the plans.
    listen_again_s: the pause before the edges of the others are followed again after a failure.
    """

    def __init__(self, wall: Callable[[], float] = time) -> None:
        self.listen_again_s = LISTEN_AGAIN_S
        self.followed = False
        self.plans: dict[str, PoolPlan] = {}
        self._models: list[PoolPlan] = []  # the plans of pools to which routes of models lead
        self._calendar = CalendarClock(wall)
        self._turn = asyncio.Event()  # set when an exchange is due before its time
        self._edge = False  # True if the other gateways have to be notified of this exchange
        self._unreadable = False
        self._deaf = False
        self._exchanged_s = 0.0

    def adopt(self, gates: Mapping[str, PoolGate], snapshot: Snapshot) -> None:
        """Adopt the pools of other documents. A plan whose pool and tiers stay goes on with what it has seen."""
        now, kept, tiers = monotonic(), self.plans, snapshot.tiers
        self.plans = {}
        for name, gate in gates.items():
            scaling = gate.pool.scaling
            if scaling is None:
                continue
            for endpoints, discovered in _endpoints(gate):
                if not discovered:
                    _assume_down(endpoints)
            plan = kept.pop(name, None)
            if plan is None:
                plan = PoolPlan(gate, scaling, tiers, now, self._calendar, self._own_edge)
            elif (plan.scaling, plan.tiers) != (scaling, tiers):
                plan.adopt(scaling, tiers, now)
            self.plans[name] = plan
        for plan in kept.values():
            plan.close()
        routes = [each for each in snapshot.routes if each.model is not None]
        models = {each.pool for each in routes}
        models.update(side.pool for each in routes for side in each.split)
        models.update(further.pool for each in routes for further in each.fallback)
        self._models = [plan for name, plan in self.plans.items() if name in models]

    def hold_s(self, tier: str, own: PoolGate) -> float:
        """Return the longest time, in seconds, for which other pools of models than `own` hold calls of a tier now; 0.0
        if none lacks a usable server.
        """
        holds = [each.scaling.hold_for(tier) or 0.0 for each in self._models if each.holds_beside(own)]
        return max(holds, default=0.0)

    async def run(self, ledger: Ledger | None = None) -> None:
        """Plan once a second, and exchange the records with other gateways; never returns."""
        async with asyncio.TaskGroup() as group:
            if ledger is not None:
                group.create_task(self._listen(ledger))
            await self._plan(ledger)

    def _own_edge(self) -> None:
        self._edge = True
        self._turn.set()

    async def _listen(self, ledger: Ledger) -> None:
        """Read the records of the others as soon as one of them has published an edge."""
        while True:
            try:
                if self.plans:
                    async with aclosing(ledger.edges()) as edges:
                        async for _ in edges:
                            self._turn.set()
                            self._deaf = False
                    await asyncio.sleep(0)
                    continue
            except LedgerLost as error:
                if not self._deaf:
                    _log.warning(
                        "cannot listen to the other gateways: a pool's first call there is noticed up to 1 s late: %s",
                        error,
                    )
                self._deaf = True
            await asyncio.sleep(self.listen_again_s)

    async def _plan(self, ledger: Ledger | None) -> None:
        while True:
            try:
                async with asyncio.timeout(PLAN_EVERY_S):
                    await self._turn.wait()
                    if ledger is not None:
                        await asyncio.sleep(max(0.0, self._exchanged_s + _REST_S - monotonic()))
            except TimeoutError:
                pass
            self._turn.clear()
            others = await self._exchange(ledger) if ledger is not None and self.plans else {}
            now = monotonic()
            for name, plan in self.plans.items():
                if others is not None:
                    plan.read(
                        {member: (pools[name], age) for member, (pools, age) in others.items() if name in pools}, now
                    )
                plan.update(now)

    async def _exchange(self, ledger: Ledger) -> dict[str, tuple[dict[str, PoolRecord], float]] | None:
        """Return the records of the other gateways by member, with their ages; None if they are not known."""
        now = self._exchanged_s = monotonic()
        edge, self._edge = self._edge, False
        try:
            async with asyncio.timeout(_EXCHANGE_S):
                records = pack({name: plan.record(now) for name, plan in self.plans.items()})
                found = await ledger.exchange(records, edge=edge)
            others = {member: (unpack(records), age_s) for member, (records, age_s) in found.items()}
        except (LedgerLost, TimeoutError):
            return None
        except UnreadableRecords as error:
            if not self._unreadable:
                _log.error("replicas are not planned while a gateway of another version shares the ledger: %s", error)
            self._unreadable = True
            return None
        self._unreadable = False
        return others


def _endpoints(gate: PoolGate) -> tuple[tuple[EndpointSet[Any], bool], ...]:
    """Return the endpoints per protocol, and whether they are discovered rather than fixed addresses."""
    pool = gate.pool
    return (gate.endpoints, pool.discover is not None), (gate.grpc, pool.grpc_discover is not None)


def _listening(endpoints: EndpointSet[Any]) -> int:
    return sum(each.reach is not Reach.UNREACHABLE for each in endpoints)


def _assume_down(endpoints: EndpointSet[Any]) -> None:
    """Use a fixed address only after a probe: in a pool that scales it may have no server."""
    for each in endpoints:
        if each.reach is Reach.UNKNOWN:
            endpoints.note_reach(each, Reach.UNREACHABLE)
