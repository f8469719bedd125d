"""One pool at run time: its endpoints, its permits and the queue for them."""

from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from oriel_gateway.endpoints import EndpointSet, HttpEndpoint, Standing
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.grpc_endpoint import GrpcEndpoint
from oriel_gateway.reports import side_of
from oriel_gateway.sticky import StickyChoice
from oriel_gateway.targets import Target
from oriel_policies.admission import Admission, Charges
from oriel_policies.budget import RetryBudget
from oriel_policies.concurrency import LearnedLimit
from oriel_policies.documents import Pool, Tenant
from oriel_policies.exchanges import Habits
from oriel_policies.feasibility import AnswerTimes, Verdict
from oriel_policies.queue import Pushed, SlaQueue, Ticket
from oriel_wire.h1_response import ResponseMemo

if TYPE_CHECKING:
    from oriel_gateway.loan import Loan

__all__ = ["PoolGate", "Waiter"]

LEAST_CHARGE: Final = 0.1  # of what a call is charged that reports nothing
MOST_CHARGE: Final = 4.0  # times as long as it held its permit: a service may have asked several models at once
LOOK: Final = 4  # one answer in so many is looked at for how long such calls take
_MAX_WORKS = 4096
_NO_TIMES = AnswerTimes()
_Others = tuple[int, frozenset[str]]  # a band and the tenants of it that are left out


class Waiter(Protocol):
    """Who waits for a permit. Called on the loop, at most once in total. queued_s: since when, monotonic seconds."""

    tenant: Tenant
    queued_s: float

    def admitted(self) -> None:
        """A permit is yours; give it back with `PoolGate.leave`."""

    def displaced(self) -> None:
        """Someone more urgent took the place."""


class PoolGate:
    """Admission to one pool, shared by HTTP and gRPC. Single writer: the gateway's loop.

    slow_s: no call with more time than this is judged too late. asks: the next request should ask for a load report.
    most_s: how long calls may take in the pool for the sake of learning how many it should hold.
    """

    def __init__(self, pool: Pool, *, most_s: float = inf) -> None:
        self.name = pool.name
        self.pool = pool
        memo = ResponseMemo()  # one for all: a thousand endpoints with a megabyte each would be a gigabyte
        self.endpoints = EndpointSet(
            lambda address: HttpEndpoint(address, self.pool, memo),
            pool.endpoints,
            max_parked=pool.max_queue,
            ask_first=bool(pool.probe),
        )
        self.grpc = EndpointSet(
            lambda address: GrpcEndpoint(address, max_response_bytes=self.pool.max_response_bytes),
            pool.grpc_endpoints,
            max_parked=pool.max_queue,
            ask_first=bool(pool.probe),
        )
        self.endpoints.became_usable = self.grpc.became_usable = self.pump
        self.retries = RetryBudget()
        self.learned = LearnedLimit(pool.max_inflight, most_s=most_s) if pool.learn_concurrency else None
        limit = self.learned.limit if self.learned else pool.max_inflight
        self.admission = Admission(
            limit=limit, queue=SlaQueue(max_items=pool.max_queue, max_bytes=pool.max_queue_bytes)
        )
        self.slow_s = 0.0
        self.asks = False
        self._times: dict[str, AnswerTimes] = {}
        self._answers = 0
        self._full = False  # something waited when the latest permit came back
        self.charges = Charges()
        self.habits = Habits()
        self.held_bytes = 0
        self.sticky = StickyChoice[HttpEndpoint](_name)
        self.grpc_sticky = StickyChoice[GrpcEndpoint](_name)
        self.shadows = 0  # copies that hold a permit or wait for one
        self.calls = 0  # that have not ended, whatever they do
        self.lendable: dict[Loan, None] = {}  # permits of those that do not read, or are silent; the longest first
        self.owed: dict[Loan, None] = {}  # permits of silent streams that others have

    def adopt(self, pool: Pool, *, most_s: float = inf) -> None:
        """The documents say something else of this pool: what waits and runs goes on, by the new bounds.

        Endpoints that stay keep their connections; from one that is gone nothing new is asked.
        """
        old, self.pool = self.pool, pool
        self.endpoints.max_parked = self.grpc.max_parked = pool.max_queue
        self.endpoints.places.first = self.grpc.places.first = bool(pool.probe)
        for endpoint in self.endpoints:
            endpoint.adopt(pool)
        if pool.discover is None:
            self.endpoints.assign(pool.endpoints)
        if pool.grpc_discover is None:
            self.grpc.assign(pool.grpc_endpoints)
        if (old.max_inflight, old.learn_concurrency) != (pool.max_inflight, pool.learn_concurrency):
            self.learned = LearnedLimit(pool.max_inflight, most_s=most_s) if pool.learn_concurrency else None
            self.admission.limit = self.learned.limit if self.learned else pool.max_inflight
        self.admission.queue.max_items = pool.max_queue
        self.admission.queue.max_bytes = pool.max_queue_bytes
        self.pump()

    @property
    def speaks_grpc(self) -> bool:
        """Whether the documents name endpoints for gRPC."""
        return bool(self.pool.grpc_endpoints) or self.pool.grpc_discover is not None

    @property
    def unused(self) -> bool:
        """Nothing waits, runs or comes in."""
        return not self.calls

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

    def judge(self, target: Target, size_bytes: int, left_s: float) -> None:
        """Raises Refused if a call cannot end within `left_s` even if it begins now."""
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

    def wait(
        self, waiter: Waiter, tenant: Tenant, target: Target, *, received_s: float, deadline: float, size_bytes: int
    ) -> Ticket:
        """Queue for a permit when `admission.enter` gave none; give the ticket to `forget` when leaving the queue.

        The tier's target orders calls of one tenant. Call `pump` when the ticket is stored. Raises Refused QUEUE_FULL,
        or INFEASIBLE if the call would wait past its deadline.
        """
        admission, tier = self.admission, tenant.tier
        due = min(received_s + tier.target_s, deadline)
        times = self._times.get(target.work, _NO_TIMES)
        backlog, waiting, behind = admission.queue.backlog(tier.band, tenant.name)
        now = monotonic()
        # Most are far from being late; only the others are worth the whole question.
        if backlog is not None and waiting and backlog.wait_s(waiting, now) + times.floor.ceiling_s > due - now:
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
        if not admission.queue.takes(tier.band, size_bytes):
            raise self._full_now()
        ticket = Ticket(
            band=tier.band,
            tenant=tenant.name,
            deadline=due,
            cost=self.charges.estimate(target.route, tenant.name),
            weight=tenant.weight,
            size_bytes=size_bytes,
            payload=waiter,
            late_s=due - times.likely_s,
            target_s=tier.target_s,
        )
        outcome, displaced = admission.wait(ticket)
        assert outcome is Pushed.QUEUED
        for loser in displaced:
            loser.payload.displaced()
        return ticket

    def _full_now(self) -> Refused:
        retry_after_s = self.admission.retry_after_s()
        return Refused(Outcome.QUEUE_FULL, "too much is waiting for this pool", retry_after_s=retry_after_s)

    def forget(self, ticket: Ticket) -> bool:
        """A waiter leaves the queue by itself; False when it has a permit already."""
        return self.admission.queue.remove(ticket)

    def leave(
        self,
        target: Target,
        tenant: Tenant,
        ticket: Ticket | None,
        held_s: float,
        cost_us: int,
        size_bytes: int,
        good: bool | None,
        late: bool = False,
        messages: int = 1,
    ) -> float:
        """Give a permit back; the answer is what the call is charged, in seconds.

        held_s: from the permit to the upstream's last byte; cost_us: what it reported, or -1; size_bytes: of the
        request, -1 if how long it took says nothing (a stream); good: answered; None: the caller ended it.
        late: its deadline passed before it was. messages: of a stream; what one of them costs is learned.
        """
        admission = self.admission
        share_s = held_s / (admission.inflight or 1)
        # Nobody's turns are free, or one whose calls cost nothing in there would get all; and none is beyond price.
        actual_s = cost_us * 1e-6 if cost_us >= 0 else share_s
        fair_s = min(max(actual_s, LEAST_CHARGE * share_s), MOST_CHARGE * held_s)
        admission.leave(held_s)
        self.charges.learn(target.route, tenant.name, fair_s if messages == 1 else fair_s / messages)
        if good and size_bytes >= 0:
            self._answers = answers = self._answers + 1
            if answers % LOOK == 0 and target.work:
                self._time(target.work, size_bytes, held_s)
        if ticket is not None:
            admission.queue.settle(ticket, fair_s)
        if admission.queue.items:
            learned = self.learned
            if learned is not None:
                if not self._full:
                    self._full = True
                    learned.calm()
                    admission.limit = learned.limit
                if good is not None and learned.ended(held_s, monotonic(), good=good, late=late):
                    admission.limit = learned.limit
                    self.asks = True
            self.pump()
        else:
            self._full = False
            if self.owed:
                self.pump()
        return actual_s

    def _time(self, work: str, size_bytes: int, held_s: float) -> None:
        times = self._times.get(work)
        if times is None:
            if len(self._times) >= _MAX_WORKS:
                del self._times[next(iter(self._times))]
            times = self._times[work] = AnswerTimes()
        times.observe(size_bytes, held_s)
        if times.floor.ceiling_s > self.slow_s:
            self.slow_s = times.floor.ceiling_s

    def reported(self, report: str | None) -> None:
        """A server's answer to a request that asked for a load report carries this one, or none."""
        if report and self.learned is not None:
            self.learned.reported(side_of(report))

    def pump(self) -> None:
        """Hand out the permits that are free."""
        admission = self.admission
        if not (admission.queue.items or self.owed) or (admission.inflight >= admission.limit and not self.lendable):
            return
        now = monotonic()
        while True:
            while admission.inflight >= admission.limit:
                if not self.lendable or not self._lend():
                    return
            if self.owed:
                if (ticket := self._borrower(now)) is None:
                    next(iter(self.owed)).returned()
                    continue
            elif (ticket := admission.next_admitted(now)) is None:
                return
            ticket.payload.admitted()

    def _lend(self) -> bool:
        """Take the permit of who rests, does not read or is silent for somebody else, see `loan`."""
        queue = self.admission.queue
        whole, mute = self._sets(self.admission.limit)
        in_vain: set[_Others] = set()
        for loan in self.lendable:
            if not loan.rests:
                others = _others(loan, whole, mute)
                if others in in_vain:
                    continue
                if not queue.others_wait(*others):
                    in_vain.add(others)
                    continue
            elif not queue.items:
                continue
            loan.lend()
            return True
        return False

    def _borrower(self, now: float) -> Ticket | None:
        """Who may have a free permit while some are owed."""
        admission = self.admission
        whole, mute = self._sets(admission.limit + 1)
        for band, tenants in dict.fromkeys([_others(loan, whole, mute) for loan in self.owed]):
            if (ticket := admission.queue.pop_other(band, tenants, now)) is not None:
                admission.inflight += 1
                return ticket
        return None

    def _sets(self, count: int) -> tuple[bool, frozenset[str] | None]:
        """Whether fewer than `count` permits are owed; if not, but all permits out are silent streams', the tenants
        of these."""
        if len(self.owed) < count:
            return True, None
        silent = [loan for loan in self.lendable if loan.silent]
        if len(silent) < self.admission.inflight:
            return False, None
        return False, frozenset([loan.tenant.name for loan in (*silent, *self.owed)])

    def give_back(self, ticket: Ticket | None) -> None:
        """Give a permit back that was not used: nobody could be asked."""
        self.decline(ticket)
        if self.owed:
            self.pump()

    def decline(self, ticket: Ticket | None) -> None:
        """Give back the permit of `Waiter.admitted`, from there: whoever hands out permits goes on with the next."""
        self.admission.inflight -= 1
        if ticket is not None:
            self.admission.queue.settle(ticket, 0.0)

    async def close(self) -> None:
        """Close idle connections and channels."""
        await self.endpoints.close()
        await self.grpc.close()

    async def close_left(self) -> None:
        """Close the endpoints that are gone and have no calls on their way any more."""
        for gone in (*self.endpoints.gone(), *self.grpc.gone()):
            await gone.close()


def _others(loan: "Loan", whole: bool, mute: frozenset[str] | None) -> _Others:
    """To whom a permit may be lent, as `SlaQueue.others_wait` takes it: to a more urgent tier at least. That of a
    silent stream to other tenants too if there is a set of permits for them (`whole`), else to who is not `mute`."""
    tier, tenant = loan.tenant.tier, loan.tenant.name
    between_answers = loan.waits and loan.exchange is not None and not loan.pauses
    if not between_answers and (loan.waits or whole):
        return tier.band, frozenset((tenant,))
    if not between_answers and mute is not None:
        return tier.band, mute
    return tier.band - 1, frozenset()


def _name(endpoint: Standing) -> str:
    """The same in every process and after every start."""
    host, port = endpoint.address
    return f"{host}:{port}"
