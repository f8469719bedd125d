"""Keep the endpoints of one pool: which can be used, which is picked next, and the calls that wait for one.

An endpoint is *usable* unless it refuses connections, its readiness probe fails, it has left the answer of the
discovery, or it is ejected as worse than the others (`oriel_policies.ejection`; at most half of those that would be
usable are ejected). `usable` is a list that is updated at every change of a state, so that a pick costs the same for
two endpoints and for a thousand.

While no endpoint is usable, calls are parked: without a permit, within their own deadline, at most as many as may
queue.
Single writer: the gateway's loop. `oriel_gateway.pools.health` probes, ejects, restores and looks up addresses.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import Generic, Protocol, TypeVar

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.http_probe import HttpProbe
from oriel_gateway.pools.model_locations import ModelLocations
from oriel_gateway.routing.sticky import StickyChoice
from oriel_policies.documents import Pool, Tenant
from oriel_policies.ejection import SUSPECT_S, Cause, Ejection, Record, most_ejected
from oriel_policies.picking import PeakEwma, two_of
from oriel_wire.engine.discovery import Address
from oriel_wire.engine.upstream import Endpoint
from oriel_wire.h1_response import ResponseMemo

_log = logging.getLogger(__name__)
TRIAL_ANSWERS = 5
_SOME = 16
_READY = {200: True, 204: True, 400: False, 404: False, 503: False}  # Triton answers 400, other servers 404 or 503


class Reach(StrEnum):
    """The latest finding about an endpoint: from a probe, or from an attempt to connect."""

    UNKNOWN = "unknown"  # such an endpoint is used, because a pool may have no probe
    READY = "ready"
    NOT_READY = "not_ready"  # its readiness probe failed
    UNREACHABLE = "unreachable"  # it does not accept connections


class EndpointState:
    """The state of one address in its pool.

    outstanding: requests under way.
    trial: answers that are missing until the endpoint is trusted again after an ejection; 0 if it is trusted.
    doubted_s: the time until which the endpoint is suspected to be dying.
    leaving: whether the discovery does not name the address any more.
    """

    outstanding: int
    heard: bool
    connect_s: float  # the longest time that a connection took

    def __init__(self, address: Address) -> None:
        self.address = address
        self.cost = PeakEwma()
        self.record = Record()
        self.ejection = Ejection()
        self.reach = Reach.UNKNOWN
        self.trial = 0
        self.leaving = False
        self.probing = False
        self.doubted_s = 0.0
        self.probed_s = 0.0
        self.probe_due_s = 0.0
        self.probe_misses = 0
        self.probed_s = 0.0  # when the probe under way began

    def note_answer(self, now: float, latency_s: float) -> None:
        """Note the head of a good answer."""
        self.cost.observed(latency_s, now)
        self.record.answered(latency_s)
        if self.trial:
            self.trial -= 1

    @property
    def state(self) -> str:
        """The state for people: `ejected:<cause>`, or the reach."""
        cause = self.ejection.cause
        return f"ejected:{cause.value}" if cause is not None else self.reach.value

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        """See `model_locations.Askable`."""
        raise NotImplementedError

    def connecting_for_s(self, now: float) -> float:
        """Return for how long the oldest attempt to connect has been going on; 0.0 if there is none."""
        return 0.0

    def give_up_connecting(self) -> None:
        """Fail the calls that wait for a connection."""

    def tidy(self, now: float) -> None:
        """Close what has not been used for long."""

    async def close(self) -> None:
        """Close everything that is open."""


class HttpEndpoint(Endpoint, EndpointState):
    """An upstream address with its connections. prober: separate connections for probes."""

    def __init__(self, address: Address, pool: Pool, memo: ResponseMemo | None = None) -> None:
        Endpoint.__init__(
            self,
            *address,
            connect_timeout_s=pool.connect_timeout_s,
            max_idle_s=pool.idle_timeout_s,
            max_response_bytes=pool.max_response_bytes,
            memo=memo,
        )
        EndpointState.__init__(self, address)
        self.prober = Endpoint(
            *address, connect_timeout_s=pool.connect_timeout_s, max_response_bytes=64 * 1024, memo=self.memo
        )

    def adopt(self, pool: Pool) -> None:
        """Adopt the new bounds of the pool."""
        self.connect_timeout_s = self.prober.connect_timeout_s = pool.connect_timeout_s
        self.max_idle_s = pool.idle_timeout_s
        self.max_response_bytes = pool.max_response_bytes

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        HttpProbe(self.prober, f"/v2/models/{model}/ready", timeout_s, lambda status: done(_READY.get(status or 0)))

    def tidy(self, now: float) -> None:
        self.close_stale(now)
        self.prober.close_stale(now)

    async def close(self) -> None:
        await Endpoint.close(self)
        await self.prober.close()


def patience_s(these: Iterable[EndpointState]) -> float:
    """Return how long to wait for a connection while other endpoints are usable: well beyond what any of these ever
    took.
    """
    return max(SUSPECT_S, 8.0 * max((member.connect_s for member in these), default=0.0))


class Parked(Protocol):
    """A call that waits for an endpoint. One of its methods is called, on the loop, at most once in total."""

    tenant: Tenant
    deadline: float

    def unparked(self) -> None:
        """An endpoint is usable: acquire a permit."""

    def displaced(self) -> None:
        """A more urgent call has taken the place."""


E = TypeVar("E", bound=EndpointState)


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
        self.max_parked = max_parked
        self._parked: dict[Parked, None] = {}
        self.model_locations = ModelLocations[E](lambda: self.usable, probe_first=probe_first)
        self._everywhere = self.model_locations.everywhere
        self.members: list[E] = []
        self.usable: list[E] = []
        self.sticky = StickyChoice[E](_name)
        self.leaving: list[E] = []
        self.ejections: dict[Cause, int] = {}
        self.named: Address | None = None  # the name that `health` looked up last
        self.look_up_s = 0.0  # when to look it up again
        self.looked_up = False  # whether a lookup has ended, with whatever result
        self.became_usable: Callable[[], None] = lambda: None  # called when the first endpoint becomes usable
        self.assign(addresses)

    def __iter__(self) -> Iterator[E]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> E:
        return self.members[index]

    # Members ---------------------------------------------------------------------------------------------------

    def assign(self, addresses: Iterable[Address]) -> None:
        """Adopt these addresses. A member that stays keeps its connections and record; one that leaves finishes its
        calls.
        """
        known = {member.address: member for member in self.members}
        wanted = dict.fromkeys(addresses)
        back = {member.address: member for member in self.leaving if member.address in wanted}
        self.leaving = [member for member in self.leaving if member.address not in back]
        for address, member in known.items():
            if address not in wanted:
                member.leaving = True
                self.leaving.append(member)
        for member in back.values():
            member.leaving = False
        self.members = [known.get(a) or back.get(a) or self._make(a) for a in wanted]
        new = [member for member in self.members if member.address not in known and member.address not in back]
        self.model_locations.assigned(self.members, new)
        self.refresh()

    def gone(self) -> list[E]:
        """Remove and return the members that left and have nothing under way any more; the caller closes them."""
        done = [member for member in self.leaving if not member.outstanding]
        if done:
            self.leaving = [member for member in self.leaving if member.outstanding]
        return done

    def refresh(self) -> None:
        """Update `usable` after a change of some state. O(n)."""
        reachable = [m for m in self.members if m.reach is not Reach.UNREACHABLE and m.reach is not Reach.NOT_READY]
        ejected = [member for member in reachable if member.ejection.cause is not None]
        excess = len(ejected) - most_ejected(len(reachable))
        if excess > 0:  # others were lost meanwhile: those whose ejection ends first are used again
            ejected = sorted(ejected, key=lambda member: member.ejection.until_s)[excess:]
        out = set(ejected)
        before = self.usable
        self.usable = [member for member in reachable if member not in out] if out else reachable
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
        endpoint.ejection.eject(cause, now)
        endpoint.trial = 0
        self.refresh()
        return True

    def restore(self, endpoint: E, now: float) -> None:
        """Restore an ejected endpoint after a good probe: it gets one call at a time until it has proven itself."""
        endpoint.ejection.admit(now)
        endpoint.trial = TRIAL_ANSWERS
        endpoint.record = Record()
        endpoint.record.heard_s = now
        _log.info("%s:%d is on trial again", *endpoint.address)
        self.refresh()

    def note_reach(self, endpoint: E, reach: Reach) -> None:
        """Note what a probe or an attempt to connect has shown."""
        if endpoint.reach is not reach:
            before, endpoint.reach = endpoint.reach, reach
            if reach is not Reach.READY:
                endpoint.probe_due_s = 0.0  # probe it again soon
            if reach is not Reach.READY or before is not Reach.UNKNOWN:
                _log.info("%s:%d is %s, was %s", *endpoint.address, reach.value, before.value)
            self.refresh()

    # Results of calls --------------------------------------------------------------------------------------------

    def note_error(self, endpoint: E, status: int, now: float, latency_s: float, wait_s: float = 0.0) -> None:
        """Note an answer of 4xx or 5xx; 500 and 502 are failures of the server, which `health` compares with the
        others'.

        A failure is quick: without the surcharge the endpoint that fails would look like the fastest one.
        """
        cost, record = endpoint.cost, endpoint.record
        if status in (429, 503):
            cost.refused(now, wait_s)
            record.broken = 0
        elif status in (500, 502):
            cost.observed(max(latency_s, min(60.0, cost.cost_s * 1.5 + 0.001)), now)
            record.erred()
            if endpoint.trial:
                self.eject(endpoint, Cause.ERRORS, now)
        else:
            cost.failed(latency_s, now, typical_s=0.0 if record.answers else self._typical_s())
            record.declined()
            if status < 500 and endpoint.trial:
                endpoint.trial -= 1

    def _typical_s(self) -> float:
        """Return how long an answer takes at a typical endpoint that has given some."""
        some = sorted(cost_s for member in islice(self.members, _SOME) if (cost_s := member.record.mean_s))
        return some[len(some) // 2] if some else 0.0

    def note_broken(self, endpoint: E, now: float) -> None:
        """Note an exchange that ended without a whole answer."""
        endpoint.doubted_s = now + SUSPECT_S
        if endpoint.record.broke() or endpoint.trial:
            self.eject(endpoint, Cause.BROKEN, now)

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
            if best.cost.load(best.outstanding, now) > second.cost.load(second.outstanding, now):
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

    def _narrowed(self, now: float, tried: Sequence[E], model: str) -> Sequence[E]:
        usable: Sequence[E] = self.usable
        if self.model_locations.needs_check:
            usable = self.model_locations.among(usable, model, now)
        return [member for member in usable if member not in tried] if tried else usable

    # Parked calls ----------------------------------------------------------------------------------------------

    def park(self, waiter: Parked) -> None:
        """Wait until an endpoint is usable; call `unpark` to stop waiting. Raises Refused QUEUE_FULL."""
        parked = self._parked
        if len(parked) >= self.max_parked:
            band = waiter.tenant.tier.band
            last = max(reversed(parked), key=lambda each: each.tenant.tier.band, default=None)
            if last is None or last.tenant.tier.band <= band:
                message = "no server of this pool is ready and enough calls wait for one"
                raise Refused(Outcome.QUEUE_FULL, message, retry_after_s=1)
            del parked[last]
            last.displaced()
        parked[waiter] = None

    def unpark(self, waiter: Parked) -> None:
        """Stop waiting."""
        self._parked.pop(waiter, None)

    @property
    def parked(self) -> int:
        """The number of calls that wait for an endpoint."""
        return len(self._parked)

    def _unpark_all(self) -> None:
        # The most urgent acquire permits first; for the rest the queue keeps its order.
        waiters = sorted(self._parked, key=lambda each: (each.tenant.tier.band, each.deadline))
        self._parked.clear()
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
