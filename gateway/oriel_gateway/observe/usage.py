"""What tenants used, as this gateway saw it: for the tenants themselves (`GET /v1/usage`) and for the usage ledger.

A call that has ended adds one tuple; they are counted together, `BATCH` at a time or when somebody reads. The servers
behind the gateway record what they used themselves, so that the gateway writes to the ledger only bytes, requests, and
an estimate of the device time of servers that do not report it. What the others report is written as lines of kind
"seen", which nobody adds up: from them a restarted gateway knows what its tenants used.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_policies.metering.usage import UsageBook, UsageKey, UsageRow
from oriel_wire.context import parse_cost
from oriel_wire.usage import COUNTERS, UsageLine

UNIT = "gateway"
BATCH: Final = 256
MAX_ROWS = 100_000
SHOWN = ("requests", "bytes_in", "bytes_out", "device_ns", "cpu_ns", "tokens_in", "tokens_out")


class _Periods:
    """The use of one tenant's target on one day and in one month."""

    __slots__ = ("day", "month")

    def __init__(self) -> None:
        self.day: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.month: dict[str, int] = dict.fromkeys(COUNTERS, 0)


class Usage:
    """Single writer: the gateway's loop. since: from when on this gateway knows what its tenants used."""

    def __init__(self, now: datetime | None = None) -> None:
        self.recent: list[tuple[Tenant, Target, int, int, str, float]] = []
        self.since = now or datetime.now(UTC)
        self._written = UsageBook(max_rows=MAX_ROWS)
        self._seen = UsageBook(max_rows=MAX_ROWS)
        self._tenants: dict[str, dict[tuple[str, bool], _Periods]] = {}
        self._day = self._month = ""

    def ended(self, tenant: Tenant, target: Target, bytes_in: int, bytes_out: int, used: str, busy_s: float) -> None:
        """Note an answered call. used: what its answer said it used, "" if nothing; busy_s: its share of the time in
        which its pool was busy.
        """
        self.recent.append((tenant, target, bytes_in, bytes_out, used, busy_s))
        if len(self.recent) >= BATCH:
            self.count()

    def count(self, now: datetime | None = None) -> None:
        """Count and clear `recent`."""
        batch, self.recent = self.recent, []
        if not batch:
            return
        self._turn(now or datetime.now(UTC))
        for tenant, target, bytes_in, bytes_out, used, busy_s in batch:
            if tenant.caller:
                continue  # a model call of a service, which the service's own call is charged for
            found = parse_cost(used) if used else None
            if found is None:
                counted = (1, bytes_in, bytes_out, max(0, round(busy_s * 1e9)), 0, 0, 0)
            else:
                counted = (1, bytes_in, bytes_out, found.device_ns, found.cpu_ns, found.tokens_in, found.tokens_out)
            estimated = found is None
            name = target.name or target.route
            key = UsageKey(tenant.name, tenant.tier.name, name, target.version, "", "", "")
            row = self._written.row(key)
            row.requests += 1
            row.bytes_in += bytes_in
            row.bytes_out += bytes_out
            kept = self._seen.row(key._replace(why="estimated" if estimated else ""))
            _add(kept, counted)
            self._note(tenant.name, name, estimated, dict(zip(SHOWN, counted, strict=True)))

    def added(self, minute: str) -> list[UsageLine]:
        """Return what was used since the last call, as lines of the ledger."""
        self.count()
        lines = [_line(minute, key, values) for key, values in self._written.added()]
        for key, values in self._seen.added():
            estimated = bool(key.why)
            counters = dict(zip(COUNTERS, values, strict=True))
            if estimated:
                # of a server that does not report it: the one record of its device time
                lines.append(_line(minute, key._replace(why=""), (0, 0, counters["device_ns"], 0, 0, 0, 0, 0), True))
            lines.append(_line(minute, key._replace(why=""), values, estimated, seen=True))
        return lines

    def restore(self, lines: Iterable[UsageLine], now: datetime | None = None) -> None:
        """Take over what an earlier gateway noted this month."""
        self._turn(now or datetime.now(UTC))
        for line in lines:
            if line.kind != "seen" or line.unit != UNIT or line.minute[:7] != self._month:
                continue
            first = datetime.fromisoformat(line.minute).replace(tzinfo=UTC)
            self.since = min(self.since, first)
            used = {name: getattr(line, name) for name in SHOWN}
            self._note(line.tenant, line.target, line.estimated, used, day=line.minute[:10] == self._day)

    def of(self, tenant: str, now: datetime | None = None) -> dict[str, Any]:
        """Return what `GET /v1/usage` answers: the use of one tenant, today and this month."""
        now = now or datetime.now(UTC)
        self.count(now)
        self._turn(now)
        found = self._tenants.get(tenant, {})
        day = [_shown(target, estimated, periods.day) for (target, estimated), periods in sorted(found.items())]
        month = [_shown(target, estimated, periods.month) for (target, estimated), periods in sorted(found.items())]
        return {
            "tenant": tenant,
            "since": self.since.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "day": {"begins": f"{self._day}T00:00:00Z", **_summed(day)},
            "month": {"begins": f"{self._month}-01T00:00:00Z", **_summed(month)},
        }

    def _note(self, tenant: str, target: str, estimated: bool, used: dict[str, int], *, day: bool = True) -> None:
        targets = self._tenants.get(tenant)
        if targets is None:
            if len(self._tenants) >= MAX_ROWS:
                return
            targets = self._tenants[tenant] = {}
        periods = targets.get((target, estimated))
        if periods is None:
            if len(targets) >= 1000:
                target = "other"
            periods = targets.setdefault((target, estimated), _Periods())
        for name, value in used.items():
            periods.month[name] += value
            if day:
                periods.day[name] += value

    def _turn(self, now: datetime) -> None:
        """Begin the day and the month of `now` in UTC."""
        day = now.astimezone(UTC).strftime("%Y-%m-%d")
        if day == self._day:
            return
        if day[:7] != self._month:
            self._tenants = {}
            self._month = day[:7]
            if self._day:
                self.since = now
        self._day = day
        for targets in self._tenants.values():
            for periods in targets.values():
                periods.day = dict.fromkeys(COUNTERS, 0)


def _add(row: UsageRow, counted: tuple[int, ...]) -> None:
    for name, value in zip(SHOWN, counted, strict=True):
        setattr(row, name, getattr(row, name) + value)


def _line(
    minute: str, key: UsageKey, values: tuple[int, ...], estimated: bool = False, *, seen: bool = False
) -> UsageLine:
    counters: dict[str, Any] = dict(zip(COUNTERS, values, strict=True))
    return UsageLine(
        kind="seen" if seen else "use",
        minute=minute,
        unit=UNIT,
        tenant=key.tenant,
        tier=key.tier,
        target=key.target,
        version=key.version,
        estimated=estimated,
        **counters,
    )


def _shown(target: str, estimated: bool, used: dict[str, int]) -> dict[str, Any]:
    return {"target": target, "estimated": estimated, **{name: used[name] for name in SHOWN}}


def _summed(targets: list[dict[str, Any]]) -> dict[str, Any]:
    used = [each for each in targets if each["requests"]]
    return {**{name: sum(each[name] for each in used) for name in SHOWN}, "targets": used}
