"""Verdicts, Markdown tables, and the pages that go into benchmarks/results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["Verdict", "conditions", "table", "word", "write_page"]


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


def conditions(where: str, commit: str, spread: str) -> str:
    """The line under which a page's figures hold. where: of `environments.machine`. spread: where it is shown."""
    processor, _, load = where.partition(", load average ")
    return f"Conditions: processor: {processor}. Commit: {commit}. Load: average {load}. Spread: {spread}."


def write_page(folder: Path, name: str, title: str, about: str, text: str, document: Mapping[str, Any]) -> None:
    """Write DATE-NAME.md and the figures, DATE-NAME.json. about: the conditions and one paragraph above the text."""
    day = datetime.now(UTC).date().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{day}-{name}.md").write_text(f"# {title}, {day}\n\n{about}\n\n{text}")
    (folder / f"{day}-{name}.json").write_text(json.dumps({"date": day, **document}, indent=1) + "\n")
