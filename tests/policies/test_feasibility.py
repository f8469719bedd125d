from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.feasibility import PROBE, SAMPLES, AnswerTimes, LowQuantile, ServiceFloor, Verdict


def learned(rows: int = 4, seconds: float = 0.010, times: int = SAMPLES) -> ServiceFloor:
    floor = ServiceFloor()
    for _ in range(times):
        floor.observe(rows, seconds)
    return floor


def test_quantile_lies_low_and_follows_a_change() -> None:
    quantile = LowQuantile(0.05)
    assert quantile.value == inf
    for n in range(2000):
        quantile.observe(1.0 + n % 10)
    assert 0.8 < quantile.value < 3.0
    for _ in range(600):
        quantile.observe(100.0)
    assert quantile.value > 20.0


def test_rare_extremes_hardly_move_it() -> None:
    quantile = LowQuantile(0.05)
    for n in range(2000):
        quantile.observe(0.001 if n % 50 == 0 else 1.0)
    assert quantile.value > 0.5


def test_a_larger_batch_is_never_quicker_and_of_smaller_ones_nothing_is_known() -> None:
    floor = learned(rows=4)
    assert floor.seconds(9) == pytest.approx(0.010, rel=0.05)
    assert floor.seconds(3) == 0.0 and not floor.refuses(3, 0.0)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 2.0)), max_size=300), st.integers(1, 64), st.floats(0, 3))
def test_refusal_needs_samples_and_less_time_than_was_ever_needed(
    samples: list[tuple[int, float]], rows: int, left_s: float
) -> None:
    floor = ServiceFloor()
    for size, seconds in samples:
        floor.observe(size, seconds)
    assert floor.seconds(rows) <= floor.ceiling_s
    if floor.refuses(rows, left_s):
        assert len(samples) >= SAMPLES
        assert left_s < max(seconds for _, seconds in samples)


def answered(times: int, *, size_bytes: int = 1000) -> AnswerTimes:
    """Calls of 10 to 19 ms in turn."""
    found = AnswerTimes()
    for n in range(times):
        found.observe(size_bytes, 0.010 + 0.001 * (n % 10))
    return found


def test_less_than_any_call_has_taken_is_too_short_and_less_than_nine_of_ten_infeasible() -> None:
    times = answered(2000)
    assert times.fastest_s == 0.010
    verdicts = [times.judge(1000, 0.0099) for _ in range(10 * PROBE)]
    assert verdicts.count(Verdict.ADMIT) == 10 and verdicts.count(Verdict.TOO_SHORT) == 10 * (PROBE - 1)
    times.fastest_s = 0.002  # once
    assert times.judge(1000, 0.005) is Verdict.INFEASIBLE
    assert times.judge(1000, times.quick_s(1000) + 1e-6) is Verdict.ADMIT


def test_a_model_that_became_quicker_is_found_by_the_probes() -> None:
    times = answered(2000)
    for _ in range(200_000):
        if times.judge(1000, 0.005) is Verdict.ADMIT:
            times.observe(1000, 0.002)
    assert times.judge(1000, 0.005) is Verdict.ADMIT


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(1e-4, 5.0)), max_size=200), st.integers(0, 10**6))
def test_a_call_is_judged_too_late_only_with_less_time_than_others_took(
    samples: list[tuple[int, float]], size_bytes: int
) -> None:
    times = AnswerTimes()
    for size, seconds in samples:
        times.observe(size, seconds)
    slowest = max((seconds for _, seconds in samples), default=0.0)
    assert times.judge(size_bytes, slowest) is Verdict.ADMIT
    if times.judge(size_bytes, 0.0) is not Verdict.ADMIT:
        assert len(samples) >= SAMPLES
