"""The error budgets of this gateway: calls of the last 30 days per tier, and per tenant, tier and target.

Gateways that share a ledger have each other's calls in their histories; see `SharedUse`. The ledger keeps sums by the
hour: a gateway that starts knows the hours before by their beginnings.

A tier's history has every call of it. Histories of pairs of tenant and target are bounded: a new one takes the place of
the one that had no calls for the longest time, if that is an hour or more, and is counted with the others otherwise.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from oriel_policies.promise.error_budget import LONG, SHORT, WINDOWS, BudgetHistory, attainment, burn, remaining

MAX_PAIRS: Final = 500
IDLE_S: Final = 3600.0
CAUSES_S: Final = 3600  # for so long causes are remembered
MAX_UNSAVED: Final = 20_000  # slots that wait to be written; the oldest ones are not written at all
OTHER: Final = "other"
SEPARATOR: Final = "\x1f"  # in the names of the ledger's sums
_SHARED: Final = "slo"  # begins the names of sums of calls, which end with `CALLS`, `BAD` or the cause of bad calls
CALLS, BAD = "+calls", "+bad"

Key = tuple[str, str, str]  # (tenant, tier, target); of a whole tier: ("", tier, "")


class Row(NamedTuple):
    """The calls of one slot of a history. width_s: its length. start_s: its first second."""

    tenant: str
    tier: str
    target: str
    width_s: int
    start_s: int
    calls: int
    bad: int


class _Series:
    """One history, with the causes of its bad calls in the last hour, by slots of 5 minutes."""

    __slots__ = ("causes", "history", "latest_s")

    def __init__(self) -> None:
        self.history = BudgetHistory()
        self.causes: deque[tuple[int, dict[str, int]]] = deque(maxlen=CAUSES_S // SHORT[0] + 1)
        self.latest_s = 0.0

    def add(self, now: float, total: int, bad: int, causes: Mapping[str, int]) -> None:
        self.latest_s = now
        self.history.add(now, total, bad)
        if causes:
            slot = int(now // SHORT[0])
            if not self.causes or self.causes[-1][0] != slot:
                self.causes.append((slot, {}))
            counts = self.causes[-1][1]
            for cause, count in causes.items():
                counts[cause] = counts.get(cause, 0) + count

    def lately(self, now: float) -> dict[str, int]:
        """Return the causes of the last hour, the most frequent first."""
        found: dict[str, int] = {}
        for slot, counts in self.causes:
            if slot * SHORT[0] > now - CAUSES_S - SHORT[0]:
                for cause, count in counts.items():
                    found[cause] = found.get(cause, 0) + count
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


class Budgets:
    """All histories. Single writer: the gateway's loop.

    keeps: True if somebody writes down what `take_unsaved` returns.
    unshared: sums that the ledger has not got yet, None without a ledger.
    """

    def __init__(self, *, max_pairs: int = MAX_PAIRS) -> None:
        self._max_pairs = max_pairs
        self._tiers: dict[Key, _Series] = {}  # whole tiers, and the other tenants of a tier
        self._pairs: OrderedDict[Key, _Series] = OrderedDict()  # the one without calls for the longest time first
        self._unsaved: dict[tuple[Key, int, int], tuple[int, int]] = {}
        self._dropped: list[Key] = []
        self.keeps = False
        self.unshared: dict[str, int] | None = None

    def add(self, key: Key, now: float, total: int, bad: int, causes: Mapping[str, int]) -> None:
        """Count calls. now: seconds since the epoch."""
        _, tier, _ = key
        for of, series in (self._tier(("", tier, "")), self._of(key, now)):
            series.add(now, total, bad, causes)
            if self.unshared is not None:
                begin = (_SHARED, str(int(now // LONG[0] * LONG[0])), *of)
                for counter, count in ((CALLS, total), (BAD, bad), *causes.items()):
                    if count:
                        name = SEPARATOR.join((*begin, counter))
                        self.unshared[name] = self.unshared.get(name, 0) + count
            if self.keeps:
                for width_s, start_s, calls, missed in series.history.rows(now):
                    self._unsaved[of, width_s, start_s] = (calls, missed)
        while len(self._unsaved) > MAX_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]

    def _tier(self, key: Key) -> tuple[Key, _Series]:
        series = self._tiers.get(key)
        if series is None:
            series = self._tiers[key] = _Series()
        return key, series

    def _of(self, key: Key, now: float) -> tuple[Key, _Series]:
        tenant, tier, _ = key
        if tenant == OTHER:
            return self._tier((OTHER, tier, OTHER))
        series = self._pairs.get(key)
        if series is None:
            if len(self._pairs) >= self._max_pairs:
                first = next(iter(self._pairs))
                if self._pairs[first].latest_s > now - IDLE_S:
                    return self._tier((OTHER, tier, OTHER))
                del self._pairs[first]
                if self.keeps:
                    self._dropped.append(first)
            series = self._pairs[key] = _Series()
        self._pairs.move_to_end(key)
        return key, series

    def take_over(self, sums: Mapping[str, int], now: float, *, whole: bool) -> None:
        """Add what other gateways have counted. whole: the sums are those of all gateways, from which this one may
        know a part, so that only the rest is added, but no causes.
        """
        missing: list[Row] = []
        for name, value in sorted(sums.items(), reverse=True):  # the latest hours first, as there may be too many keys
            begin, _, rest = name.partition(SEPARATOR)
            hour, *names = rest.split(SEPARATOR)
            if begin != _SHARED or len(names) != 4 or not (hour.isdecimal() and len(hour) < 12 and value > 0):
                continue
            start_s, (*of, counter) = int(hour), names
            key = (of[0], of[1], of[2])
            if not now - WINDOWS["30d"] <= start_s <= now + LONG[0]:
                continue
            counts = [value if counter == CALLS else 0, value if counter == BAD else 0]
            if not whole:
                _, series = self._of(key, now) if key[0] else self._tier(key)
                at_s = now if now < start_s + LONG[0] else start_s
                series.add(at_s, counts[0], counts[1], {} if any(counts) else {counter: value})
            elif any(counts) and (kept := self._kept(key)) is not None:
                begins_s, *known = kept.history.long.at(start_s)
                if begins_s == start_s:
                    counts = [max(0, each - before) for each, before in zip(counts, known, strict=True)]
                missing += [Row(*key, width_s, start_s, *counts) for width_s, _ in (SHORT, LONG)]
        self.load(missing)

    # Over a restart --------------------------------------------------------------------------------------------

    def load(self, rows: Iterable[Row]) -> None:
        """Add what `take_unsaved` gave before a restart, or what of the ledger's sums is missing."""
        for row in rows:
            series = self._kept((row.tenant, row.tier, row.target))
            if series is None:
                continue
            series.history.load(row.width_s, row.start_s, row.calls, row.bad)
            series.latest_s = max(series.latest_s, float(row.start_s))
        self._pairs = OrderedDict(sorted(self._pairs.items(), key=lambda item: item[1].latest_s))

    def _kept(self, key: Key) -> _Series | None:
        """Return the history of a key; None if there is none and no place for one."""
        if key[0] in ("", OTHER):
            return self._tier(key)[1]
        if key not in self._pairs and len(self._pairs) < self._max_pairs:
            self._pairs[key] = _Series()
        return self._pairs.get(key)

    def take_unsaved(self) -> tuple[list[Key], list[Row]]:
        """Return the keys whose histories were dropped, and then the slots that have changed, since the last time."""
        dropped, self._dropped = self._dropped, []
        unsaved, self._unsaved = self._unsaved, {}
        return dropped, [Row(*key, width_s, start_s, *counts) for (key, width_s, start_s), counts in unsaved.items()]

    def give_back(self, dropped: list[Key], rows: list[Row]) -> None:
        """Keep the counts that could not be written, for the next attempt."""
        self._dropped = dropped + self._dropped
        for row in rows:
            key = (row.tenant, row.tier, row.target)
            self._unsaved.setdefault((key, row.width_s, row.start_s), (row.calls, row.bad))

    # Reading ---------------------------------------------------------------------------------------------------

    def remaining(self, tier: str, objective: float, now: float) -> float:
        """Return the share of a tier's budget of 30 days that is left."""
        series = self._tiers.get(("", tier, ""))
        total, bad = (0.0, 0.0) if series is None else series.history.over(WINDOWS["30d"], now)
        return remaining(total, bad, objective)

    def of_tier(self, tier: str, objective: float, now: float) -> dict[str, Any]:
        """Return attainment, burn rates, budget and causes of a tier; see `admin.slo`."""
        return _figures(self._tiers.get(("", tier, "")) or _Series(), objective, now)

    def of_pairs(
        self, objectives: Mapping[str, float], now: float, *, tenant: str = "", limit: int = MAX_PAIRS
    ) -> tuple[list[tuple[Key, dict[str, Any]]], int]:
        """Return the same of each tenant, tier and target, and of the others of a tier, and how many there are in all.

        The first ones have the most bad calls of 30 days; at most `limit` are listed.

        objectives: the objective of each tier. tenant: only this one's; "" for all.
        """
        month = WINDOWS["30d"]
        ranked = []
        for key, series in (*self._pairs.items(), *self._tiers.items()):
            if key[0] and key[1] in objectives and (not tenant or key[0] == tenant):
                total, bad = series.history.over(month, now)
                ranked.append((-bad, -total, key, series))
        ranked.sort(key=lambda item: item[:3])
        listed = [(key, _figures(series, objectives[key[1]], now)) for _, _, key, series in ranked[:limit]]
        return listed, len(ranked)


def _figures(series: _Series, objective: float, now: float) -> dict[str, Any]:
    counts = {name: series.history.over(window_s, now) for name, window_s in WINDOWS.items()}
    return {
        "calls": {name: round(total) for name, (total, _) in counts.items()},
        "bad": {name: round(bad) for name, (_, bad) in counts.items()},
        "attainment": {name: attainment(total, bad) for name, (total, bad) in counts.items()},
        "burn": {name: burn(total, bad, objective) for name, (total, bad) in counts.items()},
        "budget_left": remaining(*counts["30d"], objective),
        "causes": series.lately(now),
    }
