"""A newcomer that would wait too long, under any order of turns; `test_turns` has the bounds."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.waiting.backlog import TURNS, Backlog

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
