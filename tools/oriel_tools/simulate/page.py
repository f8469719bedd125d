"""Writes the page of a simulated load: the charts of a measured one, and beside them devices, queues and batches.

The document in, text out. The page fetches nothing.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from oriel_tools.load.chart import Line, chart
from oriel_tools.load.plot import COLOURS, as_html, spans_of
from oriel_tools.simulate.used import cost_lines, replicas_text

_STYLE = """
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.tiles div { flex: 1 1 9rem; border: 1px solid var(--grid); border-radius: .5rem; padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .85rem; }
.bars td { text-align: left; } .bars td:last-child { width: 75%; }
.bars i { display: inline-block; height: .8em; border-radius: 2px; margin-right: .5em; }
"""


def as_page(document: Mapping[str, Any]) -> str:
    """A whole page for the document of `serve.simulate`."""
    found = document["simulation"]
    way = "through a gateway" if found["through_gateway"] else "without a gateway"
    about = (
        f'<p class="soft">Simulated by oriel {escape(document["oriel"])}, seed {document["seed"]}: '
        f"{replicas_text(found)} {way}. "
        "Queues, limits and batches decide as they do in production; executions take the times of the profiles. "
        "Warm-ups (grey) are not quoted.</p>" + _figures(document)
    )
    return as_html(
        {**document, "title": document["title"] or "oriel simulate"},
        about=about,
        sections=_sections(document),
        style=_STYLE,
    )


def _figures(document: Mapping[str, Any]) -> str:
    """The figures that matter most, as tiles."""
    found = document["simulation"]
    tiles = [(f"{found['utilisation']:.0%}", "of the time the devices are busy")]
    quoted = [phase for phase in document["phases"] if not phase["warm_up"]]
    scheduled = sum([phase["all"]["scheduled"] for phase in quoted])
    kept = sum([(phase["all"]["attainment"] or 0.0) * phase["all"]["scheduled"] for phase in quoted])
    if scheduled:
        tiles.insert(0, (f"{kept / scheduled:.2%}", "of all arrivals answered in time"))
    refused = sum([sum(phase["all"]["refused"].values()) for phase in quoted])
    tiles.append((f"{refused:,}", "refused"))
    tiles += [
        (f"{each['replicas_per_hour']:.4g} {each['currency']}", f"an hour for {each['device_class']}")
        for each in found["cost"]
    ]
    cells = "".join(f"<div><b>{escape(figure)}</b><span>{escape(text)}</span></div>" for figure, text in tiles)
    return f'<div class="tiles">{cells}</div>'


def _sections(document: Mapping[str, Any]) -> list[str]:
    found, spans = document["simulation"], spans_of(document)
    timeline, width_s = found["timeline"], found["timeline"]["width_s"]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(found["models"])}
    busy = [
        Line(label=name, values=[100.0 * each for each in bins], colour=colours[name])
        for name, bins in timeline["busy"].items()
    ]
    waiting = [
        Line(label=place, values=bins, colour=COLOURS[0], dash=(5, 4) if place == "gateway" else ())
        for place, bins in timeline["waiting"].items()
    ]
    scaled = [Line(label="replicas", values=timeline["replicas"], colour=COLOURS[0])] if timeline["replicas"] else []
    costs = "".join(f"<p>{escape(line)}.</p>" for line in cost_lines(found))
    return [
        '<h2>Devices</h2><p class="soft">share of the time in which batches run, by model</p>',
        chart("devices over time", "%", width_s, busy, spans),
        '<h2>Waiting</h2><p class="soft">the most calls at once, at the servers and at the gateway</p>',
        chart("waiting calls over time", "", width_s, waiting, spans),
        *(["<h2>Replicas</h2>", chart("replicas over time", "", width_s, scaled, spans)] if scaled else []),
        *[_batches(name, each, colours[name]) for name, each in found["models"].items() if each["batches"]],
        *(["<h2>Cost</h2>", costs] if costs else []),
    ]


def _batches(name: str, found: Mapping[str, Any], colour: str) -> str:
    """Return a table of one model's batches: the share of all rows that ran in batches of each size."""
    rows = _grouped([(int(size), count) for size, count in found["sizes"].items()])
    lines = [
        f'<tr><td>{label}</td><td><i style="background:{colour};width:{80 * executed / found["rows"]:.1f}%"></i>'
        f"{executed / found['rows']:.1%}</td></tr>"
        for label, executed in rows
    ]
    return (
        f'<h2>Batches of {escape(name)}</h2><p class="soft">share of all rows by the size of their batch; '
        f"{found['batches']:,} batches of {found['rows'] / found['batches']:.1f} rows on average</p>"
        f'<table class="bars">{"".join(lines)}</table>'
    )


def _grouped(sizes: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
    """(label, rows) in groups that double: 1, 2, 3 to 4, 5 to 8 and so on."""
    found: dict[int, int] = {}
    for size, count in sizes:
        group = (size - 1).bit_length()
        found[group] = found.get(group, 0) + size * count
    return [
        (str(1 << group) if group < 2 else f"{(1 << group - 1) + 1} to {1 << group}", rows)
        for group, rows in sorted(found.items())
    ]
