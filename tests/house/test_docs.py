"""The tables in docs/ agree with the code."""

import dataclasses
import re
import subprocess
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import oriel_gateway.errors
import oriel_inference.errors
import oriel_logic.errors
from oriel_inference.settings import Settings as InferenceSettings
from oriel_logic.settings import Settings as LogicSettings
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.h2.limits import H2Limits

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def section(name: str, heading: str) -> str:
    text = (DOCS / name).read_text()
    (found,) = [part for part in text.split("\n## ") if part.startswith(heading)]
    return found


def written(name: str, value: Any) -> str:
    """Format a default as the tables do."""
    if name.endswith("_bytes"):
        size, unit = next((value >> bits, unit) for bits, unit in ((20, "MiB"), (10, "KiB"), (0, "B")) if value >> bits)
        return f"{size} {unit}"
    return f"{value:g} s" if name.endswith("_s") else str(value)


@pytest.mark.parametrize(
    ("heading", "outcomes"),
    [
        ("Gateway", oriel_gateway.errors.Outcome),
        ("Logic", oriel_logic.errors.Outcome),
        ("Inference", oriel_inference.errors.Outcome),
    ],
)
def test_every_reason_is_in_the_catalogue(heading: str, outcomes: type[Enum]) -> None:
    catalogue = section("errors.md", heading)
    assert [outcome.value for outcome in outcomes if f"`{outcome.value}`" not in catalogue] == []
    lines = [line for line in catalogue.splitlines() if "|" in line]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert head[-2:] == ["cause", "remedy"]
    short = [row[0] for row in rows if len(row) != len(head) or min(map(len, row[-2:])) < 4]
    assert short == [], "each reason says what caused it and what to do"


@pytest.mark.parametrize(
    ("heading", "settings"),
    [("HTTP, as", HttpLimits), ("HTTP/2", H2Limits), ("Logic", LogicSettings), ("Inference", InferenceSettings)],
)
def test_every_limit_is_in_the_table_with_its_default(heading: str, settings: Any) -> None:
    rows = {
        line.split("`")[1]: [cell.strip() for cell in line.split("|")]
        for line in section("limits.md", heading).splitlines()
        if line.startswith("| `")
    }
    limits = {
        field.name: written(field.name, field.default)
        for field in dataclasses.fields(settings)
        if field.name.startswith(("max_", "body_min"))
        or (field.name.endswith("_s") and not field.name.endswith("_per_s"))
        or field.name == "workers"
    }
    assert limits, "the rule was looked for in the wrong place"
    assert {name: rows[name][2] if name in rows else "missing" for name in limits} == limits


def test_every_relative_link_leads_to_a_file() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    broken = [
        f"{page}: {target}"
        for page in tracked.split()
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
        if "://" not in target and not target.startswith(("#", "mailto:"))
        if not ((ROOT / page).parent / target.split("#")[0]).exists()
    ]
    assert broken == []


def test_decisions_are_numbered_and_indexed() -> None:
    files = sorted(path for path in (DOCS / "decisions").glob("*.md") if path.name != "README.md")
    index = (DOCS / "decisions" / "README.md").read_text()
    lines = [f"- [{path.read_text().splitlines()[0].removeprefix('# ')}]({path.name})" for path in files]
    assert [line for line in index.splitlines() if line.startswith("- ")] == lines, "one line per file, its own title"
    numbers = [int(path.name[:4]) for path in files]
    assert len(set(numbers)) == len(numbers)
    assert [path.read_text().split(".")[0] for path in files] == [f"# {number}" for number in numbers]


def test_the_index_lists_every_page_once() -> None:
    index = (DOCS / "README.md").read_text()
    listed = re.findall(r"\]\(([a-z0-9-]+\.md)\)", index)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_a_file_that_a_page_sends_to_is_there(page: str) -> None:
    named = re.findall(
        r"`((?:wire|policies|gateway|logic|inference|cli|tests|benchmarks)/[\w./]+)`", (ROOT / page).read_text()
    )
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_the_makefile_has_at_most_twelve_targets() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(phony.split()) <= 12


def test_every_link_to_a_heading_leads_to_one() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = {(ROOT / page).resolve(): (ROOT / page).read_text() for page in tracked.split()}
    headings = {path: headings_of(text) for path, text in pages.items()}
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path, text in pages.items()
        for target in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", text)
        for name, _, heading in [target.partition("#")]
        if heading not in headings.get((path.parent / name).resolve() if name else path, {heading})
    ]
    assert broken == []


def headings_of(page: str) -> set[str]:
    """Return the names by which links call the headings of a page, and its own anchors."""
    texts = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts]
    return {*plain, *re.findall(r'<a id="([^"]+)">', page)}


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    uneven = []
    for page in tracked.split():
        head, in_code = 0, False
        for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
            in_code ^= line.lstrip().startswith("```")
            cells = 0 if in_code or not line.startswith("|") else line.replace("\\|", "").count("|") - 1
            if cells and head and cells != head:
                uneven.append(f"{page}:{number}")
            head = (head or cells) if cells else 0
    assert uneven == []
