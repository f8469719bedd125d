"""The page and the plot of a run's document. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["markdown", "plot"]

COLOURS = {"gold": "#b8860b", "silver": "#7a8694", "bronze": "#a0522d"}
WIDTH, HEIGHT, LEFT, TOP, SPAN, TALL = 460, 290, 56, 40, 380, 190


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def markdown(document: Mapping[str, Any]) -> str:
    lines = [
        "# What the gateway keeps under load",
        "",
        f"{document['date']}, {document['machine']}. Made by `python tests/bench/gateway_sla.py"
        f" --seconds {document['seconds']:g}`, which says how in its head; Poisson arrivals by `oriel load`, whose"
        " rules for what may be quoted hold. Targets: "
        + ", ".join(f"{name} {tier['target_ms']} ms" for name, tier in document["tiers"].items())
        + "; nothing names a deadline, so calls are given up after four times their target.",
    ]
    for found in document["servers"].values():
        lines += ["", f"## Before {found['title']}", ""]
        lines += [
            f"One row takes {found['service_ms']:.1f} ms alone; the capacity C is {found['capacity']:.1f} answers a "
            f"second, at {found['server_cores']:.2f} cores of the server.",
            "",
            "| load | tier | arrivals/s | in target | goodput/s | p50 ms | p99 ms | good | refused | failed |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for cell in found["loads"]:
            for tier, figures in cell["tiers"].items():
                latency = figures["latency_ms"] or {}
                lines.append(
                    f"| {cell['load']} | {tier} | {figures['scheduled_per_s']:.1f} | {_percent(figures['attainment'])} "
                    f"| {_number(figures['goodput_per_s'])} | {_number(latency.get('p50'))} | "
                    f"{_number(latency.get('p99'))} | {figures['good']} | {_reasons(figures['refused'])} | "
                    f"{_reasons(figures['failed'])} |"
                )
        lines += ["", "| load | generator cores | gateway cores | server cores | answers/s |", "|---|---|---|---|---|"]
        for cell in found["loads"]:
            lines.append(
                f"| {cell['load']} | {cell['generator_cores']:.2f} | {cell['gateway_cores']:.2f} | "
                f"{cell['server_cores']:.2f} | {cell['answered_per_s']:.1f} |"
            )
        lines += ["", "| promise | found | wanted | |", "|---|---|---|---|"]
        for verdict in found["verdicts"]:
            kept = "kept" if verdict["kept"] else "not measured" if verdict["kept"] is None else "**missed**"
            lines.append(f"| {verdict['promise']} | {verdict['found']} | {verdict['wanted']} | {kept} |")
    return "\n".join(lines) + "\n"


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
        points = [
            (LEFT + index * step, TOP + TALL * (1.0 - attainment))
            for index, cell in enumerate(loads)
            if (attainment := cell["tiers"].get(tier, {}).get("attainment")) is not None
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{2.5 + 3 * number}"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.5 + 2 * number}" fill="{colour}"/>' for x, y in points]
        x = LEFT + number * 90
        out.append(f'<circle cx="{x}" cy="{HEIGHT - 12}" r="5" fill="{colour}"/>')
        out.append(f'<text x="{x + 10}" y="{HEIGHT - 8}">{tier}</text>')
    return "\n".join(out)


def verdict(promise: str, found: str, wanted: str, kept: bool | None) -> dict[str, Any]:
    """One line of the table of promises; kept None: it could not be measured."""
    return {"promise": promise, "found": found, "wanted": wanted, "kept": kept}


def lowest(values: Sequence[float | None]) -> float | None:
    """The smallest, None if one is missing."""
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) and known else None
