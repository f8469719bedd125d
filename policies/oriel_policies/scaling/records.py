"""The record that one gateway publishes about one pool. Records add up, and they hold ages instead of times."""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import Annotated, Final

from msgspec import Meta, Struct, field

WINDOW_S: Final = 60
CLASSES: Final = 24
_FIRST_S: Final = 0.1
_STEP: Final = 1.6
# Upper bounds of the time that is left until the deadline, one per class. The last class has no bound of its own: it
# is treated as one more step. The first also holds what is overdue.
CLASS_BOUNDS_S: Final[list[float]] = [_FIRST_S * _STEP**step for step in range(CLASSES)]


def _zeros(count: int) -> list[float]:
    return [0.0] * count


class TierRecord(Struct, array_like=True, forbid_unknown_fields=True):
    """The demand of one tier.

    arrivals: calls per second of age, the newest first. The first entry is the current second, which is not over; the
    WINDOW_S entries after it are whole seconds. Calls that were refused for want of capacity are among them.
    backlog: waiting calls by the time until their deadline, see CLASS_BOUNDS_S.
    refused: calls of the window that were refused for want of capacity.
    """

    arrivals: list[float] = field(default_factory=lambda: _zeros(WINDOW_S + 1))
    backlog: list[float] = field(default_factory=lambda: _zeros(CLASSES))
    refused: float = 0.0

    def add(self, other: "TierRecord", age_s: float = 0.0, *, with_backlog: bool = True) -> None:
        """Add a record that was made `age_s` ago."""
        shift = int(age_s + 0.5)
        for index in range(max(0, WINDOW_S + 1 - shift)):
            self.arrivals[index + shift] += other.arrivals[index]
        self.refused += other.refused
        if with_backlog:
            for index, calls in enumerate(later(other.backlog, age_s)):
                self.backlog[index] += calls


class PoolRecord(Struct, array_like=True, forbid_unknown_fields=True):
    """The report of one gateway about one pool; or the sum of several.

    tiers: the records of tiers by name.
    held: calls that wait because the pool has no usable endpoint or no permit.
    in_flight: calls at the servers.
    observed_s: seconds for which the gateway has been counting.
    idle_s: seconds since a call arrived or ended; infinite if none has.
    woken, woken_s: replicas that an operator asked for, and for how many more seconds.
    curve: rows of an execution -> (executions, their seconds), over a recent period; the points of a service curve.
    """

    tiers: dict[str, TierRecord] = field(default_factory=dict)
    held: float = 0.0
    in_flight: float = 0.0
    observed_s: float = 0.0
    idle_s: Annotated[float, Meta(ge=0.0)] = inf
    woken: int = 0
    woken_s: float = 0.0
    curve: dict[Annotated[int, Meta(ge=1)], tuple[float, float]] = field(default_factory=dict)

    def add(self, other: "PoolRecord", age_s: float = 0.0, *, with_backlog: bool = True) -> None:
        """Add a record that was made `age_s` ago; without its waiting calls unless `with_backlog`."""
        for name, tier in other.tiers.items():
            mine = self.tiers.get(name)
            if mine is None:
                mine = self.tiers[name] = TierRecord()
            mine.add(tier, age_s, with_backlog=with_backlog)
        if with_backlog:
            self.held += other.held
            self.in_flight += other.in_flight
        self.observed_s = max(self.observed_s, other.observed_s + age_s)
        self.idle_s = min(self.idle_s, other.idle_s)
        if other.woken_s > age_s and (other.woken, other.woken_s - age_s) > (self.woken, self.woken_s):
            self.woken, self.woken_s = other.woken, other.woken_s - age_s
        for rows, (executions, seconds) in other.curve.items():
            known = self.curve.get(rows, (0.0, 0.0))
            self.curve[rows] = (known[0] + executions, known[1] + seconds)


def deadline_class(left_s: float) -> int:
    """Return the class of a call whose deadline is `left_s` away."""
    return min(bisect_left(CLASS_BOUNDS_S, left_s), CLASSES - 1)


def due_by(backlog: Sequence[float], left_s: float) -> float:
    """Return how many calls of a backlog are due within `left_s`; inside a class they are taken as evenly spread."""
    due, low = 0.0, 0.0
    for calls, high in zip(backlog, CLASS_BOUNDS_S, strict=True):
        if left_s >= high:
            due += calls
        else:
            return due + calls * max(0.0, left_s - low) / (high - low)
        low = high
    return due


def later(backlog: Sequence[float], age_s: float) -> list[float]:
    """Return the same backlog `age_s` later: every call is that much closer to its deadline."""
    if age_s < _FIRST_S:
        return list(backlog)
    moved, before = [], 0.0
    for bound in CLASS_BOUNDS_S:
        until = due_by(backlog, bound + age_s)
        moved.append(until - before)
        before = until
    return moved
