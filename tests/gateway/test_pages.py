"""docs/errors.md and docs/limits.md say what the gateway does: rows beside the code's own tables."""

import re
from pathlib import Path

import pytest

from oriel_gateway import decisions, guard, queues, top_tenants
from oriel_gateway.answers import STATUS
from oriel_gateway.errors import Outcome
from oriel_gateway.ingress_grpc import _CODES
from oriel_wire.engine import control, lines, spans

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page: str) -> list[list[str]]:
    text = (DOCS / page).read_text().split("\n## Gateway\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_reason_has_one_row_with_its_statuses_and_what_to_do(outcome: Outcome) -> None:
    (row,) = [row for row in rows("errors.md") if row[0] == f"`{outcome.value}`"]
    if outcome in STATUS:
        assert str(STATUS[outcome]) in row[1].split(", ")
        assert _CODES[outcome].name in row[2].split(", ")


def test_no_row_of_a_reason_that_is_gone() -> None:
    assert [row[0] for row in rows("errors.md") if row[0].strip("`") not in set(Outcome)] == []


def test_every_refusal_has_a_status_on_both_protocols() -> None:
    refusals = set(Outcome) - {Outcome.ANSWERED, Outcome.CLIENT_LEFT}
    assert set(STATUS) >= refusals and set(_CODES) >= refusals


@pytest.mark.parametrize(
    ("begins", "values"),
    [
        ("decisions kept", (decisions.KEPT, decisions.ANSWERS)),
        ("endpoints a decision names", (decisions.TOLD,)),
        ("`/queues`", (queues.TENANTS, queues.LOOKED_AT)),
        ("tenants with a name", (top_tenants.NAMED, top_tenants.MAX_COUNTED)),
        ("lines of the access log", (lines.MAX_QUEUED, lines.CLOSE_S)),
        ("spans that wait", (spans.MAX_QUEUED_SPANS, spans.CLOSE_S)),
        ("admin token", (guard.MIN_TOKEN, guard.MAX_TOKEN)),
        ("admin port", (control.MAX_CONCURRENCY, control.MAX_HEAD_BYTES // 1024)),
    ],
)
def test_limits_of_explaining_are_as_the_page_says(begins: str, values: tuple[float, ...]) -> None:
    (row,) = [row for row in rows("limits.md") if row[0].startswith(begins)]
    assert tuple(float(number) for number in re.findall(r"[\d.]+", re.sub(r"(\d),(\d)", r"\1\2", row[1]))) == values
