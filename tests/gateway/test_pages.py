"""The rows of docs/errors.md agree with the tables in the code."""

from pathlib import Path

import pytest

from oriel_gateway.errors import Outcome
from oriel_gateway.http_status import CODES, STATUS
from oriel_wire.h2 import grpc

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page: str, heading: str = "Gateway\n") -> list[list[str]]:
    text = (DOCS / page).read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_reason_has_one_row_with_its_statuses_and_what_to_do(outcome: Outcome) -> None:
    (row,) = [row for row in rows("errors.md") if row[0] == f"`{outcome.value}`"]
    if outcome in STATUS:
        assert str(STATUS[outcome]) in row[1].split(", ")
        assert grpc.CODES[CODES[outcome]] in row[2].split(", ")


def test_no_row_of_a_reason_that_is_gone() -> None:
    assert [row[0] for row in rows("errors.md") if row[0].strip("`") not in set(Outcome)] == []


def test_every_refusal_has_a_status_on_both_protocols() -> None:
    refusals = set(Outcome) - {Outcome.ANSWERED, Outcome.CALLER_LEFT}
    assert set(STATUS) >= refusals and set(CODES) >= refusals
