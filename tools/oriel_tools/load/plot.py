"""Writes the page of a load: one HTML file that holds everything it shows. The document in, text out."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from oriel_tools.load import chart
from oriel_tools.load.chart import Line, Span

# Distinct for people who see fewer colours, too; further tiers start over.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #6b7280; --grid: #e3e6ea; --page: #fff;
  --lag: #f4c7c3; --warm: #eceef1; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3ad; --grid: #30363d; --page: #14171a; --lag: #5a2723; --warm: #22272c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; }
p { margin: .2rem 0; } .soft { color: var(--soft); } .bad { color: #c0392b; font-weight: 600; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; font-size: 13.5px; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--soft); } th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
.scroll { overflow-x: auto; }
.chart { margin: .3rem 0 1rem; } .chart .u-legend { font-size: 12px; text-align: left; color: var(--soft); }
.key { display: inline-block; width: 1.6em; height: .2em; vertical-align: middle; margin: 0 .35em 0 1em; }
"""


def as_html(document: Mapping[str, Any], *, about: str = "", sections: Sequence[str] = (), style: str = "") -> str:
    """A whole page for the document of `report.as_document`; no part of it is fetched from anywhere.

    about: HTML to stand below the title instead of what holds for a measured load. sections: HTML to stand after the
    charts. style: CSS for these.
    """
    timeline = document["timeline"]
    colours = {tier: COLOURS[index % len(COLOURS)] for index, tier in enumerate(timeline)}
    title = escape(document["title"] or "oriel load")
    quoted = "" if document["quoted"] else '<p class="bad">The generator lagged: the red phases are not quoted.</p>'
    cut = '<p class="bad">Interrupted: these are the figures until then.</p>' if document["interrupted"] else ""
    legend = "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(tier)}' for tier, colour in colours.items()
    )
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width">',
            f"<style>{chart.style()}{STYLE}{style}</style></head><body>",
            f"<h1>{title}</h1>",
            about
            or f'<p class="soft">oriel {escape(document["oriel"])}, seed {document["seed"]}; a phase is '
            f"{escape(document['rule']['text'])}. Latency counts from the scheduled arrival. "
            "Warm-ups (grey) are not quoted.</p>",
            quoted,
            cut,
            f"<p>{legend}</p>",
            *_charts(document, colours),
            *sections,
            "<h2>Phases and tiers</h2>",
            _table(document),
            "<h2>What was not answered well</h2>",
            _reasons(document),
            f"<script>{chart.script()}</script>",
            "</body></html>",
            "",
        ]
    )


def spans_of(document: Mapping[str, Any]) -> list[Span]:
    """The phases of a document, for its charts."""
    return [
        Span(
            label=phase["phase"],
            start_s=phase["start_s"],
            end_s=phase["start_s"] + phase["seconds"],
            style="" if phase["quoted"] else "warm" if phase["warm_up"] else "lag",
        )
        for phase in document["phases"]
    ]


def _charts(document: Mapping[str, Any], colours: Mapping[str, str]) -> list[str]:
    timeline = document["timeline"]
    spans = spans_of(document)
    width_s = next(iter(timeline.values()))["width_s"]

    def lines(name: str, what: str, *, by: float = 1.0, width: float = 2.0, dash: tuple[int, ...] = ()) -> list[Line]:
        return [
            Line(
                label=f"{tier}: {what}",
                values=[None if value is None else value * by for value in found[name]],
                colour=colours[tier],
                width=width,
                dash=dash,
            )
            for tier, found in timeline.items()
        ]

    targets = [
        Line(label=f"{tier}: target", values=[target], colour=colours[tier], width=1.0, dash=(8, 5))
        for tier, target in sorted(
            {(stream["tier"], stream["target_ms"]) for stream in document["streams"] if stream["target_ms"] is not None}
        )
    ]
    latency = [*lines("p50_ms", "p50", width=1.0), *lines("p99_ms", "p99"), *targets]
    flow = [
        *lines("arrivals", "arrivals", by=1.0 / width_s, dash=(5, 4)),
        *lines("good", "good answers", by=1.0 / width_s),
        *lines("others", "refused or failed", by=1.0 / width_s, dash=(2, 3)),
    ]
    return [
        '<h2>Latency</h2><p class="soft">bold p99, thin p50, long dashes the target; by scheduled arrival</p>',
        chart.chart("latency over time", "ms", width_s, latency, spans, logarithmic=True),
        '<h2>Attainment</h2><p class="soft">share of all arrivals answered within the target</p>',
        chart.chart("attainment over time", "%", width_s, lines("attainment", "attainment", by=100.0), spans),
        '<h2>Arrivals and answers</h2><p class="soft">dashed arrivals, solid good answers, dotted all others</p>',
        chart.chart("arrivals and answers over time", "/s", width_s, flow, spans),
    ]


def _table(document: Mapping[str, Any]) -> str:
    heads = (
        "phase",
        "tier",
        "arrivals/s",
        "good",
        "refused",
        "failed",
        "in target",
        "goodput/s",
        "p50",
        "p99",
        "p99.9",
    )
    rows = []
    for phase in document["phases"]:
        for tier, found in phase["tiers"].items():
            latency = found["latency_ms"] or {}
            attainment = found["attainment"]
            cells = [
                phase["phase"],
                tier,
                f"{found['scheduled_per_s']:.1f}",
                f"{found['good']}",
                f"{sum(found['refused'].values())}",
                f"{sum(found['failed'].values()) + sum(found['unsent'].values())}",
                "-" if attainment is None else f"{attainment * 100:.2f} %",
                "-" if found["goodput_per_s"] is None else f"{found['goodput_per_s']:.1f}",
                *(
                    "-" if latency.get(share) is None else f"{latency[share]:.2f} ms"
                    for share in ("p50", "p99", "p99.9")
                ),
            ]
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        if phase["objection"] and not phase["warm_up"]:
            rows.append(
                f'<tr><td colspan="{len(heads)}"><span class="bad">{escape(phase["phase"])} is not quoted:</span> '
                f"{escape(phase['objection'])}</td></tr>"
            )
    head = "".join(f"<th>{each}</th>" for each in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _reasons(document: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(phase['phase'])}</td><td>{escape(tier)}</td><td>{kind}</td>"
        f"<td>{escape(reason)}</td><td>{count}</td></tr>"
        for phase in document["phases"]
        for tier, found in phase["tiers"].items()
        for kind in ("refused", "failed", "unsent")
        for reason, count in sorted(found[kind].items(), key=lambda each: -each[1])
    ]
    if not rows:
        return "<p>Nothing.</p>"
    head = "<tr><th>phase</th><th>tier</th><th>how</th><th>reason</th><th>count</th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'
