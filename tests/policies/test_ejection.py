"""Which endpoints are ejected, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.ejection import (
    BROKEN_IN_A_ROW,
    LONGEST_S,
    MIN_ANSWERS,
    Cause,
    Ejection,
    Record,
    most_ejected,
    outliers,
    outliers_by_model,
    silent_for_too_long,
)


def record(*, latency_s: float = 0.01, error_every: int = 0, answers: int = 200) -> Record:
    made = Record()
    for n in range(answers):
        if error_every and n % error_every == 0:
            made.erred()
        else:
            made.answered(latency_s)
    return made


def test_one_server_that_fails_among_others_that_do_not() -> None:
    assert outliers([record(), record(error_every=1), record()]) == [(1, Cause.ERRORS)]
    assert outliers([record(error_every=1), record()]) == [(0, Cause.ERRORS)]


def test_an_error_all_servers_share_is_not_the_servers() -> None:
    assert outliers([record(error_every=1)] * 3) == []
    assert outliers([record(error_every=2), record(error_every=1)]) == []


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


def test_too_few_answers_say_nothing() -> None:
    few = MIN_ANSWERS - 1
    assert outliers([record(), record(error_every=1, answers=few), record(latency_s=9.0, answers=few)]) == []
    assert outliers([record(error_every=1)]) == []


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=50))
def test_the_faster_half_is_never_slow(latencies_s: list[float]) -> None:
    slow = {index for index, _ in outliers([record(latency_s=each) for each in latencies_s])}
    faster = sorted(range(len(latencies_s)), key=lambda index: latencies_s[index])[: (len(latencies_s) + 1) // 2]
    assert not slow & set(faster)


@given(st.integers(0, 10_000))
def test_never_more_than_half_are_ejected(count: int) -> None:
    assert most_ejected(count) * 2 <= count
    assert most_ejected(1) == 0


def test_three_broken_exchanges_in_a_row_are_too_many() -> None:
    broken = record()
    assert [broken.broke() for _ in range(BROKEN_IN_A_ROW)] == [False] * (BROKEN_IN_A_ROW - 1) + [True]
    broken.answered(0.01)
    assert not broken.broke()


def test_an_ejection_doubles_to_a_minute_and_is_forgiven() -> None:
    ejection = Ejection()
    now, spans = 100.0, []
    for _ in range(9):
        ejection.eject(Cause.STUCK, now)
        spans.append(ejection.until_s - now)
        now = ejection.until_s
    assert spans == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S, LONGEST_S]
    ejection.admit(now)
    assert ejection.cause is None
    ejection.eject(Cause.BROKEN, now + 5.0)
    assert ejection.until_s - (now + 5.0) == LONGEST_S
    ejection.admit(now + 65.0)
    ejection.eject(Cause.BROKEN, now + 100.0)
    assert ejection.until_s - (now + 100.0) == 1.0


def test_silence_is_judged_by_what_answers_usually_take() -> None:
    quick, slow, new = record(), record(latency_s=2.0), Record()
    for each in (quick, slow, new):
        each.heard_s = 100.0
    assert not silent_for_too_long(quick, 100.5) and silent_for_too_long(quick, 100.7)
    assert not silent_for_too_long(slow, 109.0) and silent_for_too_long(slow, 110.5)
    assert not silent_for_too_long(new, 200.0)
    assert not silent_for_too_long(quick, 109.0, [slow]), "one of its models takes that long"


@pytest.mark.parametrize(
    ("middle_s", "slow_s", "slow"),
    [(1.0, 5.0, False), (1.0, 5.001, True), (0.01, 0.11, False), (0.01, 0.111, True), (0.001, 0.1, False)],
)
def test_a_server_is_slow_if_it_takes_more_than_five_times_as_long_and_a_tenth_of_a_second_more(
    middle_s: float, slow_s: float, slow: bool
) -> None:
    found = outliers([record(latency_s=each) for each in (middle_s, middle_s, slow_s)])
    assert found == ([(2, Cause.LATENCY)] if slow else [])
