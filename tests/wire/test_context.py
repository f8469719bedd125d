"""What a head says of its request's deadline."""

import pytest

from oriel_wire.context import parse_timeout_ms, read_headers, valid_request_id


@pytest.mark.parametrize(
    ("headers", "trusted", "left_s"),
    [
        ({}, True, 60.0),
        ({"x-oriel-timeout-ms": "90000"}, True, 90.0),
        ({"x-oriel-timeout-ms": "90000"}, False, 60.0),
        ({"x-request-timeout-ms": "300"}, False, 0.3),
        ({"x-request-timeout-ms": "90000"}, False, 60.0),  # a client only shortens
        ({"x-oriel-timeout-ms": "500", "x-request-timeout-ms": "300"}, True, 0.3),
        ({"x-oriel-timeout-ms": "200", "x-request-timeout-ms": "300"}, True, 0.2),
        ({"x-request-timeout-ms": "0"}, False, 60.0),
        ({"x-request-timeout-ms": "-1"}, False, 60.0),
        ({"x-request-timeout-ms": "soon"}, False, 60.0),
    ],
)
def test_deadline(headers: dict[str, str], trusted: bool, left_s: float) -> None:
    plan = read_headers(headers.get, trusted=trusted, sample=False)
    for now in (100.0, 200.0):
        assert plan.at(now, 60.0).deadline == pytest.approx(now + left_s)


def test_requests_of_one_plan_have_their_own_ids() -> None:
    plan = read_headers({}.get, trusted=False, sample=False)
    first, second = plan.at(1.0, 1.0), plan.at(1.0, 1.0)
    assert first.request_id != second.request_id and first.trace.trace_id != second.trace.trace_id


@pytest.mark.parametrize(("given", "kept"), [("a.b", True), ("_-1", True), (".", False), ("..", False), (".a", False)])
def test_an_id_that_a_path_would_swallow_is_not_kept(given: str, kept: bool) -> None:
    """`/decisions/..` is another page."""
    assert valid_request_id(given) is kept


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("86400001", 86400.0),
        ("999999999999", 86400.0),
        ("1000000000000", 86400.0),
        ("1" * 19, None),
        ("NaN", None),
        ("-1", None),
        ("\xb2", None),
    ],
)
def test_a_deadline_is_at_most_a_day(given: str, seconds: float | None) -> None:
    assert parse_timeout_ms(given) == seconds
