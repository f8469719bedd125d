"""How long a start takes, and which calls are worth holding."""

from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.scaling.cold_start import ColdStarts, hold_until, worth_holding
from oriel_policies.waiting.admission import Admission
from oriel_policies.waiting.queue import SlaQueue

SECONDS = st.floats(0.0, 1000.0)


def seen(*took: float, guess_s: float = 60.0) -> ColdStarts:
    starts = ColdStarts(guess_s=guess_s, forget_s=300.0)
    for seconds in took:
        starts.called(0.0, empty=True)
        starts.ready(seconds)
    return starts


def test_a_start_begins_with_the_first_call_for_a_pool_without_addresses() -> None:
    starts = seen()
    assert starts.rest_s(5.0) is None and starts.retry_after_s(5.0) is None
    starts.called(10.0, empty=False)  # it has servers, which do not answer
    assert starts.rest_s(10.0) is None
    starts.called(20.0, empty=True)
    starts.called(30.0, empty=False)  # the first address is there
    assert (starts.elapsed_s(40.0), starts.rest_s(40.0), starts.retry_after_s(40.5)) == (20.0, 40.0, 40)
    starts.ready(50.0)
    assert starts.rest_s(50.0) is None and starts.quantile_s(0.5) == 30.0 and starts.count == 1


def test_earlier_starts_replace_the_guess() -> None:
    starts = seen(4.0, 10.0, 6.0)
    assert (starts.quantile_s(0.5), starts.quantile_s(0.95)) == (6.0, 10.0)
    starts.called(100.0, empty=True)
    assert starts.rest_s(100.0) == 6.0 and starts.rest_s(105.0) == 1.0
    assert starts.rest_s(107.0) == 3.0  # only the one of 10 s took longer
    assert starts.rest_s(110.0) == 1.0 and starts.rest_s(130.0) == 20.0  # late: as long again as it is late
    assert starts.rest_s(1e9) == 3600.0


def test_a_start_that_nobody_waited_for_is_given_up() -> None:
    starts = seen()
    starts.called(0.0, empty=True)
    starts.called(250.0, empty=True)
    assert starts.elapsed_s(500.0) == 500.0
    starts.called(551.0, empty=True)
    assert starts.elapsed_s(551.0) == 0.0


@given(st.lists(SECONDS, max_size=40), SECONDS)
def test_the_rest_is_that_of_a_start_that_was_seen(took: list[float], elapsed_s: float) -> None:
    starts = seen(*took)
    starts.called(2000.0, empty=True)
    rest_s = starts.rest_s(2000.0 + elapsed_s)
    assert rest_s is not None and rest_s > 0.0
    longer = [each for each in took[-32:] or [60.0] if each > starts.elapsed_s(2000.0 + elapsed_s)]  # type: ignore[operator]
    if longer:
        shorter = [each for each in longer if each <= elapsed_s + rest_s + 1e-6]
        assert 2 * len(shorter) >= len(longer) and rest_s <= max(longer)
    assert starts.retry_after_s(2000.0 + elapsed_s) == max(1, ceil(rest_s))


@given(SECONDS, SECONDS, st.one_of(SECONDS, st.just(inf)), SECONDS, st.one_of(st.none(), SECONDS))
def test_no_call_is_held_beyond_its_budget_or_its_own_deadline(
    received_s: float, hold_s: float, requested_s: float, waited_s: float, rest_s: float | None
) -> None:
    until = hold_until(received_s, hold_s, received_s + requested_s)
    assert until <= received_s + hold_s and until <= received_s + requested_s
    now = received_s + waited_s
    if rest_s is None:
        assert worth_holding(now, rest_s, until)
    else:
        assert worth_holding(now, rest_s, until) == (now + rest_s <= until)


def test_a_pool_without_permits_says_when_to_come_back() -> None:
    assert Admission(limit=0, queue=SlaQueue(max_items=1, max_bytes=1)).retry_after_s() == 1


@pytest.mark.parametrize(("requested_until", "until"), [(inf, 105.0), (106.0, 105.0), (105.0, 105.0), (104.0, 104.0)])
def test_a_call_is_held_for_its_time_or_until_its_callers_deadline(requested_until: float, until: float) -> None:
    assert hold_until(100.0, 5.0, requested_until) == until
