"""The event loop of a simulated server: what it does takes time, and threads wait for the interpreter meanwhile."""

from random import Random

import pytest

from oriel_inference.clock import VirtualClock
from oriel_inference.simulated import SWITCH_S, SimulatedLoop


@pytest.fixture
def world() -> VirtualClock:
    return VirtualClock(0.0)


def test_what_comes_during_a_turn_waits_for_the_next_one(world: VirtualClock) -> None:
    loop, seen = SimulatedLoop(world, 0.1, Random(1)), list[tuple[str, float]]()

    def handle(name: str) -> None:
        loop.spend(1.0)
        seen.append((name, loop.now()))

    loop.arrive(lambda: handle("first"))
    loop.arrive(lambda: handle("second"))
    world.call_at(0.5, lambda: loop.arrive(lambda: handle("socket")))
    world.call_at(0.6, lambda: loop.call_soon(lambda: handle("due")))
    cancelled = loop.call_at(2.0, lambda: handle("cancelled"))
    loop.call_at(1.0, cancelled.cancel)
    world.advance(10.0)
    assert seen == [
        ("first", pytest.approx(1.1)),
        ("second", pytest.approx(2.1)),
        ("due", pytest.approx(3.2)),
        ("socket", pytest.approx(4.2)),
    ]


@pytest.mark.parametrize(
    ("busy_s", "lets", "begins_s"), [(0.002, False, 0.004), (0.1, False, SWITCH_S), (0.1, True, 0.0)]
)
def test_a_job_begins_when_the_loop_rests_or_lets_it_or_has_kept_the_interpreter_for_long(
    world: VirtualClock, busy_s: float, lets: bool, begins_s: float
) -> None:
    loop, began = SimulatedLoop(world, 0.0, Random(1)), list[float]()

    def turn() -> None:
        loop.begin(lambda: began.append(loop.now()))
        if lets:
            loop.let_begin()
        loop.spend(busy_s)
        loop.call_soon(lambda: loop.spend(busy_s))

    loop.arrive(turn)
    world.advance(1.0)
    assert began == [pytest.approx(begins_s)]


def test_a_thread_waits_for_the_interpreter_as_often_as_the_loop_is_busy(world: VirtualClock) -> None:
    loop = SimulatedLoop(world, 0.0, Random(1))
    assert loop.lock_wait_s() == 0.0
    for number in range(100):
        world.call_at(number * 0.010, lambda: loop.arrive(lambda: loop.spend(0.004)))
    world.advance(1.0)
    waits = [loop.lock_wait_s() for _ in range(2000)]
    assert sum([1 for wait_s in waits if wait_s]) / len(waits) == pytest.approx(0.4, abs=0.05)
    assert max(waits) <= 0.004 and sum(waits) / len(waits) == pytest.approx(0.4 * 0.002, rel=0.15)
