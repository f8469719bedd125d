"""Counts the calls of the last minute by tier, tenant and target, from the decisions that the gateway keeps anyway.

Nothing is counted while nobody looks: `Recent` is made for the first viewer, begins with the decisions that are still
kept, and reads those that came since, once a second. The hot path does not know it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.decisions import Decisions
from oriel_gateway.observe.objectives import result_of
from oriel_gateway.observe.record import Record
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant

WINDOW_S: Final = 60.0
SLICE_S: Final = 5.0
MAX_KEYS: Final = 2048  # tenants, and targets, that are counted apart; calls of further ones count as `OTHER`
OTHER: Final = "other"
BAD_KEPT: Final = 64
# Upper bounds of durations in milliseconds, each a fifth above the one before, from 0.1 ms to about three minutes.
BOUNDS_MS: Final = tuple([0.1 * 1.2**step for step in range(80)])
_BAD: Final = frozenset({"late", "missed"})
_ANSWERED: Final = frozenset({"met", "late"})
REFUSED: Final = frozenset(
    {Outcome.QUEUE_FULL, Outcome.DISPLACED, Outcome.INFEASIBLE, Outcome.RATE_LIMITED, Outcome.CONCURRENCY_LIMITED}
    | {Outcome.QUOTA_EXCEEDED, Outcome.DEADLINE_TOO_SHORT, Outcome.NOT_READY, Outcome.SERVER_STOPPING}
)


@dataclass(slots=True)
class Tally:
    """Counts of calls. refused: those of the missed and excused ones that found no room or were over a limit.

    used_s: the time for which they held a permit.
    durations: of answered calls, by `BOUNDS_MS`; None if they are not counted.
    """

    met: float = 0.0
    late: float = 0.0
    missed: float = 0.0
    excused: float = 0.0
    refused: float = 0.0
    used_s: float = 0.0
    durations: list[float] | None = None

    @property
    def calls(self) -> float:
        """All of them, however they ended."""
        return self.met + self.late + self.missed + self.excused

    def add(self, other: "Tally", sign: float = 1.0) -> None:
        """Add the counts of `other`, or subtract them."""
        self.met += sign * other.met
        self.late += sign * other.late
        self.missed += sign * other.missed
        self.excused += sign * other.excused
        self.refused += sign * other.refused
        self.used_s += sign * other.used_s
        if other.durations is not None:
            if self.durations is None:
                self.durations = [0.0] * (len(BOUNDS_MS) + 1)
            for index, count in enumerate(other.durations):
                if count:
                    self.durations[index] += sign * count

    def quantile_ms(self, share: float) -> float | None:
        """The duration that `share` of the answered calls stay within; None without one."""
        counts = self.durations
        if counts is None or (total := sum(counts)) < 0.5:
            return None
        rank, seen = share * total, 0.0
        edges = (0.0, *BOUNDS_MS, BOUNDS_MS[-1] * 1.2)
        for (low, high), count in zip(pairwise(edges), counts, strict=True):
            if count > 0.0 and seen + count >= rank:
                return low + (high - low) * max(0.0, rank - seen) / count
            seen += count
        return edges[-1]


Tallies = dict[str, Tally]


class _Group:
    """Calls that have their tenant, their target and their end in common."""

    __slots__ = ("calls", "durations_ms", "target", "tenant", "used_s")

    def __init__(self, tenant: Tenant, target: Target | None) -> None:
        self.tenant = tenant
        self.target = target
        self.calls = 0
        self.used_s = 0.0
        self.durations_ms: list[float] = []


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
    fresh: the calls that the latest update counted.
    bad: the latest calls that were late, missed or refused, the latest first.
    """

    def __init__(self, decisions: Decisions, ended: int, now: float) -> None:
        """ended: the requests that have ended until now."""
        self._decisions = decisions
        self._slices: deque[_Slice] = deque()
        self._last = ended
        self._sum = _Slice(0.0)
        self.of_tenant: dict[str, str] = {}
        self.of_target: dict[str, Target] = {}
        self.fresh = Tally()
        self.bad: deque[Record] = deque(maxlen=BAD_KEPT)
        kept = decisions.latest(ended)
        # Where decisions were dropped, nothing is known of the time before the oldest that is kept.
        self._since_s = kept[0].ended_s if len(kept) < ended else now - WINDOW_S
        self._count(kept, 1.0)
        self._drop(now)

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

    def update(self, ended: int, now: float) -> None:
        """Count the requests that have ended since the last time. ended: all of them so far.

        Of more than the decisions keep, the latest ones are counted, each for as many as it stands for.
        """
        count, self._last = ended - self._last, ended
        self.fresh = Tally()
        if count > 0:
            kept = self._decisions.latest(count)
            self._count(kept, count / len(kept) if kept else 1.0)
        self._drop(now)

    def _count(self, kept: Iterable[Record], weight: float) -> None:
        # Calls with the same tenant, target and end are added up first: thousands of them may have ended in a second.
        # Tenants and targets are known by their identity: to hash a target would cost more than all the rest.
        groups: dict[tuple[float, int, int, Outcome, str], _Group] = {}
        for record in kept:
            ended_s, tenant, outcome, judged = record.ended_s, record.tenant, record.outcome, record.judged
            if judged is not None:
                result = judged.result
            else:
                result = (
                    "met" if tenant is not None or outcome is Outcome.ANSWERED else result_of(outcome, record.status)
                )
            if result in _BAD or outcome in REFUSED:
                self.bad.appendleft(record)
            if tenant is None:
                continue
            target = record.target
            key = (ended_s // SLICE_S, id(tenant), id(target), outcome, result)
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(tenant, target)
            group.calls += 1
            if record.permit_s:
                group.used_s += ended_s - record.permit_s
            if result in _ANSWERED:
                group.durations_ms.append((ended_s - record.received_s) * 1e3)
        for (number, _, _, outcome, result), group in groups.items():
            tenant, target = group.tenant, group.target
            self.of_tenant[tenant.name] = tenant.tier.name
            if target is not None:
                self.of_target[target.route] = target
            tally = Tally(used_s=weight * group.used_s, refused=weight * group.calls if outcome in REFUSED else 0.0)
            setattr(tally, result, weight * group.calls)
            self.fresh.add(tally)
            names = (tenant.tier.name, tenant.name, target.route if target is not None else "")
            for name, tallies, total in zip(names, self._slice(number).all, self._sum.all, strict=True):
                if not name:
                    continue
                if total is self._sum.targets and group.durations_ms:
                    tally.durations = [0.0] * (len(BOUNDS_MS) + 1)
                    for took_ms in group.durations_ms:
                        tally.durations[bisect_left(BOUNDS_MS, took_ms)] += weight
                counted = name if name in total or len(total) < MAX_KEYS else OTHER
                _of(tallies, counted).add(tally)
                _of(total, counted).add(tally)

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
                    found.add(tally, -1.0)
                    if found.calls < 0.5:
                        del total[name]
            self.of_tenant = {name: tier for name, tier in self.of_tenant.items() if name in self.tenants}
            self.of_target = {name: target for name, target in self.of_target.items() if name in self.targets}


def _of(tallies: Tallies, name: str) -> Tally:
    found = tallies.get(name)
    if found is None:
        found = tallies[name] = Tally()
    return found
