"""Draws the dashboards without Grafana, to look at them: python -m tests.path.draw_dashboards PROMETHEUS OUT WIDTH S.

Asks a running Prometheus for the panels of the last S seconds, and writes a page of WIDTH pixels per dashboard. It
knows the kinds of panels that the dashboards have. Links and descriptions are not drawn.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

import httpx

BOARDS = Path(__file__).resolve().parents[2] / "deploy/chart/monitoring/dashboards"
COLOURS = ("#5794f2", "#73bf69", "#ff9830", "#f2495c", "#b877d9", "#fade2a", "#8ab8ff", "#96d98d", "#ffb357", "#ff7383")
STYLE = """body{background:#111217;color:#ccccdc;font:12px sans-serif} td{white-space:nowrap} text{fill:#8e8e99}
.panel{position:absolute;overflow:hidden;background:#181b1f;border:1px solid #2c3235;padding:6px;box-sizing:border-box}
.row{background:none;border:0;font-size:15px} b{display:block;height:18px} small{display:block;font-size:12px}
table{position:absolute;right:6px;top:26px;width:37%;font-size:11px} p{display:inline-block;margin:12px;font-size:24px}
"""
Series = tuple[str, list[tuple[float, float]]]  # the text of the legend, and (0 to 1 over the time shown, value)


def filled(text: str, interval: str = "60s") -> str:
    """Return a query as Grafana sends it while every variable is at All."""
    return re.sub(r"\$(?!\d)\w+", ".*", text.replace("$__rate_interval", interval))


def shown(value: float, unit: str) -> str:
    """Return a value with its unit, in three digits that count."""
    return f"{value * 100:.3g} %" if unit == "percentunit" else f"{value:.3g} {unit.removesuffix('short')}"


def series_of(prometheus: httpx.Client, panel: Mapping[str, Any], seconds: float) -> list[Series]:
    """Return the series of a panel that have a number."""
    found: list[Series] = []
    end = time()
    for target in panel["targets"]:
        asked = {"query": filled(target["expr"]), "start": end - seconds, "end": end, "step": seconds / 120}
        for series in prometheus.get("/api/v1/query_range", params=asked).json()["data"]["result"]:
            numbers = [(1 - (end - at) / seconds, float(value)) for at, value in series["values"]]
            points = [(at, value) for at, value in numbers if isfinite(value)]
            labels = {f"{{{{{name}}}}}": value for name, value in series["metric"].items()}
            name = re.sub(r"\{\{\w+\}\}", lambda match, of=labels: of.get(match[0], ""), target["legendFormat"])
            found += [(name, points)] if points else []
    return found


def timeseries(found: Sequence[Series], width: float, height: float, unit: str) -> str:
    """Draw lines, the highest value and a legend with the latest ones."""
    most = max([value for _, points in found for _, value in points]) or 1.0
    drawn, rows = [f'<text y="10">{shown(most, unit)}</text><path d="M0 14H{width * 0.62}" stroke="#2c3235"/>'], []
    for number, (name, points) in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join(f"{at * width * 0.62:.1f} {height - value / most * (height - 14):.1f}" for at, value in points)
        drawn.append(f'<path d="M{path}" fill="none" stroke="{colour}"/>')
        rows.append(f'<tr><td style="color:{colour}">{escape(name)}<td>{shown(points[-1][1], unit)}')
    return f'<svg width="{width}" height="{height}">{"".join(drawn)}</svg><table>{"".join(rows)}</table>'


def heatmap(found: Sequence[Series], width: float, height: float, unit: str) -> str:
    """Draw the differences of cumulative buckets as cells, with the bounds of each fourth bucket."""
    below: dict[float, float] = {}
    cells, drawn = [], []
    tall = height / len(found)
    for row, (bound, points) in enumerate(sorted((float(name), points) for name, points in found)):
        cells += [(at, height - (row + 1) * tall, value - below.get(at, 0.0)) for at, value in points]
        below |= dict(points)
        drawn += [f'<text y="{height - row * tall}">{shown(bound, unit)}</text>'] * (row % 4 == 0)
    most = max(count for *_, count in cells) or 1.0
    for at, y, count in cells:
        box = f'x="{50 + at * (width - 60):.1f}" y="{y:.1f}" width="{width / 120:.1f}" height="{tall:.1f}"'
        drawn.append(f'<rect {box} fill="#ff9830" opacity="{min(1.0, count / most * 9):.2f}"/>' * (count > 0))
    return f'<svg width="{width}" height="{height}">{"".join(drawn)}</svg>'


def stat(found: Sequence[Series], width: float, height: float, unit: str) -> str:
    """Write the latest values."""
    return "".join(f"<p><small>{escape(name)}</small>{shown(points[-1][1], unit)}</p>" for name, points in found)


def page(board: Mapping[str, Any], prometheus: httpx.Client, width: int, seconds: float) -> str:
    """Return the page of a dashboard."""
    drawn = []
    for panel in board["panels"]:
        x, y, w, h = (panel["gridPos"][each] for each in "xywh")
        body = "" if panel["type"] == "row" else panel["fieldConfig"]["defaults"].get("noValue", "NO DATA")
        if body and (found := series_of(prometheus, panel, seconds)):
            unit = panel["options"].get("yAxis", panel["fieldConfig"]["defaults"])["unit"]
            draw = {"stat": stat, "heatmap": heatmap, "timeseries": timeseries}[panel["type"]]
            body = draw(found, w * width / 24 - 20, h * 34 - 40, unit)
        place = f"left:{x * width / 24}px;top:{40 + y * 34}px;width:{w * width / 24 - 6}px;height:{h * 34 - 6}px"
        drawn.append(f'<div class="panel {panel["type"]}" style="{place}"><b>{escape(panel["title"])}</b>{body}</div>')
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><h2>{board['title']}</h2>{''.join(drawn)}"


if __name__ == "__main__":
    with httpx.Client(base_url=sys.argv[1], trust_env=False, timeout=60) as client:
        for file in BOARDS.iterdir():
            text = page(json.loads(file.read_text()), client, int(sys.argv[3]), float(sys.argv[4]))
            (Path(sys.argv[2]) / f"{file.stem}.html").write_text(text)
