"""The grant that a call holds of its limits, by the limiter of `metered`.

A limiter is asked once per call, when the call's target is known. Its grant is settled once, when the call is over.
A limiter that counts together with others may not know the answer at once: then its grant is not `ready` yet, the call
goes on collecting its body, and `granted` or `refuse` is called within a bounded time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oriel_gateway.errors import Refused
from oriel_gateway.limits.error_text import MAX_ITEMS, states
from oriel_gateway.limits.meters import Meter
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.limits import Amounts, Bound


class Waiter(Protocol):
    """A call whose limiter has not answered yet. The event loop calls exactly one of the methods, once, unless the
    grant is settled before.
    """

    def granted(self) -> None:
        """Go on: the call is within its limits."""

    def refuse(self, refused: Refused) -> None:
        """The call is over its limits. Settling the grant gives back what other meters counted."""


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

    meters: the meters that counted the call, until the grant is settled.
    tokens: returns the tokens that the call has used so far; None for a call that reserves none.
    """

    _learn: Callable[[str, str, int], None]
    meters: Sequence[Meter]
    _amounts: Amounts
    terms: Terms
    _tenant: str
    _route: str
    _since: float
    ready: bool = True
    over: bool = False
    tokens: Callable[[], int] | None = None
    waiter: Waiter | None = None

    def units(self, meter: Meter) -> int:
        """Return the units that this meter counted."""
        return self._amounts[meter.bound.counts]

    def move(self, size_bytes: int, now: float) -> None:
        """Count bytes beyond the announced ones: of an answer, or of a body without a length."""
        if self.terms.bytes:
            for meter in self.meters:
                if meter.bound.counts is Counts.BYTES:
                    meter.charge(size_bytes, now)

    def add_tokens(self, meters: Sequence[Meter], units: int, terms: Terms) -> Amounts:
        """Add meters that have counted `units` tokens of the call. Returns all that it has acquired, by `Counts`."""
        requests, size_bytes, compute_us, _, budget = self._amounts
        self._amounts = requests, size_bytes, compute_us, units, budget
        self.meters = [*self.meters, *meters]
        self.terms = terms
        return self._amounts

    def settle_tokens(self, used: int, now: float) -> None:
        """Count the tokens that the call has used in place of those that it has reserved, or has counted before."""
        requests, size_bytes, compute_us, before, budget = self._amounts
        self._amounts = requests, size_bytes, compute_us, used, budget
        for meter in self.meters if used != before else ():
            if meter.bound.counts is Counts.TOKENS:
                meter.charge(used - before, now)

    def undo(self, now: float) -> None:
        """Give everything back, as if the call had not come."""
        meters, self.meters = self.meters, ()
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
            self.settle_tokens(self.tokens() if executed else 0, now)
            self.tokens = None
        meters, self.meters = self.meters, ()
        self.over = True
        self.waiter = None  # the waiter holds this grant: without this they would form a reference cycle
        if not self.terms.settles:
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
                    units = -1  # the used amount is charged by `Limiter.spend`
                else:
                    units = 0 if executed else -1
                # A reservation in a window that is over is gone with the window: the next one is not charged for it.
                if units > 0 or (units and meter.began(now) <= self._since):
                    meter.charge(units, now)
        if executed and messages and self._amounts[Counts.COMPUTE_US]:
            self._learn(self._route, self._tenant, cost_us // messages)

    def admit(self, meters: Sequence[Meter]) -> None:
        """Add meters that had to ask their ledger, and let the call go on."""
        self.meters = [*self.meters, *meters]
        self.ready = True
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.granted()

    def headers(self, now: float) -> tuple[tuple[str, str], ...]:
        """Return the `RateLimit-Policy` and `RateLimit` headers for the answer."""
        return ("ratelimit-policy", self.terms.policies), ("ratelimit", states(self.meters, now))

    def lines(self, now: float) -> str:
        """Return the same headers as lines of an HTTP head, each with its CRLF."""
        return f"ratelimit-policy: {self.terms.policies}\r\nratelimit: {states(self.meters, now)}\r\n"
