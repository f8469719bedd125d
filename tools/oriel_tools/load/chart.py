"""A line chart over time as inline SVG: no script, no font, nothing fetched. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 26, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: values at the middles of equal bins, None where there is none. style: a CSS class of the page."""

    label: str
    values: Sequence[float | None]
    width_s: float
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase: a label over its stretch of time. style: a CSS class for what lies behind it, none if empty."""

    label: str
    start_s: float
    end_s: float
    style: str = ""


def chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    spans: Sequence[Span],
    *,
    logarithmic: bool = False,
    top: float | None = None,
    levels: Sequence[Line] = (),
) -> str:
    """An SVG element. top: the axis' end where it is known; levels: lines of one value across the whole width."""
    known = [value for line in (*lines, *levels) for value in line.values if value is not None]
    end_s = max([span.end_s for span in spans] + [len(line.values) * line.width_s for line in lines] + [1e-9])
    low, high, ticks = _axis(known, logarithmic, top)

    def x(moment: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * moment / end_s

    def y(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(1.0, max(0.0, share)))

    floor = HEIGHT - BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for span in spans:
        if span.style:
            left, width = x(span.start_s), x(span.end_s) - x(span.start_s)
            box = f'x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{floor - TOP}"'
            parts.append(f'<rect class="{span.style}" {box}/>')
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y(tick) + 4:.1f}" class="end">{_short(tick)}</text>')
    parts.append(f'<text x="{LEFT - 7}" y="{TOP - 10}" class="end">{escape(unit)}</text>')
    parts += [
        f'<text x="{x(second):.1f}" y="{floor + 18}" class="middle">{_short(second)} s</text>'
        for second in _steps(0, end_s, 10)
    ]
    for number, span in enumerate(spans):
        if number:
            parts.append(
                f'<line class="phase" x1="{x(span.start_s):.1f}" x2="{x(span.start_s):.1f}" y1="{TOP}" y2="{floor}"/>'
            )
        room = int((x(span.end_s) - x(span.start_s)) / 6.6)
        if room > 3:
            label = span.label if len(span.label) <= room else span.label[: room - 1] + "\u2026"
            parts.append(f'<text x="{x(span.start_s) + 4:.1f}" y="{TOP - 10}">{escape(label)}</text>')
    across = f'x1="{LEFT}" x2="{WIDTH - RIGHT}"'
    parts += [
        f'<line class="{level.style} level" {across} y1="{y(value):.1f}" y2="{y(value):.1f}">'
        f"<title>{escape(level.label)}</title></line>"
        for level in levels
        for value in level.values
        if value is not None and low <= value <= high
    ]
    for line in lines:
        for run in _runs(line):
            points = " ".join(f"{x((index + 0.5) * line.width_s):.1f},{y(value):.1f}" for index, value in run)
            if len(run) == 1:
                cx, cy = points.split(",")
                parts.append(f'<circle class="{line.style}" cx="{cx}" cy="{cy}" r="2"/>')
            else:
                parts.append(
                    f'<polyline class="{line.style}" points="{points}"><title>{escape(line.label)}</title></polyline>'
                )
    parts.append("</svg>")
    return "\n".join(parts)


def _runs(line: Line) -> list[list[tuple[int, float]]]:
    """The stretches of a line without gaps."""
    runs: list[list[tuple[int, float]]] = [[]]
    for index, value in enumerate(line.values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((index, value))
    return [run for run in runs if run]


def _axis(known: Sequence[float], logarithmic: bool, top: float | None) -> tuple[float, float, list[float]]:
    """Both ends of the value axis and its ticks."""
    if logarithmic:
        positive = [value for value in known if value > 0] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(positive)))
        high = 10.0 ** math.ceil(math.log10(max(positive)) + 1e-9)
        if high <= low:
            high = low * 10
        decades = round(math.log10(high / low))
        return low, high, [low * 10.0**step for step in range(decades + 1)]
    high = top if top is not None else max([*known, 1e-9])
    ticks = _steps(0, high, 5)
    return 0.0, high if top is not None else max(high, ticks[-1]) * 1.04, ticks


def _steps(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers from `low` to `high`, about `wanted` of them."""
    rough = max(high - low, 1e-9) / wanted
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)
    return [low + number * step for number in range(int((high - low) / step + 1e-6) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}" if value >= 0.001 or not value else f"{value:.0e}"
