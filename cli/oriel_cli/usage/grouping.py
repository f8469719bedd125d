"""Adds up lines of the usage ledger by what the command asks for, and puts prices to them. Pure."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from oriel_cli.errors import CommandFailed
from oriel_policies.metering.prices import Amounts, Price, amounts, price_at
from oriel_policies.metering.reconcile import TOLERANCE, DeviceHour
from oriel_wire.usage.lines import COUNTERS, UsageLine

KEYS = ("tenant", "target", "tier", "version", "class", "why", "day", "hour", "minute", "unit")
IDLE = "(idle)"
UNBILLED = "(unbilled)"
_LENGTHS = {"day": 10, "hour": 13, "minute": 16}


@dataclass(slots=True)
class Group:
    """The sum of what was used under one key.

    keys: name -> value.
    device_class, day, tier: the class of device, the day and the tier, on which the price depends; tier: "" where no
    price is for one tier.
    sums: counter -> number.
    estimated: True if some of it is an estimate.
    """

    keys: dict[str, str]
    device_class: str
    day: str
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    estimated: bool = False
    tier: str = ""

    def priced(self, prices: Sequence[Price]) -> tuple[Price, Amounts] | None:
        """Return the price that applies and what is to be paid; None without a price."""
        price = price_at(prices, self.device_class, self.day, self.tier)
        if price is None:
            return None
        names = ("device_ns", "cpu_ns", "bytes_out", "tokens_in", "tokens_out")
        return price, amounts(price, **{name: self.sums[name] for name in names})


def group(lines: Iterable[UsageLine], by: Sequence[str], *, idle: str = "", by_tier: bool = False) -> list[Group]:
    """Add up the lines of use. Groups of different classes or days are never one, because their prices differ. Tokens
    have no class, whatever device made them: so budgets price them too. One in which nothing was used is left out.

    by_tier: the prices differ by tier too.
    idle: "show" adds a group of each class for the time in which devices were idle, "spread" charges that time to the
    tenants of the class and the day, in proportion to their use; "" leaves it out.
    """
    lines = list(lines)
    outer = outermost(lines)
    found: dict[tuple[str, ...], Group] = {}
    for line in lines:
        if line.kind != "use":
            continue
        day, tier, counts = line.minute[:10], line.tier if by_tier else "", counted(line, outer)
        tokens = {name: counts.pop(name) for name in ("tokens_in", "tokens_out")}
        for device_class, part in ((line.device_class, counts), ("", tokens)):
            if not any(part.values()):
                continue
            keys = {name: device_class if name == "class" else _value(line, name) for name in by}
            at = (*keys.values(), device_class, day, tier)
            known = found.get(at)
            if known is None:
                known = found[at] = Group(keys, device_class, day, tier=tier)
            known.estimated |= line.estimated
            for name, value in part.items():
                known.sums[name] += value
    groups = [each for each in found.values() if any(each.sums.values())]
    if idle:
        _idle(groups, lines, by, idle)
    return sorted(groups, key=lambda each: (*each.keys.values(), each.day, each.device_class, each.tier))


def outermost(lines: Iterable[UsageLine]) -> set[str]:
    """Return the units that count requests and bytes of tenants: the gateway if it recorded any, because calls pass it
    first and would be counted twice otherwise.
    """
    units = {line.unit for line in lines if line.kind == "use" and line.tenant}
    return {"gateway"} if "gateway" in units else units


def counted(line: UsageLine, outer: Container[str]) -> dict[str, int]:
    """Return the counters of a line: requests and bytes of tenants only of the `outer` units, see `outermost`."""
    left_out = ("requests", "bytes_in", "bytes_out") if line.tenant and line.unit not in outer else ()
    return {name: 0 if name in left_out else getattr(line, name) for name in COUNTERS}


def billed_twice(lines: Sequence[UsageLine]) -> list[tuple[str, str, int]]:
    """Return (tenant, target, estimated nanoseconds) of use that a gateway has estimated although a server recorded it.

    A server that keeps a ledger reports each call to the gateway. So where servers recorded more requests than were
    reported, the estimates are of their calls. target: a model; "" for the services of a tenant together.
    """
    models = {(line.tenant, line.target) for line in lines if line.kind == "use" and line.unit == "inference"}
    estimated: Counter[tuple[str, str]] = Counter()
    excess: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        direct = line.unit != "logic" and (line.tenant, line.target) in models
        at = line.tenant, line.target if direct else ""
        if line.kind == "use" and line.estimated:
            estimated[at] += line.device_ns
        elif line.kind == "use" and line.unit != "gateway" and not line.why:
            excess[at] += line.requests * (1 - TOLERANCE)
        elif line.kind == "seen" and not line.estimated:
            excess[at] -= line.requests
    return [(*at, ns) for at, ns in sorted(estimated.items()) if ns and excess[at] > 0]


def _value(line: UsageLine, name: str) -> str:
    if name in _LENGTHS:
        return line.minute[: _LENGTHS[name]]
    if name == "tenant":
        return line.tenant or UNBILLED
    value: str = getattr(line, name)
    return value


def _idle(groups: list[Group], lines: Iterable[UsageLine], by: Sequence[str], how: str) -> None:
    idle_ns: dict[tuple[str, str], int] = {}
    for line in lines:
        if line.kind == "device":
            at = (line.device_class, line.minute[:10])
            idle_ns[at] = idle_ns.get(at, 0) + line.wall_ns - line.busy_ns
    for (device_class, day), ns in sorted(idle_ns.items()):
        users = [each for each in groups if (each.device_class, each.day) == (device_class, day)]
        used = [each.sums["device_ns"] for each in users]
        if how == "spread" and any(used):
            from oriel_policies.metering.shares import split

            for each, share in zip(users, split(max(0, ns), used), strict=True):
                each.sums["device_ns"] += share
            continue
        keys = {name: IDLE if name == "tenant" else day if name == "day" else "" for name in by}
        shown = Group(keys, device_class, day)
        shown.sums["device_ns"] = max(0, ns)
        groups.append(shown)


def hours(lines: Iterable[tuple[str, UsageLine]]) -> Mapping[tuple[str, str, str], DeviceHour]:
    """Return (instance, device, hour) -> its sums, for `oriel usage reconcile`."""
    found: dict[tuple[str, str, str], DeviceHour] = {}
    opened: dict[tuple[str, str], int] = {}
    for identity, line in lines:
        if not line.device:
            continue
        instance = identity.partition("-")[0]
        hour = found.setdefault((instance, line.device, line.minute[:13]), DeviceHour())
        if line.kind == "device":
            hour.busy_ns += line.busy_ns
            hour.wall_ns += line.wall_ns
            hour.open_ns += line.open_ns - opened.get((instance, line.device), 0)
            opened[instance, line.device] = line.open_ns
        elif line.kind == "use" and not line.estimated:
            if line.tenant and not line.why:
                hour.tenants_ns += line.device_ns
            else:
                hour.unbilled_ns += line.device_ns
    return found


def keys_of(text: str) -> list[str]:
    """Return the keys of `--by`. Raises CommandFailed."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in KEYS]
    if unknown or not names:
        raise CommandFailed(f"--by takes {', '.join(KEYS)}, not {', '.join(map(repr, unknown)) or 'nothing'}")
    return list(dict.fromkeys(names))
