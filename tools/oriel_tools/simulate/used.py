"""Reports how much of its servers a simulated load used, and the cost of that, for machines and for people. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from oriel_cli.table import columns
from oriel_policies.metering.prices import NANO, Price, amounts
from oriel_tools.load.report import tier_lines
from oriel_tools.simulate.profile import Profile
from oriel_tools.simulate.virtual import Use


def used(
    use: Use,
    profiles: Mapping[str, Profile],
    document: Mapping[str, Any],
    prices: Mapping[str, Price | None],
    *,
    through_gateway: bool,
) -> dict[str, Any]:
    """Return the part `simulation` of a document. prices: the prices of today, by class of device."""
    phases = document["phases"]
    seconds = sum([phase["seconds"] for phase in phases])
    good = sum([phase["all"]["good"] for phase in phases])
    device_s = sum(use.device_s.values())
    mean = use.replica_s / seconds
    return {
        "replicas": use.replicas,
        "mean_replicas": round(mean, 3),
        "replica_seconds": round(use.replica_s, 3),
        "through_gateway": through_gateway,
        "seconds": round(seconds, 3),
        "device_s": round(device_s, 6),
        "utilisation": round(sum(map(sum, use.busy.values())) / (use.replica_s * use.slots), 4),
        "models": {
            name: {
                "device_class": profile.device_class,
                "device_s": round(use.device_s[name], 6),
                "batches": sum(use.batches.get(name, {}).values()),
                "rows": sum([rows * count for rows, count in use.batches.get(name, {}).items()]),
                "sizes": {str(rows): count for rows, count in sorted(use.batches.get(name, {}).items())},
                "capacity_rows_per_s": round(profile.capacity * mean, 2),
            }
            for name, profile in profiles.items()
        },
        "tiers": {tier: {"device_s": round(use.tier_s[tier], 6)} for tier in document["timeline"]},
        "cost": [
            found
            for name, price in sorted(prices.items())
            if (found := _cost(name, price, use, profiles, seconds, good)) is not None
        ],
        "timeline": {
            "width_s": use.width_s,
            "busy": {
                name: [round(busy / use.capacity_s(index), 4) for index, busy in enumerate(bins)]
                for name, bins in use.busy.items()
            },
            "waiting": use.waiting,
            "replicas": use.scaled,
        },
    }


def _cost(
    name: str, price: Price | None, use: Use, profiles: Mapping[str, Profile], seconds: float, good: int
) -> dict[str, Any] | None:
    """Return what one class of device costs: what was used of it, and all replicas for the whole time."""
    if price is None:
        return None
    used_s = sum([use.device_s[model] for model, profile in profiles.items() if profile.device_class == name])
    replicas = amounts(price, device_ns=round(use.replica_s * 1e9)).device / NANO
    return {
        "device_class": name,
        "price": price.name,
        "currency": price.currency,
        "used": amounts(price, device_ns=round(used_s * 1e9)).device / NANO,
        "replicas": replicas,
        "replicas_per_hour": price.device_hour / NANO * use.replica_s / seconds,
        "per_million_answers": round(replicas / good * 1e6, 6) if good else None,
    }


def as_text(document: Mapping[str, Any]) -> list[str]:
    """The lines that a person reads."""
    found, lines = document["simulation"], list[str]()
    for phase in document["phases"]:
        warm = "; a warm-up, not quoted" if phase["warm_up"] else ""
        lines += [f"{phase['phase']}: {phase['arrivals']} arrivals, {phase['seconds']:g} s{warm}"]
        lines += [*tier_lines(phase, document["streams"]), ""]
    way = "through a gateway" if found["through_gateway"] else "without a gateway"
    lines.append(
        f"{replicas_text(found)} {way}: busy for {found['utilisation']:.1%} of the time, "
        f"{found['device_s']:.1f} s of device time"
    )
    lines += [f"  {line}" for line in model_table(found)]
    lines += [f"  {tier}: {each['device_s']:.1f} s of device time in answers" for tier, each in found["tiers"].items()]
    lines += [f"  {line}" for line in cost_lines(found)]
    return lines


def replicas_text(found: Mapping[str, Any]) -> str:
    """How many replicas there were."""
    if found["timeline"]["replicas"]:
        return f"{found['mean_replicas']:.1f} replicas on average, {max(found['timeline']['replicas'])} at most,"
    return "1 replica" if found["replicas"] == 1 else f"{found['replicas']} replicas"


def model_table(found: Mapping[str, Any]) -> list[str]:
    """The lines of the table of models."""
    rows: list[Sequence[str]] = []
    for name, each in found["models"].items():
        mean = f"{each['rows'] / each['batches']:.2f}" if each["batches"] else "-"
        rows.append([name, f"{each['device_s']:.1f}", str(each["batches"]), mean, f"{each['capacity_rows_per_s']:.0f}"])
    return columns(("model", "device s", "batches", "rows/batch", "rows/s at most"), rows, right=range(1, 5))


def cost_lines(found: Mapping[str, Any]) -> list[str]:
    """One sentence for each class of device that has a price."""
    lines = []
    for each in found["cost"]:
        hour, million, currency = each["replicas_per_hour"], each["per_million_answers"], each["currency"]
        if not each["replicas"]:
            lines.append(f"{each['device_class']}: {each['price']} has no price for device time")
            continue
        share = f"{each['used'] / each['replicas']:.1%} of it used"
        line = f"{each['device_class']} at {each['price']}: {hour:.4g} {currency} an hour for the replicas, {share}"
        lines.append(line if million is None else f"{line}; {million:.4g} {currency} for a million answers")
    return lines
