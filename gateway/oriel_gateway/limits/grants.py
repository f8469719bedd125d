"""The `Limiter` protocol, and the grant that a call holds of its limits.

A limiter is asked once per call, when the call's target is known. Its grant is settled once, when the call is over.
A limiter that counts together with others may not know the answer at once: then its grant is not `ready` yet, the call
goes on collecting its body, and `granted` or `refuse` is called within a bounded time.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oriel_gateway.errors import Refused
from oriel_gateway.limits.error_text import MAX_ITEMS, states
from oriel_gateway.limits.meters import Meter
from oriel_gateway.routing.targets import Target
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.limits import Amounts, Bound
from oriel_policies.documents import Allowance, Tenant
from oriel_policies.metering.budgets import Budget


class CostLearner(Protocol):
    """A limiter that learns what calls cost."""

    def learn(self, route: str, tenant: str, cost_us: int) -> None:
        """Note that a call of a tenant with a quota of computing cost this much."""


class Waiter(Protocol):
    """A call whose limiter has not answered yet. The loop calls one method once, unless the grant is settled."""

    def granted(self) -> None:
        """Go on: the call is within its limits."""

    def refuse(self, refused: Refused) -> None:
        """The call is over its limits. Settling the grant gives back what other meters counted."""


class TokenReading(Protocol):
    """Knows how many tokens a call has used so far."""

    def total(self) -> int:
        """Return the tokens of prompt and answer; 0 if the answer is an error or was not made for this call."""


class Limiter(Protocol):
    """Counts calls against the allowances of their tenants. Single writer: the loop.

    used_before: returns what a tenant has used of a budget in its period before there was a meter for it.
    """

    used_before: Callable[[str, Budget], int]

    def acquire(self, tenant: Tenant, target: Target, size_bytes: int, now: float) -> "Grant | None":
        """Count a call at the monotonic time `now`. Returns None if there is nothing to settle.

        size_bytes: the announced size of the body; 0 if it was not announced.
        Raises Refused RATE_LIMITED, CONCURRENCY_LIMITED or QUOTA_EXCEEDED with the true wait; then no allowance has
        counted anything.
        """

    def reserve_tokens(self, grant: "Grant", tenant: Tenant, target: Target, units: int, now: float) -> None:
        """Reserve tokens for a call that `acquire` has counted, when its body is known.

        The grant may not be ready afterwards. Raises Refused TOKENS_LIMITED with the true wait; the grant stays as it
        was.
        """

    def spend(self, tenant: Tenant, units: Mapping[str, int], now: float) -> None:
        """Count what a tenant has used of its budgets, by their names, whether they admit it or not."""

    def usual_tokens(self, tenant: Tenant, target: Target) -> float:
        """Return the tokens of an answer to this tenant on this target, by its earlier ones."""

    def learn_tokens(self, tenant: Tenant, target: Target, answer: int) -> None:
        """Note how many tokens an answer had."""

    def acquire_further(
        self, tenant: Tenant, target: Target, size_bytes: int, now: float, held: Container[Meter]
    ) -> "Grant | float":
        """Count a further message of a stream: one more request, perhaps of another model.

        held: the meters of which the stream has a slot.
        Returns the seconds until the message would be within its rates, if nothing was counted; or a grant. The waiter
        of a grant that is not ready is called later. A ready one goes to `StreamGrant.add_message` and is not settled.
        Raises Refused CONCURRENCY_LIMITED or QUOTA_EXCEEDED.
        """

    def left(self, tenant: str, allowance: Allowance, now: float) -> Sequence[tuple[Bound, float, float]]:
        """Return each bound of an allowance, what is left of it, and the seconds until there is more."""

    async def close(self) -> None:
        """Save or give back what is held, within a bounded time."""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The facts that all calls with the same bounds share.

    policies: the value of the `RateLimit-Policy` header.
    bytes: True if the bytes that pass are counted.
    settles: True if the end of a call changes what was counted when it began.
    """

    policies: str
    bytes: bool = field(kw_only=True)
    settles: bool = field(kw_only=True)

    @classmethod
    def of(cls, bounds: Sequence[Bound]) -> "Terms":
        """Return the terms of one allowance."""
        return cls(
            ", ".join([bound.policy for bound in bounds[:MAX_ITEMS]]),
            bytes=any(bound.counts is Counts.BYTES for bound in bounds),
            settles=any(bound.rate is None or bound.counts is Counts.TOKENS for bound in bounds),
        )


@dataclass(slots=True, eq=False, repr=False)
class Grant:
    """The units that one call acquired from its meters. The call moves bytes on it and settles it, once.

    limited_s: since when the complete call has waited for the limiter's answer, monotonic seconds; 0.0: it has not.
    tokens: None for a call that reserves none.
    """

    _limiter: CostLearner
    _meters: Sequence[Meter]
    _amounts: Amounts
    _terms: Terms
    _tenant: str
    _route: str
    _since: float
    ready: bool = True
    over: bool = False
    limited_s: float = 0.0
    tokens: TokenReading | None = None
    waiter: Waiter | None = None

    @property
    def meters(self) -> Sequence[Meter]:
        """The meters that counted the call, until the grant is settled."""
        return self._meters

    def units(self, meter: Meter) -> int:
        """Return the units that this meter counted."""
        return self._amounts[meter.bound.counts]

    def move(self, size_bytes: int, now: float) -> None:
        """Count bytes beyond the announced ones: of an answer, or of a body without a length."""
        if self._terms.bytes:
            for meter in self._meters:
                if meter.bound.counts is Counts.BYTES:
                    meter.charge(size_bytes, now)

    @property
    def terms(self) -> Terms:
        """The facts about its bounds."""
        return self._terms

    def add_tokens(self, meters: Sequence[Meter], units: int, terms: Terms) -> Amounts:
        """Add meters that have counted `units` tokens of the call. Returns all that it has acquired, by `Counts`."""
        requests, size_bytes, compute_us, _, budget = self._amounts
        self._amounts = requests, size_bytes, compute_us, units, budget
        self._meters = [*self._meters, *meters]
        self._terms = terms
        return self._amounts

    def settle_tokens(self, used: int, now: float) -> None:
        """Count the tokens that the call has used in place of those that it has reserved, or has counted before."""
        requests, size_bytes, compute_us, before, budget = self._amounts
        self._amounts = requests, size_bytes, compute_us, used, budget
        for meter in self._meters if used != before else ():
            if meter.bound.counts is Counts.TOKENS:
                meter.charge(used - before, now)

    def undo(self, now: float) -> None:
        """Give everything back, as if the call had not come."""
        meters, self._meters = self._meters, ()
        self.over = True
        self.waiter = None
        for meter in meters:
            meter.undo(self._amounts[meter.bound.counts], now)

    def settle(
        self, cost_us: int, executed: bool, now: float, due: Mapping[Meter, int] | None = None, messages: int = 1
    ) -> None:
        """Settle the grant of a call that is over. A grant that is not ready is given up: what its ledger grants goes
        back.

        cost_us: microseconds that the call is charged.
        executed: false if the call was refused before any server got it.
        due: for a stream, the computing of each meter that is not counted yet.
        messages: for a stream, the number of messages to learn the cost from.
        """
        if not self.ready:
            self.undo(now)
            return
        if self.tokens is not None:
            self.settle_tokens(self.tokens.total() if executed else 0, now)
            self.tokens = None
        meters, self._meters = self._meters, ()
        self.over = True
        self.waiter = None  # the waiter holds this grant: without this they would form a reference cycle
        if not self._terms.settles:
            return
        for meter in meters:
            bound = meter.bound
            if bound.slots:
                meter.release_slot(now - self._since, now)
            elif bound.period is not None:
                if bound.counts is Counts.COMPUTE_US:
                    units = (due[meter] if due else cost_us) if executed else 0
                    units -= self._amounts[Counts.COMPUTE_US]
                elif bound.counts is Counts.BUDGET:
                    units = -1  # what was used is charged by `Limiter.spend`
                else:
                    units = 0 if executed else -1
                # A reservation in a window that is over is gone with the window: the next one is not charged for it.
                if units > 0 or (units and meter.began(now) <= self._since):
                    meter.charge(units, now)
        if executed and messages and self._amounts[Counts.COMPUTE_US]:
            self._limiter.learn(self._route, self._tenant, cost_us // messages)

    def admit(self, meters: Sequence[Meter]) -> None:
        """Add meters that had to ask their ledger, and let the call go on."""
        self._meters = [*self._meters, *meters]
        self.ready = True
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.granted()

    def headers(self, now: float) -> tuple[tuple[str, str], ...]:
        """Return the `RateLimit-Policy` and `RateLimit` headers for the answer."""
        return ("ratelimit-policy", self._terms.policies), ("ratelimit", states(self._meters, now))

    def lines(self, now: float) -> str:
        """Return the same headers as lines of an HTTP head, each with its CRLF."""
        return f"ratelimit-policy: {self._terms.policies}\r\nratelimit: {states(self._meters, now)}\r\n"
