"""Counts the calls of the last minute by tier, tenant and target.

Nothing is counted while nobody looks: `Recent` is made for the first viewer, begins with the records that are still
kept, and then reads the cells that all other counters read (`observe.cube`).
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Final

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.cube import Cell, add_up
from oriel_gateway.observe.decisions import Decisions
from oriel_gateway.observe.objectives import result_of
from oriel_gateway.observe.record import Record
from oriel_gateway.routing.targets import Target

WINDOW_S: Final = 60.0
SLICE_S: Final = 5.0
MAX_KEYS: Final = 2048  # tenants, and targets, that are counted apart; calls of further ones count as `OTHER`
OTHER: Final = "other"
BAD_KEPT: Final = 64
# Upper bounds of durations in milliseconds, each a fifth above the one before, from 0.1 ms to about three minutes.
BOUNDS_MS: Final = tuple([0.1 * 1.2**step for step in range(80)])
REFUSED: Final = frozenset(
    {Outcome.QUEUE_FULL, Outcome.DISPLACED, Outcome.INFEASIBLE, Outcome.RATE_LIMITED, Outcome.CONCURRENCY_LIMITED}
    | {Outcome.QUOTA_EXCEEDED, Outcome.DEADLINE_TOO_SHORT, Outcome.NOT_READY, Outcome.SERVER_STOPPING}
)


@dataclass(slots=True)
class Tally:
    """Counts of calls. refused: the number of missed and excused calls that found no room or were over a limit.

    used_s: the time for which they held a permit. tokens: that they read and wrote.
    durations: counts of answered calls, by `BOUNDS_MS`; None if they are not counted.
    """

    met: int = 0
    late: int = 0
    missed: int = 0
    excused: int = 0
    refused: int = 0
    used_s: float = 0.0
    tokens: int = 0
    durations: list[int] | None = None

    @property
    def calls(self) -> int:
        """All of them, however they ended."""
        return self.met + self.late + self.missed + self.excused

    def add(self, other: "Tally", sign: int = 1) -> None:
        """Add the counts of `other`, or subtract them."""
        self.met += sign * other.met
        self.late += sign * other.late
        self.missed += sign * other.missed
        self.excused += sign * other.excused
        self.refused += sign * other.refused
        self.used_s += sign * other.used_s
        self.tokens += sign * other.tokens
        if other.durations is not None:
            if self.durations is None:
                self.durations = [0] * (len(BOUNDS_MS) + 1)
            for index, count in enumerate(other.durations):
                if count:
                    self.durations[index] += sign * count

    def quantile_ms(self, share: float) -> float | None:
        """The duration that `share` of the answered calls stay within; None without one."""
        counts = self.durations
        if counts is None or not (total := sum(counts)):
            return None
        rank, seen = share * total, 0
        edges = (0.0, *BOUNDS_MS, BOUNDS_MS[-1] * 1.2)
        for (low, high), count in zip(pairwise(edges), counts, strict=True):
            if count and seen + count >= rank:
                return low + (high - low) * max(0.0, rank - seen) / count
            seen += count
        return edges[-1]


Tallies = dict[str, Tally]


@dataclass(slots=True)
class _Slice:
    """The calls of a few seconds."""

    begins_s: float
    tiers: Tallies = field(default_factory=dict)
    tenants: Tallies = field(default_factory=dict)
    targets: Tallies = field(default_factory=dict)

    @property
    def all(self) -> tuple[Tallies, Tallies, Tallies]:
        return self.tiers, self.tenants, self.targets


class Recent:
    """The calls of the last `WINDOW_S`. Single writer: the gateway's loop.

    tiers, tenants, targets: counts by name; a target is `model:NAME` or `service:NAME`.
    of_tenant, of_target: the tier of each tenant and what each target is, of those in `tenants` and `targets`.
    fresh: the calls that were counted between the two latest updates.
    bad: the latest calls that were late, missed or refused, the latest first.
    """

    def __init__(self, decisions: Decisions, ended: int, now: float) -> None:
        """ended: the requests that have ended until now."""
        self._slices: deque[_Slice] = deque()
        self._sum = _Slice(0.0)
        self._fresh = Tally()
        self.of_tenant: dict[str, str] = {}
        self.of_target: dict[str, Target] = {}
        self.fresh = Tally()
        self.bad: deque[Record] = deque(maxlen=BAD_KEPT)
        kept = decisions.latest(ended)
        # If decisions were dropped, the window begins with the oldest one that is kept.
        self._since_s = kept[0].ended_s if len(kept) < ended else now - WINDOW_S
        self.count(add_up(kept, {}))
        self.update(now)

    @property
    def tiers(self) -> Tallies:
        return self._sum.tiers

    @property
    def tenants(self) -> Tallies:
        return self._sum.tenants

    @property
    def targets(self) -> Tallies:
        return self._sum.targets

    def covers_s(self, now: float) -> float:
        """The seconds that the counts are about; rates are per this time."""
        return max(1.0, min(WINDOW_S, now - self._since_s))

    def update(self, now: float) -> None:
        """Begin to count the next fresh calls, and forget those that ended more than `WINDOW_S` ago."""
        self.fresh, self._fresh = self._fresh, Tally()
        self._drop(now)

    def count(self, cells: Iterable[Cell]) -> None:
        """Count the requests that ended since the previous call."""
        bad: list[Record] = []
        for cell in cells:
            refused, promises = cell.outcome in REFUSED, cell.promises
            bad += [record for record in cell.bad if refused or _result(record) in ("late", "missed")]
            tenant, target = cell.tenant, cell.target
            if tenant is None:
                continue
            self.of_tenant[tenant.name] = tenant.tier.name
            route = self._route_of(cell, target)
            tally = Tally(promises.met, promises.late, promises.missed, promises.excused)
            tally.used_s, tally.refused = cell.permit_s, cell.requests if refused else 0
            tally.tokens = sum(cell.charge.tokens()) if cell.charge is not None else 0
            self._fresh.add(tally)
            names = (tenant.tier.name, tenant.name, route)
            slices = self._slice(cell.second // SLICE_S)
            for name, tallies, total in zip(names, slices.all, self._sum.all, strict=True):
                if not name:
                    continue
                if total is self._sum.targets and cell.answered:
                    tally.durations = [0] * (len(BOUNDS_MS) + 1)
                    for took_s in cell.durations_s:
                        tally.durations[bisect_left(BOUNDS_MS, took_s * 1e3)] += 1
                counted = name if name in total or len(total) < MAX_KEYS else OTHER
                _of(tallies, counted).add(tally)
                _of(total, counted).add(tally)
        self.bad.extendleft(sorted(bad, key=attrgetter("ended_s")))

    def _route_of(self, cell: Cell, target: Target | None) -> str:
        """Return the name under which the calls of a cell count; "" for none.

        Callers can invent models where a pattern is routed, so a name that was only ever answered 404 counts as
        `OTHER`.
        """
        if target is None:
            return ""
        route = target.route
        if route not in self.targets:
            if len(self.targets) >= MAX_KEYS or (cell.bad and all(record.status == 404 for record in cell.bad)):
                return OTHER
        self.of_target[route] = target
        return route

    def _slice(self, number: float) -> _Slice:
        """The slice of the calls that ended `number` times `SLICE_S` after the clock's zero."""
        begins_s = number * SLICE_S
        for found in reversed(self._slices):
            if found.begins_s == begins_s:
                return found
        made = _Slice(begins_s)
        self._slices.append(made)
        if len(self._slices) > 1 and self._slices[-2].begins_s > begins_s:
            self._slices = deque(sorted(self._slices, key=lambda each: each.begins_s))
        return made

    def _drop(self, now: float) -> None:
        """Forget the calls that ended more than `WINDOW_S` ago."""
        while self._slices and self._slices[0].begins_s + SLICE_S < now - WINDOW_S:
            old = self._slices.popleft()
            for tallies, total in zip(old.all, self._sum.all, strict=True):
                for name, tally in tallies.items():
                    found = total[name]
                    found.add(tally, -1)
                    if not found.calls:
                        del total[name]
            self.of_tenant = {name: tier for name, tier in self.of_tenant.items() if name in self.tenants}
            self.of_target = {name: target for name, target in self.of_target.items() if name in self.targets}


def _result(record: Record) -> str:
    """Return what became of a request that did not keep a promise, or whose sender is not known."""
    judged = record.judged
    if judged is not None:
        return judged.result
    return "met" if record.outcome is Outcome.ANSWERED else result_of(record.outcome, record.status)


def _of(tallies: Tallies, name: str) -> Tally:
    found = tallies.get(name)
    if found is None:
        found = tallies[name] = Tally()
    return found
