"""Keep the endpoints of one pool: which can be used, which is picked next, and the calls that wait for one.

An endpoint is *usable* unless it refuses connections, its readiness probe fails, it has left the answer of the
discovery, or it is ejected as worse than the others (`oriel_policies.upstreams.ejection`; at most half of those that
would be usable are ejected). `usable` is a list that is updated at every change of a state, so that a pick costs the
same for two endpoints and for a thousand.

While no endpoint is usable, calls are parked: without a permit, within their own deadline, at most as many as may
queue.
Single writer: the gateway's loop. `oriel_gateway.pools.health` probes, ejects, restores and looks up addresses.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from time import monotonic
from typing import Final, Generic, Protocol, TypeVar

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.demand import PoolDemand
from oriel_gateway.pools.endpoint_state import EndpointState, HttpEndpoint, Reach
from oriel_gateway.pools.grpc_endpoint import GrpcEndpoint
from oriel_gateway.pools.model_locations import ABSENT_S, ModelLocations
from oriel_gateway.pools.sequences import Sequences
from oriel_policies.documents import Tenant
from oriel_policies.upstreams.assignment import StickyChoice
from oriel_policies.upstreams.ejection import ERROR_RATE, MIN_ANSWERS, SUSPECT_S, Cause, Record, most_ejected
from oriel_policies.upstreams.picking import two_of
from oriel_policies.upstreams.prefixes import PrefixHomes
from oriel_policies.waiting.shares import Holding, Shares
from oriel_wire.discovery.discovery import Address
from oriel_wire.discovery.endpoint_slices import Listed

_log = logging.getLogger(__name__)
TRIAL_ANSWERS = 5
SHARE = 1.5  # of an equal share of the calls, for the sake of a prefix cache
_NOT_LISTED: Final[Mapping[Address, Listed]] = {}
_SOME = 16


class Parked(Protocol):
    """A call that waits for an endpoint. One of its methods is called, on the loop, at most once in total.

    due_s: the time by which it should be answered, by the target of its tier.
    """

    tenant: Tenant
    deadline: float
    due_s: float

    def unparked(self) -> None:
        """An endpoint is usable: acquire a permit."""

    def displaced(self) -> None:
        """Another call has taken the place, by the rule of `oriel_policies.waiting.shares`."""


PoolEndpoint = HttpEndpoint | GrpcEndpoint
E = TypeVar("E", bound=PoolEndpoint)


class EndpointSet(Generic[E]):
    """The endpoints of one pool over one protocol.

    make: builds an endpoint for an address.
    probe_first: see `ModelLocations`.
    """

    def __init__(
        self,
        make: Callable[[Address], E],
        addresses: Iterable[Address],
        *,
        max_parked: int,
        probe_first: bool = False,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._make = make
        self._random = random
        self.slots = Shares(max_parked)  # places for calls that wait for an endpoint
        self._parked: dict[Parked, Holding] = {}
        self.model_locations = ModelLocations[E](lambda: self.usable, probe_first=probe_first)
        self._everywhere = self.model_locations.everywhere
        self.members: list[E] = []
        self.usable: list[E] = []
        self.sticky = StickyChoice[E](_name)
        self.sequences = Sequences()
        self.prefixes = PrefixHomes[E]()
        self.leaving: list[E] = []
        self.ejections: dict[Cause, int] = {}
        self.named: Address | None = None  # the name that `health` looked up last
        self.listed: tuple[Listed, ...] | None = None  # the latest list from Kubernetes
        self.look_up_s = 0.0  # when to look it up again
        self.looked_up = False  # True once a lookup has ended, with any result
        self.became_usable: Callable[[], None] = lambda: None  # called when the first endpoint becomes usable
        # called when the state of an endpoint has changed, before parked calls go on
        self.usable_changed: Callable[[], None] = lambda: None
        self.retry_after_s: Callable[[], int] = lambda: 1  # for refusals while no endpoint is usable
        self.demand: PoolDemand | None = None  # None unless the pool scales
        self.assign(addresses)

    def __iter__(self) -> Iterator[E]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> E:
        return self.members[index]

    # Members ---------------------------------------------------------------------------------------------------

    def assign(self, addresses: Iterable[Address], listed: Mapping[Address, Listed] = _NOT_LISTED) -> None:
        """Adopt these addresses. A member that stays keeps its connections and record; one that leaves finishes its
        calls.

        listed: Kubernetes' facts about the addresses. One that belongs to another pod than before becomes a new member.
        """
        wanted = dict.fromkeys(addresses)

        def stays(member: E) -> bool:
            pod = listed[member.address].pod if member.address in listed else ""
            return member.address in wanted and (not pod or not member.pod or member.pod == pod)

        known = {member.address: member for member in self.members if stays(member)}
        back = {m.address: m for m in self.leaving if stays(m) and m.address not in known}
        gone = [member for member in self.members if known.get(member.address) is not member]
        self.leaving = [member for member in self.leaving if back.get(member.address) is not member] + gone
        for member in gone:
            member.leaving = True
        for member in back.values():
            member.leaving = False
        self.members = [known.get(a) or back.get(a) or self._make(a) for a in wanted]
        new = [member for member in self.members if member.address not in known and member.address not in back]
        for member in self.members:
            self._note_listed(member, listed.get(member.address))
        self.model_locations.assigned(self.members, new)
        self.refresh()

    def assign_listed(self, listed: tuple[Listed, ...], port: int, *, probed: bool) -> None:
        """Adopt the pods of a Kubernetes service.

        probed: True if the pool has a probe. Pods that are not ready become members that wait for a good probe;
        without probes only Kubernetes can say when they are, and until then they are left out.
        """
        self.listed = listed
        found = {(each.host, port): each for each in listed if each.ready or probed}
        self.assign(found, found)

    def _note_listed(self, member: E, listed: Listed | None) -> None:
        if listed is None:
            return
        if not member.pod:
            member.pod = listed.pod
            if not listed.ready and member.reach is Reach.UNKNOWN:
                member.reach = Reach.NOT_READY
        if listed.ready is not (member.reach in (Reach.READY, Reach.UNKNOWN)):
            member.probe_due_s = 0.0  # Kubernetes thinks otherwise: probe it soon

    def gone(self) -> list[E]:
        """Remove and return the members that left and have nothing under way any more, no call and no sequence; the
        caller closes them.
        """
        homes = self.sequences.homes()
        done = [member for member in self.leaving if not member.outstanding and member not in homes]
        if done:
            self.leaving = [member for member in self.leaving if member.outstanding or member in homes]
        return done

    def refresh(self) -> None:
        """Update `usable` after a change of some state. O(n)."""
        reachable = [m for m in self.members if m.reach is not Reach.UNREACHABLE and m.reach is not Reach.NOT_READY]
        ejected = [member for member in reachable if member.ejection.cause is not None]
        excess = len(ejected) - most_ejected(len(reachable))
        if excess > 0:  # other endpoints were lost meanwhile: the ejected ones whose ejection ends first are used again
            ejected = sorted(ejected, key=lambda member: member.ejection.until_s)[excess:]
        out = set(ejected)
        before = self.usable
        self.usable = [member for member in reachable if member not in out] if out else reachable
        self.usable_changed()
        if self.usable and not before:
            self._unpark_all()
            self.became_usable()

    def eject(self, endpoint: E, cause: Cause, now: float) -> bool:
        """Eject an endpoint for a while, unless too many are ejected already. Returns whether it was ejected."""
        again = endpoint.ejection.cause is not None
        if not again:
            reachable = ejected = 0
            for member in self.members:
                reachable += member.reach is not Reach.UNREACHABLE and member.reach is not Reach.NOT_READY
                ejected += member.ejection.cause is not None
            if endpoint.leaving or ejected + 1 > most_ejected(reachable):
                return False
            self.ejections[cause] = self.ejections.get(cause, 0) + 1
            _log.warning("%s:%d is ejected: %s", *endpoint.address, cause.value)
            endpoint.lost_s.append(now)
        endpoint.ejection.eject(cause, now)
        endpoint.trial = 0
        self.refresh()
        return True

    def withhold(self, endpoint: E, model: str, cause: Cause, now: float) -> None:
        """Send a model's calls to other endpoints for a while: this one is worse for them, and well for others."""
        record = endpoint.record_of(model)
        record.answers, record.broken = MIN_ANSWERS - 1, 0  # its next answer decides
        _log.warning("%s:%d gets no calls for model %r for a while: %s", *endpoint.address, model, cause.value)
        endpoint.withheld_until = endpoint.withheld(now) | {model: now + ABSENT_S}
        self.model_locations.note_denied(endpoint, model, now)

    def restore(self, endpoint: E, now: float) -> None:
        """Restore an ejected endpoint after a good probe: it gets one call at a time until it has proven itself."""
        endpoint.ejection.admit(now)
        endpoint.trial = TRIAL_ANSWERS
        endpoint.record, endpoint.records = Record(), {}
        endpoint.record.heard_s = now
        _log.info("%s:%d is on trial after its ejection: it gets one call at a time", *endpoint.address)
        self.refresh()

    def note_reach(self, endpoint: E, reach: Reach) -> None:
        """Note what a probe or an attempt to connect has shown."""
        if endpoint.reach is not reach:
            before, endpoint.reach = endpoint.reach, reach
            if before is Reach.READY:
                endpoint.lost_s.append(monotonic())
            if reach is not Reach.READY:
                endpoint.probe_due_s = 0.0  # probe it again soon
            if reach is not Reach.READY or before is not Reach.UNKNOWN:
                _log.info("%s:%d is %s, was %s", *endpoint.address, reach.value, before.value)
            self.refresh()

    # Results of calls ------------------------------------------------------------------------------------------

    def note_answer(self, endpoint: E, now: float, latency_s: float, model: str = "") -> None:
        """Note the head of a good answer."""
        endpoint.cost.observed(latency_s, now)
        record = endpoint.record
        record.succeeded(latency_s)
        if endpoint.records.get(model) is not record and (own := endpoint.record_of(model)) is not record:
            own.succeeded(latency_s)
        if endpoint.trial:
            endpoint.trial -= 1

    def note_error(
        self, endpoint: E, status: int, now: float, latency_s: float, wait_s: float = 0.0, model: str = ""
    ) -> None:
        """Note an answer of 4xx or 5xx; 500 and 502 are failures of the server, which `health` compares with the
        others'.

        A failure is quick: without the surcharge the endpoint that fails would look like the fastest one.
        """
        cost, record = endpoint.cost, endpoint.record
        if status in (429, 503):
            cost.reported_full(now, wait_s)
            record.broken = 0
        elif status in (500, 502):
            cost.observed(max(latency_s, min(60.0, cost.cost_s * 1.5 + 0.001)), now)
            record.erred()
            if (own := endpoint.record_of(model)) is not record:
                own.erred()
            if endpoint.trial and not self._fails_elsewhere(endpoint, model):
                self.eject(endpoint, Cause.ERRORS, now)
        else:
            cost.record_failure(latency_s, now, typical_s=0.0 if record.answers else self._typical_s())
            record.declined()
            if (found := endpoint.records.get(model, record)) is not record:
                found.declined()
            if status < 500 and endpoint.trial:
                endpoint.trial -= 1

    def _typical_s(self) -> float:
        """Return how long an answer takes at a typical endpoint that has given some."""
        some = sorted(cost_s for member in islice(self.members, _SOME) if (cost_s := member.record.mean_s))
        return some[len(some) // 2] if some else 0.0

    def note_broken(self, endpoint: E, now: float, model: str = "") -> None:
        """Note an exchange that ended without a whole answer."""
        endpoint.doubted_s = now + SUSPECT_S
        record, own = endpoint.record, endpoint.record_of(model)
        too_many = record.broke()
        if own is not record:
            own.broke()
            if model and (own.broken >= record.broken or self._fails_elsewhere(endpoint, model)):
                if too_many:  # all of them were this model's
                    self.withhold(endpoint, model, Cause.BROKEN, now)
                    record.broken = 0
                return
        if too_many or endpoint.trial:
            self.eject(endpoint, Cause.BROKEN, now)

    def _fails_elsewhere(self, endpoint: E, model: str) -> bool:
        """Return whether the model fails at another endpoint too, so that its failures are not this endpoint's."""
        others = [member.records.get(model) for member in islice(self.members, _SOME) if member is not endpoint]
        return any(other is not None and other.error_rate > ERROR_RATE for other in others)

    # Picking ---------------------------------------------------------------------------------------------------

    def pick(self, now: float, tried: Sequence[E] = (), model: str = "") -> E | None:
        """Return the less loaded of two random usable endpoints, without `tried` and without those known to lack
        `model`.

        Returns None if there is none, or if all endpoints have to be probed for the model first. The clock that finds a
        stuck server starts here if the endpoint was idle.
        """
        usable: Sequence[E] = self.usable
        if tried or (self.model_locations.needs_check and model not in self._everywhere):
            usable = self._narrowed(now, tried, model)
        count = len(usable)
        if count > 1:
            one, other = two_of(count, self._random)
            best, second = usable[one], usable[other]
            load = best.cost.load(best.outstanding + best.waiting, now)
            if load > second.cost.load(second.outstanding + second.waiting, now):
                best, second = second, best
            if (best.trial or best.record.broken) and best.outstanding and not second.trial:
                # A process that dies loses one connection after the other while its kernel still accepts new ones.
                if best.trial or (now < best.doubted_s and not second.record.broken):
                    best = second
        elif count:
            best = usable[0]
        else:
            return None
        if not best.outstanding:
            best.record.heard_s = now
        return best

    def pick_cached(self, digests: Sequence[bytes], inside: int, now: float, model: str) -> E | None:
        """Return the endpoint that has the beginning of a prompt in its cache, unless calls wait there or it has much
        more than its share of them; then, or if none has it, as `pick` does.

        digests: see `prefixes.beginnings`. inside: the calls that have permits.
        """
        found, usable = self.prefixes.find(digests), self.usable
        if found is not None and (found.waiting or found.trial or found not in usable):
            found = None
        if found is None or found.outstanding > 1 + SHARE * inside / len(usable):
            found = self.pick(now, (), model)
        elif not found.outstanding:
            found.record.heard_s = now
        if found is not None:
            self.prefixes.note(digests, found)
        return found

    def _narrowed(self, now: float, tried: Sequence[E], model: str) -> Sequence[E]:
        usable: Sequence[E] = self.usable
        if self.model_locations.needs_check:
            usable = self.model_locations.among(usable, model, now)
        return [member for member in usable if member not in tried] if tried else usable

    # Parked calls ----------------------------------------------------------------------------------------------

    def park(self, waiter: Parked) -> None:
        """Wait until an endpoint is usable; call `unpark` to stop waiting. Raises Refused QUEUE_FULL."""
        tenant = waiter.tenant
        holding = Holding(tenant.tier.band, tenant.name, tenant.weight, waiter)
        displaced = self.slots.acquire(holding, 1)
        if displaced is None:
            message = "no server of this pool is ready and enough calls wait for one"
            raise Refused(Outcome.QUEUE_FULL, message, retry_after_s=self.retry_after_s())
        self._parked[waiter] = holding
        if self.demand is not None:
            self.demand.queued(tenant.tier.name, waiter.due_s)
            if self.parked == 1:
                self.demand.plan_soon()
        for each in displaced:
            self.unpark(each.payload)
            each.payload.displaced()

    def unpark(self, waiter: Parked) -> None:
        """Stop waiting."""
        holding = self._parked.pop(waiter, None)
        if holding is None:
            return
        self.slots.release(holding)
        if self.demand is not None:
            self.demand.left_queue(waiter.tenant.tier.name, waiter.due_s)

    def lacking(self, model: str) -> str:
        """Return why no endpoint is usable. model: the model that the call asks for; "" if every server has it."""
        if not any(member.reach is Reach.NOT_READY for member in self.members):
            return "no server of this pool could be reached"
        if model:
            return f"model {model.partition('/versions/')[0]!r} was not ready on any server of this pool"
        return "no server of this pool was ready"

    @property
    def parked(self) -> int:
        """The number of calls that wait for an endpoint."""
        return self.slots.held

    def count_parked(self) -> None:
        """Tell `demand` of the calls that wait already."""
        if self.demand is not None:
            for waiter in self._parked:
                self.demand.queued(waiter.tenant.tier.name, waiter.due_s)

    def _unpark_all(self) -> None:
        # The most urgent acquire permits first; for the rest the queue keeps its order.
        waiters = sorted(self._parked, key=lambda each: (each.tenant.tier.band, each.deadline))
        for waiter in waiters:
            self.unpark(waiter)
        for waiter in waiters:
            waiter.unparked()

    async def close(self) -> None:
        """Close the members and those that leave."""
        for member in (*self.members, *self.leaving):
            await member.close()


def _name(endpoint: EndpointState) -> str:
    """Return a name of the endpoint that is the same in every process and after every start."""
    host, port = endpoint.address
    return f"{host}:{port}"
