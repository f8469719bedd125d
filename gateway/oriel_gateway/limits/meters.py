"""Meters that count one bound of one tenant in this process.

A limiter calls `acquire` on every meter of a call; if one refuses, the others get `undo`. When the call is over,
`charge` corrects what had to be estimated: the bytes of the answer, the computing, a call that was not executed. The
loop is the single writer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from oriel_policies.bounds.calendar import CalendarClock
from oriel_policies.bounds.limits import Bound, Gcra, Slots, Window, state_item

ASK = -1.0  # the meter cannot decide by itself: its ledger has to be asked


class QuotaRow(NamedTuple):
    """The use of a bound in one window. number: the number of the window, counted from the epoch."""

    tenant: str
    bound: str
    period: str
    number: int
    used: int


class Meter(ABC):
    """A counter for one bound. bound: the limit that it counts for; a reload of the documents may replace it."""

    __slots__ = ("bound",)

    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    @abstractmethod
    def acquire(self, units: int, now: float) -> float:
        """Count the units if they fit and return 0.0; or return the seconds until they would fit, or `ASK` if unknown
        here.
        """

    @abstractmethod
    def charge(self, units: int, now: float) -> None:
        """Count units unconditionally; negative ones are given back."""

    @abstractmethod
    def remaining(self, now: float) -> tuple[float, float]:
        """Return the units left, and the seconds until there are more (0.0 if none are missing, or if unknown)."""

    @abstractmethod
    def droppable(self, now: float) -> bool:
        """Return whether dropping this meter forgives nothing."""

    def at_least(self, units: int, now: float) -> None:
        """Count the units unless as many are counted already; only for quotas."""
        raise AssertionError("only quotas begin with what was used")

    def undo(self, units: int, now: float) -> None:
        """Give back the units of a call that another bound refused."""
        self.charge(-units, now)

    def release_slot(self, took_s: float, now: float) -> None:
        """Release the slot of a call that is over; only for bounds of concurrency."""
        raise AssertionError("only slots are released")

    def began(self, now: float) -> float:
        """Return the monotonic time at which the present window began; only for quotas."""
        raise AssertionError("only quotas have windows")

    def state(self, now: float) -> str:
        """Return what is left as a member of `RateLimit`, for the answer to a call that this meter has counted."""
        left, more_s = self.remaining(now)
        if self.bound.budget is not None:  # the call has only asked whether something is left, with one unit
            left = min(left + 1, self.bound.limit)
        return state_item(self.bound, left, more_s)


class RateMeter(Meter):
    """Requests or bytes per second."""

    __slots__ = ("_gcra",)

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound)
        self._gcra = Gcra()

    def acquire(self, units: int, now: float) -> float:
        assert self.bound.rate is not None
        return self._gcra.acquire(self.bound.rate, now, units)

    def charge(self, units: int, now: float) -> None:
        assert self.bound.rate is not None
        self._gcra.charge(self.bound.rate, now, units)

    def remaining(self, now: float) -> tuple[float, float]:
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

    def droppable(self, now: float) -> bool:
        return self._gcra.arrival <= now


class SlotMeter(Meter):
    """Concurrent calls."""

    __slots__ = ("_slots",)

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound)
        self._slots = Slots()

    def acquire(self, units: int, now: float) -> float:
        return self._slots.acquire(self.bound.limit, now)

    def undo(self, units: int, now: float) -> None:
        self._slots.undo()

    def charge(self, units: int, now: float) -> None:
        raise AssertionError("slots are released, not charged")

    def release_slot(self, took_s: float, now: float) -> None:
        self._slots.release(took_s, now)

    def remaining(self, now: float) -> tuple[float, float]:
        return self.bound.limit - self._slots.used, 0.0

    def state(self, now: float) -> str:
        left = self.bound.limit - self._slots.used
        return f'"{self.bound.name}";r={left if left > 0 else 0}'

    def droppable(self, now: float) -> bool:
        return self._slots.used == 0


class QuotaMeter(Meter):
    """Requests or computing of a calendar window. changed: called once per change that has not been saved yet."""

    __slots__ = ("_changed", "_clock", "saved", "tenant", "window")

    def __init__(
        self, bound: Bound, tenant: str, window: Window, clock: CalendarClock, changed: "Callable[[QuotaMeter], None]"
    ) -> None:
        super().__init__(bound)
        self.tenant = tenant
        self.window = window
        self.saved = True
        self._clock = clock
        self._changed = changed

    def acquire(self, units: int, now: float) -> float:
        bound = self.bound
        assert bound.period is not None
        wait_s = self.window.acquire(bound.limit, units, bound.period, self._clock, now)
        if wait_s == 0.0 and self.saved:
            self._unsaved()
        return wait_s

    def charge(self, units: int, now: float) -> None:
        bound = self.bound
        assert bound.period is not None
        self.window.roll(self._clock.window(bound.period, now))
        self.window.charge(units)
        if self.saved:
            self._unsaved()

    def at_least(self, units: int, now: float) -> None:
        self.charge(max(0, units - self.window.used), now)

    def began(self, now: float) -> float:
        period = self.bound.period
        assert period is not None
        return now + self._clock.ends_in(period, now) - self._clock.length(period, now)

    def remaining(self, now: float) -> tuple[float, float]:
        bound = self.bound
        assert bound.period is not None
        self.window.roll(self._clock.window(bound.period, now))
        return bound.limit - self.window.used, self._clock.ends_in(bound.period, now)

    def droppable(self, now: float) -> bool:
        bound = self.bound
        assert bound.period is not None
        return self.saved and (not self.window.used or self.window.number < self._clock.window(bound.period, now))

    def row(self) -> QuotaRow:
        """Return the window as a row of the quota file."""
        assert self.bound.period is not None
        return QuotaRow(self.tenant, self.bound.name, self.bound.period.value, self.window.number, self.window.used)

    def _unsaved(self) -> None:
        self.saved = False
        self._changed(self)
