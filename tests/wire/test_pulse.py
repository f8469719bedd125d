"""What counts as a pause of a loop, and how old it makes what is read."""

from collections.abc import Callable
from math import inf
from typing import Any, cast

import pytest

from oriel_wire.engine.kernel import Arrival
from oriel_wire.engine.pulse import BEAT_S, DOUBT_S, PAUSE_S, UNKNOWN_S, Pulse


class Loop:
    """An event loop with a clock that the test sets and one timer."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timer: tuple[float, Callable[[], None]] = (0.0, lambda: None)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "Loop":
        self._timer = (self.now + delay_s, callback)
        return self

    def cancel(self) -> None:
        self._timer = (inf, lambda: None)

    def pass_(self, seconds: float, *, polling: bool = True) -> None:
        """Let time pass; a loop that does not poll meanwhile runs what is due only afterwards."""
        ends = self.now + seconds
        while polling and self._timer[0] <= ends:
            self.now = self._timer[0]
            self._timer[1]()
        self.now = ends

    def resume(self) -> None:
        if self._timer[0] <= self.now:
            self._timer[1]()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def pulse(loop: Loop) -> Pulse:
    return Pulse(cast(Any, loop), clock=lambda: loop.now)


def fresh(pulse: Pulse, loop: Loop) -> bool:
    return loop.now < pulse.fresh_until


def test_a_loop_that_polls_asks_nobody(loop: Loop, pulse: Pulse) -> None:
    for _ in range(200):
        loop.pass_(0.013)
        assert fresh(pulse, loop)
    assert pulse.pauses == 0


def test_a_callback_or_a_collection_of_60_ms_is_no_pause(loop: Loop, pulse: Pulse) -> None:
    for _ in range(50):
        loop.pass_(0.060, polling=False)
        assert fresh(pulse, loop)
        loop.resume()
        assert fresh(pulse, loop)
    assert pulse.pauses == 0


@pytest.mark.parametrize("timers_first", [True, False])
def test_after_a_pause_the_kernel_says_how_old_what_is_read_is(loop: Loop, pulse: Pulse, timers_first: bool) -> None:
    loop.pass_(2.7, polling=False)
    if timers_first:
        loop.resume()
    assert not fresh(pulse, loop)
    assert pulse.age_s(Arrival(gone=False, age_s=2.5), loop.now) == 2.5
    assert pulse.age_s(Arrival(gone=False, age_s=0.0), loop.now) == 0.0  # it came just now: it is not refused
    loop.resume()
    loop.pass_(DOUBT_S - 2 * BEAT_S)
    assert not fresh(pulse, loop)
    loop.pass_(3 * BEAT_S)
    assert fresh(pulse, loop) and pulse.pauses == 1


def test_who_measures_the_loop_hears_how_late_each_beat_is_and_of_a_pause_before_the_timer_runs(
    loop: Loop, pulse: Pulse
) -> None:
    late: list[float] = []
    pulse.on_beat = late.append
    loop.pass_(2 * BEAT_S)
    loop.pass_(BEAT_S + 0.06, polling=False)
    loop.resume()
    assert late == pytest.approx([0.0, 0.0, 0.06])
    loop.pass_(PAUSE_S, polling=False)
    pulse.age_s(None, loop.now)
    assert late[3:] == pytest.approx([PAUSE_S - BEAT_S])
    loop.resume()
    assert late[4:] == pytest.approx([-BEAT_S])


def test_what_was_left_unread_on_purpose_is_as_old_as_the_kernel_says(loop: Loop, pulse: Pulse) -> None:
    pulse.doubt()
    assert not fresh(pulse, loop)
    assert pulse.age_s(Arrival(gone=False, age_s=0.3), loop.now) == 0.3
    loop.pass_(DOUBT_S - 2 * BEAT_S)
    assert not fresh(pulse, loop)
    loop.pass_(3 * BEAT_S)
    assert fresh(pulse, loop) and pulse.pauses == 0


def test_without_the_kernel_only_what_is_read_at_once_after_a_long_pause_is_old(loop: Loop, pulse: Pulse) -> None:
    loop.pass_(UNKNOWN_S - 0.1, polling=False)
    assert pulse.age_s(None, loop.now) == 0.0  # a busy loop refuses nothing by a guess
    loop.resume()
    loop.pass_(2 * BEAT_S)
    loop.pass_(2.7, polling=False)
    assert pulse.age_s(None, loop.now) == pytest.approx(2.7, abs=BEAT_S)
    loop.resume()
    loop.pass_(2 * BEAT_S)
    assert pulse.age_s(None, loop.now) == 0.0


def test_bytes_that_came_after_a_pause_do_not_make_those_before_them_new(loop: Loop, pulse: Pulse) -> None:
    """A connection of HTTP/2 carries many requests, and the kernel knows of its latest bytes alone."""
    before_s = loop.now
    loop.pass_(2.7, polling=False)
    late, recent = Arrival(gone=False, age_s=2.5), Arrival(gone=False, age_s=0.0)
    assert pulse.shared_age_s(late, loop.now, before_s) == 2.5
    assert pulse.shared_age_s(recent, loop.now, before_s) == pytest.approx(2.7, abs=BEAT_S)
    assert pulse.shared_age_s(recent, loop.now, loop.now) == 0.0  # what came in the pause was read before
    loop.resume()
    loop.pass_(2 * BEAT_S)
    assert pulse.shared_age_s(recent, loop.now, before_s) == 0.0


def test_a_closed_pulse_doubts_nothing(loop: Loop, pulse: Pulse) -> None:
    pulse.close()
    loop.pass_(10 * PAUSE_S, polling=False)
    assert fresh(pulse, loop)
