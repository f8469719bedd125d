"""The learned limit: against simulated servers in virtual time, and whatever it is told, it stays within its bounds."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.waiting.concurrency import LearnedLimit, ladder

from .pool_sim import Batches, Rate, Server, run

CEILING = 32
SERVERS = [
    Rate(slots=1, service_s=0.020),
    Rate(slots=5, service_s=0.020),
    Rate(slots=12, service_s=0.040),
    Batches(fixed_s=0.020, row_s=0.002, most=8),
    Batches(fixed_s=0.020, row_s=0.004, most=32),
    Batches(fixed_s=0.0, row_s=0.010, most=16),
]


@pytest.mark.parametrize("server", SERVERS, ids=repr)
def test_throughput_stays_near_the_best_fixed_limit_and_little_waits_in_the_server(server: Server) -> None:
    limits = sorted({*ladder(CEILING), *range(1, 13), 24})
    best = max((run(server, limit, seconds=30.0) for limit in limits), key=lambda each: each.per_s)
    runs = [run(server, LearnedLimit(CEILING), seconds=60.0, skip_s=20.0, seed=seed) for seed in range(2)]
    assert sum(each.per_s for each in runs) / len(runs) >= 0.95 * best.per_s
    all_in = run(server, CEILING, seconds=8.0)
    # As many as a fixed limit needs for nearly the same, and a rung of the ladder more; or it is all worth it.
    fixed = [run(server, limit, seconds=8.0) for limit in limits]
    enough = min(each.limit for each in fixed if each.per_s >= 0.99 * best.per_s)
    for each in runs:
        assert each.limit <= 2.0 * enough + 2.0
        assert each.waiting <= all_in.waiting


def test_a_pool_that_grows_and_shrinks_is_followed() -> None:
    limit = LearnedLimit(CEILING)
    run(Rate(slots=2, service_s=0.02), limit, seconds=20.0)
    assert limit.base <= 6
    grown = run(Rate(slots=16, service_s=0.02), limit, seconds=40.0, skip_s=20.0, start_s=20.0)
    assert grown.per_s >= 0.9 * 16 / 0.0205
    run(Rate(slots=2, service_s=0.02), limit, seconds=60.0, start_s=60.0)
    assert limit.base <= 8


def test_a_pool_with_free_permits_learns_nothing() -> None:
    limit = LearnedLimit(CEILING)
    now = 1.0
    for number in range(2000):
        now += 0.01
        if number % 10 == 0:
            limit.calm()
        assert not limit.note_finished(0.005, now)
    assert limit.limit == limit.base == 8


def test_before_a_quick_server_as_many_are_held_as_wait_a_few_milliseconds() -> None:
    limit = LearnedLimit(64)
    found = run(Rate(slots=1, service_s=0.00005), limit, seconds=2.0)
    assert limit.base == 32 and found.waiting / found.per_s <= 0.004
    limit = LearnedLimit(64, most_s=0.0005)
    run(Rate(slots=1, service_s=0.00005), limit, seconds=2.0)
    assert limit.base <= 16


def test_a_quick_pool_that_is_full_only_for_moments_gets_more_permits() -> None:
    limit, now = LearnedLimit(64), 1.0
    for held_s, rungs in ((0.01, 8), (0.0005, 64)):
        for _ in range(20):
            for _ in range(8):
                now += 0.0001
                limit.note_finished(held_s, now)
            limit.calm()
        assert limit.limit == rungs


def test_where_nothing_is_answered_well_nothing_is_concluded() -> None:
    limit = LearnedLimit(CEILING)
    now = 1.0
    for _ in range(3000):
        now += 0.001
        assert not limit.note_finished(0.0005, now, good=False)


def test_calls_that_pass_their_deadlines_in_the_pool_halve_its_limit_until_some_are_answered() -> None:
    """A server that answered 32 calls at once in time works off 80 a second now: calls with 0.3 s all end in there."""
    limit = LearnedLimit(CEILING, start=CEILING)
    now, held, answered = 0.0, deque[float](), 0
    for _ in range(2000):
        while len(held) < limit.limit:
            held.append(now)
        now += 1 / 80
        began = held.popleft()
        good = now - began < 0.3
        answered += good
        limit.note_finished(min(now - began, 0.3), now, good=good, late=not good)
    assert limit.base <= 16 and answered >= 0.9 * 2000
    base = limit.base
    for _ in range(200):
        limit.note_finished(0.0001, now := now + 0.01, good=False)  # errors are not late: they say nothing of the limit
    assert limit.base == base


def test_the_ladder_rises_in_steps_to_the_ceiling() -> None:
    for ceiling in (1, 2, 7, 32, 1000):
        rungs = ladder(ceiling)
        assert rungs[0] == 1 and rungs[-1] == ceiling
        assert all(low < high <= max(low + 1, 1.5 * low) for low, high in pairwise(rungs))


TOLD = st.one_of(
    st.tuples(st.just("ended"), st.floats(0.0, 2.0), st.booleans(), st.booleans()),
    st.tuples(st.just("many"), st.floats(0.0, 0.2), st.booleans(), st.booleans()),
    st.tuples(st.just("calm")),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(TOLD, max_size=80), st.integers(1, 100))
def test_whatever_it_is_told_it_stays_within_its_bounds(told: list[tuple[object, ...]], ceiling: int) -> None:
    limit = LearnedLimit(ceiling)
    now = 10.0
    for what in told:
        match what:
            case ("ended" | "many" as how, float(held_s), bool(good), bool(late)):
                for _ in range(1 if how == "ended" else 60):
                    now += 0.003
                    before = limit.limit
                    assert limit.note_finished(held_s, now, good=good, late=late and not good) is (
                        limit.limit != before
                    )
            case ("calm",):
                limit.calm()
                assert limit.limit in (limit.base, limit.limit)
        assert 1 <= limit.limit <= ceiling and 1 <= limit.base <= ceiling


def after_an_incident(limit: LearnedLimit) -> float:
    """Let all calls of a full pool be late until the limit falls no further. Returns the time."""
    now = 100.0
    for _ in range(2000):
        now += 0.1
        limit.note_finished(0.05, now, good=False, late=True)
    return now


def test_an_incident_is_unlearned_while_the_pool_is_not_full() -> None:
    """The limit stayed at 1 for as long as the load was light, so that the next burst found one permit."""
    limit = LearnedLimit(CEILING)
    now = after_an_incident(limit)
    assert limit.limit == 1 and limit.lowered
    limits = []
    for _ in range(100):
        now += 0.1
        limit.has_room(now)
        limits.append(limit.limit)
    assert limits[5] <= 2 and limits[-1] == 8 and not limit.lowered, limits
    limit.has_room(now + 60.0)
    assert limit.limit == 8, "no further than a pool begins"


@pytest.mark.parametrize("servers", [3, 4, 100])
def test_the_limit_is_never_below_the_number_of_servers(servers: int) -> None:
    limit = LearnedLimit(CEILING)
    limit.keep_at_least(servers)
    assert limit.limit >= min(servers, CEILING)
    after_an_incident(limit)
    assert min(servers, CEILING) <= limit.limit <= CEILING and limit.base >= min(servers, CEILING)
    run(Rate(slots=1, service_s=0.020), limit, seconds=20.0)
    assert limit.base >= min(servers, CEILING)


def test_a_call_that_began_with_the_window_belongs_to_it_and_an_earlier_one_does_not() -> None:
    """The first limit of 8 is measured over sixteen calls."""
    limit = LearnedLimit(CEILING)
    assert not limit.note_finished(1.0, 1.0)  # the window begins when the first call of the limit has ended
    assert not any(limit.note_finished(0.75, 1.5) for _ in range(100)), "these began before it"
    assert [limit.note_finished(0.5, 1.5) for _ in range(16)] == [False] * 15 + [True]
