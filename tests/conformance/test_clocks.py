"""The tests that every `Clock` has to pass: the event loop's own clock, and the one that tests set by hand."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from oriel_inference.clock import Clock, LoopClock, VirtualClock

STEP_S = 0.005
Pass = Callable[[float], Awaitable[None]]


@pytest.fixture(params=["loop", "virtual"])
async def clock_and_pass(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Clock, Pass]]:
    """A clock, and a function that lets at least so many seconds of it pass."""
    if request.param == "loop":
        yield LoopClock(asyncio.get_running_loop()), asyncio.sleep
        return
    virtual = VirtualClock()

    async def advance(seconds: float) -> None:
        virtual.advance(seconds)

    yield virtual, advance


async def until(done: list[str], count: int, clock: Clock, time_passes: Pass) -> None:
    async with asyncio.timeout(60):
        while len(done) < count:
            await time_passes(STEP_S)


async def test_time_goes_on_and_never_back(clock_and_pass: tuple[Clock, Pass]) -> None:
    clock, time_passes = clock_and_pass
    began = clock.now()
    await time_passes(STEP_S)
    assert clock.now() > began


async def test_nothing_runs_inside_the_call_that_asked_for_it(clock_and_pass: tuple[Clock, Pass]) -> None:
    clock, time_passes = clock_and_pass
    done: list[str] = []
    clock.call_soon(lambda: done.append("a"))
    clock.call_soon(lambda: done.append("b"))
    clock.call_at(clock.now() - 1.0, lambda: done.append("late"))
    assert done == []
    await until(done, 3, clock, time_passes)
    assert done.index("a") < done.index("b")


async def test_timers_fire_in_their_order_and_not_early(clock_and_pass: tuple[Clock, Pass]) -> None:
    clock, time_passes = clock_and_pass
    now, done = clock.now(), list[str]()
    early: list[str] = []

    def fire(name: str, when_s: float) -> None:
        done.append(name)
        if clock.now() < when_s - 0.002:  # a loop rounds to its clock's resolution
            early.append(name)

    for name, delay_s in (("third", 6 * STEP_S), ("first", 2 * STEP_S), ("second", 4 * STEP_S)):
        clock.call_at(now + delay_s, lambda name=name, when_s=now + delay_s: fire(name, when_s))  # type: ignore[misc]
    await until(done, 3, clock, time_passes)
    assert (done, early) == (["first", "second", "third"], [])


async def test_a_timer_that_was_called_off_does_not_fire(clock_and_pass: tuple[Clock, Pass]) -> None:
    clock, time_passes = clock_and_pass
    done: list[str] = []
    timer = clock.call_at(clock.now() + STEP_S, lambda: done.append("never"))
    clock.call_at(clock.now() + 2 * STEP_S, lambda: done.append("after"))
    timer.cancel()
    timer.cancel()
    await until(done, 1, clock, time_passes)
    assert done == ["after"]


async def test_other_threads_may_ask(clock_and_pass: tuple[Clock, Pass]) -> None:
    clock, time_passes = clock_and_pass
    done: list[str] = []
    asking = threading.Thread(
        target=lambda: clock.call_from_thread(lambda: done.append(threading.current_thread().name))
    )
    asking.start()
    asking.join()
    await until(done, 1, clock, time_passes)
    assert done == [threading.current_thread().name]
