"""Counts what tenants used, as this gateway saw it: for `GET /v1/usage` and for the usage ledger.

Calls that have ended come added up (`observe.cube`): those that were answered, and what passed of those that their
clients cut off. The servers behind the gateway record what they used themselves, so that the gateway writes to the
ledger only bytes, requests, and an estimate of the device time of servers that do not report it. Reports of the others,
and use that was cut off, are written as lines of kind "seen", which nobody adds up: from them a restarted gateway knows
what its tenants used.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from oriel_gateway.observe.budgets import SEPARATOR
from oriel_gateway.observe.cube import Cell, Charge
from oriel_gateway.observe.spending import Spending
from oriel_gateway.observe.top_names import OTHER, TopNames
from oriel_gateway.routing.targets import Target
from oriel_policies.bounds.calendar import Period
from oriel_policies.documents import Tenant
from oriel_policies.metering.budgets import Budget, Use, spent
from oriel_policies.metering.usage import UsageBook, UsageKey, UsageRow, counters
from oriel_wire.usage.lines import COUNTERS, UsageLine

UNIT = "gateway"
MAX_ROWS = 100_000
MAX_SUMS = 20_000
MAX_CLASSES = 32  # device classes per target; bounded because servers name them
TOKEN_SERIES = 100  # the most tenants, routes and tiers whose tokens are counted under their names
CUT_OFF = "left"  # why nobody else is charged for a call that its client left, or that was later than it allowed
SHOWN = ("requests", "bytes_in", "bytes_out", "device_ns", "cpu_ns", "tokens_in", "tokens_out")


_Counts = Mapping[str, int]
_Names = tuple[str, str, str, str, bool]  # tenant, kind, target, tier, True for an estimate


class _SumName(NamedTuple):
    """The parts of the name under which the ledger has one counter of all gateways. estimated: "1" or "0"."""

    day: str
    tenant: str
    kind: str
    target: str
    tier: str
    estimated: str
    device_class: str
    counter: str


class _Periods:
    """The use of one tenant's target in one tier on one day and in one month.

    classes, month_classes: device time by class.
    """

    __slots__ = ("classes", "day", "month", "month_classes")

    def __init__(self) -> None:
        self.classes: dict[str, int] = {}
        self.month_classes: dict[str, int] = {}
        self.day: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.month: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def add(self, used: _Counts, by_class: _Counts, *, today: bool) -> None:
        """Add what was used this month. by_class: device time by class. today: True if it was used today."""
        for name, value in used.items():
            self.month[name] += value
        _add_classes(self.month_classes, by_class)
        if today:
            for name, value in used.items():
                self.day[name] += value
            _add_classes(self.classes, by_class)


class _Sums(NamedTuple):
    """Everything that the calls of one tenant to one target are added to, so that no name is looked up per call.

    tenant, target: kept, because their identity is the key. periods: None if there are too many tenants.
    """

    tenant: Tenant
    target: Target
    written: UsageRow
    seen: UsageRow
    periods: _Periods | None


class Usage:
    """The use of all tenants. Single writer: the gateway's loop.

    since: the time from which on this gateway knows the use of its tenants.
    spending: the spent amounts of budgets; None if there are no budgets.
    unshared: sums that the ledger has not got yet; None without a ledger.
    tokens: tokens that were read (`input`) and written (`output`), by tenant, route and tier.
    classes: device classes, see `cube.Charge`.
    """

    def __init__(self, now: datetime | None = None) -> None:
        self.spending: Spending | None = None
        self.since = now or datetime.now(UTC)
        self.tokens: TopNames[tuple[str, str, str]] = TopNames(lambda of: (OTHER, OTHER, of[2]), max_named=TOKEN_SERIES)
        self._written = UsageBook(max_rows=MAX_ROWS)
        self._seen = UsageBook(max_rows=MAX_ROWS)
        self.unshared: dict[str, int] | None = None
        self._tenants: dict[str, dict[tuple[str, str, str, bool], _Periods]] = {}
        self._sums: dict[tuple[int, int, str, str], _Sums] = {}  # until the books or the tenants are replaced
        self.classes: dict[str, str] = {}
        self._day = self._month = ""

    def count(self, cells: Iterable[Cell], now: datetime | None = None) -> None:
        """Count the calls that tenants are charged for."""
        self._turn(now or datetime.now(UTC))
        for cell in cells:
            tenant, target, charge = cell.tenant, cell.target, cell.charge
            if charge is None or tenant is None or target is None or not charge.requests:
                continue
            self._spend(tenant, target, charge)
            self._keep(tenant, target, charge)

    def _spend(self, tenant: Tenant, target: Target, charge: Charge) -> None:
        spending = self.spending
        if spending is not None and tenant.budgets:
            spending.add(tenant, _use_of(charge, tenant.tier.name), self._day)
        read, written = charge.tokens()
        if read or written:
            of = (tenant.name, target.plan.name, tenant.tier.name)
            self.tokens.count(of, "input", read)
            self.tokens.count(of, "output", written)
            if spending is not None:
                spending.used_tokens(tenant)

    def _keep(self, tenant: Tenant, target: Target, charge: Charge) -> None:
        """Note the use of answered calls, and of the answered part of those that were cut off."""
        reported, estimated = charge.reported, charge.estimated
        classes = charge.device_classes()
        if charge.cut_off:
            self._see(tenant, target, CUT_OFF, estimated.values(sum(classes.values()), reported.cpu_ns), classes)
            return
        if reported.requests:
            self._see(tenant, target, "", reported.values(sum(classes.values()), reported.cpu_ns), classes)
        if estimated.requests:
            busy_ns = estimated.device_ns
            self._see(tenant, target, "estimated", estimated.values(busy_ns, 0), {"": busy_ns})

    def _see(self, tenant: Tenant, target: Target, why: str, counted: tuple[int, ...], classes: _Counts) -> None:
        """Note some use for the tenant's page, and for a gateway that starts later. classes: device time by class."""
        first = "" if why == CUT_OFF else next(iter(classes), "")
        key = (id(tenant), id(target), why, first)
        sums = self._sums.get(key) or self._sums.setdefault(key, self._sums_of(tenant, target, why, first))
        seen, used = sums.seen, {name: value for name, value in counters(counted).items() if value}
        seen.add(counted)
        if why != CUT_OFF:
            sums.written.requests += used["requests"]
            sums.written.bytes_in += used.get("bytes_in", 0)
            sums.written.bytes_out += used.get("bytes_out", 0)
        for device_class, device_ns in classes.items():
            if device_class != first:
                seen.device_ns -= device_ns
                self._seen.row(seen.key._replace(device_class=device_class)).device_ns += device_ns
        if self.unshared is not None:
            self._share(_names(tenant, target, why), used, classes)
        if sums.periods is not None:
            sums.periods.add(used, classes, today=True)

    def _sums_of(self, tenant: Tenant, target: Target, why: str, device_class: str) -> _Sums:
        if len(self._sums) >= MAX_SUMS:
            self._sums.clear()
        name, tier = target.name or target.route, tenant.tier.name
        written = UsageKey(tenant.name, tier, name, target.version, "", "", "", target.kind)
        seen = written._replace(device_class=device_class, why=why)
        periods = self._periods_of(_names(tenant, target, why))
        return _Sums(tenant, target, self._written.row(written), self._seen.row(seen), periods)

    def added(self, minute: str) -> list[UsageLine]:
        """Return what was used since the last call, as lines of the ledger.

        The rows are dropped with it: nothing is done for tenants that were not served meanwhile.
        """
        self._sums.clear()
        written, self._written = self._written, UsageBook(max_rows=MAX_ROWS)
        seen, self._seen = self._seen, UsageBook(max_rows=MAX_ROWS)
        lines = [_line(minute, key, values) for key, values in written.added()]
        for key, values in seen.added():
            estimated, why = bool(key.why), key.why
            key = key._replace(why=CUT_OFF if why == CUT_OFF else "")
            if estimated and why != CUT_OFF:
                # of a server that does not report it: the one record of its device time, and of its tokens
                used = counters(values)
                only = (0, 0, used["device_ns"], 0, 0, 0, used["tokens_in"], used["tokens_out"])
                lines.append(_line(minute, key, only, True))
            lines.append(_line(minute, key, values, estimated, seen=True))
        return lines

    def read_ledger(self, lines: Iterable[UsageLine], now: datetime | None = None, *, share: bool = False) -> None:
        """Take over what an earlier gateway noted this month. share: as sums of the ledger as well."""
        self._turn(now or datetime.now(UTC))
        for line in lines:
            if line.kind != "seen" or line.unit != UNIT or line.minute[:7] != self._month:
                continue
            first = datetime.fromisoformat(line.minute).replace(tzinfo=UTC)
            self.since = min(self.since, first)
            used = {name: getattr(line, name) for name in SHOWN}
            by_class = {line.device_class: line.device_ns}
            of = (line.tenant, line.target_kind, line.target, line.tier, line.estimated)
            self._note(of, used, by_class, line.minute[:10], share=share)

    def of(self, tenant: str, now: datetime | None = None) -> dict[str, Any]:
        """Return what `GET /v1/usage` answers: the use of one tenant, today and this month."""
        now = now or datetime.now(UTC)
        self._turn(now)
        found = self._tenants.get(tenant, {})
        day = [_shown(*at, periods.day) for at, periods in sorted(found.items())]
        month = [_shown(*at, periods.month) for at, periods in sorted(found.items())]
        return {
            "tenant": tenant,
            "since": self.since.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "day": {"begins": f"{self._day}T00:00:00Z", **_summed(day)},
            "month": {"begins": f"{self._month}-01T00:00:00Z", **_summed(month)},
        }

    def today(self, tenant: str, now: datetime | None = None) -> tuple[str, list[Use]]:
        """Return the day, as "2026-11-24", and what a tenant has used on it in each tier, as it is priced."""
        self._turn(now or datetime.now(UTC))
        return self._day, self._uses(tenant, month=False)

    def before(self, tenant: str, budget: Budget) -> int:
        """Return a tenant's use of a budget in the present period before the budget was counted."""
        prices = self.spending.snapshot.prices.values() if self.spending is not None else ()
        self._turn(datetime.now(UTC))
        uses = self._uses(tenant, month=budget.period is Period.MONTH)
        return sum([spent(budget.unit, use, prices, self._day) for use in uses])

    def _uses(self, tenant: str, *, month: bool) -> list[Use]:
        used: defaultdict[str, Counter[str]] = defaultdict(Counter)
        classes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for of, periods in self._tenants.get(tenant, {}).items():
            tier = of[2]
            used[tier].update(periods.month if month else periods.day)
            classes[tier].update(periods.month_classes if month else periods.classes)
        names = ("cpu_ns", "bytes_out", "tokens_in", "tokens_out")
        return [
            Use(tier=tier, device_ns=dict(classes[tier]), **{name: found[name] for name in names})
            for tier, found in used.items()
        ]

    def month(self) -> str:
        """Return the present month in UTC, as "2026-11"."""
        self._turn(datetime.now(UTC))
        return self._month

    def take_over(self, sums: Mapping[str, int], *, whole: bool) -> None:
        """Add what other gateways have counted; see `SharedUse`. whole: the sums are those of all gateways."""
        if whole:
            self._tenants = {}
            self._sums.clear()
            self.since = min(self.since, datetime.fromtimestamp(sums.get("since", self.since.timestamp()), UTC))
        for name, value in sums.items():
            parts = name.split(SEPARATOR)
            if len(parts) != len(_SumName._fields):
                continue
            of = _SumName(*parts)
            if of.day[:7] == self._month and of.counter in SHOWN:
                by_class = {of.device_class: value} if of.counter == "device_ns" else {}
                at = (of.tenant, of.kind, of.target, of.tier, of.estimated == "1")
                self._note(at, {of.counter: value}, by_class, of.day)

    def _note(self, of: _Names, used: _Counts, by_class: _Counts, day: str = "", *, share: bool = False) -> None:
        """Add to the sums of a name. by_class: device time by class. day: "" for today."""
        if share and self.unshared is not None:
            self._share(of, used, by_class, day)
        periods = self._periods_of(of)
        if periods is not None:
            periods.add(used, by_class, today=day in ("", self._day))

    def _share(self, of: _Names, used: _Counts, by_class: _Counts, day: str = "") -> None:
        """Add to what the ledger has not got yet."""
        assert self.unshared is not None
        *names, estimated = of
        begin = SEPARATOR.join((day or self._day, *names, str(int(estimated))))
        for device_class, counter, value in (
            *(("", name, value) for name, value in used.items() if name in SHOWN and name != "device_ns"),
            *((device_class, "device_ns", ns) for device_class, ns in by_class.items()),
        ):
            if value:
                name = SEPARATOR.join((begin, device_class, counter))
                self.unshared[name] = self.unshared.get(name, 0) + value

    def _periods_of(self, of: _Names) -> _Periods | None:
        """Return the sums of a name; None beyond `MAX_ROWS` tenants."""
        tenant, kind, target, tier, estimated = of
        targets = self._tenants.get(tenant)
        if targets is None:
            if len(self._tenants) >= MAX_ROWS:
                return None
            targets = self._tenants[tenant] = {}
        periods = targets.get((kind, target, tier, estimated))
        if periods is None:
            if len(targets) >= 1000:
                target = "other"
            periods = targets.setdefault((kind, target, tier, estimated), _Periods())
        return periods

    def _turn(self, now: datetime) -> None:
        """Begin the day and the month of `now` in UTC."""
        day = now.astimezone(UTC).strftime("%Y-%m-%d")
        if day == self._day:
            return
        self._sums.clear()
        if day[:7] != self._month:
            self._tenants = {}
            self._month = day[:7]
            if self._day:
                self.since = now
        self._day = day
        for targets in self._tenants.values():
            for periods in targets.values():
                periods.day = dict.fromkeys(COUNTERS, 0)
                periods.classes = {}


def _names(tenant: Tenant, target: Target, why: str) -> _Names:
    return tenant.name, target.kind, target.name or target.route, tenant.tier.name, why != ""


def _add_classes(sums: dict[str, int], by_class: Mapping[str, int]) -> None:
    for device_class, device_ns in by_class.items():
        known = device_class if device_class in sums or len(sums) < MAX_CLASSES else ""
        sums[known] = sums.get(known, 0) + device_ns


def _use_of(charge: Charge, tier: str) -> Use:
    reported, estimated, classes = charge.reported, charge.estimated, dict(charge.device_classes())
    classes[""] = classes.get("", 0) + estimated.device_ns
    tokens_in, tokens_out = charge.tokens()
    sent = reported.bytes_out + estimated.bytes_out
    return Use(
        tier=tier,
        device_ns=classes,
        cpu_ns=reported.cpu_ns,
        bytes_out=sent,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
    )


def _line(
    minute: str, key: UsageKey, values: tuple[int, ...], estimated: bool = False, *, seen: bool = False
) -> UsageLine:
    kind: Literal["seen", "use"] = "seen" if seen else "use"
    return UsageLine(kind=kind, minute=minute, unit=UNIT, estimated=estimated, **key._asdict(), **counters(values))


def _shown(kind: str, target: str, tier: str, estimated: bool, used: dict[str, int]) -> dict[str, Any]:
    return {
        "target": target,
        "kind": kind,
        "tier": tier,
        "estimated": estimated,
        **{name: used[name] for name in SHOWN},
    }


def _summed(targets: list[dict[str, Any]]) -> dict[str, Any]:
    used = [each for each in targets if each["requests"]]
    return {**{name: sum(each[name] for each in used) for name in SHOWN}, "targets": used}
