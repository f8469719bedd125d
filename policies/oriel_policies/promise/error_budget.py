"""Error budgets: what an objective allows, how fast it is used up, and the counts of 30 days that say so. Pure.

budget = 1 - objective. burn over a window = the share of bad calls in it / budget: at 1 the budget of 30 days lasts
30 days. Left = 1 - the share of bad calls in 30 days / budget; it is below 0 if more than the budget was used.
"""

from array import array
from collections.abc import Iterator
from typing import Final

WINDOWS: Final = {
    "5m": 300.0, "30m": 1800.0, "1h": 3600.0, "2h": 7200.0, "6h": 21600.0, "1d": 86400.0, "3d": 259200.0,
    "30d": 2592000.0,
}  # fmt: skip
SHORT: Final = (300, 3 * 86400 // 300)  # slots of 5 minutes for 3 days
LONG: Final = (3600, 30 * 86400 // 3600)  # slots of an hour for 30 days
_MOST: Final = 0xFFFFFFFF  # largest count of a slot, which has 32 bits


def attainment(total: float, bad: float) -> float | None:
    """Return the share of calls that kept the promise; None without calls."""
    return 1.0 - bad / total if total > 0 else None


def burn(total: float, bad: float, objective: float) -> float | None:
    """Return how many times faster than allowed the budget is used; None without calls."""
    return (bad / total) / (1.0 - objective) if total > 0 else None


def remaining(total: float, bad: float, objective: float) -> float:
    """Return the share of the budget that is left after these calls of 30 days; without calls, all of it."""
    used = burn(total, bad, objective)
    return 1.0 if used is None else 1.0 - used


class Slots:
    """Counts of calls, and of the bad ones among them, in slots of `width_s` seconds, of which the latest are kept."""

    __slots__ = ("_bad", "_total", "count", "latest", "width_s")

    def __init__(self, width_s: int, count: int) -> None:
        self.width_s = width_s
        self.count = count
        self.latest = -1  # the number of the newest slot: seconds since the epoch / width_s
        self._total = array("I", bytes(4 * count))
        self._bad = array("I", bytes(4 * count))

    def add(self, at_s: float, total: int, bad: int) -> None:
        """Count calls. A clock that was set back counts into the newest slot, or into one that is still kept."""
        slot = int(at_s // self.width_s)
        if slot > self.latest:
            self._advance(slot)
        elif slot <= self.latest - self.count:
            slot = self.latest
        index = slot % self.count
        self._total[index] = min(_MOST, self._total[index] + total)
        self._bad[index] = min(_MOST, self._bad[index] + bad)

    def over(self, window_s: float, now_s: float) -> tuple[float, float]:
        """Return calls and bad calls of the last `window_s` seconds; of the oldest slot, the part inside the window."""
        begin_s, width_s, count = now_s - window_s, self.width_s, self.count
        begins = int(begin_s // width_s)
        first, last = max(begins, self.latest - count + 1), min(self.latest, int(now_s // width_s))
        if first > last:
            return 0.0, 0.0
        index, slots = first % count, last - first + 1
        ends, wrapped = min(count, index + slots), max(0, index + slots - count)
        outside = (begin_s - begins * width_s) / width_s if first == begins else 0.0
        total, bad = [
            sum(counts[index:ends]) + sum(counts[:wrapped]) - outside * counts[index]
            for counts in (self._total, self._bad)
        ]
        return total, bad

    def at(self, at_s: float) -> tuple[int, int, int]:
        """Return the slot of this time: its first second since the epoch, its calls and its bad calls."""
        slot = int(at_s // self.width_s)
        slot = slot if self.latest - self.count < slot <= self.latest else self.latest
        index = slot % self.count
        return slot * self.width_s, self._total[index], self._bad[index]

    def _advance(self, slot: int) -> None:
        """Begin a newer slot, and clear those of which it and the ones between take the place."""
        for old in range(max(self.latest + 1, slot - self.count + 1), slot + 1):
            index = old % self.count
            self._total[index] = self._bad[index] = 0
        self.latest = slot


class BudgetHistory:
    """The calls of the last 30 days for one objective: 12.7 KB."""

    def __init__(self) -> None:
        self.short = Slots(*SHORT)
        self.long = Slots(*LONG)

    def add(self, at_s: float, total: int, bad: int) -> None:
        """Count calls that ended at this time, in seconds since the epoch."""
        self.short.add(at_s, total, bad)
        self.long.add(at_s, total, bad)

    def over(self, window_s: float, now_s: float) -> tuple[float, float]:
        """Return calls and bad calls of a window. Up to 3 days it is made of slots of 5 minutes, else of hours."""
        return (self.short if window_s <= SHORT[0] * SHORT[1] else self.long).over(window_s, now_s)

    def rows(self, at_s: float) -> Iterator[tuple[int, int, int, int]]:
        """Yield (width, first second, calls, bad calls) of the two slots of this time."""
        for slots in (self.short, self.long):
            yield (slots.width_s, *slots.at(at_s))

    def load(self, width_s: int, start_s: int, total: int, bad: int) -> None:
        """Take a slot back that `rows` gave; of the other width, or too old, it is ignored."""
        for slots in (self.short, self.long):
            if slots.width_s == width_s and start_s // width_s > slots.latest - slots.count:
                slots.add(start_s, total, bad)
