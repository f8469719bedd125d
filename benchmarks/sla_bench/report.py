"""The page and the plot of a run's document. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from harness.pages import conditions

from sla_bench.promises import DRIFT, drift

__all__ = ["CONTROLS", "markdown", "plot"]

CONTROLS = {"direct": "straight to the server", "fifo": "behind HAProxy, first come first served"}
DASHES = {"direct": "2 4", "fifo": "7 4"}

COLOURS = {"gold": "#b8860b", "silver": "#7a8694", "bronze": "#a0522d"}
WIDTH, HEIGHT, LEFT, TOP, SPAN, TALL = 460, 312, 56, 40, 380, 190


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def markdown(document: Mapping[str, Any]) -> str:
    lines = [
        "# What the gateway keeps under load",
        "",
        conditions(document["machine"], document["commit"], "not noted (each phase once)"),
        "",
        f"{document['date']}, {document['machine']}. Made by `python benchmarks/gateway_sla.py"
        f" --seconds {document['seconds']:g} --layers {document['layers']}`, which says how in its head; Poisson"
        " arrivals by `oriel load`, whose rules for what may be quoted hold. Targets: "
        + ", ".join(f"{name} {tier['target_ms']} ms" for name, tier in document["tiers"].items())
        + "; nothing names a deadline, so calls are given up after four times their target.",
    ]
    for found in document["servers"].values():
        lines += ["", f"## Before {found['title']}", "", _about(found), ""]
        lines += [*_tiers(found["loads"]), "", *_machine(found, found["loads"])]
        lines += ["", "| promise | found | wanted | |", "|---|---|---|---|"]
        for verdict in found["verdicts"]:
            kept = "kept" if verdict["kept"] else "not judged" if verdict["kept"] is None else "**missed**"
            lines.append(f"| {verdict['promise']} | {verdict['found']} | {verdict['wanted']} | {kept} |")
        for control, title in CONTROLS.items():
            cells = [cell for cell in found["controls"] if cell["control"] == control]
            if cells:
                lines += ["", f"### Control: the same load {title}", ""]
                lines += [*_tiers(cells), "", *_machine(found, cells)]
    return "\n".join(lines) + "\n"


def _about(found: Mapping[str, Any]) -> str:
    cells = [*found["loads"], *found["controls"]]
    rates = [each for cell in cells for each in (cell["capacity_before"], cell["capacity_after"])]
    return (
        f"One row takes {found['service_ms']:.1f} ms alone; the capacity C is {found['capacity']:.1f} answers a second,"
        f" at {found['server_cores']:.2f} cores of the server. Measured between the phases it was {min(rates):.1f} to "
        f"{max(rates):.1f}. The gateway learned its concurrency for {found['learning_s']:g} s under 2 C before."
    )


def _tiers(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| load | tier | arrivals/s | in target | goodput/s | p50 ms | p99 ms | good | refused | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for tier, figures in cell["tiers"].items():
            latency = figures["latency_ms"] or {}
            lines.append(
                f"| {cell['load']} | {tier} | {figures['scheduled_per_s']:.1f} | {_percent(figures['attainment'])} "
                f"| {_number(figures['goodput_per_s'])} | {_number(latency.get('p50'))} | "
                f"{_number(latency.get('p99'))} | {figures['good']} | {_reasons(figures['refused'])} | "
                f"{_reasons(figures['failed'])} |"
            )
    return lines


def _machine(found: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe what each phase used, and whether the machine stayed as it was."""
    lines = [
        "| load | generator cores | gateway cores | server cores | answers/s | permits at its end | capacity after |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for cell in cells:
        moved = "" if drift(found["capacity"], cell) <= DRIFT else ", moved: not judged"
        permits = "-" if cell["permits"] is None else cell["permits"]
        lines.append(
            f"| {cell['load']} | {cell['generator_cores']:.2f} | {cell['gateway_cores']:.2f} | "
            f"{cell['server_cores']:.2f} | {cell['answered_per_s']:.1f} | {permits} | "
            f"{cell['capacity_after']:.1f}{moved} |"
        )
    return lines


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "0"


def plot(document: Mapping[str, Any]) -> str:
    """Attainment of each tier over offered load, a panel per server, as one SVG file that fetches nothing."""
    panels = list(document["servers"].values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" '
        'font-family="system-ui,sans-serif" font-size="12">',
        f'<rect width="{WIDTH * len(panels)}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for index, found in enumerate(panels):
        parts.append(f'<g transform="translate({index * WIDTH} 0)">{_panel(found)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(found: Mapping[str, Any]) -> str:
    loads = [cell for cell in found["loads"] if cell["factor"]]
    step = SPAN / max(1, len(loads) - 1)
    out = [f'<text x="{LEFT}" y="20" font-weight="600">In target, before {escape(found["title"])}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + TALL * (1.0 - share)
        out.append(f'<line x1="{LEFT}" x2="{LEFT + SPAN}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end" fill="#555">{share * 100:.0f} %</text>')
    for index, cell in enumerate(loads):
        x = LEFT + index * step
        out.append(f'<text x="{x:.0f}" y="{TOP + TALL + 18}" text-anchor="middle" fill="#555">{cell["load"]}</text>')
    out.append(
        f'<text x="{LEFT + SPAN / 2:.0f}" y="{TOP + TALL + 36}" text-anchor="middle" fill="#555">'
        "offered load, times capacity</text>"
    )
    # The lowest tier first and widest: tiers that are equal, as all should be at 100 %, are seen side by side.
    for number, (tier, colour) in reversed([*enumerate(COLOURS.items())]):
        points = _attainment(loads, tier)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{2.5 + 3 * number}"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.5 + 2 * number}" fill="{colour}"/>' for x, y in points]
        x = LEFT + number * 90
        out.append(f'<circle cx="{x}" cy="{HEIGHT - 32}" r="5" fill="{colour}"/>')
        out.append(f'<text x="{x + 10}" y="{HEIGHT - 28}">{tier}</text>')
    # The controls know no tiers: of gold, what they do to everybody.
    for number, (control, title) in enumerate(CONTROLS.items()):
        cells = [cell for cell in found["controls"] if cell["control"] == control]
        if not cells:
            continue
        drawn = f'fill="none" stroke="#444" stroke-width="1.5" stroke-dasharray="{DASHES[control]}"'
        out.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in _attainment(cells, "gold"))}" {drawn}/>'
        )
        x, y = LEFT + number * 200, HEIGHT - 12
        out.append(f'<line x1="{x - 5}" x2="{x + 20}" y1="{y}" y2="{y}" {drawn}/>')
        out.append(f'<text x="{x + 26}" y="{y + 4}">gold {escape(title.partition(",")[0])}</text>')
    return "\n".join(out)


def _attainment(loads: Sequence[Mapping[str, Any]], tier: str) -> list[tuple[float, float]]:
    step = SPAN / max(1, len(loads) - 1)
    return [
        (LEFT + index * step, TOP + TALL * (1.0 - attainment))
        for index, cell in enumerate(loads)
        if (attainment := cell["tiers"].get(tier, {}).get("attainment")) is not None
    ]
