"""The endpoints of one pool: who may be asked, who is asked next, and where calls wait while nobody can be.

An endpoint is *usable* unless it cannot be connected to, says by its readiness probe that it is not ready, has left the
discovery's answer, or is ejected as worse than the others (`oriel_policies.ejection`; at most half of those that would
be usable). `usable` is a list kept up to date at every change of a state, so that picking costs the same for two and
for a thousand.

While nobody is usable, calls are parked: without a permit, within their own deadline, at most as many as may queue.
Single writer: the gateway's loop. `oriel_gateway.watch` probes, ejects, re-admits and looks addresses up.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import Generic, Protocol, TypeVar

from oriel_gateway.discovery import Address
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.http_probe import HttpProbe
from oriel_gateway.places import Places
from oriel_policies.documents import Pool, Tenant
from oriel_policies.ejection import SUSPECT_S, Cause, Ejection, Record, most_ejected
from oriel_policies.picking import PeakEwma, two_of
from oriel_wire.engine.upstream import Endpoint
from oriel_wire.h1_response import ResponseMemo

__all__ = ["EndpointSet", "HttpEndpoint", "Parked", "Reach", "Standing", "patience_s"]

_log = logging.getLogger(__name__)
TRIAL_ANSWERS = 5
_SOME = 16
_READY = {200: True, 204: True, 400: False, 404: False, 503: False}  # Triton says 400, others 404 or 503


class Reach(StrEnum):
    """What was last found out about an endpoint by asking it."""

    UNKNOWN = "unknown"  # used: a pool may have no probe
    READY = "ready"
    NOT_READY = "not_ready"  # its readiness probe says so
    UNREACHABLE = "unreachable"  # it does not accept connections


class Standing:
    """What a pool thinks of one address. outstanding: requests under way; trial: how many answers until it is trusted
    again after an ejection, 0 = it is; doubted_s: until when it may be dying; leaving: discovery does not name it any
    more."""

    outstanding: int
    heard: bool
    connect_s: float  # what a connection took at most

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

    def answered(self, now: float, latency_s: float) -> None:
        """The head of a good answer came."""
        self.cost.observed(latency_s, now)
        self.record.answered(latency_s)
        if self.trial:
            self.trial -= 1

    @property
    def state(self) -> str:
        """For people: `ejected:<cause>`, or the reach."""
        cause = self.ejection.cause
        return f"ejected:{cause.value}" if cause is not None else self.reach.value

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        """See `places.Askable`."""
        raise NotImplementedError

    def connecting_for_s(self, now: float) -> float:
        """For how long the oldest attempt to connect goes on; 0.0: there is none."""
        return 0.0

    def give_up_connecting(self) -> None:
        """Whoever waits for a connection is told that there is none."""

    def tidy(self, now: float) -> None:
        """Give back what has not been used for long."""

    async def close(self) -> None:
        """Give back what is kept open."""


class HttpEndpoint(Endpoint, Standing):
    """An upstream address with its connections. prober: connections of their own for probes."""

    def __init__(self, address: Address, pool: Pool, memo: ResponseMemo | None = None) -> None:
        Endpoint.__init__(
            self,
            *address,
            connect_timeout_s=pool.connect_timeout_s,
            max_idle_s=pool.idle_timeout_s,
            max_response_bytes=pool.max_response_bytes,
            memo=memo,
        )
        Standing.__init__(self, address)
        self.prober = Endpoint(
            *address, connect_timeout_s=pool.connect_timeout_s, max_response_bytes=64 * 1024, memo=self.memo
        )

    def adopt(self, pool: Pool) -> None:
        """Its pool has other bounds now."""
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


def patience_s(these: Iterable[Standing]) -> float:
    """How long a connection is waited for while others can be asked: well beyond what any of these ever took."""
    return max(SUSPECT_S, 8.0 * max((member.connect_s for member in these), default=0.0))


class Parked(Protocol):
    """Who waits for an endpoint. Called on the loop, at most once in total."""

    tenant: Tenant
    deadline: float

    def unparked(self) -> None:
        """An endpoint is usable: ask for a permit."""

    def displaced(self) -> None:
        """Someone more urgent took the place."""


E = TypeVar("E", bound=Standing)


class EndpointSet(Generic[E]):
    """The endpoints of one pool over one protocol. make: builds one for an address; ask_first: see `places`."""

    def __init__(
        self,
        make: Callable[[Address], E],
        addresses: Iterable[Address],
        *,
        max_parked: int,
        ask_first: bool = False,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._make = make
        self._random = random
        self.max_parked = max_parked
        self._parked: dict[Parked, None] = {}
        self.places = Places[E](lambda: self.usable, first=ask_first)
        self._plain = self.places.plain
        self.members: list[E] = []
        self.usable: list[E] = []
        self.leaving: list[E] = []
        self.ejections: dict[Cause, int] = {}
        self.named: Address | None = None  # the name that was looked up last, for `watch`
        self.look_up_s = 0.0  # when to do it again
        self.looked_up = False  # once at least, with whatever result
        self.became_usable: Callable[[], None] = lambda: None  # after nobody was
        self.assign(addresses)

    def __iter__(self) -> Iterator[E]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> E:
        return self.members[index]

    # Who is there ----------------------------------------------------------------------------------------------

    def assign(self, addresses: Iterable[Address]) -> None:
        """These are the addresses now. Who stays keeps its connections and record; who goes finishes its calls."""
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
        self.places.assigned(self.members, new)
        self.refresh()

    def gone(self) -> list[E]:
        """Members that left and have nothing under way any more; they are the caller's to close."""
        done = [member for member in self.leaving if not member.outstanding]
        if done:
            self.leaving = [member for member in self.leaving if member.outstanding]
        return done

    def refresh(self) -> None:
        """Some state has changed: find out who is usable. O(n)."""
        reachable = [m for m in self.members if m.reach is not Reach.UNREACHABLE and m.reach is not Reach.NOT_READY]
        ejected = [member for member in reachable if member.ejection.cause is not None]
        excess = len(ejected) - most_ejected(len(reachable))
        if excess > 0:  # others were lost meanwhile: those whose time is over first are used again
            ejected = sorted(ejected, key=lambda member: member.ejection.until_s)[excess:]
        out = set(ejected)
        before = self.usable
        self.usable = [member for member in reachable if member not in out] if out else reachable
        if self.usable and not before:
            self._unpark_all()
            self.became_usable()

    def eject(self, endpoint: E, cause: Cause, now: float) -> bool:
        """Leave an endpoint alone for a while, unless too many are already; whether it was ejected."""
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

    def admit(self, endpoint: E, now: float) -> None:
        """A probe of an ejected endpoint went well: one call at a time until it has proven itself."""
        endpoint.ejection.admit(now)
        endpoint.trial = TRIAL_ANSWERS
        endpoint.record = Record()
        endpoint.record.heard_s = now
        _log.info("%s:%d is on trial again", *endpoint.address)
        self.refresh()

    def found(self, endpoint: E, reach: Reach) -> None:
        """What asking an endpoint has shown."""
        if endpoint.reach is not reach:
            before, endpoint.reach = endpoint.reach, reach
            if reach is not Reach.READY:
                endpoint.probe_due_s = 0.0  # ask again soon
            if reach is not Reach.READY or before is not Reach.UNKNOWN:
                _log.info("%s:%d is %s, was %s", *endpoint.address, reach.value, before.value)
            self.refresh()

    # What came back --------------------------------------------------------------------------------------------

    def erred(self, endpoint: E, status: int, now: float, latency_s: float, wait_s: float = 0.0) -> None:
        """An answer of 4xx or 5xx: 500 and 502 count as the server's failures, which `watch` compares with the others'.

        Failing is quick: without the surcharge the endpoint that fails would look like the fastest one.
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
        """What an answer takes at one of the endpoints that gave some."""
        some = sorted(cost_s for member in islice(self.members, _SOME) if (cost_s := member.record.mean_s))
        return some[len(some) // 2] if some else 0.0

    def broke(self, endpoint: E, now: float) -> None:
        """An exchange ended without a whole answer."""
        endpoint.doubted_s = now + SUSPECT_S
        if endpoint.record.broke() or endpoint.trial:
            self.eject(endpoint, Cause.BROKEN, now)

    # Who is next -----------------------------------------------------------------------------------------------

    def pick(self, now: float, tried: Sequence[E] = (), model: str = "") -> E | None:
        """The less loaded of two usable endpoints, none of `tried`, one that has `model` if that is known.

        None: there is none, or everybody has to be asked for the model first. The endpoint's clock for stuck servers
        starts here if it was idle.
        """
        usable: Sequence[E] = self.usable
        if tried or (self.places.wary and model not in self._plain):
            usable = self._narrowed(now, tried, model)
        count = len(usable)
        if count > 1:
            one, other = two_of(count, self._random)
            best, second = usable[one], usable[other]
            if best.cost.load(best.outstanding, now) > second.cost.load(second.outstanding, now):
                best, second = second, best
            if (best.trial or best.record.broken) and best.outstanding and not second.trial:
                # A process that dies loses one connection after the other, and its kernel takes new ones meanwhile.
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
        if self.places.wary:
            usable = self.places.among(usable, model, now)
        return [member for member in usable if member not in tried] if tried else usable

    # Where calls wait ------------------------------------------------------------------------------------------

    def park(self, waiter: Parked) -> None:
        """Wait until somebody is usable; `unpark` when leaving by itself. Raises Refused QUEUE_FULL."""
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
        """A waiter leaves by itself."""
        self._parked.pop(waiter, None)

    @property
    def parked(self) -> int:
        """How many calls wait for an endpoint."""
        return len(self._parked)

    def _unpark_all(self) -> None:
        # The most urgent ask first; for the rest the queue keeps its order.
        waiters = sorted(self._parked, key=lambda each: (each.tenant.tier.band, each.deadline))
        self._parked.clear()
        for waiter in waiters:
            waiter.unparked()

    async def close(self) -> None:
        """Close what is kept open."""
        for member in (*self.members, *self.leaving):
            await member.close()
