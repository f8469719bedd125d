"""The `Limiter` seam, and what a call holds of its limits.

A limiter is asked once per call, when its target is known. What it answers is given back once, when the call is over.
A limiter that counts together with others may not know at once: its grant is not `ready` yet, the call goes on
collecting its body, and hears `granted` or `refuse` within a bounded time.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from oriel_gateway.errors import Refused
from oriel_gateway.limits.meters import Meter
from oriel_gateway.limits.words import MAX_ITEMS, states
from oriel_policies.documents import Tenant
from oriel_policies.limits import Bound, Counts

if TYPE_CHECKING:
    from oriel_gateway.limits.metered import MeteredLimiter
    from oriel_gateway.targets import Target

__all__ = ["Grant", "Limiter", "Waiter"]


class Waiter(Protocol):
    """A call whose limiter has not answered yet. Called on the loop, once, unless it settled its grant before."""

    def granted(self) -> None:
        """Go on."""

    def refuse(self, refused: Refused) -> None:
        """The call is over its limits; settling the grant gives the rest back."""


class Limiter(Protocol):
    """Counts calls against the allowances of their tenants. Single writer: the loop."""

    def take(self, tenant: Tenant, target: "Target", size_bytes: int, now: float) -> "Grant | None":
        """Count a call at monotonic `now`; None: nothing to give back, now or later.

        size_bytes: of the body, as announced, 0 if it was not. Raises Refused RATE_LIMITED, CONCURRENCY_LIMITED or
        QUOTA_EXCEEDED with the true wait; then nothing was counted by any allowance.
        """

    def further(
        self, tenant: Tenant, target: "Target", size_bytes: int, now: float, held: Container[Meter]
    ) -> "Grant | float":
        """Count a further message of a stream: one more request, of perhaps another model.

        held: meters of which the stream has a slot. A number: nothing was counted, it would be within its rates after
        so many seconds. A grant that is not ready: its waiter will hear. One that is ready goes to `StreamGrant.took`
        and is not settled. Raises Refused CONCURRENCY_LIMITED or QUOTA_EXCEEDED.
        """

    async def close(self) -> None:
        """Save or give back what is held. Bounded in time."""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What calls with the same bounds are told of them, and what becomes of them later. policies: as headers say it.

    bytes: what goes through is counted. settles: the end of a call changes what was counted when it began.
    """

    policies: str
    bytes: bool = field(kw_only=True)
    settles: bool = field(kw_only=True)

    @classmethod
    def of(cls, bounds: Sequence[Bound]) -> "Terms":
        """Those of one allowance."""
        return cls(
            ", ".join([bound.policy for bound in bounds[:MAX_ITEMS]]),
            bytes=any(bound.counts is Counts.BYTES for bound in bounds),
            settles=any(bound.rate is None for bound in bounds),
        )


class Grant:
    """What one call took of the meters that count it. The call moves bytes on it and settles it, once."""

    __slots__ = (
        "_amounts",
        "_limiter",
        "_meters",
        "_route",
        "_since",
        "_tenant",
        "_terms",
        "over",
        "ready",
        "waiter",
    )

    def __init__(
        self,
        limiter: "MeteredLimiter",
        meters: Sequence[Meter],
        amounts: tuple[int, int, int],
        terms: Terms,
        tenant: str,
        route: str,
        now: float,
    ) -> None:
        self._limiter = limiter
        self._meters = meters
        self._amounts = amounts
        self._terms = terms
        self._tenant = tenant
        self._route = route
        self._since = now
        self.ready = True
        self.over = False
        self.waiter: Waiter | None = None

    @property
    def meters(self) -> Sequence[Meter]:
        """Those that took something, until it is settled."""
        return self._meters

    def units(self, meter: Meter) -> int:
        """What this one took."""
        return self._amounts[meter.bound.counts]

    def move(self, size_bytes: int, now: float) -> None:
        """Bytes beyond those announced went through: of an answer, of a body without a length."""
        if self._terms.bytes:
            for meter in self._meters:
                if meter.bound.counts is Counts.BYTES:
                    meter.charge(size_bytes, now)

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
        """The call is over. cost_us: its charge; executed: false if it was refused before any server got it. Of a
        stream: what each meter of computing has not counted of that, and the messages to learn from.

        A grant that is not ready yet is given up: what its ledger still grants goes back.
        """
        if not self.ready:
            self.undo(now)
            return
        meters, self._meters = self._meters, ()
        self.over = True
        self.waiter = None  # it holds this grant: what is over leaves no ring behind
        if not self._terms.settles:
            return
        for meter in meters:
            bound = meter.bound
            if bound.slots:
                meter.leave(now - self._since, now)
            elif bound.period is not None:
                if bound.counts is Counts.COMPUTE_US:
                    units = (due[meter] if due else cost_us) if executed else 0
                    units -= self._amounts[Counts.COMPUTE_US]
                else:
                    units = 0 if executed else -1
                # What was reserved of a window that is over is gone with it: the next one does not owe it.
                if units > 0 or (units and meter.began(now) <= self._since):
                    meter.charge(units, now)
        if executed and messages and self._amounts[Counts.COMPUTE_US]:
            self._limiter.learn(self._route, self._tenant, cost_us // messages)

    def admit(self, meters: Sequence[Meter]) -> None:
        """What had to be asked for is taken as well: the call may go on."""
        self._meters = [*self._meters, *meters]
        self.ready = True
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.granted()

    def headers(self, now: float) -> tuple[tuple[str, str], ...]:
        """`RateLimit-Policy` and `RateLimit` for the answer."""
        return ("ratelimit-policy", self._terms.policies), ("ratelimit", states(self._meters, now))

    def lines(self, now: float) -> str:
        """The same as lines of an HTTP head, each with its CRLF."""
        return f"ratelimit-policy: {self._terms.policies}\r\nratelimit: {states(self._meters, now)}\r\n"
