"""Whether a newcomer would wait too long: bursts up to their deadlines, standing queues up to the target."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.backlog import PROBE, TURNS, Backlog


def timed(turn_s: float = 0.01, turns: int = 100) -> tuple[Backlog, float]:
    backlog, now = Backlog(), 100.0
    for _ in range(turns):
        now += turn_s
        backlog.turn(now, True)
    return backlog, now


def asked(backlog: Backlog, now: float, waiting: int, target_s: float = 0.2, left_s: float = 0.8) -> bool:
    """Whether any newcomer is refused here, whatever its place among the probes."""
    return any(
        backlog.refuses(waiting, now, target_s=target_s, left_s=left_s, quick_s=0.01) for _ in range(2)
    )  # fmt: skip


def test_nothing_is_refused_before_turns_were_seen() -> None:
    backlog, now = timed(turns=TURNS)
    assert backlog.turns == TURNS - 1 and not asked(backlog, now, 10_000)


def test_a_burst_may_wait_until_its_deadline() -> None:
    backlog, now = timed()
    assert not asked(backlog, now, 75)
    assert asked(backlog, now, 81)


def test_a_newcomer_that_goes_before_the_late_ones_is_welcome_while_few_are_in_time() -> None:
    backlog, now = timed()
    few = [backlog.refuses(200, now, behind=196, target_s=0.2, left_s=0.8, quick_s=0.01) for _ in range(PROBE)]
    assert not any(few)
    assert backlog.refuses(200, now, behind=150, target_s=0.2, left_s=0.8, quick_s=0.01)


def test_the_wait_that_is_named_is_what_is_ahead_at_the_measured_pace() -> None:
    backlog, now = timed()
    assert backlog.refuses(200, now, target_s=0.2, left_s=0.8, quick_s=0.01) == pytest.approx(2.0, rel=0.01)


def test_one_in_so_many_is_a_probe() -> None:
    backlog, now = timed()
    verdicts = [backlog.refuses(500, now, target_s=0.2, left_s=0.8, quick_s=0.01) for _ in range(10 * PROBE)]
    assert sum(not verdict for verdict in verdicts) == 10


def test_a_standing_queue_is_cut_to_the_target_until_nobody_had_to_be_refused_for_a_while() -> None:
    backlog, now = timed()
    late = 0.0
    while late < 1.0:  # calls have been late for as long as a deadline allows
        now, late = now + 0.05, late + 0.05
        backlog.turn(now, True)
        backlog.late(now, 0.2)
    backlog.turn_s = 0.01
    assert asked(backlog, now, 30)
    assert not asked(backlog, now, 15)
    assert asked(backlog, now + 0.15, 30)  # lateness is over, the cut still holds
    assert not asked(backlog, now + 0.15 + 0.25, 30)


def test_time_in_which_nothing_waited_is_no_turn() -> None:
    backlog, now = timed()
    backlog.turn(now + 0.01, False)
    backlog.turn(now + 50.0, True)
    assert backlog.turn_s < 0.02
    backlog.emptied()
    backlog.turn(now + 90.0, True)
    assert backlog.turn_s < 0.02


Step = Callable[[Backlog, float], object]


@given(st.lists(st.tuples(st.sampled_from(["turn", "last", "late"]), st.floats(0.0, 3.0)), max_size=80), st.data())
def test_a_refusal_names_a_wait_past_the_target_and_nothing_waits_for_nobody(
    steps: list[tuple[str, float]], data: st.DataObject
) -> None:
    backlog, now = Backlog(), 10.0
    for what, after_s in steps:
        now += after_s
        if what == "late":
            backlog.late(now, 0.5)
        else:
            backlog.turn(now, what == "turn")
        waiting = data.draw(st.integers(0, 1000))
        target_s = data.draw(st.floats(0.0, 5.0))
        left_s = target_s * data.draw(st.floats(1.0, 10.0))
        wait_s = backlog.refuses(waiting, now, target_s=target_s, left_s=left_s, quick_s=0.0)
        assert wait_s >= 0.0
        if wait_s:
            assert waiting and backlog.turns >= TURNS and wait_s > min(target_s, left_s)
