"""Counters of the tenants with the most traffic, so that a label `tenant` has a bounded number of values.

Every tenant with traffic is counted, up to `max_counted`; `read`, called by a scrape, names those with the most
traffic. A tenant that gets a name begins at 0 and takes its counter along when it loses the name. So every series,
`other` included, only grows while it exists: rates are never wrong, but sums over all time may be low.
"""

from collections.abc import Callable
from time import monotonic

NAMED = 50
MAX_COUNTED = 8192
OTHER = "other"
RENAME_EVERY_S = 60.0

Counts = dict[str, int]


class _Tenant:
    __slots__ = ("counts", "score", "seen")

    def __init__(self) -> None:
        self.counts: Counts = {}
        self.seen = 0  # calls when names were last assigned
        self.score = 0.0  # calls per period; each older period counts half of the next


class TopTenants:
    """Counters by tenant. max_named: tenants with a name of their own. The gateway's loop is the only writer and
    reader.
    """

    def __init__(
        self, *, max_named: int = NAMED, max_counted: int = MAX_COUNTED, clock: Callable[[], float] = monotonic
    ) -> None:
        self._max_named = max_named
        self._max_counted = max_counted
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._rest: Counts = {}  # counts of tenants not in `_tenants`, and those from before a tenant got its name
        self._begun: dict[str, Counts] = {}  # named tenant -> its counts when it got the name
        self._renamed_s = -RENAME_EVERY_S

    def count(self, name: str, result: str, times: int = 1) -> None:
        """Count `count` more requests of this tenant with this result."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._max_counted:
                self._rest[result] = self._rest.get(result, 0) + times
                return
            tenant = self._tenants[name] = _Tenant()
        counts = tenant.counts
        counts[result] = counts.get(result, 0) + times

    def read(self) -> dict[str, Counts]:
        """Return counts by tenant, with the rest as `other`. Names move at most once in RENAME_EVERY_S."""
        now = self._clock()
        if now - self._renamed_s >= RENAME_EVERY_S:
            self._renamed_s = now
            self._rename()
        counts = {name: _less(self._tenants[name].counts, begun) for name, begun in self._begun.items()}
        other = dict(self._rest)
        for name, tenant in self._tenants.items():
            _add(other, self._begun.get(name, tenant.counts))
        # A tenant may be called `other`: then it counts among the others.
        _add(other, counts.pop(OTHER, {}))
        return {**counts, OTHER: other}

    def _rename(self) -> None:
        for tenant in self._tenants.values():
            calls = sum(tenant.counts.values())
            tenant.score = tenant.score / 2 + calls - tenant.seen
            tenant.seen = calls

        def rank(name: str) -> tuple[float, str]:
            # A tenant keeps its name until another one has twice the traffic, so that series do not come and go.
            return -self._tenants[name].score * (2.0 if name in self._begun else 1.0), name

        ranked = sorted(self._tenants, key=rank)
        top = set(ranked[: self._max_named])
        for name in [name for name in self._begun if name not in top]:
            # What it counted under its name leaves with it; what it had before stays with the others.
            self._tenants[name].counts = self._begun.pop(name)
            self._tenants[name].seen = sum(self._tenants[name].counts.values())
        for name in top:
            if name not in self._begun:
                self._begun[name] = dict(self._tenants[name].counts)
        if len(self._tenants) >= self._max_counted:
            for name in ranked[max(self._max_named, self._max_counted // 2) :]:
                _add(self._rest, self._tenants.pop(name).counts)


def _less(counts: Counts, begun: Counts) -> Counts:
    return {result: count - begun.get(result, 0) for result, count in counts.items()}


def _add(to: Counts, counts: Counts) -> None:
    for result, count in counts.items():
        to[result] = to.get(result, 0) + count
