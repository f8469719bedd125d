"""One word per event in all units, and every word that was ever published is still published."""

from enum import Enum
from pathlib import Path

import pytest

import oriel_gateway.errors
import oriel_inference.errors
import oriel_logic.errors
from oriel_wire.outcomes import ALIASES, SHARED, event_of

OUTCOMES = {
    "Gateway": oriel_gateway.errors.Outcome,
    "Logic": oriel_logic.errors.Outcome,
    "Inference": oriel_inference.errors.Outcome,
}
PUBLISHED = {
    "Gateway": "answered bad_request unauthenticated identity_unavailable tier_not_allowed not_ready "
    "ambiguous_credentials not_found method_not_allowed too_large encoding_unsupported rate_limited "
    "concurrency_limited tokens_limited quota_exceeded budget_spent queue_full displaced infeasible "
    "deadline_too_short deadline_exceeded upstream_unreachable upstream_broken "
    "sequence_lost server_stopping client_left",
    "Logic": "ok client_left bad_request input_refused media_unsupported not_acceptable input_too_large "
    "parameter_wrong model_unknown service_unknown service_broken deadline_exceeded saturated handler_failed "
    "worker_died handler_timed_out memory_exceeded model_input_wrong model_unavailable model_busy model_failed "
    "model_unreachable",
    "Inference": "ok invalid_request too_large not_found method_not_allowed unknown_model model_not_ready "
    "no_available_version not_supported queue_full queue_timeout deadline_exceeded deadline_too_short caller_left "
    "server_stopping control_refused load_failed backend_failed model_says_not_found model_says_exists "
    "model_says_unavailable model_says_cancelled model_says_unknown model_memory_full restricted",
}


@pytest.mark.parametrize("unit", OUTCOMES)
def test_a_member_is_named_after_its_event_in_every_unit(unit: str) -> None:
    members: list[Enum] = list(OUTCOMES[unit])
    assert [member.name for member in members if event_of(member.value) != member.name.lower()] == []


@pytest.mark.parametrize("unit", OUTCOMES)
def test_no_word_that_clients_match_on_has_changed(unit: str) -> None:
    assert {member.value for member in OUTCOMES[unit]} == set(PUBLISHED[unit].split())


def test_an_alias_is_published_and_means_a_shared_event() -> None:
    published = {word for words in PUBLISHED.values() for word in words.split()}
    assert set(ALIASES) <= published and set(ALIASES.values()) <= set(SHARED)


def test_the_shared_table_holds_the_events_of_more_than_one_unit() -> None:
    events = [{event_of(word) for word in words.split()} for words in PUBLISHED.values()]
    shared = {event for unit in events for event in unit if sum(event in each for each in events) > 1}
    logic_pages = {"not_found", "method_not_allowed"}  # answered by `replies` without an Outcome
    assert shared | logic_pages == set(SHARED)


def test_the_documentation_lists_every_alias() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    lines = page.partition("## One word per event")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert {alias: event for event, alias, _ in rows} == ALIASES
    for event, alias, units in rows:
        named = {unit for unit, words in PUBLISHED.items() if alias in words.split()}
        assert named == {unit.strip().capitalize() for unit in units.split(",")}, f"{event}: {alias}"
