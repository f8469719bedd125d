"""More calls than the device can serve, in virtual time: which are displaced or refused, and what capacity is left."""

import random
from dataclasses import replace
from itertools import permutations

import pytest

from oriel_inference.batching.service_times import USEFUL_EVERY
from oriel_inference.errors import DeadlineExceeded, DeadlineTooShort
from oriel_policies.waiting.feasibility import PROBE, SAMPLES

from .bench import Bench, Linear, spec
from .loads import DEVICES, Device, most_in_time, poisson, simulate

LONGEST = (4.0, "weight-bound MLP")  # simulates as many calls as all the others together


def busy(**more: object) -> Bench:
    bench = Bench(spec(max_rows=4, **more), curve=Linear(0.010, 0.001))  # type: ignore[arg-type]
    bench.call()
    bench.clock.run()
    return bench


def test_call_that_a_full_batch_would_make_late_makes_room_for_one_that_is_still_in_time() -> None:
    bench = busy()
    tight = bench.call(timeout_s=0.0125)  # alone it would make it, among four it would not
    others = [bench.call(timeout_s=1.0) for _ in range(4)]
    bench.settle()
    assert bench.batches == [1, 4, 1]
    assert bench.order == [0, *others, tight]


def test_without_a_crowd_the_batch_is_made_small_for_it() -> None:
    bench = busy()
    tight = bench.call(timeout_s=0.0125)
    others = [bench.call(timeout_s=1.0) for _ in range(2)]
    bench.settle()
    assert bench.batches == [1, 2, 1]
    assert bench.order[:2] == [0, tight] and set(bench.order[2:]) == set(others)


def test_a_crowd_of_a_lower_tier_makes_nobody_of_a_higher_one_wait() -> None:
    bench = busy()
    urgent = bench.call(timeout_s=0.0125, band=0)
    for _ in range(8):
        bench.call(timeout_s=1.0, band=1)
    bench.settle()
    assert bench.order[:2] == [0, urgent]


def test_call_that_made_room_still_expires_on_time_and_frees_its_place() -> None:
    bench = busy()
    tight = bench.call(timeout_s=0.0125)
    for _ in range(4):
        bench.call(timeout_s=1.0)
    bench.workers.run_next()
    bench.clock.run()  # the four are on the device now
    bench.clock.advance(0.013)
    assert isinstance(bench.error(tight), DeadlineExceeded)
    bench.settle()
    assert bench.batches == [1, 4] and bench.batcher.pending == 0


def test_calls_that_run_alone_are_not_started_too_late_while_others_wait() -> None:
    bench = busy(alone=True)
    late, *others = bench.call(timeout_s=0.008), bench.call(timeout_s=1.0), bench.call(timeout_s=1.0)
    bench.settle()
    assert bench.order == [0, *others, late]


def test_batches_take_at_most_half_of_what_callers_usually_give() -> None:
    bench = Bench(spec(max_rows=8), curve=Linear(0.010, 0.001))
    for _ in range(USEFUL_EVERY):
        bench.call(timeout_s=0.030)  # half of it is enough for four rows
        bench.settle()
    for _ in range(8):
        bench.call(timeout_s=0.030)
    bench.settle()
    assert bench.batches[-2:] == [4, 4]


def quick(bench: Bench) -> None:
    for _ in range(SAMPLES):
        bench.batcher._service_times.floor.observe(1, 0.010)


def test_deadline_shorter_than_the_model_ever_takes_is_refused_at_once() -> None:
    bench = Bench(spec())
    quick(bench)
    number = bench.call(timeout_s=0.005)
    assert isinstance(bench.error(number), DeadlineTooShort)
    assert bench.batcher.pending == 0
    probes = [bench.call(timeout_s=0.005) for _ in range(2 * PROBE)]
    assert sum(not bench.replies[number] for number in probes) == 2  # a model that became quicker shows
    bench.settle()


def test_call_that_waited_too_long_to_be_finished_is_not_started() -> None:
    bench = Bench(spec(alone=True))
    quick(bench)
    bench.call()
    bench.clock.run()
    waited = bench.call(timeout_s=0.050)
    bench.clock.advance(0.045)
    bench.settle()
    assert isinstance(bench.error(waited), DeadlineTooShort)
    assert bench.batches == [1]


@pytest.mark.parametrize(
    ("load", "device"),
    [
        pytest.param(
            load, device, id=f"{load}-{device.name}", marks=[pytest.mark.long] if LONGEST == (load, device.name) else []
        )
        for load in (1.5, 4.0)
        for device in DEVICES
    ],
)
def test_overload_costs_neither_the_capacity_nor_the_higher_tier(device: Device, load: float) -> None:
    """A regression: earliest deadline first by itself kept half of the capacity at a load of 1.5."""
    chance = random.Random(7)
    until_s = 12 * max(device.deadlines_s)
    arrivals = [(at, 0 if chance.random() < 0.2 else 1) for at in poisson(load * device.capacity, until_s, chance)]
    found = simulate(device, arrivals, 7)
    # what is left out is the ramp at the beginning, and what a batch of half the deadline costs against a full one
    assert found.goodput() >= 0.75 * device.capacity * until_s
    assert found.good[0] >= 0.9 * found.came[0] or load * 0.2 > 0.7


def test_service_times_that_scatter_cost_no_capacity_at_the_knee() -> None:
    """A regression: batches were made too small for fear of slow ones, so the model fell behind at exactly its
    capacity.
    """
    (found,) = (each for each in DEVICES if each.name == "bench MLP")
    device = replace(found, noise=0.2)
    shares = []
    for seed in range(3):
        chance = random.Random(seed)
        arrivals = [(at, 0 if chance.random() < 0.3 else 1) for at in poisson(device.capacity, 3.0, chance)]
        most = most_in_time(arrivals, device.capacity, device.deadlines_s)
        shares.append(simulate(device, arrivals, seed).goodput() / most)
    assert sum(shares) / 3 >= 0.935


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_serving_exceeds_what_is_said_to_be_the_most(seed: int) -> None:
    chance = random.Random(seed)
    deadlines_s = (0.4, 1.3)
    arrivals = sorted((chance.uniform(0.0, 3.0), chance.randrange(2)) for _ in range(6))
    most = most_in_time(arrivals, 1.0, deadlines_s)
    best = 0
    for order in permutations(arrivals):
        free_s, served = 0.0, 0
        for at_s, tier in order:
            began_s = max(free_s, at_s)
            if began_s <= at_s + deadlines_s[tier]:  # generous: it need only begin in time
                free_s, served = began_s + 1.0, served + 1
        best = max(best, served)
    assert best <= most <= 6
