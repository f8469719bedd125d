"""Reports a tuning: one document for machines, from which the text is made. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from oriel_cli.table import columns
from oriel_policies.metering.prices import NANO, Price, price_at
from oriel_tools.tune.config_text import patch
from oriel_tools.tune.objective import Reached, most_lost, number
from oriel_tools.tune.plan import Plan
from oriel_tools.tune.session import Tuned
from oriel_tools.tune.setting import CONFIG_FILE, FIELDS, Setting, changes
from oriel_tools.tune.trial import HIGHEST, Trial
from oriel_tools.tune.turns import Measured

MUCH = 0.8  # a latency below this part of another one is worth a line


def as_document(tuned: Tuned, prices: Sequence[Price], *, today: str, version: str) -> dict[str, Any]:
    """Return everything that a tuning found. prices: those of `today` count."""
    plan, present, best = tuned.plan, tuned.present, tuned.best
    text = tuned.text if tuned.confirmed else tuned.subject.text
    return {
        "oriel": version,
        "model": tuned.options.model,
        "objectives": [str(each) for each in tuned.options.load.objectives],
        "met": best.met,
        "confirmed": tuned.confirmed,
        "cores": tuned.subject.cores,
        "engines": [
            {**asdict(engine), "rows_per_s": round(profile.capacity, 1)} for engine, profile in tuned.profiles.items()
        ],
        "trials": tuned.trials,
        "measured": [
            {
                "setting": {name: _value(each.setting, field) for field, name in FIELDS.items()},
                "measured": [_reached(found) for found in each.reached],
                "objection": each.objection or None,
            }
            for each in tuned.measured
        ],
        "cut_off": plan.cut_off,
        "seconds": {name: round(each, 2) for name, each in tuned.seconds.items()},
        "present": _side(plan.present, present),
        "chosen": _side(plan.chosen, tuned.chosen),
        "changes": [
            {
                "fields": {
                    FIELDS[field]: [_value(present.setting, field), _value(tuned.chosen.setting, field)]
                    for field in worth.fields
                },
                "worth": worth.text,
                "without": [_reached(each) for each in worth.without.reached],
            }
            for worth in plan.worths
        ],
        "best": {
            "setting": {name: _value(plan.best.setting, field) for field, name in FIELDS.items()},
            "simulated": [_reached(each) for each in plan.best.reached],
        },
        "limit": {"kind": plan.limit[0], "text": plan.limit[1]},
        "reaches": {"part": round(plan.most, 3), "rate_per_s": round(plan.most * tuned.options.load.rate, 2)},
        "promises": _promises(tuned, prices, today),
        "cost": costs(prices, today, present, best),
        "patch": patch(f"{tuned.options.model}/{CONFIG_FILE}", tuned.subject.text, text),
    }


def _side(trial: Trial, measured: Measured) -> dict[str, Any]:
    return {
        "setting": {name: _value(trial.setting, field) for field, name in FIELDS.items()},
        "simulated": [_reached(each) for each in trial.reached],
        "measured": [_reached(each) for each in measured.reached],
        "objection": measured.objection or None,
        "goodput_per_s": round(measured.goodput, 2),
    }


def _value(setting: Setting, field: str) -> Any:
    value = getattr(setting, field)
    return list(value) if isinstance(value, tuple) else value


def _reached(found: Reached) -> dict[str, Any]:
    return {
        "objective": str(found.objective),
        "calls": found.calls,
        "attained": round(found.attained, 6),
        "latency_ms": round(found.latency_ms, 3) if found.latency_ms < inf else None,
        "goodput_per_s": round(found.goodput, 2),
        "met": found.met,
    }


def _promises(tuned: Tuned, prices: Sequence[Price], today: str) -> list[dict[str, Any]]:
    """Return the tightest targets of the chosen setting by load, and what a million answers cost at that load."""
    load, replicas = tuned.options.load, tuned.plan.chosen.setting.replicas
    found = []
    for each in tuned.plan.promises:
        rate = each.part * load.rate
        found.append(
            {
                "rate_per_s": round(rate, 2),
                "targets": [
                    {
                        "tier": objective.tier,
                        "percent": objective.percent,
                        "target_ms": round(target_ms, 3) if target_ms < inf else None,
                    }
                    for objective, target_ms in zip(load.objectives, each.targets_ms, strict=True)
                ],
                "cost": {
                    price.name: round(hour * replicas / 3600.0 / rate * 1e6, 6)
                    for price, hour in _hourly(prices, today)
                }
                if each.kept
                else {},
            }
        )
    return found


def _hourly(prices: Sequence[Price], today: str) -> list[tuple[Price, float]]:
    """Return the prices of device time that count today, each with what an hour of a device costs."""
    classes = sorted({each.device_class for each in prices if each.device_class})
    current = [price_at(prices, name, today) for name in classes]
    return [(price, price.device_hour / NANO) for price in current if price is not None and price.device_hour]


def costs(prices: Sequence[Price], today: str, present: Measured, best: Measured) -> list[dict[str, Any]]:
    """Return what a million answers in time cost at each price of device time, with devices as quick as this one."""
    found = []
    for price, hour in _hourly(prices, today):
        found.append(
            {
                "device_class": price.device_class,
                "price": price.name,
                "currency": price.currency,
                "per_hour": round(hour * best.setting.replicas, 6),
                "per_million": _per_million(hour, best),
                "per_million_present": _per_million(hour, present),
            }
        )
    return found


def _per_million(hour: float, measured: Measured) -> float | None:
    if measured.objection or not measured.goodput:
        return None
    return round(hour * measured.setting.replicas / 3600.0 / measured.goodput * 1e6, 6)


def as_text(document: Mapping[str, Any], tuned: Tuned) -> list[str]:
    """The lines that a person reads."""
    plan, present, chosen = tuned.plan, tuned.present, tuned.chosen
    fields = changes(present.setting, chosen.setting)
    lines = [f"{document['model']}: {' and '.join(document['objectives'])}", ""]
    sides = [("present", present, plan.present)]
    if fields:
        sides.append(("chosen", chosen, plan.chosen))
    for name, measured, trial in sides:
        for found, guess in zip(measured.reached, trial.reached, strict=True):
            tier = f" {found.objective.tier}" if found.objective.tier else ""
            lines.append(f"{name}{tier}: {found} (simulated: {guess})")
        if measured.objection:
            lines.append(f"{name}: not quoted: {measured.objection}")
    lines += ["", *_verdict(tuned, fields)]
    if fields:
        rows = [
            (
                " and ".join([FIELDS[field] for field in worth.fields]),
                " and ".join([present.setting.shown(field) for field in worth.fields]),
                " and ".join([chosen.setting.shown(field) for field in worth.fields]),
                worth.text,
            )
            for worth in plan.worths
        ]
        lines += ["", *columns(("change", "present", "chosen", "without it (simulated)"), rows)]
    if tuned.confirmed:
        lines += ["", f"what limits now: {document['limit']['text']}", *_reaching(document, plan.most)]
    if beyond := _beyond(plan):
        lines.append(beyond)
    if plan.cut_off:
        lines.append("the search was not over when its time was: a larger --budget may find more")
    if tuned.confirmed:
        lines += ["", *_promised(document["promises"])]
    lines += [_cost_text(each) for each in document["cost"]]
    if document["patch"]:
        lines += ["", document["patch"].rstrip("\n")]
    return lines


def _verdict(tuned: Tuned, fields: Sequence[str]) -> list[str]:
    best = tuned.best
    if tuned.present.objection or tuned.chosen.objection:
        return ["there is no verdict from a measurement that is not quoted: measure again on a quiet machine"]
    reached = "the objective is reached" if best.met else "the objective is not reached"
    if not fields and best.met:
        return [f"{reached}: nothing has to be changed"]
    if not fields:
        return [f"{reached}; no setting that was tried is better than the present one"]
    if not tuned.confirmed:
        return [f"{reached} by the present setting, and the chosen one was not better when it was measured: keep it"]
    lines = [f"{reached} by the chosen setting"]
    if best.setting.replicas > 1:
        lines.append(
            f"with {best.setting.replicas} replicas: one of them was measured, with its part of the load; the others "
            "are assumed to be equal"
        )
    return lines


def _beyond(plan: Plan) -> str:
    """Describe a setting that is quicker than the chosen one, although nobody needs that; "" if there is none."""
    chosen, best = plan.chosen, plan.best
    if best.setting == chosen.setting or best.score[1] > MUCH * chosen.score[1]:
        return ""
    more = [f"{FIELDS[field]} {best.setting.shown(field)}" for field in changes(chosen.setting, best.setting)]
    better, _ = most_lost(best.reached, chosen.reached)
    return f"not needed for the objectives, but quicker by the simulation: {', '.join(more)} ({better})"


def _reaching(document: Mapping[str, Any], most: float) -> list[str]:
    rate = document["reaches"]["rate_per_s"]
    if not most:
        return ["no rate was found at which it would be reached"]
    setting, more = "chosen setting" if document["changes"] else "setting", " and beyond" if most == HIGHEST else ""
    return [f"by the simulation the {setting} reaches it up to {rate:.{0 if rate >= 10 else 2}f}/s{more}"]


def _promised(promises: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of targets by load. Each heading of a target names the percentile of its objective."""
    targets = promises[0]["targets"]
    prices = sorted({name for each in promises for name in each["cost"]})
    heading = ["calls/s", *[f"p{number(each['percent'])} {each['tier']}".strip() for each in targets]]
    heading += [f"{name} per million" for name in prices]
    rows = [
        [
            f"{each['rate_per_s']:.4g}",
            *["none" if one["target_ms"] is None else f"{one['target_ms']:.3g} ms" for one in each["targets"]],
            *[f"{each['cost'][name]:.4g}" if name in each["cost"] else "-" for name in prices],
        ]
        for each in promises
    ]
    title = "the tightest targets that each load allows (simulated, with a tenth more calls):"
    return [title, *columns(heading, rows, right=range(len(heading)))]


def _cost_text(cost: Mapping[str, Any]) -> str:
    where = f"{cost['device_class']} at {cost['price']}: {cost['per_hour']:.4g} {cost['currency']} an hour"
    if cost["per_million"] is None:
        return where
    now = cost["per_million_present"]
    before = f", {now:.4g} with the present setting" if now not in (None, cost["per_million"]) else ""
    return f"{where}, {cost['per_million']:.4g} {cost['currency']} for a million answers in time{before}"
