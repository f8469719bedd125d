"""Expected waits: from the work ahead and the learned service times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.batch import ServiceCurve, best_rate, expected_wait_s


def curve(*samples: tuple[int, float]) -> ServiceCurve:
    made = ServiceCurve()
    for rows, seconds in samples:
        made.observe(rows, seconds)
    return made


def test_best_rate_is_that_of_the_batch_size_with_most_rows_per_second() -> None:
    known = curve((1, 0.010), (4, 0.012), (8, 0.040))
    assert best_rate(known.predict, 8) == pytest.approx(4 / 0.012)
    assert best_rate(known.predict, 2) < best_rate(known.predict, 4)


def test_calls_that_run_alone_have_the_rate_of_their_own_size() -> None:
    known = curve((1, 0.010), (8, 0.011))
    assert best_rate(known.predict, 8, smaller=False) == pytest.approx(8 / 0.011)
    assert best_rate(known.predict, 1, smaller=False) == pytest.approx(1 / 0.010)


def test_nothing_is_said_of_work_whose_speed_is_not_known() -> None:
    assert best_rate(ServiceCurve().predict, 8) == 0.0
    assert expected_wait_s(3, 0.0) is None
    assert expected_wait_s(0, 0.0) == 0.0


def test_wait_is_the_work_ahead_at_the_best_rate() -> None:
    assert expected_wait_s(20, 400.0) == pytest.approx(0.05)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 10.0)), max_size=20),
    st.integers(0, 8).map(lambda power: 1 << power),
    st.floats(0.0, 1e6),
    st.floats(0.0, 1e6),
)
def test_more_work_never_waits_less_and_larger_batches_are_never_slower(
    samples: list[tuple[int, float]], max_rows: int, ahead: float, more: float
) -> None:
    known = curve(*samples)
    rate = best_rate(known.predict, max_rows)
    assert 0.0 <= rate <= best_rate(known.predict, 2 * max_rows)
    first, second = expected_wait_s(ahead, rate), expected_wait_s(ahead + more, rate)
    assert (first is None or first >= 0.0) and (first is None or second is None or first <= second)
