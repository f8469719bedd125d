"""Verdicts, Markdown tables, bars, and the pages that go into benchmarks/results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["Bar", "Panel", "Verdict", "html_page", "table", "targets", "today", "word", "write_page"]

WIDTH, LABEL, VALUE, BAR, GAP, TOP = 720, 230, 110, 18, 6, 8
STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "svg{width:100%;height:auto}text{font:13px system-ui,sans-serif;fill:#222}.own{fill:#1f6feb}.other{fill:#9aa4b2}"
    ".mark{stroke:#c2410c;stroke-width:2;stroke-dasharray:4 3}p{color:#555}"
    "@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#16181c}text{fill:#e6e6e6}p{color:#aaa}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target and what was found; met is None when it was not measured."""

    target: str
    found: str
    met: bool | None


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def word(met: bool | None) -> str:
    """Return the word for a verdict."""
    return {True: "met", False: "MISSED", None: "open"}[met]


def targets(found: Mapping[str, tuple[str, bool]]) -> str:
    """A Markdown table of targets: what is promised -> what was found, and whether that is enough."""
    return table(
        ("target", "found", "met"), [(what, each, "yes" if met else "no") for what, (each, met) in found.items()]
    )


def today() -> str:
    """The date that names a page."""
    return datetime.now(UTC).date().isoformat()


def conditions(where: str, commit: str, spread: str) -> str:
    """The line under which a page's figures hold. where: of `environments.machine`. spread: where it is shown."""
    processor, _, load = where.partition(", load average ")
    return f"Conditions: processor: {processor}. Commit: {commit}. Load: average {load}. Spread: {spread}."


def write_page(folder: Path, name: str, title: str, about: str, text: str, document: Mapping[str, Any]) -> None:
    """Write DATE-NAME.md and the figures, DATE-NAME.json. about: the conditions and one paragraph above the text."""
    day = today()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{day}-{name}.md").write_text(f"# {title}, {day}\n\n{about}\n\n{text}")
    (folder / f"{day}-{name}.json").write_text(json.dumps({"date": day, **document}, indent=1) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """value: None where it was not measured. own: ours."""

    label: str
    value: float | None
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """mark: a target, in the unit of the bars."""

    title: str
    unit: str
    bars: Sequence[Bar]
    mark: float | None = None


def html_page(title: str, about: str, panels: Sequence[Panel]) -> str:
    """The document. `about` is one paragraph."""
    parts = [f"<h2>{escape(panel.title)}</h2>\n{_svg(panel)}" for panel in panels]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n<p>{escape(about)}</p>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _svg(panel: Panel) -> str:
    largest = max([bar.value for bar in panel.bars if bar.value] + [panel.mark or 0.0, 1e-9])
    span = WIDTH - LABEL - VALUE
    height = 2 * TOP + len(panel.bars) * (BAR + GAP)
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(panel.title)}">']
    for index, bar in enumerate(panel.bars):
        y = TOP + index * (BAR + GAP)
        length = span * (bar.value or 0.0) / largest
        value = "not measured" if bar.value is None else f"{bar.value:,.{0 if bar.value >= 100 else 1}f} {panel.unit}"
        out.append(f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>')
        style = "own" if bar.own else "other"
        out.append(f'<rect class="{style}" x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>')
        out.append(f'<text x="{LABEL + length + 6:.1f}" y="{y + 14}">{escape(value)}</text>')
    if panel.mark is not None:
        x = LABEL + span * panel.mark / largest
        out.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 2}"/>')
    return "\n".join([*out, "</svg>"])
