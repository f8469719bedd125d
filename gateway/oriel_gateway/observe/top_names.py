"""Counters of the keys with the most traffic, so that labels such as `tenant` have a bounded number of values.

Every key with traffic is counted, up to `max_counted`. A new one has a name from its first call on while names are
left; after that `read`, called by a scrape, names those with the most traffic. A key that gets its name later begins at
0 and takes its counter along when it loses the name. So every series, those of the others included, only grows while it
exists: rates are never wrong, but sums over all time may be low.
"""

from collections.abc import Callable, Hashable
from time import monotonic
from typing import Generic, TypeVar

NAMED = 50
MAX_COUNTED = 8192
OTHER = "other"
RENAME_EVERY_S = 60.0

K = TypeVar("K", bound=Hashable)
Counts = dict[str, int]


class _Counted:
    __slots__ = ("counts", "score", "seen")

    def __init__(self) -> None:
        self.counts: Counts = {}
        self.seen = 0  # calls when names were last assigned
        self.score = 0.0  # calls per period; each older period counts half of the next


class TopNames(Generic[K]):
    """Counters by key. max_named: keys with a name of their own. The gateway's loop is the only writer and reader.

    other: the name under which a key without one of its own is counted. eligible: which keys may have one.
    at_once: a new key has a name from its first call on; False for keys that callers can invent.
    """

    def __init__(
        self,
        other: Callable[[K], K],
        *,
        max_named: int,
        max_counted: int = MAX_COUNTED,
        eligible: Callable[[K], bool] = lambda _: True,
        at_once: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._other = other
        self._max_named = max_named
        self._max_counted = max_counted
        self._eligible = eligible
        self._at_once = at_once
        self._clock = clock
        self._counted: dict[K, _Counted] = {}
        # the counts of keys that are not in `_counted`, by the name of the others
        self._rest: dict[K, Counts] = {}
        self._begun: dict[K, Counts] = {}  # named key -> its counts when it got the name
        self._renamed_s = -RENAME_EVERY_S

    @property
    def named(self) -> dict[K, Counts]:
        """The keys that have a name now."""
        return self._begun

    def names(self, key: K) -> bool:
        """Return whether a key has a name, or gets one when it is counted first."""
        room = self._at_once and len(self._begun) < self._max_named
        return key in self._begun or (room and key not in self._counted and self._eligible(key))

    def count(self, key: K, result: str, times: int = 1) -> None:
        """Count `times` more requests of this key with this result."""
        found = self._counted.get(key)
        if found is None:
            if len(self._counted) >= self._max_counted:
                counts = self._rest.setdefault(self._other(key), {})
                counts[result] = counts.get(result, 0) + times
                return
            if self.names(key):
                self._begun[key] = {}
            found = self._counted[key] = _Counted()
        counts = found.counts
        counts[result] = counts.get(result, 0) + times

    def read(self) -> dict[K, Counts]:
        """Return counts by key, the others' under their name. Names move at most once in RENAME_EVERY_S."""
        now = self._clock()
        if now - self._renamed_s >= RENAME_EVERY_S:
            self._renamed_s = now
            self._rename()
        found = {key: _less(self._counted[key].counts, begun) for key, begun in self._begun.items()}
        others = {name: dict(counts) for name, counts in self._rest.items()}
        for key, counted in self._counted.items():
            _add(others.setdefault(self._other(key), {}), self._begun.get(key, counted.counts))
        # A key may be called as the others are: then it counts among them.
        for name, counts in others.items():
            _add(counts, found.pop(name, {}))
        return {**found, **others}

    def _rename(self) -> None:
        for counted in self._counted.values():
            calls = sum(counted.counts.values())
            counted.score = counted.score / 2 + calls - counted.seen
            counted.seen = calls

        def rank(key: K) -> tuple[float, str]:
            # A key keeps its name until another one has twice the traffic, so that series do not come and go.
            return -self._counted[key].score * (2.0 if key in self._begun else 1.0), str(key)

        ranked = sorted(self._counted, key=rank)
        top = set([key for key in ranked if self._eligible(key)][: self._max_named])
        for key in [key for key in self._begun if key not in top]:
            # Its count under its own name ends here; its earlier count stays in the sum of the others.
            self._counted[key].counts = self._begun.pop(key)
            self._counted[key].seen = sum(self._counted[key].counts.values())
        for key in top:
            if key not in self._begun:
                self._begun[key] = dict(self._counted[key].counts)
        if len(self._counted) >= self._max_counted:
            kept = max(self._max_named, self._max_counted // 2)
            for key in [key for key in ranked if key not in top][max(0, kept - len(top)) :]:
                _add(self._rest.setdefault(self._other(key), {}), self._counted.pop(key).counts)


def _less(counts: Counts, begun: Counts) -> Counts:
    return {result: count - begun.get(result, 0) for result, count in counts.items()}


def _add(to: Counts, counts: Counts) -> None:
    for result, count in counts.items():
        to[result] = to.get(result, 0) + count
