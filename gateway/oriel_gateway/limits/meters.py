"""One bound of one tenant at run time, counted in this process.

A limiter asks every meter of a call with `take`; if one refuses, the others get theirs back with `undo`. When the call
is over, `charge` corrects what had to be estimated: the bytes of the answer, the computing, a slot, a call that never
ran. The single writer is the loop.
"""

from collections.abc import Callable
from math import ceil
from typing import Protocol

from oriel_policies.calendar import CalendarClock
from oriel_policies.limits import Bound, Gcra, Slots, Window, state_item

__all__ = ["ASK", "Meter", "QuotaMeter", "RateMeter", "SlotMeter"]

ASK = -1.0  # a meter that cannot say by itself: its ledger has to be asked


class Meter(Protocol):
    """See the module's head. bound: what it counts; a reload of the documents may put another in its place."""

    bound: Bound

    def take(self, units: int, now: float) -> float:
        """0.0: the units fit and are counted. > 0: seconds until they would fit. `ASK`: unknown here."""

    def wait(self, units: int, now: float) -> float:
        """Seconds until they would fit, without counting them; 0.0 also when that is unknown here."""

    def undo(self, units: int, now: float) -> None:
        """Another bound refused the call that took these units."""

    def charge(self, units: int, now: float) -> None:
        """Count units without asking; negative ones are given back."""

    def leave(self, held_s: float, now: float) -> None:
        """A call that took a slot is over; only for bounds of concurrency."""

    def began(self, now: float) -> float:
        """Monotonic seconds at which the present window began; only for quotas."""

    def left(self, now: float) -> tuple[float, float]:
        """Units that are left, and the seconds until there are more (0.0: none are missing, or nobody knows)."""

    def state(self, now: float) -> str:
        """The same as a member of `RateLimit`."""


class RateMeter:
    """Requests or bytes a second."""

    __slots__ = ("_gcra", "bound")

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self._gcra = Gcra()

    def take(self, units: int, now: float) -> float:
        assert self.bound.rate is not None
        return self._gcra.take(self.bound.rate, now, units)

    def wait(self, units: int, now: float) -> float:
        assert self.bound.rate is not None
        return self._gcra.wait(self.bound.rate, now, units)

    def undo(self, units: int, now: float) -> None:
        self.charge(-units, now)

    def charge(self, units: int, now: float) -> None:
        assert self.bound.rate is not None
        self._gcra.charge(self.bound.rate, now, units)

    def leave(self, held_s: float, now: float) -> None:
        raise AssertionError("a rate has no slots")

    def began(self, now: float) -> float:
        raise AssertionError("a rate has no window")

    def left(self, now: float) -> tuple[float, float]:
        rate, gcra = self.bound.rate, self._gcra
        assert rate is not None
        wait_s = gcra.arrival - now
        return gcra.remaining(rate, now), wait_s if wait_s > 0.0 else 0.0

    def state(self, now: float) -> str:
        bound, wait_s = self.bound, self._gcra.arrival - now
        if wait_s <= 0.0:
            return f'"{bound.name}";r={bound.limit}'
        assert bound.rate is not None
        left = int(bound.limit - wait_s * bound.rate.requests_per_s + 1e-6)
        return f'"{bound.name}";r={left if left > 0 else 0};t={ceil(wait_s)}'

    def idle(self, now: float) -> bool:
        """Whether forgetting this meter forgives nothing."""
        return self._gcra.arrival <= now


class SlotMeter:
    """Calls at once."""

    __slots__ = ("_slots", "bound")

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self._slots = Slots()

    def take(self, units: int, now: float) -> float:
        return self._slots.take(self.bound.limit, now)

    def wait(self, units: int, now: float) -> float:
        return self._slots.wait(self.bound.limit, now)

    def undo(self, units: int, now: float) -> None:
        self._slots.undo()

    def charge(self, units: int, now: float) -> None:
        raise AssertionError("slots are left, not charged")

    def leave(self, held_s: float, now: float) -> None:
        self._slots.leave(held_s, now)

    def began(self, now: float) -> float:
        raise AssertionError("slots have no window")

    def left(self, now: float) -> tuple[float, float]:
        return self.bound.limit - self._slots.used, 0.0

    def state(self, now: float) -> str:
        left = self.bound.limit - self._slots.used
        return f'"{self.bound.name}";r={left if left > 0 else 0}'

    def idle(self, now: float) -> bool:
        """Whether forgetting this meter forgives nothing."""
        return self._slots.used == 0


class QuotaMeter:
    """Requests or computing of a calendar window. changed: called once per change that has not been saved yet."""

    __slots__ = ("_changed", "_clock", "bound", "saved", "tenant", "window")

    def __init__(
        self, bound: Bound, tenant: str, window: Window, clock: CalendarClock, changed: "Callable[[QuotaMeter], None]"
    ) -> None:
        self.bound = bound
        self.tenant = tenant
        self.window = window
        self.saved = True
        self._clock = clock
        self._changed = changed

    def take(self, units: int, now: float) -> float:
        bound = self.bound
        assert bound.period is not None
        wait_s = self.window.take(bound.limit, units, bound.period, self._clock, now)
        if wait_s == 0.0 and self.saved:
            self._unsaved()
        return wait_s

    def wait(self, units: int, now: float) -> float:
        bound = self.bound
        assert bound.period is not None
        return self.window.wait(bound.limit, units, bound.period, self._clock, now)

    def undo(self, units: int, now: float) -> None:
        self.charge(-units, now)

    def charge(self, units: int, now: float) -> None:
        bound = self.bound
        assert bound.period is not None
        self.window.roll(self._clock.window(bound.period, now))
        self.window.charge(units)
        if self.saved:
            self._unsaved()

    def leave(self, held_s: float, now: float) -> None:
        raise AssertionError("a quota has no slots")

    def began(self, now: float) -> float:
        period = self.bound.period
        assert period is not None
        return now + self._clock.ends_in(period, now) - self._clock.length(period, now)

    def left(self, now: float) -> tuple[float, float]:
        bound = self.bound
        assert bound.period is not None
        self.window.roll(self._clock.window(bound.period, now))
        return bound.limit - self.window.used, self._clock.ends_in(bound.period, now)

    def state(self, now: float) -> str:
        return state_item(self.bound, *self.left(now))

    def idle(self, now: float) -> bool:
        """Whether forgetting this meter forgives nothing."""
        bound = self.bound
        assert bound.period is not None
        return self.saved and (not self.window.used or self.window.number < self._clock.window(bound.period, now))

    def _unsaved(self) -> None:
        self.saved = False
        self._changed(self)
