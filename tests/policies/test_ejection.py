"""Which endpoints are ejected, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.ejection import (
    LONGEST_S,
    Cause,
    Ejection,
    Record,
    most_ejected,
    outliers,
    outliers_by_model,
)


def record(*, latency_s: float = 0.01, error_every: int = 0, answers: int = 200) -> Record:
    made = Record()
    for n in range(answers):
        if error_every and n % error_every == 0:
            made.erred()
        else:
            made.succeeded(latency_s)
    return made


def test_one_server_that_fails_among_others_that_do_not() -> None:
    assert outliers([record(), record(error_every=1), record()]) == [(1, Cause.ERRORS)]
    assert outliers([record(error_every=1), record()]) == [(0, Cause.ERRORS)]


def test_an_error_all_servers_share_is_not_the_servers() -> None:
    assert outliers([record(error_every=1)] * 3) == []
    assert outliers([record(error_every=2), record(error_every=1)]) == [] == outliers([record(error_every=1)])


def test_one_server_that_is_slow_among_others_that_are_not() -> None:
    assert outliers([record(), record(latency_s=0.5), record()]) == [(1, Cause.LATENCY)]
    assert outliers([record(latency_s=0.001), record(latency_s=0.05)]) == []  # less than 0.1 s more is nothing


def test_a_server_is_ejected_only_for_all_its_models() -> None:
    slow, fails = record(latency_s=3.0), record(error_every=1)
    assert outliers_by_model([{"a": slow, "b": record()}, {"a": record(), "b": record()}]) == [(0, "a", Cause.LATENCY)]
    assert outliers_by_model([{"a": slow, "b": fails}, {"a": record(), "b": record()}]) == [(0, "", Cause.LATENCY)]
    assert outliers_by_model([{"a": fails}, {"a": record(), "b": record()}]) == [(0, "", Cause.ERRORS)]
    assert outliers_by_model([{"a": slow}, {"b": record()}]) == [], "they have nothing in common"
    # a model that only this server has speaks for the server
    assert outliers_by_model([{"a": slow, "own": record()}, {"a": record()}]) == [(0, "a", Cause.LATENCY)]


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=50))
def test_the_faster_half_is_never_slow(latencies_s: list[float]) -> None:
    slow = {index for index, _ in outliers([record(latency_s=each) for each in latencies_s])}
    faster = sorted(range(len(latencies_s)), key=lambda index: latencies_s[index])[: (len(latencies_s) + 1) // 2]
    assert not slow & set(faster)


@given(st.integers(0, 10_000))
def test_never_more_than_half_are_ejected(count: int) -> None:
    assert most_ejected(count) * 2 <= count
    assert most_ejected(1) == 0


def test_an_ejection_doubles_to_a_minute() -> None:
    ejection = Ejection()
    now, spans = 100.0, []
    for _ in range(9):
        ejection.eject(Cause.STUCK, now)
        spans.append(ejection.until_s - now)
        now = ejection.until_s
    assert spans == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S, LONGEST_S]
    ejection.admit(now)
    assert ejection.cause is None


@pytest.mark.parametrize(
    ("middle_s", "slow_s", "slow"),
    [(1.0, 5.0, False), (1.0, 5.001, True), (0.01, 0.11, False), (0.01, 0.111, True), (0.001, 0.1, False)],
)
def test_a_server_is_slow_if_it_takes_more_than_five_times_as_long_and_a_tenth_of_a_second_more(
    middle_s: float, slow_s: float, slow: bool
) -> None:
    found = outliers([record(latency_s=each) for each in (middle_s, middle_s, slow_s)])
    assert found == ([(2, Cause.LATENCY)] if slow else [])
