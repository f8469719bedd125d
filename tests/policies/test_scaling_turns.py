"""Where the rules of scaling turn: windows to the second, silence, idle gaps, service times, forecasts in numbers."""

from math import inf, nextafter, sqrt

import pytest

from oriel_policies.scaling.counter import DemandCounter
from oriel_policies.scaling.forecast import expected_rate, growth
from oriel_policies.scaling.keep_alive import IdleGaps
from oriel_policies.scaling.members import Members, State
from oriel_policies.scaling.records import PoolRecord, TierRecord, deadline_class, due_by, later
from oriel_policies.scaling.wanted import (
    Scaling,
    ServiceTime,
    TierLoad,
    TierScaling,
    _too_late,
    replicas_wanted,
    service_time,
)

NOTHING = [0.0] * 24


# The counter of a gateway ---------------------------------------------------------------------------------------------


def test_arrivals_are_told_by_the_whole_seconds_of_their_age_for_a_minute() -> None:
    it = DemandCounter(0.0)
    for second in (39.9, 40.0, 40.99, 41.0, 99.99, 100.0):
        it.arrived("gold", second)
    it.arrived("gold", 100.5, calls=2)
    it.refused("gold", 41.0)
    it.refused("gold", 100.0)
    found = it.record(100.75).tiers["gold"]
    assert {age: calls for age, calls in enumerate(found.arrivals) if calls} == {0: 3.0, 1: 1.0, 59: 1.0, 60: 2.0}
    assert found.refused == 2.0
    found = it.record(101.0).tiers["gold"]
    assert {age: calls for age, calls in enumerate(found.arrivals) if calls} == {1: 3.0, 2: 1.0, 60: 1.0}


def test_a_refusal_noted_before_the_arrivals_of_an_earlier_second_does_not_outlive_the_window() -> None:
    """The seconds were dropped in the order of their notes: a minute later the plan failed on one that was too old."""
    it = DemandCounter(0.0)
    it.refused("gold", 10.1)
    it.arrived("gold", 9.5)
    found = it.record(70.0).tiers["gold"]
    assert (sum(found.arrivals), found.refused) == (0.0, 1.0)
    assert sum(it.record(71.0).tiers["gold"].arrivals) == 0.0 and not it._tiers["gold"].seconds


def test_a_record_tells_idle_time_waiting_calls_and_an_operators_wish() -> None:
    it = DemandCounter(10.0)
    assert it.record(15.0).idle_s == inf and it.record(15.0).observed_s == 5.0
    it.arrived("gold", 20.0)
    assert it.record(21.5).idle_s == 1.5
    it.queued("gold", 30.0)
    it.queued("gold", 30.0)
    assert (it.record(29.0).held, it.record(29.0).idle_s, sum(it.record(29.0).tiers["gold"].backlog)) == (2.0, 0.0, 2.0)
    for _ in range(2):
        it.left_queue("gold", 30.0)
    assert it.record(29.0).held == 0.0 and not it._tiers["gold"].waiting
    it.started()
    assert (it.record(29.0).in_flight, it.record(29.0).idle_s) == (1.0, 0.0)
    it.finished(29.0)
    assert it.record(31.0).idle_s == 2.0
    it.running(2, 40.0)
    assert it.record(41.0).in_flight == 2.0
    it.running(0, 42.0)
    it.running(0, 43.0)
    assert it.record(45.0).idle_s == 3.0, "it had ended at 42"
    it.wake(3, 50.0)
    assert [(it.record(now).woken, it.record(now).woken_s) for now in (49.0, 50.0)] == [(3, 1.0), (0, 0.0)]


def test_executions_count_by_their_size_and_by_half_after_a_while() -> None:
    it = DemandCounter(0.0)
    it.executed(2, 0.5, 1.0)
    it.executed(2, 1.5, 1.0, executions=3.0)
    assert it.record(1.0).curve == {2: (4.0, 2.0)}
    half_life_s = next(second for second in range(1, 100_000) if it.record(float(second)).curve != {2: (4.0, 2.0)})
    assert it.record(float(half_life_s)).curve == {2: (2.0, 1.0)}
    assert it.record(2.0 * half_life_s - 1.0).curve == {2: (2.0, 1.0)}
    assert it.record(2.0 * half_life_s).curve == {2: (1.0, 0.5)}


# Records --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "number"), [(-1.0, 0), (0.0, 0), (0.1, 0), (nextafter(0.1, 1.0), 1), (0.16, 1), (0.17, 2), (1e9, 23)]
)
def test_a_deadline_belongs_to_the_class_that_it_is_within(left_s: float, number: int) -> None:
    assert deadline_class(left_s) == number


def test_calls_of_a_class_are_due_evenly() -> None:
    backlog = [4.0, 6.0, *[0.0] * 22]
    due = [due_by(backlog, left_s) for left_s in (-1.0, 0.0, 0.05, 0.1, 0.13, 0.16, 9.0)]
    assert due == pytest.approx([0.0, 0.0, 2.0, 4.0, 7.0, 10.0, 10.0])
    assert later(backlog, 0.09) == backlog
    assert later(backlog, 0.1)[:2] == pytest.approx([10.0, 0.0])
    assert sum(later([0.0, 0.0, 8.0, *[0.0] * 21], 0.1)) == pytest.approx(8.0)


def test_a_record_is_added_by_its_age_to_the_second() -> None:
    for age_s, shift in ((0.0, 0), (0.49, 0), (0.5, 1), (1.49, 1), (60.0, 60), (60.5, 61)):
        total, one = TierRecord(), TierRecord()
        one.arrivals, one.refused, one.backlog = [5.0] + [1.0] * 60, 2.0, [3.0] * 24
        total.add(one, age_s, with_backlog=False)
        assert total.arrivals == ([0.0] * shift + one.arrivals)[:61] and total.refused == 2.0 and not sum(total.backlog)


def test_of_several_wishes_the_largest_counts_and_of_equal_ones_the_longest() -> None:
    total = PoolRecord()
    for woken, woken_s, age_s, found in (
        (2, 5.0, 5.0, (0, 0.0)),
        (2, 5.0, 1.0, (2, 4.0)),
        (2, 9.0, 1.0, (2, 8.0)),
        (1, 99.0, 0.0, (2, 8.0)),
        (3, 1.0, 0.0, (3, 1.0)),
    ):
        one = PoolRecord()
        one.woken, one.woken_s = woken, woken_s
        total.add(one, age_s)
        assert (total.woken, total.woken_s) == found


# Sums over gateways ---------------------------------------------------------------------------------------------------


def report(observed_s: float = 500.0) -> PoolRecord:
    made = PoolRecord()
    made.observed_s, made.held = observed_s, 1.0
    return made


@pytest.mark.parametrize(
    ("later_s", "state", "held", "continuous"),
    [
        (0.0, State.COMPLETE, 2.0, True),
        (10.0, State.COMPLETE, 2.0, True),
        (10.5, State.PARTIAL, 0.0, False),
        (59.5, State.PARTIAL, 0.0, False),
        (60.0, State.UNAVAILABLE, 0.0, False),
    ],
)
def test_a_sum_is_partial_after_10_s_of_silence_and_unavailable_after_60(
    later_s: float, state: State, held: float, continuous: bool
) -> None:
    it = Members(0.0)
    for now in range(0, 201, 10):
        it.read({"a": (report(), 0.0), "b": (report(), 0.0)}, float(now))
    found = it.demand(200.0 + later_s)
    assert (found.state, found.total.held, found.continuous) == (state, held, continuous)


@pytest.mark.parametrize(("after_s", "state"), [(0.0, State.PARTIAL), (59.5, State.PARTIAL), (60.0, State.COMPLETE)])
@pytest.mark.parametrize("how", ["left", "old", "outage"])
def test_a_sum_is_partial_for_a_minute_after_a_gateway_was_lost(how: str, after_s: float, state: State) -> None:
    it = Members(0.0)
    for now in range(0, 191, 10):
        it.read({"a": (report(), 0.0), "b": (report(), 0.0)}, float(now))
    lost_s = 201.0 if how == "outage" else 200.0
    both = {"a": (report(), 0.0), "b": (report(), 60.0 if how == "old" else 0.0)}
    it.read({"a": (report(), 0.0)} if how == "left" else both, lost_s)
    kept = {name: each for name, each in both.items() if each[1] < 60.0 and (how == "outage" or name == "a")}
    now = lost_s
    while now < lost_s + after_s:
        now = min(now + 10.0, lost_s + after_s)
        it.read(kept, now)
    found = it.demand(now)
    assert found.state is state and found.continuous is (state is State.COMPLETE)


def test_a_window_that_was_not_seen_whole_is_not_continuous() -> None:
    for observed_s, since_s, continuous in ((60.0, 60.0, True), (59.5, 60.0, False), (60.0, 59.5, False)):
        it = Members(200.0 - since_s)
        it._lost_s = 0.0
        it.read({"a": (report(observed_s), 0.0)}, 200.0)
        it._lost_s = 0.0
        assert it.demand(200.0).continuous is continuous


# Idle gaps ------------------------------------------------------------------------------------------------------------


def gaps(*lengths: float, shortest_s: float = 5.0) -> IdleGaps:
    it = IdleGaps(shortest_s)
    for length in lengths:
        it.observe(length)
        it.observe(0.0)
    return it


def test_a_gap_is_as_long_as_a_start_at_least_and_ends_when_idle_time_falls() -> None:
    it = gaps(4.5, 5.0)
    assert list(it._gaps) == [5.0]
    for idle_s in (6.0, 6.0, 7.0, 6.5):
        it.observe(idle_s)
    assert list(it._gaps) == [5.0, 7.0]


def test_a_replica_is_ordered_a_start_before_a_regular_call() -> None:
    count = next(number for number in range(1, 100) if gaps(*[100.0] * number).keep_alive_s(300.0) == 100.0)
    assert gaps(*[100.0] * (count - 1)).keep_alive_s(300.0) == 300.0
    it = gaps(*[100.0] * count)
    for idle_s, expected in ((79.5, False), (80.0, True), (100.0, True), (100.5, False)):
        it.observe(idle_s)
        assert it.expects_call(20.0) is expected
    assert it.keep_alive_s(60.0) == 60.0
    few = gaps(*[100.0] * (count - 1))
    few.observe(90.0)
    assert not few.expects_call(20.0)


# Service times --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target_s", "device_s", "latency_s"),
    [(2.0, 0.25, 1.0), (nextafter(2.0, 0.0), 0.375, 0.75), (1.5, 0.375, 0.75), (1.25, 0.5, 0.5), (0.1, 0.5, 0.5)],
)
def test_the_planned_batch_is_the_largest_within_half_of_the_target(
    target_s: float, device_s: float, latency_s: float
) -> None:
    curve = {1: (4.0, 2.0), 2: (2.0, 1.5), 4: (1.0, 1.0), 8: (0.0, 0.0)}
    found = service_time(curve, target_s)
    assert found is not None and (found.device_s, found.latency_s) == (device_s, latency_s)
    assert service_time({8: (0.0, 9.0)}, target_s) is None and service_time({}, target_s) is None


# Forecasts ------------------------------------------------------------------------------------------------------------


def forecast(arrivals: list[float], *, start_s: float = 20.0, target_s: float = 0.5, **more: float) -> float:
    return expected_rate(
        arrivals,
        observed_s=more.get("observed_s", 100.0),
        grown=growth(arrivals, start_s) if more.get("continuous", True) else 1.0,
        target_s=target_s,
        start_s=start_s,
    )


def test_a_burst_of_six_seconds_counts_beyond_four_sigmas() -> None:
    for calls, counts in ((3.7, False), (3.9, True)):
        arrivals = [0.0] + [4.0 + calls] * 6 + [4.0] * 54
        minute = 4.0 + calls / 10
        assert (4.0 + calls > minute + 4.0 * sqrt(minute / 6)) is counts
        found = forecast(arrivals, continuous=False)
        assert found == pytest.approx(4.0 + calls if counts else minute)
        assert forecast(arrivals, target_s=20.0) == pytest.approx(minute), "such a call waits for the replica"
        assert forecast(arrivals, target_s=nextafter(20.0, 0.0), continuous=False) == found


def test_a_ramp_is_extrapolated_to_a_start_and_the_delay_and_to_twice_at_most() -> None:
    rising = [0.0] + [100.0 - age for age in range(60)]  # one more per second; 93 in the mean of the last 15 s
    assert forecast(rising, start_s=5.0) == pytest.approx(93.0 + 20.0)
    assert forecast(rising, start_s=500.0) == pytest.approx(2 * 93.0)
    assert forecast(rising, continuous=False) == pytest.approx(97.5), "a burst"
    chance = [0.0] + [100.0] * 30 + [97.0] * 30
    assert forecast(chance) == pytest.approx(98.5)


def test_after_a_step_the_calls_are_not_taken_for_a_ramp() -> None:
    stepped = [0.0] + [40.0] * 30 + [10.0] * 30
    deviation = sqrt(80.0 / 15) / 15
    assert forecast(stepped) == pytest.approx(40.0 + 35.0 * deviation)


def test_calls_that_shrink_are_planned_for_at_their_present_rate() -> None:
    falling = [0.0] + [40.0 + age for age in range(60)]  # 47 in the mean of the last 15 s, 40 by the line
    assert forecast(falling) == pytest.approx(47.0) == forecast(falling, target_s=99.0)
    assert forecast([0.0] * 21 + [40.0] * 40) == 0.0
    assert forecast([0.0] * 61) == 0.0


def test_a_rate_is_the_mean_of_what_was_observed() -> None:
    arrivals = [0.0] + [6.0] * 6 + [0.0] * 54
    for observed_s, found in ((0.0, 6.0), (6.9, 6.0), (12.0, 3.0), (60.0, 0.6), (99.0, 0.6)):
        assert forecast(arrivals, observed_s=observed_s, target_s=99.0, continuous=False) == pytest.approx(found)


# The wanted number ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "work", "slack", "share"),
    [
        (2.0, 2.0, 9.0, 1.0),
        (2.0, 3.0, 9.0, 1.0),
        (2.0, 1.0, 0.0, 0.2233),
        (2.0, 1.0, 1.0, 0.0302),
        (5.0, 4.0, 0.0, 0.5045),
    ],
)
def test_the_share_of_calls_that_wait_too_long(servers: float, work: float, slack: float, share: float) -> None:
    """Halfin and Whitt: density / (density + excess * below), times exp(-2 (servers - work) slack)."""
    assert _too_late(servers, work, slack) == pytest.approx(share, abs=2e-4)


def test_replicas_are_counted_up_from_what_is_needed_and_within_the_bounds() -> None:
    pool = Scaling(minimum=1, maximum=5, spare=1, start_s=20.0)
    for models, wanted in ((0.0, 2), (1.0, 2), (2.0000001, 2), (2.01, 3), (4.0, 4), (5.0, 5), (9.0, 5)):
        assert replicas_wanted(pool, [], 0, models, spare=1) == wanted, "one is spare, and holds models too"
    assert replicas_wanted(pool, [], 0, 1.0) == 1
    urgent = TierLoad(TierScaling(band=0, target_s=1.0, weight=0.0), ServiceTime(0.1, 0.1), NOTHING, 100.0)
    assert replicas_wanted(pool, [urgent], 1) == 1
