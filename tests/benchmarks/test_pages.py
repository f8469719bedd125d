"""Every page of figures names processor, commit, load and spread, or says that it does not know them."""

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_names_its_conditions(page: Path) -> None:
    lines = re.findall(r"^Conditions: .*$", page.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        assert re.fullmatch(r"Conditions: processor: .+\. Commit: .+\. Load: .+\. Spread: .+\.", line), line


def test_figures_of_the_table_of_benchmarks_are_marked_as_bounds() -> None:
    """The table says what is measured; a figure in it that has no mark would be read as a measurement."""
    table = (RESULTS.parent / "README.md").read_text().split("\nBehaviour is shown by tests")[0]
    figures = re.findall(r"\(([^()]*?\d[^()]* (?:%|us|ms|s|MB)[^()]*)\)", table)
    assert figures and [each for each in figures if not each.startswith("bound: ")] == []
