"""One pool at run time: its endpoints, its permits and the queue for them."""

from collections.abc import Sequence
from typing import Protocol

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.sticky import StickyChoice
from oriel_policies.admission import Admission, Charges
from oriel_policies.documents import Pool, Tenant
from oriel_policies.picking import least_outstanding
from oriel_policies.queue import Pushed, SlaQueue, Ticket
from oriel_wire.engine.upstream import Endpoint

__all__ = ["PoolGate", "Waiter"]


class Waiter(Protocol):
    """Who waits for a permit. Called on the loop, at most once in total."""

    def admitted(self) -> None:
        """A permit is yours; give it back with `PoolGate.leave`."""

    def displaced(self) -> None:
        """Someone more urgent took the place."""


class PoolGate:
    """Admission to one pool, shared by HTTP and gRPC. Single writer: the gateway's loop."""

    def __init__(self, pool: Pool) -> None:
        self.name = pool.name
        self.pool = pool
        self.endpoints: Sequence[Endpoint] = [Endpoint(host, port) for host, port in pool.endpoints]
        self.admission = Admission(
            limit=pool.max_inflight, queue=SlaQueue(max_items=pool.max_queue, max_bytes=pool.max_queue_bytes)
        )
        self.charges = Charges()
        self.held_bytes = 0
        self._left: list[Endpoint] = []  # not in the documents any more
        self._turn = 0
        self.sticky = StickyChoice[Endpoint](lambda endpoint: f"{endpoint.host}:{endpoint.port}")
        self.shadows = 0  # copies that hold a permit or wait for one

    def adopt(self, pool: Pool) -> None:
        """The documents say something else of this pool: what waits and runs goes on, by the new bounds.

        Endpoints that stay keep their connections; from one that is gone nothing new is asked.
        """
        self.pool = pool
        known = {(endpoint.host, endpoint.port): endpoint for endpoint in self.endpoints}
        self.endpoints = [known.pop(address) if address in known else Endpoint(*address) for address in pool.endpoints]
        self._left += known.values()
        self.admission.limit = pool.max_inflight
        self.admission.queue.max_items = pool.max_queue
        self.admission.queue.max_bytes = pool.max_queue_bytes
        self.pump()

    @property
    def unused(self) -> bool:
        """Nothing waits, runs or comes in."""
        return not (self.admission.inflight or len(self.admission.queue) or self.held_bytes)

    def hold(self, size_bytes: int, *, urgent: bool) -> bool:
        """Take bytes of an incoming body from the pool's budget, `max_queue_bytes`; False: there are not enough.

        Only the most urgent tier may use all of it; the others leave it a quarter.
        """
        bound = self.pool.max_queue_bytes
        if self.held_bytes + size_bytes > (bound if urgent else bound * 3 // 4):
            return False
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give bytes back to the budget."""
        self.held_bytes -= size_bytes

    def copy_done(self, size_bytes: int) -> None:
        """A shadow copy is over: see `shadow.place_for_copy`."""
        self.shadows -= 1
        self.held_bytes -= size_bytes

    def wait(self, waiter: Waiter, tenant: Tenant, route: str, *, due: float, size_bytes: int) -> Ticket:
        """Queue for a permit when `admission.enter` gave none; give the ticket to `forget` when leaving the queue.

        due: monotonic time of the tier's target, which orders calls of one tenant. Call `pump` when the ticket is
        stored. Raises Refused QUEUE_FULL.
        """
        admission = self.admission
        ticket = Ticket(
            band=tenant.tier.band,
            tenant=tenant.name,
            deadline=due,
            cost=self.charges.estimate(route, tenant.name),
            weight=tenant.weight,
            size_bytes=size_bytes,
            payload=waiter,
        )
        outcome, displaced = admission.wait(ticket)
        if outcome is Pushed.FULL:
            raise Refused(
                Outcome.QUEUE_FULL, "too much is waiting for this pool", retry_after_s=admission.retry_after_s()
            )
        for loser in displaced:
            loser.payload.displaced()
        return ticket

    def forget(self, ticket: Ticket) -> bool:
        """A waiter leaves the queue by itself; False when it has a permit already."""
        return self.admission.queue.remove(ticket)

    def leave(self, route: str, tenant: Tenant, ticket: Ticket | None, held_s: float, cost_us: int) -> float:
        """Give a permit back; the call's charge in seconds.

        held_s: from the permit to the upstream's last byte; cost_us: what it reported, or -1.
        """
        admission = self.admission
        actual_s = cost_us * 1e-6 if cost_us >= 0 else held_s / max(1, admission.inflight)
        admission.leave(held_s)
        self.charges.learn(route, tenant.name, actual_s)
        if ticket is not None:
            admission.queue.settle(ticket, actual_s)
        if len(admission.queue):
            self.pump()
        return actual_s

    def pump(self) -> None:
        """Hand out the permits that are free."""
        while (ticket := self.admission.next_admitted()) is not None:
            ticket.payload.admitted()

    def pick(self, tried: Sequence[Endpoint] = ()) -> Endpoint | None:
        """The endpoint with the least outstanding work that was not tried yet; equals take turns."""
        endpoints = self.endpoints
        if tried:
            endpoints = [e for e in endpoints if e not in tried]
        if len(endpoints) < 2:
            return endpoints[0] if endpoints else None
        self._turn += 1
        return endpoints[least_outstanding([e.outstanding for e in endpoints], self._turn)]

    async def close(self) -> None:
        """Close idle connections."""
        for endpoint in (*self.endpoints, *self._left):
            await endpoint.close()
        self._left.clear()

    async def close_left(self) -> None:
        """Close the endpoints that are gone and have no calls on their way any more."""
        for endpoint in [endpoint for endpoint in self._left if not endpoint.outstanding]:
            self._left.remove(endpoint)
            await endpoint.close()
