"""Counts what tenants use: one row per tenant, tier, target, version and device.

Rows only grow, so that metrics can show them. The usage ledger writes what was added since it wrote last
(`UsageBook.added`). Their number is bounded: beyond `max_rows`, what is used counts for a row named OTHER. When half
of the rows are taken, those without use for QUIET rounds of `added` are dropped; no call lasts that long.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

MAX_ROWS = 20_000
QUIET = 3600
MAX_TENANTS = 50
MAX_PAIRS = 500
OTHER = "other"
FIELDS = ("requests", "rows", "device_ns", "cpu_ns", "bytes_in", "bytes_out", "tokens_in", "tokens_out")
UNBILLED = ("failed", "left", "warmup", "probe", "shadow", "repeat", "untenanted")


_values: Callable[[Any], tuple[int, ...]] = attrgetter(*FIELDS)


class UsageKey(NamedTuple):
    """The key of a row: who used what.

    device: "" where none was used.
    device_class: the class for which there are prices, such as "cpu".
    why: why nobody is charged, one of UNBILLED; "" if the tenant is.
    target_kind: "model" or "service", where both may have this name; "" where that is known.
    """

    tenant: str
    tier: str
    target: str
    version: str
    device: str
    device_class: str
    why: str = ""
    target_kind: str = ""


class UsageRow:
    """The counters of one key. Durations are nanoseconds. Single writer, which calls `touch` before it adds.

    pending: True if the next `UsageBook.added` has to write it. turn: turn of the call that wrote it last.
    """

    __slots__ = (*FIELDS, "_touched", "key", "pending", "turn", "written")

    def __init__(self, key: UsageKey, touched: "list[UsageRow] | None" = None) -> None:
        """touched: gets this row when it changes; None for sums that are not written."""
        self.key = key
        self._touched = touched
        self.pending = touched is None
        self.requests = self.rows = self.device_ns = self.cpu_ns = 0
        self.bytes_in = self.bytes_out = self.tokens_in = self.tokens_out = 0
        self.written: tuple[int, ...] = (0,) * len(FIELDS)
        self.turn = 0

    def touch(self) -> None:
        """Note that the counters are about to grow: the ledger looks at no other rows."""
        if not self.pending and self._touched is not None:
            self.pending = True
            self._touched.append(self)

    def values(self) -> tuple[int, ...]:
        """Return the counters in the order of FIELDS."""
        return _values(self)

    def add(self, values: tuple[int, ...]) -> None:
        """Add counters in the order of FIELDS."""
        for name, value in zip(FIELDS, values, strict=True):
            if value:
                setattr(self, name, getattr(self, name) + value)


class UsageBook:
    """The rows of one server. Single writer: its loop.

    generation: changes whenever rows were dropped; whoever remembers a row has to find it again then.
    dropped_ns: device time of rows that were dropped.
    """

    def __init__(self, *, max_rows: int = MAX_ROWS, quiet: int = QUIET) -> None:
        self._max_rows = max_rows
        self._quiet = quiet
        self._rows: dict[UsageKey, UsageRow] = {}
        self._touched: list[UsageRow] = []
        self._turn = 0
        self.generation = 0
        self.dropped_ns = 0

    def row(self, key: UsageKey) -> UsageRow:
        """Return the row of a key, to be added to; beyond the bound, the row of OTHER on its device."""
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) >= self._max_rows:
                key = key._replace(tenant=key.tenant and OTHER, tier="", target=OTHER, version="")
            found = self._rows.setdefault(key, UsageRow(key, self._touched))
        found.touch()
        return found

    def rows(self) -> Iterator[UsageRow]:
        """Yield every row."""
        yield from self._rows.values()

    @property
    def device_ns(self) -> int:
        """The device time of all rows, charged or not."""
        return sum([row.device_ns for row in self._rows.values()]) + self.dropped_ns

    def added(self) -> list[tuple[UsageKey, tuple[int, ...]]]:
        """Return what was added to each row since the last call, in the order of FIELDS; rows without use are left
        out.
        """
        self._turn += 1
        found = []
        for row in self._touched:
            row.pending = False
            row.turn = self._turn
            values = row.values()
            if values != row.written:
                added = [now - before for now, before in zip(values, row.written, strict=True)]
                found.append((row.key, tuple(added)))
                row.written = values
        self._touched.clear()
        # Looking through all rows is rare: a row may be quiet for a sixtieth of its time more.
        if len(self._rows) > self._max_rows // 2 and self._turn % max(1, self._quiet // 60) == 0:
            quiet = [key for key, row in self._rows.items() if self._turn - row.turn >= self._quiet]
            self.generation += bool(quiet)
            for key in quiet:
                self.dropped_ns += self._rows.pop(key).device_ns
        return found


def counters(values: tuple[int, ...]) -> dict[str, Any]:
    """Return the counters by their names; they are whole numbers."""
    return dict(zip(FIELDS, values, strict=True))


def by_label(rows: Iterator[UsageRow], *, max_tenants: int = MAX_TENANTS, max_pairs: int = MAX_PAIRS) -> list[UsageRow]:
    """Return the rows of tenants for metrics: versions and devices of a class together, names bounded.

    The tenants, and the pairs of tenant and target, that came first keep their names, so that a series never loses
    what it has counted; the use of the others has OTHER for a name.
    """
    tenants: set[str] = set()
    pairs: set[tuple[str, str]] = set()
    found: dict[UsageKey, UsageRow] = {}
    for row in rows:
        tenant, target = row.key.tenant, row.key.target
        if row.key.why:
            continue
        if tenant not in tenants:
            if len(tenants) < max_tenants:
                tenants.add(tenant)
            else:
                tenant = OTHER
        if (tenant, target) not in pairs:
            if len(pairs) < max_pairs:
                pairs.add((tenant, target))
            else:
                target = OTHER
        key = UsageKey(tenant, row.key.tier, target, "", "", row.key.device_class)
        sums = found.get(key)
        if sums is None:
            sums = found[key] = UsageRow(key)
        sums.add(row.values())
    return list(found.values())


def unbilled_ns(rows: Iterator[UsageRow], counter: str = "device_ns") -> dict[str, int]:
    """Return the time that nobody is charged for, by reason; every reason is there. counter: which time."""
    found = dict.fromkeys(UNBILLED, 0)
    for row in rows:
        if row.key.why:
            found[row.key.why] += getattr(row, counter)
    return found
