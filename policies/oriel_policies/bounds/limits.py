"""Limit arithmetic: counts the use of one bound, and computes how long the next call would have to wait.

A `Bound` says what is counted and how much of it there may be; `Gcra`, `Slots` and `Window` count. All of them judge
units (requests, bytes, microseconds of computing) at a moment that the caller passes in: monotonic seconds for rates
and slots, and for calendar windows what `calendar.CalendarClock` makes of the wall clock.

GCRA, the generic cell rate algorithm (ITU-T I.371), as a virtual schedule: the state is one number, the theoretical
arrival time of the next unit that would conform exactly. Equivalent to a token bucket of `burst` tokens refilled at the
rate, without refilling. A call of more units than the burst is admitted when nothing is owed and is charged in full, so
that the mean rate holds and no size is impossible.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from oriel_policies.bounds.calendar import CalendarClock, Period
from oriel_policies.bounds.kinds import KINDS, UNITS, Counts, LimitKind
from oriel_policies.documents.promises import Allowance, Limit, RateLimit
from oriel_policies.metering.budgets import Budget

_FEW_SLOTS = 64
_DAYS = {Period.DAY: 1, Period.MONTH: 31}


Amounts = tuple[int, int, int, int, int]  # the units of one call, by `Counts`


@dataclass(frozen=True, kw_only=True)  # without slots: `policy` is kept
class Bound:
    """One bound of an allowance. Exactly one of rate, slots, period is set.

    name: unique among the bounds of a tenant, stable over reloads: the counter's key and the policy's name in headers.
    limit: units of the burst, calls at once, units of the window. budget: the budget that a bound with a period is made
    of, if it is one.
    """

    name: str
    counts: Counts
    limit: int
    rate: RateLimit | None = None
    slots: bool = False
    period: Period | None = None
    budget: Budget | None = None

    @cached_property
    def policy(self) -> str:
        """The bound's member of `RateLimit-Policy`; a month counts with its longest length."""
        return policy_item(self, _DAYS[self.period] * 86400.0 if self.period else 0.0)


def bounds(allowance: Allowance) -> tuple[Bound, ...]:
    """The bounds of an allowance; those whose units are cheapest to return come first."""
    return bounds_of(allowance.name, allowance.limits, allowance.budgets)


def bounds_of(name: str, limits: Sequence[Limit], budgets: Sequence[Budget]) -> tuple[Bound, ...]:
    """The bounds of an allowance of this name."""
    prefix = "" if name == "all" else f"{name}/"
    found = [_bound(prefix, KINDS[limit.field], limit) for limit in limits]
    found.sort(key=lambda bound: not bound.slots)
    found += [
        Bound(name=budget.name, counts=Counts.BUDGET, limit=budget.amount, period=budget.period, budget=budget)
        for budget in budgets
    ]
    return tuple(found)


def _bound(prefix: str, kind: LimitKind, limit: Limit) -> Bound:
    name, counts = prefix + kind.name, kind.counts
    if kind.seconds:
        rate = RateLimit(requests_per_s=limit.amount / kind.seconds, burst=limit.burst)
        return Bound(name=name, counts=counts, limit=rate.burst, rate=rate)
    units = int(limit.amount) * UNITS[counts].scale
    return Bound(name=name, counts=counts, limit=units, slots=kind.slots, period=kind.period)


class Gcra:
    """A rate limit. Times are monotonic seconds; the single writer is the limiter that owns it."""

    __slots__ = ("arrival",)

    def __init__(self) -> None:
        self.arrival = 0.0

    def acquire(self, limit: RateLimit, now: float, units: float = 1.0) -> float:
        """Count the units and return 0.0 if they conform; otherwise change nothing and return the seconds until they
        would.
        """
        interval = 1.0 / limit.requests_per_s
        arrival = self.arrival if self.arrival > now else now
        free = limit.burst - units
        early = arrival - now - (free if free > 0.0 else 0.0) * interval
        # One part in 10^9 of slack: sums of 1/rate are not exact, and a whole burst has to fit.
        if early > 1e-9 * limit.burst:
            return early
        self.arrival = arrival + units * interval
        return 0.0

    def charge(self, limit: RateLimit, now: float, units: float) -> None:
        """Count units unconditionally; negative ones are returned."""
        arrival = self.arrival if self.arrival > now else now
        self.arrival = arrival + units / limit.requests_per_s

    def remaining(self, limit: RateLimit, now: float) -> int:
        """Units that would conform now."""
        debt_s = self.arrival - now
        if debt_s <= 0.0:
            return limit.burst
        left = int(limit.burst - debt_s * limit.requests_per_s + 1e-6)
        return left if left > 0 else 0


class Slots:
    """A concurrency limit. hold_s: recent duration of a call, to estimate when the next slot is free."""

    __slots__ = ("_since", "hold_s", "used")

    def __init__(self) -> None:
        self.used = 0
        self.hold_s = 0.0
        self._since: list[float] = []  # starts of the running calls, while they are few

    def acquire(self, limit: int, now: float) -> float:
        """Take a slot and return 0.0, or return the seconds after which one is probably free."""
        if self.used < limit:
            self.used += 1
            if limit <= _FEW_SLOTS:
                self._since.append(now)
            return 0.0
        left_s = self.hold_s - (now - self._since[0]) if self._since else self.hold_s / limit
        return max(left_s, 1e-3)

    def undo(self) -> None:
        """Return the slot that was taken last, as it was not needed."""
        self.used = max(0, self.used - 1)
        if self._since:
            self._since.pop()

    def release(self, took_s: float, now: float) -> None:
        """Release a slot that was had for `took_s`."""
        self.used = max(0, self.used - 1)
        if self._since:
            place = bisect_left(self._since, now - took_s - 1e-6)
            del self._since[min(place, len(self._since) - 1)]
        self.hold_s += (0.1 if self.hold_s else 1.0) * (took_s - self.hold_s)


class Window:
    """A quota: units used in the current calendar window. number: the window that `used` belongs to."""

    __slots__ = ("_left", "number", "used")

    def __init__(self, number: int = -1, used: int = 0) -> None:
        self.number = number
        self.used = used
        self._left: tuple[int, int] | None = None  # the previous window and the units used in it

    def roll(self, number: int) -> None:
        """Move on to window `number`, the current one.

        A clock that was wrong for a while resets nothing. If it was set back, the count continues, also when the clock
        is right again; if it was ahead, the units used before and meanwhile are counted together.
        """
        if number == self.number:
            return
        left, self._left = self._left, (self.number, self.used)
        if left is not None and left[0] == number:
            self.used = self.used if number > self.number else left[1] + self.used
            self._left = None
        elif number > self.number:
            self.used = 0
        self.number = number

    def acquire(self, limit: int, units: int, period: Period, clock: CalendarClock, now: float) -> float:
        """Count the units and return 0.0, or return the seconds until the window ends."""
        number = clock.window(period, now)
        if number != self.number:
            self.roll(number)
        if self.used + (units if units < limit else limit) > limit:
            return clock.ends_in(period, now)
        self.used += units
        return 0.0

    def charge(self, units: int) -> None:
        """Count units unconditionally; negative ones are returned, at most as many as were counted."""
        self.used = max(0, self.used + units)


def policy_item(bound: Bound, window_s: float = 0.0) -> str:
    """One member of `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-10).

    A rate is its burst over the time that refills it; window_s: length of a calendar window.
    """
    if bound.slots:
        return f'"{bound.name}";q={bound.limit};qu="concurrent-requests"'
    if bound.rate is not None:
        window_s = bound.rate.burst / bound.rate.requests_per_s
    named = UNITS[bound.counts].header if bound.budget is None else bound.budget.unit
    unit = f';qu="{named}"' if named else ""
    return f'"{bound.name}";q={_whole(bound, bound.limit)}{unit};w={ceil(window_s)}'


def state_item(bound: Bound, remaining: float, wait_s: float) -> str:
    """One member of `RateLimit`: the remaining units, and the whole seconds until there are more (0.0 omits them)."""
    left = _whole(bound, 0 if remaining < 0.0 else int(remaining))
    return f'"{bound.name}";r={left};t={ceil(wait_s)}' if wait_s > 0.0 else f'"{bound.name}";r={left}'


def _whole(bound: Bound, units: int) -> int:
    """Return units of a bound as whole ones of the unit in which headers name them; 1 for less than one of a budget,
    because calls pass while any of it is left.
    """
    if bound.budget is not None:
        return units // bound.budget.scale or min(units, 1)
    return units // UNITS[bound.counts].scale
