"""Bounds of every kind against their definition, under any arrival pattern."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.bounds.calendar import CalendarClock, Period
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.limits import Bound, Gcra, Slots, Window, bounds, policy_item, state_item
from oriel_policies.documents import Allowance, Limit, RateLimit, Selector

LIMIT = RateLimit(requests_per_s=10.0, burst=5)
NOON = 1_790_000_000.0 // 86400 * 86400 + 43200


def test_a_burst_passes_and_the_next_waits_exactly_one_interval() -> None:
    bucket = Gcra()
    assert [bucket.acquire(LIMIT, 100.0) for _ in range(5)] == [0.0] * 5
    wait = bucket.acquire(LIMIT, 100.0)
    assert abs(wait - 0.1) < 1e-6
    assert bucket.acquire(LIMIT, 100.0 + wait) == 0.0


def test_remaining_counts_down_and_comes_back() -> None:
    bucket = Gcra()
    seen = []
    for _ in range(5):
        seen.append(bucket.remaining(LIMIT, 7.0))
        bucket.acquire(LIMIT, 7.0)
    assert seen == [5, 4, 3, 2, 1] and bucket.remaining(LIMIT, 7.0) == 0 and bucket.remaining(LIMIT, 8.0) == 5


def test_more_than_the_burst_passes_when_nothing_is_owed_and_is_paid_in_full() -> None:
    bucket = Gcra()
    assert bucket.acquire(LIMIT, 10.0, 50) == 0.0
    assert bucket.acquire(LIMIT, 10.0, 1) == pytest.approx(
        4.6
    )  # 50 units are 5 s, of which the burst is ahead by 0.4 s
    bucket.charge(LIMIT, 10.0, -49)
    assert bucket.acquire(LIMIT, 10.0, 4) == 0.0


@given(
    st.floats(0.1, 1000.0),
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 80)), min_size=1, max_size=100),
)
def test_no_window_admits_more_than_burst_plus_rate(rate: float, burst: int, arrivals: list[tuple[float, int]]) -> None:
    limit, bucket, now = RateLimit(requests_per_s=rate, burst=burst), Gcra(), 1000.0
    admitted: list[tuple[float, int]] = []
    for gap, units in arrivals:
        now += gap
        wait = bucket.acquire(limit, now, units)
        if wait == 0.0:
            admitted.append((now, units))
        else:
            again = Gcra()
            again.arrival = bucket.arrival
            assert again.acquire(limit, now + wait + 1e-6, units) == 0.0, "the wait is true"
    for first in range(len(admitted)):
        taken = 0
        for last in range(first, len(admitted)):
            window = admitted[last][0] - admitted[first][0]
            # What the last call has beyond the burst is paid by those after it.
            assert taken + min(admitted[last][1], burst) <= burst + rate * window + 1e-3 or last == first
            taken += admitted[last][1]


@pytest.mark.parametrize("limit", [2, 100])
def test_slots_are_bounded_and_the_wait_is_learned(limit: int) -> None:
    slots, now = Slots(), 10.0
    assert [slots.acquire(limit, now) for _ in range(limit)] == [0.0] * limit
    assert slots.acquire(limit, now) > 0.0
    for _ in range(60):
        slots.release(4.0, now)
        assert slots.acquire(limit, now) == 0.0
    few = limit == 2  # of few the oldest is known, of many the mean time between two ends
    assert slots.acquire(limit, now) == pytest.approx(4.0 if few else 4.0 / limit, rel=0.01)
    assert not few or slots.acquire(limit, now + 2.5) == pytest.approx(1.5, rel=0.01)
    for _ in range(limit + 3):
        slots.release(1.0, now)
    assert slots.used == 0


@given(st.integers(1, 5), st.lists(st.floats(0.01, 2.0), min_size=20, max_size=60))
def test_the_wait_for_a_slot_is_true_when_calls_take_their_time(limit: int, gaps: list[float]) -> None:
    """Calls that take 5 s each, and callers at any moment: a slot is free when they are told, within a second."""
    slots, now = Slots(), 0.0
    ends: list[float] = []
    for gap in gaps:
        now += gap
        while ends and ends[0] <= now:
            slots.release(5.0, ends.pop(0))
        wait_s = slots.acquire(limit, now)
        if wait_s == 0.0:
            ends.append(now + 5.0)
            assert len(ends) <= limit
        elif slots.hold_s:
            assert abs(now + wait_s - ends[0]) < 2e-3  # never less than a millisecond is said
    taken = slots.used
    assert taken == len(ends)
    if slots.acquire(limit, now) == 0.0:
        slots.undo()
    assert slots.used == taken


class Wall:
    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def test_a_quota_lasts_until_its_window_ends_and_says_when() -> None:
    wall = Wall(NOON)
    clock, window = CalendarClock(wall), Window()
    assert [window.acquire(3, 1, Period.DAY, clock, 0.0) for _ in range(3)] == [0.0] * 3
    assert window.acquire(3, 1, Period.DAY, clock, 0.0) == pytest.approx(43200)
    wall.at += 43200 - 0.5
    assert window.acquire(3, 1, Period.DAY, clock, 43199.5) == pytest.approx(0.5)
    wall.at += 0.5
    assert window.acquire(3, 1, Period.DAY, clock, 43200.0) == 0.0
    assert window.used == 1
    window.charge(-5)
    assert window.used == 0


def test_more_than_a_whole_quota_passes_only_a_fresh_window() -> None:
    clock, window = CalendarClock(Wall(NOON)), Window()
    assert window.acquire(100, 500, Period.MONTH, clock, 0.0) == 0.0
    assert window.acquire(100, 1, Period.MONTH, clock, 0.0) > 0.0


@given(st.lists(st.floats(-40 * 86400.0, 40 * 86400.0), max_size=8))
def test_jumps_of_the_wall_clock_that_do_not_last_change_nothing(jumps: list[float]) -> None:
    """R33: the clock is set somewhere and back, again and again; calls are neither refused nor forgiven."""
    wall, now = Wall(NOON), 5.0
    clock, window = CalendarClock(wall), Window()
    clock.epoch(now)
    taken = 0
    for jump in jumps:
        wall.at += jump
        for _ in range(10):
            now += 1.5
            wall.at += 1.5
            assert window.acquire(1000, 1, Period.DAY, clock, now) == 0.0
            taken += 1
        wall.at -= jump
        now += 5.0
        wall.at += 5.0
        clock.epoch(now)
    assert window.used == taken


def test_a_step_that_lasts_is_taken_over_and_going_back_forgives_nothing() -> None:
    wall = Wall(NOON)
    clock, window = CalendarClock(wall, patience_s=300.0), Window()
    window.acquire(1, 1, Period.DAY, clock, 0.0)
    wall.at -= 86400
    for second in range(0, 400, 10):
        wall.at += 10
        assert window.acquire(1, 1, Period.DAY, clock, second + 10.0) > 0.0
    assert clock.epoch(400.0) == wall.at, "the clock is a day back now, and the count goes on"


@given(st.floats(0, 4e9), st.sampled_from(Period))
def test_a_window_ends_when_the_next_begins(epoch_s: float, period: Period) -> None:
    clock = CalendarClock(Wall(epoch_s))
    number, ends_in = clock.window(period, 0.0), clock.ends_in(period, 0.0)
    assert CalendarClock(Wall(epoch_s + ends_in + 1e-3)).window(period, 0.0) == number + 1
    assert 0 < ends_in <= clock.length(period, 0.0) <= (86400 if period is Period.DAY else 31 * 86400)


def test_an_allowance_has_one_bound_per_thing_it_bounds() -> None:
    allowance = Allowance(
        name="model:a*",
        selector=Selector(model="a*"),
        limits=(
            Limit(field="requests_per_s", amount=10.0, burst=5),
            Limit(field="concurrency", amount=3),
            Limit(field="bytes_per_s", amount=1e6, burst=2_000_000),
            Limit(field="requests_per_day", amount=10),
            Limit(field="compute_ms_per_month", amount=500),
        ),
    )
    assert [(b.name, b.counts, b.limit) for b in bounds(allowance)] == [
        ("model:a*/concurrency", Counts.REQUESTS, 3),
        ("model:a*/requests", Counts.REQUESTS, 5),
        ("model:a*/bytes", Counts.BYTES, 2_000_000),
        ("model:a*/requests-day", Counts.REQUESTS, 10),
        ("model:a*/compute-month", Counts.COMPUTE_US, 500_000),
    ]


@pytest.mark.parametrize(
    ("bound", "policy", "state"),
    [
        (
            Bound(name="requests", counts=Counts.REQUESTS, limit=5, rate=LIMIT),
            '"requests";q=5;w=1',
            '"requests";r=2;t=1',
        ),
        (
            Bound(name="concurrency", counts=Counts.REQUESTS, limit=3, slots=True),
            '"concurrency";q=3;qu="concurrent-requests"',
            '"concurrency";r=2;t=1',
        ),
        (
            Bound(name="compute-day", counts=Counts.COMPUTE_US, limit=9_000_000, period=Period.DAY),
            '"compute-day";q=9000;qu="compute-ms";w=86400',
            '"compute-day";r=0;t=1',
        ),
    ],
)
def test_headers_are_structured_fields_with_whole_seconds(bound: Bound, policy: str, state: str) -> None:
    assert policy_item(bound, 86400.0) == policy
    assert state_item(bound, 2, 0.05) == state
    assert ceil(0.05) == 1


@pytest.mark.parametrize(
    ("visits", "used"),
    [
        ([(7, 5), (0, 1), (7, 0)], 6),  # no right time at the start, as on machines without a clock of their own
        ([(7, 5), (8, 2), (7, 0)], 7),  # ahead for a while
        ([(7, 5), (8, 2), (7, 1), (8, 3)], 3),  # and the day after that is a new one
        ([(7, 5), (30000, 2), (7, 0), (8, 3)], 3),
        ([(30000, 5), (7, 1)], 6),  # kept by a gateway whose clock was ahead ...
        ([(30000, 5), (7, 1), (8, 2)], 2),  # ... which locks nobody out
        ([(7, 5), (8, 2), (9, 3)], 3),
    ],
)
def test_a_clock_that_was_wrong_for_a_while_forgives_nothing(visits: list[tuple[int, int]], used: int) -> None:
    """After a start in 1970 and the right time five minutes later, a quota that was used up was there again."""
    window = Window()
    for number, units in visits:
        window.roll(number)
        window.charge(units)
    assert window.used == used
