from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.batch import (
    Backlog,
    BatchBounds,
    Fill,
    Idle,
    RecentMinimum,
    Run,
    ServiceCurve,
    WaitUntil,
    decide,
)

rows_counts = st.integers(1, 300)
durations = st.floats(1e-5, 2.0)
observations = st.lists(st.tuples(rows_counts, durations), max_size=40)


def learned(samples: list[tuple[int, float]]) -> ServiceCurve:
    curve = ServiceCurve()
    for rows, seconds in samples:
        curve.observe(rows, seconds)
    return curve


def linear(rows: int = 32, *, fixed: float = 0.010, per_row: float = 0.001) -> ServiceCurve:
    """A curve that has seen every size up to `rows` exactly, without deviation."""
    return learned([(n, fixed + per_row * n) for n in range(1, rows + 1)])


# --- the service-time curve ---------------------------------------------------------------------------------------


def test_unknown_curve_predicts_nothing_so_everything_is_admitted() -> None:
    assert ServiceCurve().predict(7) == 0.0


def test_known_sizes_are_predicted_exactly_and_between_them_linearly() -> None:
    curve = learned([(2, 0.010), (8, 0.016)])
    assert curve.predict(2) == pytest.approx(0.010)
    assert curve.predict(5) == pytest.approx(0.013)
    assert curve.predict(8) == pytest.approx(0.016)
    assert curve.predict(14) == pytest.approx(0.022)


def test_one_known_size_scales_with_rows_above_it() -> None:
    curve = learned([(4, 0.008)])
    assert curve.predict(1) == pytest.approx(0.008)
    assert curve.predict(8) == pytest.approx(0.016)


def test_one_slow_outlier_does_not_make_every_larger_batch_look_slow() -> None:
    curve = learned([(1, 0.5)] + [(8, 0.010)] * 30)
    assert curve.predict(8) < 0.05


def test_curve_follows_a_model_that_became_slower() -> None:
    curve = learned([(1, 0.001)] * 50 + [(1, 0.010)] * 60)
    assert curve.predict(1) == pytest.approx(0.010, rel=0.1)


def test_bound_exceeds_the_mean_of_a_jittery_model() -> None:
    curve = learned([(1, 0.010 if n % 2 else 0.020) for n in range(200)])
    assert curve.bound(1) > 0.019


@given(observations, rows_counts, rows_counts)
def test_prediction_never_decreases_with_rows(samples: list[tuple[int, float]], a: int, b: int) -> None:
    curve = learned(samples)
    low, high = sorted((a, b))
    assert curve.predict(low) <= curve.predict(high) + 1e-9
    assert curve.bound(low) >= curve.predict(low)


@given(observations)
def test_prediction_of_a_seen_size_stays_within_what_was_seen(samples: list[tuple[int, float]]) -> None:
    curve = learned(samples)
    for rows, _ in samples:
        seen = [seconds for _, seconds in samples]
        assert min(seen) - 1e-9 <= curve.predict(rows) <= max(seen) + 1e-9


@given(st.lists(rows_counts, min_size=1, max_size=500))
def test_size_classes_are_few(sizes: list[int]) -> None:
    curve = learned([(rows, 0.001) for rows in sizes])
    assert len(curve._keys) <= 16 + 8 * 5
    assert all(curve.samples(rows) >= 1 for rows in sizes)


# --- run, wait or idle --------------------------------------------------------------------------------------------


def test_nothing_waiting_is_idle() -> None:
    assert decide(Backlog(0, 0.0, inf), BatchBounds(max_rows=8), ServiceCurve(), 0.0) == Idle()


def test_without_bounds_an_idle_instance_never_waits() -> None:
    decision = decide(Backlog(1, 100.0, inf), BatchBounds(max_rows=64), linear(), 100.0)
    assert decision == Run(1, "idle_instance")


def test_a_full_batch_runs_whatever_the_delay() -> None:
    bounds = BatchBounds(max_rows=8, max_delay_s=1.0)
    assert decide(Backlog(20, 100.0, inf), bounds, linear(), 100.0) == Run(8, "full")


def test_delay_waits_from_the_oldest_arrival_then_runs() -> None:
    bounds = BatchBounds(max_rows=8, max_delay_s=0.5)
    assert decide(Backlog(2, 100.0, inf), bounds, linear(), 100.2) == WaitUntil(100.5)
    assert decide(Backlog(2, 100.0, inf), bounds, linear(), 100.5) == Run(2, "delay")


def test_the_largest_preferred_size_reached_runs_at_once() -> None:
    bounds = BatchBounds(max_rows=16, preferred_rows=(4, 8), max_delay_s=1.0)
    assert decide(Backlog(3, 100.0, inf), bounds, linear(), 100.0) == WaitUntil(101.0)
    assert decide(Backlog(5, 100.0, inf), bounds, linear(), 100.0) == Run(4, "preferred")
    assert decide(Backlog(9, 100.0, inf), bounds, linear(), 100.0) == Run(8, "preferred")


def test_waiting_ends_while_the_tightest_deadline_can_still_be_met() -> None:
    bounds = BatchBounds(max_rows=8, max_delay_s=5.0)
    curve = linear()  # two rows: 12 ms
    waiting = decide(Backlog(2, 100.0, 100.1), bounds, curve, 100.0)
    assert isinstance(waiting, WaitUntil) and waiting.at_s == pytest.approx(100.1 - curve.bound(2))
    assert decide(Backlog(2, 100.0, 100.1), bounds, curve, 100.089) == Run(2, "deadline")


def test_bounds_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows"):
        BatchBounds(max_rows=0)
    with pytest.raises(ValueError, match="max_bytes"):
        BatchBounds(max_rows=4, max_bytes=0)
    with pytest.raises(ValueError, match="preferred"):
        BatchBounds(max_rows=4, preferred_rows=(8,))


backlogs = st.builds(Backlog, st.integers(0, 200), st.floats(0, 100), st.one_of(st.just(inf), st.floats(0, 300)))
bounds_of_any_kind = st.integers(1, 64).flatmap(
    lambda most: st.builds(
        BatchBounds,
        max_rows=st.just(most),
        preferred_rows=st.lists(st.integers(1, most), max_size=3).map(tuple),
        max_delay_s=st.sampled_from([0.0, 0.001, 1.0, 60.0]),
    )
)


@given(backlogs, bounds_of_any_kind, observations)
def test_decision_is_idle_only_for_an_empty_backlog_and_waits_only_within_its_window(
    backlog: Backlog, bounds: BatchBounds, samples: list[tuple[int, float]]
) -> None:
    now, curve = 100.0, learned(samples)
    match decide(backlog, bounds, curve, now):
        case Idle():
            assert backlog.rows == 0
        case Run(rows=rows):
            assert 1 <= rows <= min(bounds.max_rows, backlog.rows)
        case WaitUntil(at_s=at):
            assert bounds.max_delay_s > 0 and backlog.rows < bounds.max_rows
            assert now < at <= backlog.oldest_s + bounds.max_delay_s
            assert at + curve.bound(backlog.rows) <= backlog.tightest_s + 1e-9


# --- filling one batch --------------------------------------------------------------------------------------------


def filled(calls: list[tuple[int, float]], limit: int, curve: ServiceCurve, now: float = 0.0) -> int:
    fill = Fill(limit, curve, now)
    taken = 0
    for rows, deadline in calls:
        if not fill.admit(rows, deadline):
            break
        taken += 1
    return taken


def test_batch_ends_at_its_bound_of_bytes_but_takes_the_first_call_whatever_its_size() -> None:
    fill = Fill(32, ServiceCurve(), 0.0, limit_bytes=100)
    assert [fill.admit(1, inf, size) for size in (60, 40, 1)] == [True, True, False]
    assert fill.size_bytes == 100
    large = Fill(32, ServiceCurve(), 0.0, limit_bytes=100)
    assert large.admit(1, inf, 5000) and not large.admit(1, inf, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 200)), min_size=1), st.integers(1, 400), st.integers(1, 16))
def test_no_batch_of_several_calls_passes_its_bounds(calls: list[tuple[int, int]], most: int, limit: int) -> None:
    fill = Fill(limit, ServiceCurve(), 0.0, limit_bytes=most)
    taken = [admitted for rows, size in calls if (admitted := fill.admit(rows, inf, size))]
    assert taken
    assert len(taken) == 1 or (fill.size_bytes <= most and fill.rows <= limit)


def test_delay_ends_when_the_bytes_of_a_batch_are_there() -> None:
    bounds = BatchBounds(max_rows=8, max_delay_s=1.0, max_bytes=100)
    assert decide(Backlog(2, 100.0, inf, 99), bounds, linear(), 100.0) == WaitUntil(101.0)
    assert decide(Backlog(2, 100.0, inf, 100), bounds, linear(), 100.0) == Run(2, "bytes")


def test_batch_takes_as_many_rows_as_the_tightest_deadline_allows() -> None:
    # 10 ms + 1 ms per row: 15.5 ms leave room for five rows.
    assert filled([(1, 0.0155)] + [(1, 1.0)] * 10, 32, linear()) == 5


def test_a_member_late_even_alone_does_not_shrink_the_batch() -> None:
    assert filled([(1, 0.001)] + [(1, 1.0)] * 10, 8, linear()) == 8


def test_a_tight_call_behind_a_full_enough_batch_stays_for_the_next() -> None:
    assert filled([(1, 1.0)] * 6 + [(1, 0.012)], 32, linear()) == 6


def test_the_first_call_is_taken_even_above_the_limit() -> None:
    assert filled([(12, 1.0), (1, 1.0)], 4, linear()) == 1


@given(
    st.lists(st.tuples(st.integers(1, 16), st.floats(0, 0.2)), min_size=1, max_size=40),
    st.integers(1, 64),
    observations,
)
def test_no_member_that_could_end_in_time_alone_is_made_late_by_its_batch(
    calls: list[tuple[int, float]], limit: int, samples: list[tuple[int, float]]
) -> None:
    curve = learned(samples)
    taken = calls[: filled(calls, limit, curve)]
    rows = sum(size for size, _ in taken)
    assert taken
    assert len(taken) == 1 or rows <= limit
    for size, deadline in taken:
        if curve.bound(size) <= deadline:
            assert curve.bound(rows) <= deadline


def test_a_call_that_a_full_batch_would_make_late_is_endangered() -> None:
    fill = Fill(20, linear(), 100.0)  # 30 ms
    assert fill.endangers(100.029) and not fill.endangers(100.031)
    assert not Fill(20, ServiceCurve(), 100.0).endangers(100.0)  # nothing is known


@given(observations, st.floats(1e-5, 3.0), st.integers(1, 200))
def test_rows_within_is_the_largest_batch_that_ends_in_time(
    samples: list[tuple[int, float]], seconds: float, most: int
) -> None:
    curve = learned(samples)
    rows = curve.rows_within(seconds, most)
    assert 0 <= rows <= most
    assert rows == 0 or curve.bound(rows) <= seconds
    assert rows == most or curve.bound(rows + 1) > seconds


def test_the_recent_minimum_ignores_waiting_and_follows_a_model_that_got_slower() -> None:
    fastest = RecentMinimum()
    assert fastest.seconds(8) == float("inf")
    for seconds in (0.009, 0.0001, 0.007, 0.0002):
        fastest.observe(8, seconds)
    assert 0.0001 <= fastest.seconds(8) < 0.0003
    assert fastest.seconds(7) == float("inf")  # nothing is known of other sizes
    for _ in range(300):
        fastest.observe(8, 0.009)
    assert fastest.seconds(8) > 0.008
