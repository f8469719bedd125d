"""Reports a load: one document for machines, from which the text and the plot are made. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from oriel_cli.table import columns
from oriel_tools.load.generator import Record
from oriel_tools.load.histogram import Histogram
from oriel_tools.load.lag import LagRule
from oriel_tools.load.scenario import Scenario
from oriel_tools.load.tally import Tally, Timeline, total

_SHARES = ("p50", "p99", "p99.9")


def as_document(scenario: Scenario, record: Record, *, version: str) -> dict[str, Any]:
    """Everything a load brought. Durations in ms unless the name says otherwise.

    A phase with `quoted` false keeps its counts; its latencies, attainment and goodput are null.
    """
    rule = LagRule(max_lag_ms=scenario.max_lag_ms)
    phases = []
    start = 0.0
    for number, phase in enumerate(scenario.phase):
        seconds = min(phase.seconds, max(0.0, record.ran_s - start))
        if seconds:
            busy = record.busy.get(number, 0.0)
            found = _phase(scenario, number, record.tallies[number], seconds, rule, busy)
            phases.append({**found, "start_s": start, "complete": seconds >= phase.seconds - 1e-3})
        start += phase.seconds
    return {
        "oriel": version,
        "title": scenario.title,
        "seed": scenario.seed,
        "interrupted": record.interrupted,
        "quoted": bool(phases) and all(phase["quoted"] or phase["warm_up"] for phase in phases),
        "rule": {
            "max_lag_ms": scenario.max_lag_ms,
            "max_in_flight": scenario.max_in_flight,
            "text": _rule_text(rule),
        },
        "streams": [
            {
                "name": stream.name,
                "tier": stream.tier,
                "url": stream.url,
                "target_ms": stream.target_ms,
                "deadline_ms": stream.deadline_ms,
            }
            for stream in scenario.stream
        ],
        "phases": phases,
        "timeline": {tier: _timeline(line) for tier, line in record.timelines.items()},
    }


def _rule_text(rule: LagRule) -> str:
    return (
        f"quoted if every arrival was sent, 99 % of them within {rule.max_lag_ms:g} ms of schedule, "
        f"by a generator busy for at most {rule.max_busy * 100:.0f} % of a core"
    )


def _phase(
    scenario: Scenario, number: int, tallies: Sequence[Tally], seconds: float, rule: LagRule, busy: float
) -> dict[str, Any]:
    phase = scenario.phase[number]
    whole = total(tallies)
    objection = "it is a warm-up" if phase.warm_up else rule.objection(whole.lag, sum(whole.unsent.values()), busy)
    quoted = objection is None
    tail = quoted and rule.allows_p999(whole.lag)
    tiers: dict[str, list[Tally]] = {}
    for stream, tally in zip(scenario.stream, tallies, strict=True):
        tiers.setdefault(stream.tier, []).append(tally)
    return {
        "phase": phase.name,
        "arrivals": phase.arrivals,
        "seconds": round(seconds, 3),
        "warm_up": phase.warm_up,
        "quoted": quoted,
        "objection": objection,
        "lag": {**(_percentiles(whole.lag, tail=True) or {}), "unsent": whole.unsent},
        "generator_busy": round(busy, 3),
        "tiers": {tier: _figures(total(found), seconds, quoted, tail) for tier, found in tiers.items()},
        "streams": {
            stream.name: _figures(tally, seconds, quoted, tail)
            for stream, tally in zip(scenario.stream, tallies, strict=True)
        },
        "all": _figures(whole, seconds, quoted, tail),
    }


def _figures(tally: Tally, seconds: float, quoted: bool, tail: bool) -> dict[str, Any]:
    retry = tally.retry_after
    return {
        "scheduled": tally.scheduled,
        "scheduled_per_s": round(tally.scheduled / seconds, 2),
        "sent": tally.sent,
        "good": tally.good,
        "refused": tally.refused,
        "failed": tally.failed,
        "unsent": tally.unsent,
        "refused_ms": {reason: _percentiles(found, tail=tail) for reason, found in tally.refusals.items()}
        if quoted
        else None,
        "retry_after": {"count": retry.count, "least_s": retry.least_s, "most_s": retry.most_s},
        "attainment": round(tally.attainment, 6) if quoted and tally.attainment is not None else None,
        "goodput_per_s": round(tally.kept / seconds, 2) if quoted else None,
        "latency_ms": _percentiles(tally.latency, tail=tail) if quoted else None,
        "service_ms": _percentiles(tally.service, tail=tail) if quoted else None,
    }


def _percentiles(found: Histogram, *, tail: bool) -> dict[str, float | None] | None:
    """A percentile is null when less than one sample lies beyond it; without `tail` also p99.9 and max."""
    if not found.count:
        return None
    return {
        "p50": round(found.percentile_s(0.5) * 1e3, 3),
        "p99": round(found.percentile_s(0.99) * 1e3, 3) if found.count >= 100 else None,
        "p99.9": round(found.percentile_s(0.999) * 1e3, 3) if tail and found.count >= 1000 else None,
        "max": round(found.max_s * 1e3, 3) if tail else None,
    }


def _timeline(line: Timeline) -> dict[str, Any]:
    """Per bin; attainment null where nothing was scheduled."""
    bins = line.bins
    return {
        "width_s": line.width_s,
        "arrivals": [each.arrivals for each in bins],
        "unsent": [each.unsent for each in bins],
        "good": [each.good for each in bins],
        "others": [each.others for each in bins],
        "attainment": [round(each.kept / each.arrivals, 4) if each.arrivals else None for each in bins],
        "p50_ms": [round(each.latency.percentile_s(0.5) * 1e3, 3) if each.latency.count else None for each in bins],
        "p99_ms": [round(each.latency.percentile_s(0.99) * 1e3, 3) if each.latency.count else None for each in bins],
    }


def as_text(document: Mapping[str, Any]) -> list[str]:
    """The lines a person reads."""
    lines = []
    for phase in document["phases"]:
        lines += ["", *_phase_lines(phase, document["streams"])]
    if document["interrupted"]:
        lines += ["", "interrupted: these are the figures until then"]
    return lines[1:]


def _phase_lines(phase: Mapping[str, Any], streams: Sequence[Mapping[str, Any]]) -> list[str]:
    cut = "" if phase["complete"] else " (cut short)"
    lag = phase["lag"]
    late = f"own lag p50 {lag['p50']:.2f}, max {lag['max']:.2f} ms" if "p50" in lag else "nothing sent"
    busy = f"generator busy {phase['generator_busy'] * 100:.0f} %"
    lines = [f"{phase['phase']}: {phase['arrivals']} arrivals, {phase['seconds']:g} s{cut}; {late}; {busy}"]
    if phase["objection"]:
        lines.append(
            f"  not quoted: {phase['objection']}" if phase["warm_up"] else f"  NOT QUOTED: {phase['objection']}"
        )
    return [*lines, *tier_lines(phase, streams)]


def tier_lines(phase: Mapping[str, Any], streams: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines about the tiers of one phase: a table, and what was not answered well."""
    targets: dict[str, set[float]] = {}
    for stream in streams:
        if stream["target_ms"] is not None:
            targets.setdefault(stream["tier"], set()).add(stream["target_ms"])
    rows = []
    for tier, found in phase["tiers"].items():
        latency = found["latency_ms"] or {}
        rows.append(
            (
                tier,
                f"{found['scheduled_per_s']:.1f}",
                found["good"],
                sum(found["refused"].values()),
                sum(found["failed"].values()) + sum(found["unsent"].values()),
                "/".join(f"{target:g}" for target in sorted(targets.get(tier, ()))) or "-",
                f"{found['attainment'] * 100:.2f} %" if found["attainment"] is not None else "-",
                f"{found['goodput_per_s']:.1f}" if found["goodput_per_s"] is not None else "-",
                *(f"{value:.2f}" if (value := latency.get(name)) is not None else "-" for name in _SHARES),
            )
        )
    heading = ("tier", "arrivals/s", "good", "refused", "failed", "target ms", "in target", "goodput/s")
    table = columns((*heading, *(f"{share} ms" for share in _SHARES)), rows, right=set(range(1, 11)))
    lines = [f"  {line}" for line in table]
    for tier, found in phase["tiers"].items():
        for kind in ("refused", "failed", "unsent"):
            for reason, count in sorted(found[kind].items(), key=lambda each: -each[1]):
                lines.append(f"  {tier}: {kind} {count} x {reason}{_after(kind, reason, found)}")
        retry = found["retry_after"]
        if retry["count"]:
            lines.append(f"  {tier}: Retry-After on {retry['count']}, {retry['least_s']:g} to {retry['most_s']:g} s")
    return lines


def _after(kind: str, reason: str, found: Mapping[str, Any]) -> str:
    """Describe how long the refusals of this reason took."""
    taken = (found["refused_ms"] or {}).get(reason) if kind == "refused" else None
    if not taken:
        return ""
    tail = f", p99 {taken['p99']:.2f} ms" if taken["p99"] is not None else " ms"
    return f", after p50 {taken['p50']:.2f}{tail}"


def progress_line(scenario: Scenario, record: Record, offset_s: float, under_way: int) -> str:
    """One line about the phase that is being sent; counts so far."""
    whole = total(record.tallies[record.phase])
    refused = sum(whole.refused.values())
    failed = sum(whole.failed.values()) + sum(whole.unsent.values())
    lag_ms = whole.lag.percentile_s(0.99) * 1e3
    p99 = f"{whole.latency.percentile_s(0.99) * 1e3:.1f} ms" if whole.latency.count else "-"
    return (
        f"{offset_s:6.1f} s  {scenario.phase[record.phase].name}: {whole.scheduled} scheduled, {whole.good} good, "
        f"{refused} refused, {failed} failed, {under_way} under way; "
        f"p99 {p99}, own lag p99 {lag_ms:.1f} ms"
    )
