"""The rows of docs/errors.md and docs/limits.md agree with the tables in the code."""

import re
from pathlib import Path

import pytest

from oriel_gateway import app, core
from oriel_gateway.admin import guard, queues, slo
from oriel_gateway.api_docs import document, pages, published, reading
from oriel_gateway.call import unread
from oriel_gateway.errors import Outcome
from oriel_gateway.grpc_codes import CODES
from oriel_gateway.http_status import STATUS
from oriel_gateway.limits import error_text, ledger_client
from oriel_gateway.observe import budgets, decisions, objectives, top_names
from oriel_gateway.routing import target_cache
from oriel_gateway.shared import state
from oriel_policies.waiting import overload
from oriel_wire.engine import listener
from oriel_wire.h2 import grpc
from oriel_wire.observe import otel_settings, server_timing, spans
from oriel_wire.process import control, lines

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


@pytest.mark.parametrize(
    "heading",
    ["HTTP, as", "Special routes", "Gateway\n", "v2 messages", "Logic (", "OpenAI", "Load generator", "Control planes"],
)
def test_every_limit_names_a_test_that_there_is_and_stands_once(heading: str) -> None:
    folder = Path(__file__).resolve().parents[1]
    tests = "\n".join(path.read_text() for name in ("test_*.py", "*_suite.py") for path in folder.rglob(name))
    there, listed = set(re.findall(r"def (test_\w+)", tests)), rows("limits.md", heading)
    if heading not in ("HTTP, as", "Special routes", "Gateway\n"):
        there.add("-")  # in the other sections a bound may still be without a test
    assert listed and [row[0] for row in listed if row[-1].strip("`") not in there] == []
    settings = r"(?<!\()`([A-Za-z]+_[A-Za-z_]+)`"
    about = [re.findall(settings, row[0])[:1] or [row[0]] for row in listed if "usable" not in row[0]]
    assert [each for each in about if about.count(each) > 1] == []


@pytest.mark.parametrize(
    ("begins", "values"),
    [
        ("listen backlog", (listener.BACKLOG,)),
        ("`KEPT_BYTES`", (state.KEPT_BYTES >> 20,)),
        ("shared limiter: meters", (ledger_client.MAX_TICKED,)),
        ("answer waiting", (unread.READER_BYTES >> 10, unread.READER_BYTES >> 12, unread.MAX_BYTES >> 20)),
        ("decisions kept", (decisions.KEPT, decisions.ANSWERS)),
        (
            "event loop that is behind",
            (overload.LATE_S * 1e3, overload.VERY_LATE_S * 1e3, overload.BUSY_PER_S)
            + (overload.TURN_S * 1e3, overload.WAIT_S * 1e3),
        ),
        ("endpoints that a decision names", (decisions.MAX_TRIED,)),
        ("`/queues`", (queues.TENANTS, queues.LOOKED_AT)),
        ("tenants with a name", (top_names.NAMED, top_names.MAX_COUNTED)),
        ("targets with series", (objectives.MAX_PAIRS, objectives.MAX_CELLS)),
        ("error budgets", (budgets.MAX_PAIRS, budgets.MAX_UNSAVED, slo.LISTED, slo.MOST_LISTED)),
        ("targets of which", (objectives.MAX_ROUTES, server_timing.MOST)),
        ("bounds named in", (error_text.MAX_ITEMS,)),
        ("requests of tenants", (2, target_cache._TARGETS)),
        ("calls under way at SIGTERM", (app.DRAIN_S, core.INCOMPLETE_S)),
        ("lines of the access log", (lines.MAX_QUEUED, lines.CLOSE_S)),
        ("spans that wait", (otel_settings.MAX_QUEUED_SPANS, spans.CLOSE_S)),
        (
            "descriptions of pools",
            (published.MAX_POOLS, published.MAX_ENDPOINTS, published.ANSWER_S, 512, published.EVERY_S),
        ),
        ("services, models described", (reading.MAX_NAMES,) * 2 + (published.MAX_METADATA, published.AGAIN)),
        ("nesting of a described", (reading.MAX_DEPTH, reading.MAX_TEXT, reading.MAX_TENSORS, document.MAX_EXAMPLE)),
        ("services, models in one", (document.MAX_LISTED,)),
        ("documents of tenants", (pages.MAX_KEPT_BYTES >> 20,)),
        ("admin token", (guard.MIN_TOKEN, guard.MAX_TOKEN)),
        ("admin port", (control.ControlLimits().requests, control.MAX_HEAD_BYTES // 1024)),
    ],
)
def test_constants_are_as_the_page_says(begins: str, values: tuple[float, ...]) -> None:
    listed = [*rows("limits.md"), *rows("limits.md", "HTTP, as"), *rows("limits.md", "Special routes")]
    (row,) = [row for row in listed if row[0].startswith(begins)]
    assert tuple(float(number) for number in re.findall(r"[\d.]+", re.sub(r"(\d),(\d)", r"\1\2", row[1]))) == values
