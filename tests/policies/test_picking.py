"""Picking by Peak-EWMA: the arithmetic, and what a pool of servers gets out of it."""

import random
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.picking import DECAY_S, LONGEST_BUSY_S, PENALTY_S, PeakEwma, two_of

seconds = st.floats(0.0, 100.0)


@given(st.integers(2, 5000), st.integers(0, 2**32))
def test_two_different_endpoints_are_compared(count: int, seed: int) -> None:
    one, other = two_of(count, random.Random(seed).random)
    assert one != other and 0 <= one < count and 0 <= other < count


def test_every_pair_is_as_likely() -> None:
    rng = random.Random(1)
    pairs = [two_of(3, rng.random) for _ in range(6000)]
    assert {pair: pairs.count(pair) for pair in set(pairs)} == pytest.approx(
        {(a, b): 1000 for a in range(3) for b in range(3) if a != b}, rel=0.15
    )


@given(st.lists(st.tuples(seconds, seconds), min_size=1))
def test_a_cost_stays_between_the_least_and_the_greatest_latency_and_leaps_to_a_peak(
    steps: list[tuple[float, float]],
) -> None:
    ewma, now, seen = PeakEwma(), 0.0, []
    for gap_s, latency_s in steps:
        now += gap_s
        before = ewma.cost_s
        ewma.observed(latency_s, now)
        seen.append(latency_s)
        assert (0.0 if len(seen) == 1 else min(seen)) - 1e-9 <= ewma.cost_s <= max(seen) + 1e-9
        assert ewma.cost_s >= latency_s - 1e-9
        if latency_s >= before:
            assert ewma.cost_s == latency_s


@given(st.floats(0.001, 100.0), st.integers(0, 1000), seconds)
def test_load_grows_with_outstanding_work_and_fades_with_time(latency_s: float, outstanding: int, gap_s: float) -> None:
    ewma = PeakEwma()
    ewma.observed(latency_s, 5.0)
    assert ewma.load(outstanding, 5.0) == pytest.approx(latency_s * (outstanding + 1))
    later = ewma.load(outstanding, 5.0 + gap_s)
    assert later == pytest.approx(latency_s * (outstanding + 1) * exp(-gap_s / DECAY_S))
    assert ewma.load(outstanding + 1, 5.0 + gap_s) > later or later == 0.0


def test_an_endpoint_that_never_answered_gets_one_call_and_then_waits_its_turn() -> None:
    known, fresh = PeakEwma(), PeakEwma()
    known.observed(2.0, 1.0)
    assert fresh.load(0, 1.0) < known.load(0, 1.0) < known.load(100, 1.0) < fresh.load(1, 1.0) < fresh.load(2, 1.0)


@given(st.lists(st.tuples(seconds, st.sampled_from(["failed", "refused"]), seconds), min_size=1))
def test_what_fails_never_looks_better_than_before(steps: list[tuple[float, str, float]]) -> None:
    """Quick errors made the endpoint that failed look like the fastest one."""
    ewma, now = PeakEwma(), 5.0
    ewma.observed(0.02, now)
    for gap_s, step, latency_s in steps:
        now += gap_s
        before = ewma.load(1, now)
        if step == "failed":
            ewma.record_failure(latency_s, now)
        else:
            ewma.reported_full(now, latency_s)
            assert ewma.load(0, now) >= PENALTY_S and ewma.busy_s <= now + LONGEST_BUSY_S
        assert ewma.load(1, now) >= before and ewma.cost_s >= 0.02


def test_one_without_room_is_left_alone_for_longer_while_it_says_so() -> None:
    ewma, now, waits = PeakEwma(), 1.0, []
    ewma.observed(0.02, now)
    for _ in range(8):
        for _ in range(30):  # all that were under way are refused: once is enough
            ewma.reported_full(now)
        waits.append(ewma.busy_s - now)
        now = ewma.busy_s
        assert ewma.load(0, now) < 1.0
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    ewma.observed(0.02, now)
    ewma.reported_full(now, 2.0)
    assert ewma.busy_s == now + 2.0  # as long as it says


def test_one_that_never_answered_well_costs_what_others_do() -> None:
    ewma = PeakEwma()
    ewma.record_failure(0.001, 1.0, typical_s=0.02)
    assert ewma.load(0, 1.0) == 0.02


def test_a_slow_server_gets_less_than_its_share() -> None:
    """Four servers, one takes ten times as long, in virtual time: it gets few calls without being ejected."""
    rng = random.Random(3)
    takes_s = [0.01, 0.01, 0.01, 0.1]
    costs = [PeakEwma() for _ in takes_s]
    outstanding = [0] * 4
    got = [0] * 4
    due: list[tuple[float, int, float]] = []
    for step in range(8000):
        now = step * 0.004
        for end_s, server, began_s in [each for each in due if each[0] <= now]:
            due.remove((end_s, server, began_s))
            outstanding[server] -= 1
            costs[server].observed(end_s - began_s, end_s)
        one, other = two_of(4, rng.random)
        if costs[one].load(outstanding[one], now) > costs[other].load(outstanding[other], now):
            one = other
        outstanding[one] += 1
        got[one] += 1
        due.append((now + takes_s[one], one, now))
    assert got[3] < 0.1 * sum(got) and min(got[:3]) > 0.25 * sum(got)
