"""Charts over time for pages that hold everything they show: drawn by uPlot, which the gateway's console ships."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files

__all__ = ["Line", "Span", "chart", "script", "style"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: values at the middles of equal bins, None where there is none; one value stands for all bins.

    colour: a CSS colour. dash: lengths of strokes and gaps in pixels; empty for a solid line.
    """

    label: str
    values: Sequence[float | None]
    colour: str
    width: float = 2.0
    dash: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase: a label over its stretch of time. style: the page's custom property with its colour; "" for none."""

    label: str
    start_s: float
    end_s: float
    style: str = ""


def chart(
    title: str,
    unit: str,
    bin_s: float,
    lines: Sequence[Line],
    spans: Sequence[Span],
    *,
    logarithmic: bool = False,
) -> str:
    """Return an element that `script` draws. unit: unit of the values; "%" ends at 100. bin_s: seconds of a bin."""
    found = {
        "unit": unit,
        "bin_s": bin_s,
        "lines": [asdict(line) for line in lines],
        "spans": [asdict(span) for span in spans],
        "logarithmic": logarithmic,
        "top": 100.0 if unit == "%" else None,
    }
    data = json.dumps(found).replace("<", "\\u003c")
    label = escape(title)
    return f'<div class="chart" role="img" aria-label="{label}"><script type="application/json">{data}</script></div>'


def style() -> str:
    """Return the style sheet of the charts."""
    return _vendored("uplot.css")


def script() -> str:
    """Return the script that draws every chart of the page. It has to stand behind them."""
    return f"{_vendored('uplot.js')}\n{files('oriel_tools').joinpath('load/charts.js').read_text(encoding='utf-8')}"


def _vendored(name: str) -> str:
    return files("oriel_gateway").joinpath("admin/console/static/vendor", name).read_text(encoding="utf-8")
