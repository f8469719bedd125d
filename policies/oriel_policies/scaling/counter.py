"""Counts the demand that one gateway sees for one pool."""

from math import ceil, inf
from typing import Final

from oriel_policies.scaling.records import WINDOW_S, PoolRecord, TierRecord, deadline_class
from oriel_policies.waiting.batch import size_class

_SLOTS_PER_S: Final = 8  # resolution of the deadlines of waiting calls
_CURVE_HALF_LIFE_S: Final = 60.0


class _Tier:
    """Counts of one tier. seconds: second -> arrivals, refusals; waiting: deadline slot -> calls."""

    __slots__ = ("seconds", "waiting")

    def __init__(self) -> None:
        self.seconds: dict[int, tuple[int, int]] = {}
        self.waiting: dict[int, int] = {}


class DemandCounter:
    """See the package's docstring. Single writer: the loop that owns the pool.

    Memory is bounded by the number of tiers, WINDOW_S and the calls that wait. Every `queued` has exactly one
    `left_queue` with the same deadline, every `started` one `finished`; when all calls are gone, all counts are 0.
    """

    def __init__(self, now: float) -> None:
        self._tiers: dict[str, _Tier] = {}
        self._started_s = now
        self._touched_s = -inf
        self._held = 0
        self._in_flight = 0
        self._curve: dict[int, tuple[float, float]] = {}
        self._curve_s = now
        self._woken = 0
        self._woken_until_s = now

    def wake(self, replicas: int, until_s: float) -> None:
        """Note that an operator wants this number of replicas until then; this replaces an earlier wish."""
        self._woken, self._woken_until_s = replicas, until_s

    def arrived(self, tier: str, now: float, calls: int = 1) -> None:
        """Count calls that want this pool's capacity, whatever becomes of them. Calls beyond a tenant's limit are not
        counted.
        """
        self._count(tier, now, calls, 0)

    def refused(self, tier: str, now: float) -> None:
        """Note that a call that has `arrived` is refused because capacity is missing: queue full, too late, no
        endpoint.
        """
        self._count(tier, now, 0, 1)

    def queued(self, tier: str, deadline: float) -> None:
        """Note that a call waits for a permit or an endpoint.

        deadline: monotonic seconds.
        """
        waiting = self._tier(tier).waiting
        slot = ceil(deadline * _SLOTS_PER_S)
        waiting[slot] = waiting.get(slot, 0) + 1
        self._held += 1

    def left_queue(self, tier: str, deadline: float) -> None:
        """Note that a call that was `queued` with this deadline waits no more, for whatever reason."""
        waiting = self._tier(tier).waiting
        slot = ceil(deadline * _SLOTS_PER_S)
        waiting[slot] -= 1
        if not waiting[slot]:
            del waiting[slot]
        self._held -= 1

    def started(self) -> None:
        """Note that a call goes to a server."""
        self._in_flight += 1

    def finished(self, now: float) -> None:
        """Note that a call that was `started` has ended."""
        self._in_flight -= 1
        self._touched_s = now

    def running(self, calls: int, now: float) -> None:
        """Set the number of calls at servers: for callers that count them elsewhere, in place of `started` and
        `finished`.
        """
        if calls or self._in_flight:
            self._touched_s = now
        self._in_flight = calls

    def executed(self, rows: int, seconds: float, now: float, executions: float = 1.0) -> None:
        """Note that servers ran `executions` batches of `rows` calls each; `seconds` is the time of all of them
        together.
        """
        self._decay(now)
        rows = size_class(rows)
        known = self._curve.get(rows, (0.0, 0.0))
        self._curve[rows] = (known[0] + executions, known[1] + seconds)

    def record(self, now: float) -> PoolRecord:
        """Return the record to be published. Its size does not depend on the number of calls."""
        self._decay(now)
        record = PoolRecord()
        for name, tier in self._tiers.items():
            self._forget(tier, now)
            record.tiers[name] = self._tier_record(tier, now)
        record.held = float(self._held)
        record.in_flight = float(self._in_flight)
        record.observed_s = now - self._started_s
        record.idle_s = 0.0 if self._held or self._in_flight else max(0.0, now - self._touched_s)
        if now < self._woken_until_s:
            record.woken, record.woken_s = self._woken, self._woken_until_s - now
        record.curve = dict(self._curve)
        return record

    def _tier_record(self, tier: _Tier, now: float) -> TierRecord:
        made, current = TierRecord(), int(now)
        for second, (arrived, refused) in tier.seconds.items():
            if (age := max(0, current - second)) <= WINDOW_S:  # seconds are not noted in order: see `_forget`
                made.arrivals[age] += arrived
                made.refused += refused
        for slot, calls in tier.waiting.items():
            made.backlog[deadline_class(slot / _SLOTS_PER_S - now)] += calls
        return made

    def _tier(self, name: str) -> _Tier:
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers[name] = _Tier()
        return tier

    def _count(self, name: str, now: float, arrived: int, refused: int) -> None:
        tier, second = self._tier(name), int(now)
        known = tier.seconds.get(second)
        if known is None:
            self._forget(tier, now)
            known = (0, 0)
        tier.seconds[second] = (known[0] + arrived, known[1] + refused)
        self._touched_s = now

    def _forget(self, tier: _Tier, now: float) -> None:
        """Drop the seconds that have left the window. One noted after a later one stays until that goes too."""
        oldest = int(now) - WINDOW_S
        while tier.seconds and (first := next(iter(tier.seconds))) < oldest:
            del tier.seconds[first]

    def _decay(self, now: float) -> None:
        """Halve the weight of executions once per half-life, so that a changed model is learned."""
        if now - self._curve_s >= _CURVE_HALF_LIFE_S:
            self._curve_s = now
            self._curve = {rows: (count / 2, seconds / 2) for rows, (count, seconds) in self._curve.items()}
