"""A gateway in virtual time: the real limits, routes, queues and permits; only the upstream is made up.

It decides in the order of `ingress.judging` and of the table in `call.lifecycle`: whether the call could be in time,
its limits, a permit or a place in the queue, and what its end gives back. Calls for a scaled pool without a replica are
held as in a cold start. Bytes are left out, and with them retries, hedging, shadow copies, kept answers and fallback
pools.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from oriel_gateway.core import learn_within_s
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.limits.embedded import EmbeddedLimiter
from oriel_gateway.limits.grants import Grant
from oriel_gateway.pools.demand import PoolDemand
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.target_cache import TargetCache
from oriel_gateway.routing.targets import Target, chosen
from oriel_policies.documents import Snapshot, Tenant
from oriel_policies.scaling.records import PoolRecord
from oriel_policies.waiting.flows import Ticket

EPOCH_S = 1767225600.0  # the wall clock at the beginning of a simulation, for quotas: 2026-01-01, a Thursday

# The end of a call: the status of its answer, the reason of a refusal and what the server reports as its cost.
End = Callable[[int, str, int], None]
Cancel = Callable[[], None]


# Calls a function at a time of the clock, unless that is cancelled before.
CallAt = Callable[[float, Callable[[], None]], Cancel]
# The servers behind the gateway: model or service, tenant, rows, deadline and `end`. Returns how to cancel the call,
# whose `end` is then not called any more.
Upstream = Callable[[str, Tenant, int, float, End], Cancel]


class SimulatedGateway:
    """One gateway. now: the virtual time, in seconds. upstream: gets the calls that have a permit.

    scaled: pool that has replicas only while `set_replicas` says so; "": no pool is ever without one.
    """

    def __init__(
        self, snapshot: Snapshot, now: Callable[[], float], call_at: CallAt, upstream: Upstream, scaled: str = ""
    ) -> None:
        began_s = now()
        self.now = now
        self.call_at = call_at
        self.upstream = upstream
        self.limiter = EmbeddedLimiter(wall=lambda: EPOCH_S + now() - began_s)
        self.targets = TargetCache(snapshot)
        most_s = learn_within_s(snapshot)
        pools = [
            replace(pool, scaling=pool.scaling if pool.name == scaled else None, probe="", discover=None, endpoints=())
            for pool in snapshot.pools.values()
        ]
        self.pools = {pool.name: PoolGate(pool, most_s=most_s, clock=now) for pool in pools}

    @property
    def waiting(self) -> int:
        """Count the calls that wait for a permit or a replica."""
        return sum([len(gate.admission.queue) + gate.endpoints.parked for gate in self.pools.values()])

    def set_replicas(self, pool: str, ready: int, grows_until_s: float = 0.0) -> None:
        """Let the scaled pool have this number of ready replicas. grows_until_s: see `PoolGate`."""
        gate = self.pools[pool]
        gate.grows_until_s = grows_until_s
        if ready != len(gate.endpoints):
            gate.endpoints.assign([("replica", number) for number in range(ready)])

    def count_demand(self, pool: str, capacity: float, plan_soon: Callable[[], None]) -> Callable[[float], PoolRecord]:
        """Count the demand for a pool from now on. Returns how to read it at a time. capacity: devices of a replica.

        plan_soon: see `PoolDemand`; called for the first call that waits for a replica.
        """
        gate = self.pools[pool]
        demand = PoolDemand(self.now(), plan_soon, clock=self.now)
        demand.active, demand.capacity = True, capacity
        gate.count_demand(demand)
        return lambda now: demand.record(gate.admission.inflight, now)

    def call(
        self,
        tenant: Tenant,
        path: str,
        headers: Mapping[str, str],
        *,
        request_id: str,
        rows: int,
        size_bytes: int,
        timeout_s: float | None,
        end: End,
    ) -> None:
        """Take a call now. `end` is called once.

        timeout_s: the client's time for it; the tier's time if that is less, or None.
        """
        try:
            target = self.targets.of_line(tenant, f"POST {path} HTTP/1.1".encode("ascii"), "POST", path, "")
            if target.choices is not None:
                target = chosen(target, headers.get, request_id)
            tenant, gate, now = target.tenant, self.pools[target.pool], self.now()
            left_s = tenant.tier.give_up_s if timeout_s is None else min(timeout_s, tenant.tier.give_up_s)
            if left_s < gate.slow_s:
                gate.judge_request(target, tenant, size_bytes, left_s)
            grant = self.limiter.acquire(tenant, target, size_bytes, now) if target.allowances else None
        except Refused as refused:
            end(STATUS[refused.outcome], refused.outcome.value, 0)
            return
        requested_s = inf if timeout_s is None else now + timeout_s
        _Call(self, gate, target, grant, now, now + left_s, requested_s, rows, size_bytes, end).begin()


@dataclass(slots=True, eq=False, repr=False)
class _Call:
    """A call from its permit or its place in the queue to its end. It is a `pools.pool.Waiter`."""

    _gateway: SimulatedGateway
    _gate: PoolGate
    _target: Target
    _grant: Grant | None
    queued_s: float
    deadline: float
    _requested_s: float
    _rows: int
    _size_bytes: int
    _end: End | None
    _ticket: Ticket | None = None
    _permit_s: float = -1.0
    _held: bool = False
    _cancel: Cancel | None = None
    _timer: Cancel | None = None
    tenant: Tenant = field(init=False)
    due_s: float = 0.0  # its deadline, because the target of a call that waits for a replica can often not be met

    def __post_init__(self) -> None:
        self.tenant = self._target.tenant

    @property
    def _cold(self) -> bool:
        return self._gate.cold_start is not None and not self._gate.endpoints.usable

    def begin(self) -> None:
        """Send the call on if a permit is free, else queue it; hold it if there is no replica."""
        if self._cold:
            self._hold(new=True)
            return
        self._arrived()
        self._last_until(self.deadline)
        self._acquire()

    def _arrived(self) -> None:
        if self._gate.demand is not None:
            self._gate.demand.arrived(self.tenant.tier.name, self.queued_s)

    def _hold(self, *, new: bool) -> None:
        """Wait for a replica. new: the call does not count as demand yet."""
        gate = self._gate
        try:
            until = gate.hold_until(gate.endpoints, self.tenant, self.queued_s, self._requested_s)
        except Refused as refused:
            self._finish(STATUS[refused.outcome], refused.outcome.value)
            return
        if new:
            self._arrived()
        self._held = until is not None
        self._last_until(self.deadline if until is None else until)
        try:
            gate.endpoints.park(self)
        except Refused as refused:
            self._turned_away()
            self._finish(STATUS[refused.outcome], refused.outcome.value)

    def _last_until(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer()
        self.deadline = self.due_s = deadline
        self._timer = self._gateway.call_at(deadline, self._expired)

    def unparked(self) -> None:
        """Acquire a permit, because there is a replica: the call has the time of its tier, or the rest of its hold."""
        until = min(self._gateway.now() + self.tenant.tier.give_up_s, self._requested_s)
        self._last_until(max(until, self.deadline))
        self._acquire()

    def _acquire(self) -> None:
        gate = self._gate
        if gate.admission.acquire(self._target.counted, self._gateway.now()):
            self.admitted()
            return
        if self._gateway.now() < gate.grows_until_s and gate.cold_start is not None:
            until = min(self.queued_s + gate.cold_start.hold_s(self.tenant), self._requested_s)
            self._last_until(max(until, self.deadline))
        try:
            self._ticket = gate.join_queue(
                self,
                self.tenant,
                self._target,
                received_s=inf if self._held else self.queued_s,  # as in `call.call`
                deadline=self.deadline,
                size_bytes=self._size_bytes,
            )
        except Refused as refused:
            self._turned_away()
            self._finish(STATUS[refused.outcome], refused.outcome.value)
            return
        gate.pump()

    def _turned_away(self) -> None:
        if self._gate.demand is not None:
            self._gate.demand.refused(self.tenant.tier.name)

    def admitted(self) -> None:
        """Send the call to a server: it has a permit."""
        if self._cold:
            self._gate.decline_permit(self._ticket, self._target.counted)
            self._ticket = None
            self._hold(new=False)
            return
        self._permit_s = self._gateway.now()
        cancel = self._gateway.upstream(self._target.name, self.tenant, self._rows, self.deadline, self._finish)
        if self._end is not None:
            self._cancel = cancel

    def displaced(self) -> None:
        """End the call: a more urgent one has taken its place."""
        self._ticket = None
        self._turned_away()
        self._finish(STATUS[Outcome.DISPLACED], Outcome.DISPLACED.value)

    def _expired(self) -> None:
        if self._cancel is not None:
            self._cancel()
        elif self._permit_s < 0.0:
            if self._ticket is None:
                self._gate.endpoints.unpark(self)
            else:
                self._gate.leave_queue(self._ticket)
                self._ticket = None
            self._turned_away()
        self._finish(STATUS[Outcome.DEADLINE_EXCEEDED], Outcome.DEADLINE_EXCEEDED.value)

    def _finish(self, status: int, reason: str, cost_us: int = -1) -> None:
        end, self._end = self._end, None
        if end is None:
            return
        if self._timer is not None:
            self._timer()
        now, executed, cost_s = self._gateway.now(), self._permit_s >= 0.0, 0.0
        if executed:
            late = status != 200 and now >= self.deadline
            gate, target, took_s, good = self._gate, self._target, now - self._permit_s, status < 500
            share_s = took_s / gate.streams.at_servers
            cost_s = cost_us * 1e-6 if cost_us >= 0 else share_s
            charge_s = gate.charge(target, self.tenant, took_s, share_s, cost_s)
            if self._ticket is not None:
                gate.settle(self._ticket, charge_s)
            if good:
                gate.note_answered(took_s, share_s, cost_us)
            if status < 300:
                gate.note_time(target, self._size_bytes, took_s)
            gate.release_permit(target.counted, took_s, good, late)
        if self._grant is not None:
            self._grant.settle(round(cost_s * 1e6), executed, now)
        end(status, reason, cost_us)
