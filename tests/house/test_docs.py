"""The tables in docs/ agree with the code."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

import oriel_gateway.errors
import oriel_inference.errors
import oriel_logic.errors
from oriel_gateway.settings import Settings as GatewaySettings
from oriel_gateway.shared.state import CACHE_BYTES
from oriel_inference.settings import Settings as InferenceSettings
from oriel_logic.settings import Settings as LogicSettings
from oriel_policies.documents import schema
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.h2.limits import H2Limits

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def script(name: str) -> Any:
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = script("reference")


def section(name: str, heading: str) -> str:
    text = (DOCS / name).read_text()
    (found,) = [part for part in text.split("\n## ") if part.startswith(heading)]
    return found


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


def bounds(kind: type) -> list[str]:
    """Return the settings of a class that bound something."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [name for name in names if name.startswith(("max_", "body_min")) or re.search(r"(?<!_per)_s$", name)]


@pytest.mark.parametrize("title", [title for title in REFERENCE.CLASSES if title != "Control planes"])
def test_every_bound_among_the_settings_says_what_it_bounds(title: str) -> None:
    kind = REFERENCE.CLASSES[title]
    meanings = {row[0].strip("`"): row[-1] for row in REFERENCE.settings(kind)}
    assert bounds(kind) and [name for name in bounds(kind) if len(meanings[name]) < 15] == []


def test_every_bound_of_connections_is_named_by_a_test() -> None:
    """Tests that reach a bound make it small, or compute with it, and name it for that."""
    texts = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    named = set(re.findall(r"\w+", texts))
    assert {*bounds(HttpLimits), *bounds(H2Limits)} - named == set()


def test_the_bounds_of_operators_have_the_defaults_of_the_code() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for heading in ("In policy documents", "On the command line")
        for line in section("limits.md", heading).splitlines()
        if line.startswith("| ") and "`" in line
    ]
    fields = {
        field.name: field.default
        for table in (schema.PoolTable, schema.TierTable)
        for field in msgspec.structs.fields(table)
        if isinstance(field.default, int)
    }
    parsers = {"oriel gateway": GatewaySettings, "oriel logic": LogicSettings, "oriel inference": InferenceSettings}
    flags = {
        name: (field.name, field.default)
        for kind in parsers.values()
        for field in dataclasses.fields(kind)
        for flag in field.metadata.get("flags", ())
        for name in flag.names
    }
    checked = 0
    for row in rows:
        (first, *_) = re.findall(r"`(?:oriel \w+ )?(-{0,2}[\w-]+)", row[0])
        name, default = flags.get(first) or (first, fields.get(first))
        if default and not isinstance(default, str) and row[1] not in ("none", "all"):
            shown = row[1].partition(",")[0].replace(" ms", "") if name.endswith("_ms") else row[1].partition(",")[0]
            assert shown == REFERENCE.amount(name, default).replace(" ms", ""), row
            checked += 1
    assert checked >= 20 and len(rows) == 30


def test_the_reference_has_the_constants_of_every_unit() -> None:
    page, found = REFERENCE.written(), REFERENCE.all_constants()
    assert {each.module.partition("/")[0] for each in found} == set(REFERENCE.UNITS)
    assert [each for each in found if f"`{each.name}`" not in page or f"\n`{each.module}`: " not in page] == []
    values = {(each.module, each.name): each.value for each in found}
    assert values["gateway/oriel_gateway/shared/state.py", "CACHE_BYTES"] == CACHE_BYTES


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


WIDTH = 120


def prose(page: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are neither code, tables, headings, pictures nor HTML, with their numbers."""
    in_code = False
    for number, line in enumerate(page.splitlines(), start=1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and not re.match(r"\s*(\||```|<|!\[|#)|\s{4,}", line):
            yield number, line


def test_prose_and_code_have_one_width() -> None:
    """A line may be longer where one word of it, such as a link, does not fit."""
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    long = [
        f"{page}:{number}"
        for page in tracked.split()
        if not page.startswith("benchmarks/results/")  # written by programs
        for number, line in prose((ROOT / page).read_text())
        if len(line) > WIDTH and len(re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", line)) > WIDTH // 2
    ]
    assert long == []


def test_the_pages_have_no_more_words_than_a_reader_can_find_their_way_in() -> None:
    pages = [*DOCS.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / each for each in ("README.md", "CONTRIBUTING.md"))]
    assert sum(len(page.read_text().split()) for page in (*pages, ROOT / "CHANGELOG.md")) <= 92_900


def test_the_first_page_is_short_and_ends_with_five_links() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 150
    assert len(re.findall(r"^- \[", readme.partition("## Where to go next")[2], re.MULTILINE)) == 5
