"""One pool at run time: its endpoints, its permits and the queue for them."""

from collections.abc import Callable
from math import ceil, inf
from time import monotonic
from typing import Any, Final, Protocol

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.cold_start import PoolColdStart
from oriel_gateway.pools.demand import PoolDemand
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.endpoints import EndpointSet, PoolEndpoint
from oriel_gateway.pools.engine_load import EngineSteering
from oriel_gateway.pools.grpc_endpoint import GrpcEndpoint
from oriel_gateway.pools.stream_slots import StreamSlots
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Pool, Tenant
from oriel_policies.upstreams.budget import RetryBudget
from oriel_policies.upstreams.engines import ENGINES
from oriel_policies.upstreams.fallback import Prospect
from oriel_policies.waiting.admission import Admission, Charges
from oriel_policies.waiting.concurrency import LearnedLimit
from oriel_policies.waiting.feasibility import PROBE, AnswerTimes, Verdict
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue
from oriel_policies.waiting.shares import Holding, Shares
from oriel_wire.h1.response import ResponseMemo

LEAST_CHARGE: Final = 0.1  # the least charge of a call that reports no cost, as a part of its share
# the highest charge, as a multiple of the time a call held its permit: a service may have called several models
MOST_CHARGE: Final = 4.0
SAMPLE_EVERY: Final = 4  # every fourth answer is a sample of how long such calls take
MAX_WORKS = 4096
_NO_TIMES = AnswerTimes()


def holding_of(tenant: Tenant, payload: Any = None) -> Holding:
    """Return an empty holding: a tenant's part of a shared budget. payload: see `Holding`."""
    return Holding(tenant.tier.band, tenant.name, tenant.weight, payload)


class Waiter(Protocol):
    """A call that waits for a permit. One of its methods is called, on the loop, at most once in total.

    queued_s: the time when it joined the queue, in monotonic seconds.
    """

    tenant: Tenant
    queued_s: float

    def admitted(self) -> None:
        """A permit is acquired; release it with `PoolGate.release_permit`."""

    def displaced(self) -> None:
        """Another call has taken the place, by the rule of `oriel_policies.waiting.shares`."""


class PoolGate:
    """Admission to one pool, shared by HTTP and gRPC. Single writer: the gateway's loop.

    slow_s: a call with more time left than this is never refused as infeasible; infinite while calls are held.
    cold_start: the starts of a pool that scales.
    streams: the slots of streaming calls whose answer has begun.
    most_s: the longest time in seconds that a call may take for the pool's concurrency to be learned from it.
    demand: counts the demand for a pool that scales; None for others.
    grows_until_s: when ordered replicas are ready, in monotonic seconds; until then no call is refused for its wait.
    learned: its concurrency by latency, None if it is fixed. engines: by what engines of others report, None for pools
    of other servers.
    clock: monotonic seconds; another one than the machine's in simulations.
    """

    def __init__(self, pool: Pool, *, most_s: float = inf, clock: Callable[[], float] = monotonic) -> None:
        self.name = pool.name
        self._clock = clock
        self.pool = pool
        memo = ResponseMemo()  # one for all endpoints: a thousand of them with a megabyte each would be a gigabyte
        self.endpoints = EndpointSet(
            lambda address: HttpEndpoint(address, self.pool, memo),
            pool.endpoints,
            max_parked=pool.max_queue,
            probe_first=bool(pool.probe),
        )
        self.grpc = EndpointSet(
            lambda address: GrpcEndpoint(address, self.pool),
            pool.grpc_endpoints,
            max_parked=pool.max_queue,
            probe_first=bool(pool.probe),
        )
        self.grpc.sequences.users = self.endpoints.sequences.users
        for these in (self.endpoints, self.grpc):
            these.became_usable = self.pump
            these.usable_changed = self._usable_changed
            these.retry_after_s = lambda: (self.cold_start and self.cold_start.retry_after_s()) or 1
        self.retries = RetryBudget()
        self.learned: LearnedLimit | None = None
        self.engines: EngineSteering | None = None
        self.admission = Admission(limit=0, queue=SlaQueue(max_items=pool.max_queue, max_bytes=0))
        self._learn_anew(most_s)
        self.streams = StreamSlots(self.admission, pool.max_streams)
        self.bytes = Shares(0)
        self._bound_bytes()
        self.slow_s = self._slowest_s = 0.0
        self._times: dict[str, AnswerTimes] = {}
        self._answers = 0
        self._full = False  # True if calls waited when the latest permit was released
        self.charges = Charges()
        self.shadows = 0  # shadow copies that hold a permit or wait for one
        self.calls = 0  # calls that have not finished, in whatever state
        self.demand: PoolDemand | None = None
        self._late = 0  # calls that would have been late here and have other pools to go to
        self.cold_start: PoolColdStart | None = None
        self.grows_until_s = 0.0
        self._adopt_cold_start()

    def count_demand(self, demand: PoolDemand | None) -> None:
        """Count with `demand` from now on, beginning with the calls that wait already; None: do not count."""
        self.demand = self.endpoints.demand = self.grpc.demand = demand
        if demand is None:
            return
        for band, _, _ in self.admission.queue.depths():
            for ticket in self.admission.queue.waiting(band):
                demand.queued(ticket.payload.tenant.tier.name, ticket.deadline)
        self.endpoints.count_parked()
        self.grpc.count_parked()

    def adopt(self, pool: Pool, *, most_s: float = inf) -> None:
        """Adopt new documents for this pool: what waits and runs goes on, within the new bounds.

        Endpoints that stay keep their connections; one that left gets no new calls.
        """
        old, self.pool = self.pool, pool
        self.endpoints.slots.bound = self.grpc.slots.bound = pool.max_queue
        self.endpoints.model_locations.probe_first = self.grpc.model_locations.probe_first = bool(pool.probe)
        for endpoint in (*self.endpoints, *self.grpc):
            endpoint.adopt(pool)
        if pool.discover is None:
            self.endpoints.assign(pool.endpoints)
        if pool.grpc_discover is None:
            self.grpc.assign(pool.grpc_endpoints)
        if (old.max_inflight, old.learn_concurrency, old.engine) != (
            pool.max_inflight,
            pool.learn_concurrency,
            pool.engine,
        ):
            self._learn_anew(most_s)
        self.admission.queue.slots.bound = pool.max_queue
        self.streams.resize(pool.max_streams, self._clock())
        self._bound_bytes()
        self._adopt_cold_start()
        self.pump()

    def _learn_anew(self, most_s: float) -> None:
        pool = self.pool
        engine = ENGINES.get(pool.engine)
        learns = pool.learn_concurrency
        self.learned = LearnedLimit(pool.max_inflight, most_s=most_s) if learns else None
        self.engines = None
        if learns and engine is not None and engine.metrics:
            self.engines = EngineSteering(engine, pool.name, pool.max_inflight, self.admission, self._engines_read)
        self._adopt_limit()

    def _engines_read(self) -> None:
        self._adopt_limit()
        self.pump()

    def _adopt_limit(self) -> None:
        """Adopt the number of permits that is in force: the learned or the fixed one."""
        learned, engines = self.learned, self.engines
        if engines is not None and engines.readable:
            self.admission.limit = engines.limit.limit
        else:
            self.admission.limit = self.pool.max_inflight if learned is None else learned.limit

    def keeps_permits(self) -> bool:
        """Return whether streams keep their permits to their end: the limit counts all calls inside the engines."""
        return self.engines is not None and self.engines.readable

    def _adopt_cold_start(self) -> None:
        scaling = self.pool.scaling
        if scaling is None:
            self.cold_start = None
        elif self.cold_start is None:
            self.cold_start = PoolColdStart(scaling, (self.endpoints, self.grpc), self._clock)
        else:
            self.cold_start.adopt(scaling)
        self._usable_changed()

    def _usable_changed(self) -> None:
        if self.learned is not None:
            self.learned.keep_at_least(max(len(self.endpoints.usable), len(self.grpc.usable)))
            self._adopt_limit()
        cold = self.cold_start
        if cold is None:
            self.slow_s = self._slowest_s
            return
        cold.note_ready(probed=bool(self.pool.probe))
        # A pool may have servers of one protocol only: then calls of the other are held or refused when they are here.
        empty = not self.endpoints.usable and not self.grpc.usable
        self.slow_s = inf if empty and cold.holds else self._slowest_s

    def retry_after_s(self) -> int:
        """Whole seconds after which the pool probably takes calls again."""
        return (self.cold_start and self.cold_start.retry_after_s()) or self.admission.retry_after_s()

    def endpoints_for(self, *, grpc: bool) -> EndpointSet[Any]:
        """Return the endpoints that speak a protocol: gRPC, or HTTP."""
        return self.grpc if grpc else self.endpoints

    @property
    def speaks_grpc(self) -> bool:
        """Return whether the documents name endpoints for gRPC."""
        return bool(self.pool.grpc_endpoints) or self.pool.grpc_discover is not None

    @property
    def unused(self) -> bool:
        """Return whether no call waits, runs or is being received."""
        return not self.calls

    def _bound_bytes(self) -> None:
        """Only the most urgent tier may use all of the pool's bytes; the others leave it a quarter."""
        self.bytes.bound = self.pool.max_queue_bytes
        self.bytes.spared = self.pool.max_queue_bytes - self.pool.max_queue_bytes * 3 // 4

    @property
    def held_bytes(self) -> int:
        """The bytes of the pool's budget, `max_queue_bytes`, that calls hold, by `reserve_bytes`."""
        return self.bytes.held

    def reserve_bytes(self, holding: Holding, size_bytes: int) -> bool:
        """Take bytes that have come, or may come at once, from the pool's budget; `bytes.release` gives them back.

        holding: its payload is displaced when another call gets the bytes, unless it is fixed. Returns False if there
        are not enough.
        """
        displaced = self.bytes.acquire(holding, size_bytes)
        for each in displaced or ():
            each.payload.displaced()
        return displaced is not None

    def no_bytes_for(self, tenant: Tenant) -> Refused:
        """Return the refusal of a request for which the budget has no bytes, and count it as demand."""
        if self.demand is not None:
            self.demand.turned_away(tenant.tier.name)
        return Refused(
            Outcome.QUEUE_FULL,
            "too many bytes of requests are waiting for this pool",
            retry_after_s=self.retry_after_s(),
        )

    def hold_until(
        self, these: EndpointSet[Any], tenant: Tenant, received_s: float, requested_until: float
    ) -> float | None:
        """Judge a call whose body is not here yet, while no endpoint of `these` is usable.

        requested_until: see `PoolColdStart.until`. Returns when it is given up; None: it is not held, but waits until
        its deadline. Raises Refused, and then counts the call as demand.
        """
        cold = self.cold_start
        if cold is None or these.usable:
            return None
        try:
            return cold.until(these, tenant, received_s, requested_until, self._clock())
        except Refused:
            if self.demand is not None:
                self.demand.turned_away(tenant.tier.name)
            raise

    def judge_request(self, target: Target, tenant: Tenant, size_bytes: int, left_s: float) -> None:
        """Judge a request that is no call yet, as `judge` does; one that capacity would help counts as demand."""
        try:
            self.judge(target, size_bytes, left_s)
        except Refused as refused:
            refused.left_s = left_s
            if self.demand is not None and refused.outcome is Outcome.INFEASIBLE:
                self.demand.turned_away(tenant.tier.name)
            raise

    def judge(self, target: Target, size_bytes: int, left_s: float) -> None:
        """Raise Refused INFEASIBLE or DEADLINE_TOO_SHORT if a call cannot end within `left_s` even if it begins now."""
        times = self._times.get(target.work)
        verdict = times.judge(size_bytes, left_s) if times is not None else Verdict.ADMIT
        if verdict is Verdict.TOO_SHORT:
            raise Refused(
                Outcome.DEADLINE_TOO_SHORT,
                f"{left_s * 1e3:.0f} ms are left, less than any such call has ever taken",
            )
        if verdict is Verdict.INFEASIBLE:
            raise Refused(
                Outcome.INFEASIBLE,
                f"{left_s * 1e3:.0f} ms are left, and nine of ten such calls take longer now",
                retry_after_s=self.admission.retry_after_s(),
            )

    def prospect(self, target: Target, tenant: Tenant, size_bytes: int, *, usable: bool) -> Prospect:
        """Return the prospects of a call in this pool now. usable: True if an endpoint of its protocol is usable."""
        admission, band = self.admission, tenant.tier.band
        queues = admission.inflight >= admission.limit or bool(admission.queue.items)
        queues = queues or target.counted in admission.queue.aside
        backlog, waiting, _ = admission.queue.backlog(band, tenant.name, target.counted)
        waits = queues and backlog is not None and waiting
        return Prospect(
            usable=usable,
            room=not queues or admission.queue.slots.fits(holding_of(tenant), 1),
            wait_s=backlog.wait_s(waiting, self._clock()) if waits and backlog is not None else 0.0,
            service_s=self._times.get(target.work, _NO_TIMES).expected_s,
        )

    def keeps_late_call(self) -> bool:
        """Return True for one late call in PROBE: it stays, so that it is noticed when the pool became faster."""
        self._late += 1
        return self._late % PROBE == 0

    def join_queue(
        self, waiter: Waiter, tenant: Tenant, target: Target, *, received_s: float, deadline: float, size_bytes: int
    ) -> Ticket:
        """Join the queue for a permit after `admission.acquire` gave none; pass the ticket to `leave_queue` to stop
        waiting.

        The tier's target orders calls of one tenant; one that was held (`received_s` is infinite) goes last. Call
        `pump` when the ticket is stored. Raises Refused QUEUE_FULL, or INFEASIBLE if it would wait past its deadline.
        """
        admission, tier = self.admission, tenant.tier
        due = min(received_s + tier.target_s, deadline)
        times = self._times.get(target.work, _NO_TIMES)
        backlog, waiting, behind = admission.queue.backlog(tier.band, tenant.name, target.counted)
        now = self._clock()
        if (
            now >= self.grows_until_s
            and backlog is not None
            and waiting
            and backlog.wait_s(waiting, now) + times.floor.ceiling_s > due - now
        ):
            left_s = deadline - now
            wait_s = backlog.refuses(
                waiting,
                now,
                behind=behind,
                target_s=due - now,
                left_s=left_s,
                quick_s=times.quick_s(size_bytes),
            )
            if wait_s:
                raise Refused(
                    Outcome.INFEASIBLE,
                    f"a call would wait about {wait_s * 1e3:.0f} ms now, and this one has {left_s * 1e3:.0f} ms left",
                    retry_after_s=max(1, min(60, ceil(wait_s))),
                )
        ticket = Ticket(
            band=tier.band,
            tenant=tenant.name,
            deadline=due,
            cost=self.charges.estimate(target.route, tenant.name),
            weight=tenant.weight,
            payload=waiter,
        )
        ticket.late_s, ticket.target_s, ticket.model = due - times.likely_s, tier.target_s, target.counted
        if received_s == inf:
            ticket.go_last()
        displaced = admission.queue.push(ticket)
        if displaced is None:
            retry_after_s = admission.retry_after_s()
            raise Refused(Outcome.QUEUE_FULL, "too many calls are waiting for this pool", retry_after_s=retry_after_s)
        demand = self.demand
        if demand is not None:
            demand.queued(tier.name, due)
            for loser in displaced:
                demand.left_queue(loser.payload.tenant.tier.name, loser.deadline)
        for loser in displaced:
            loser.payload.displaced()
        return ticket

    def leave_queue(self, ticket: Ticket) -> bool:
        """Leave the queue. Returns False if the waiter has acquired a permit already."""
        left = self.admission.queue.remove(ticket)
        if left and self.demand is not None:
            self.demand.left_queue(ticket.payload.tenant.tier.name, ticket.deadline)
        return left

    def charge(
        self,
        target: Target,
        tenant: Tenant,
        worked_s: float,
        share_s: float,
        cost_s: float,
        messages: int = 1,
    ) -> float:
        """Charge a call that is over to its tenant. Returns the charge, by which its turn in the queue is settled.

        worked_s: the time that a server was at work for the call.
        share_s: this time divided by the calls that shared the servers.
        cost_s: the cost that the server reported; `share_s` if it reported none.
        messages: the messages of a stream; the cost of one of them is learned.
        """
        fair_s = cost_s
        if cost_s != share_s:
            # No turn is free, or a tenant whose calls report no cost would get all of them; and the charge has an upper
            # bound.
            fair_s = min(max(cost_s, LEAST_CHARGE * share_s), MOST_CHARGE * worked_s)
        self.charges.learn(target.route, tenant.name, fair_s if messages <= 1 else fair_s / messages)
        return fair_s

    def settle(self, ticket: Ticket, charge_s: float) -> None:
        """Settle the turn of a ticket in the queue, before the permit is released."""
        self.admission.queue.settle(ticket, charge_s)

    def note_answered(self, worked_s: float, share_s: float, cost_us: int) -> None:
        """Count an answered call as demand; see `charge`."""
        demand = self.demand
        if demand is None:
            return
        if cost_us >= 0:
            demand.note_work(cost_us * 1e-6)
        else:  # the devices of the usable endpoints share the calls that are at the servers
            devices = demand.capacity * max(len(self.endpoints.usable), len(self.grpc.usable), 1)
            demand.note_work(min(worked_s, share_s * devices))

    def note_time(self, target: Target, size_bytes: int, took_s: float) -> None:
        """Take the time of one answered call in `SAMPLE_EVERY` as a sample of how long such calls take.

        size_bytes: the size of the request.
        """
        self._answers = answers = self._answers + 1
        if answers % SAMPLE_EVERY == 0 and target.work:
            self._time(target.work, size_bytes, took_s)

    def release_permit(self, model: str, took_s: float, good: bool | None, late: bool = False) -> None:
        """Release a permit, and give it to a waiting call.

        model: the name by which the permit is counted.
        took_s: seconds for which the call had the permit.
        good: True if the call was answered; None if the caller ended it.
        late: True if the deadline passed before the answer.
        """
        admission, now = self.admission, self._clock()
        admission.release(took_s, model, now)
        learned = None if self.keeps_permits() else self.learned
        if (queue := admission.queue).items and not queue.aside:  # else permits may be kept free for quicker models
            if learned is not None:
                if not self._full:
                    self._full = True
                    learned.calm()
                    admission.limit = learned.limit
                if good is not None and learned.note_finished(took_s, now, good=good, late=late):
                    admission.limit = learned.limit
            self.pump()
        else:
            self._full = False
            if learned is not None and learned.lowered and not queue.items:
                learned.has_room(now)
                admission.limit = learned.limit
            if queue.aside:
                self.pump()

    def _time(self, work: str, size_bytes: int, took_s: float) -> None:
        times = self._times.get(work)
        if times is None:
            if len(self._times) >= MAX_WORKS:
                del self._times[next(iter(self._times))]
            times = self._times[work] = AnswerTimes()
        times.observe(size_bytes, took_s)
        if times.floor.ceiling_s > self._slowest_s:
            self._slowest_s = times.floor.ceiling_s
            self._usable_changed()

    def pump(self) -> None:
        """Hand out the permits that are free."""
        admission = self.admission
        if not (admission.queue.items or admission.queue.aside) or admission.inflight >= admission.limit:
            return
        now = self._clock()
        while (ticket := admission.next_admitted(now)) is not None:
            if self.demand is not None:
                self.demand.left_queue(ticket.payload.tenant.tier.name, ticket.deadline)
            ticket.payload.admitted()

    def release_unused_permit(self, ticket: Ticket | None, model: str) -> None:
        """Release a permit that was not used because no endpoint was usable."""
        self.decline_permit(ticket, model)
        if self.admission.queue.aside:
            self.pump()

    def decline_permit(self, ticket: Ticket | None, model: str) -> None:
        """Release the permit from within `Waiter.admitted`; the loop that hands out permits continues with the next
        call.
        """
        self.admission.release_unused(model)
        if ticket is not None:
            self.admission.queue.settle(ticket, 0.0)

    async def close(self) -> None:
        """Close idle connections and channels."""
        await self.endpoints.close()
        await self.grpc.close()

    async def close_left(self) -> None:
        """Close the endpoints that left and have no calls under way any more."""
        gone: list[PoolEndpoint] = [*self.endpoints.gone(), *self.grpc.gone()]
        for endpoint in gone:
            await endpoint.close()
