"""The gateway's deadline clock on a loop whose time the test sets: no call ends early, none over two ticks late."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import nextafter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oriel_gateway import clock
from oriel_gateway.clock import YOUNG, DeadlineClock

TICK_S = 0.005


class Loop:
    """A loop with one timer. It calls the timer as late as the test says."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.due_s = now
        self.timer: Callable[[], None] | None = None

    def call_later(self, delay_s: float, timer: Callable[[], None]) -> "Loop":
        assert self.timer is None, "two timers at once"
        self.due_s, self.timer = self.now + delay_s, timer
        return self

    def cancel(self) -> None:
        self.timer = None

    def fire(self, late_s: float = 0.0) -> None:
        timer, self.timer = self.timer, None
        assert timer is not None
        self.now = self.due_s + late_s
        timer()


@dataclass(eq=False)
class Call:
    loop: Loop
    deadline: float
    received_s: float = 0.0
    slot: int = YOUNG
    ended_s: list[float] = field(default_factory=list)
    fails: bool = False

    def expired(self) -> None:
        self.ended_s.append(self.loop.now)
        if self.fails:
            raise RuntimeError("the call failed to end")

    def stopping(self) -> None:
        raise AssertionError("nobody stops")


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop(1000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: loop)
        patch.setattr(clock, "monotonic", lambda: loop.now)
        yield loop


# Deadlines right on a tick, right beside one, in the middle between two, and over already.
deadlines = st.builds(
    lambda ticks, beside: ticks * TICK_S + beside,
    st.integers(0, 12),
    st.sampled_from([-2 * TICK_S, -TICK_S - 1e-4, 0.0, 1e-9, 1e-4, TICK_S / 2, TICK_S - 1e-4, TICK_S - 1e-9]),
)


@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 6), deadlines, st.booleans()), min_size=1, max_size=8),
    st.lists(st.sampled_from([0.0, 1e-6, 1e-4, 0.002, TICK_S, 0.02]), max_size=12),
)
@example(234, [(0, -TICK_S, False)], [0.0])  # the next tick is rounded down
def test_no_call_ends_early_and_none_more_than_two_ticks_late(
    loop: Loop, start: int, calls: list[tuple[int, float, bool]], late: list[float]
) -> None:
    loop.now, loop.timer = start * TICK_S, None
    ticking, waiting, ticks = DeadlineClock(), list(calls), 0
    watched: list[Call] = []
    while waiting or loop.timer is not None:
        for begins, after_s, young in [each for each in waiting if each[0] <= ticks]:
            call = Call(loop, loop.now + after_s, loop.now)
            watched.append(call)
            if young:
                if not ticking.young:
                    ticking.start()
                ticking.young[call] = None
            else:
                call.slot = ticking.watch(call, call.deadline, loop.now)
            waiting.remove((begins, after_s, young))
        if loop.timer is not None:
            loop.fire(late[ticks] if ticks < len(late) else 1e-6)
        ticks += 1
        assert set(ticking) == {call for call in watched if not call.ended_s}
        # so the first tick that is a whole tick late ends it, which may itself be a tick late
        assert not [c for c in watched if not c.ended_s and loop.now >= max(c.deadline, c.received_s) + TICK_S + 1e-8]
    assert len(ticking) == 0
    assert all(len(call.ended_s) == 1 and call.ended_s[0] >= call.deadline for call in watched)


def test_a_call_that_ended_by_itself_is_left_alone_and_then_the_clock_rests(loop: Loop) -> None:
    loop.now, loop.timer = 1000.0, None
    ticking = DeadlineClock()
    gone, young, stays = Call(loop, 1000.001), Call(loop, 1000.001, 1000.0), Call(loop, nextafter(1000.01, 0.0))
    slot = ticking.watch(gone, gone.deadline, loop.now)
    ticking.watch(stays, stays.deadline, loop.now)
    ticking.young[young] = None
    assert len(ticking) == 2 and set(ticking) == {gone, young, stays}
    ticking.unwatch(gone, slot)
    del ticking.young[young]
    loop.fire()
    assert not stays.ended_s and loop.timer is not None
    while loop.timer is not None:
        loop.fire(1e-6)
    assert not gone.ended_s and not young.ended_s and len(stays.ended_s) == 1
    later = Call(loop, loop.now)
    ticking.watch(later, later.deadline, loop.now)
    loop.fire(1e-6)
    loop.fire(1e-6)
    assert len(later.ended_s) == 1 and loop.now == pytest.approx(later.deadline + 2 * TICK_S, abs=1e-4)


def test_a_call_that_fails_to_end_does_not_stop_the_clock_of_the_others(loop: Loop) -> None:
    loop.now, loop.timer = 1000.0, None
    ticking = DeadlineClock()
    broken, other = Call(loop, 1000.0, fails=True), Call(loop, 1000.03)
    for call in (broken, other):
        ticking.watch(call, call.deadline, loop.now)
    with pytest.raises(RuntimeError):
        for _ in range(2):
            loop.fire(1e-6)
    while loop.timer is not None:
        loop.fire(1e-6)
    assert len(broken.ended_s) == len(other.ended_s) == 1
    ticking.watch(other, 1001.0, loop.now)
    ticking.stop()
    assert loop.timer is None
