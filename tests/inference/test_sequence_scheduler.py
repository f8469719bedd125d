"""Sequences in virtual time: which step runs when, what it sees, and how sequences end."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.errors import CallerLeft, DeadlineExceeded, InferenceError, InvalidRequest, QueueFull

from .sequence_bench import IDLE_S, SequenceBench, bits

START_MISSING = "must specify the START flag on the first request of the sequence"


def test_one_step_of_a_sequence_runs_at_a_time_and_steps_of_several_share_batches() -> None:
    bench = SequenceBench()
    one, two = bench.send(1, start=True), bench.send(2, start=True)
    more = [bench.send(1), bench.send(1, end=True)]
    bench.settle()
    assert [batch["x"] for batch in bench.sessions[0].batches] == [[one, two], [more[0]], [more[1]]]
    assert bench.value(more[1]) == bits(one, *more) and bench.value(two) == bits(two)
    assert bench.scheduler.table.holding == 1 and bench.ended() == {"end": 1}


def test_the_model_is_told_what_a_step_is() -> None:
    bench = SequenceBench(corrid=True)
    bench.send(7, start=True)
    bench.send(7)
    bench.send(7, end=True)
    bench.settle()
    seen = [(b["START"][0], b["END"][0], b["READY"][0], b["CORRID"][0]) for b in bench.sessions[0].batches]
    assert seen == [(1, -1, 1, 7), (-1, -1, 1, 7), (-1, 1, 1, 7)]
    wrong = [bench.send("text", start=True), bench.send(1 << 31, start=True)]
    assert "sequence_id 'text' must be a number for this model" in bench.text(wrong[0])
    assert "must lie between -2147483648 and 2147483647" in bench.text(wrong[1])


def test_slots_go_by_band_and_deadline_and_sequences_keep_their_instance() -> None:
    bench = SequenceBench(instances=2, slots=1)
    first = [bench.send(each, start=True) for each in (1, 2)]
    late, soon, urgent = (
        bench.send(3, start=True, band=1, timeout_s=50),
        bench.send(4, start=True, band=1, timeout_s=40),
        bench.send(5, start=True, timeout_s=55),
    )
    bench.settle()
    assert bench.scheduler.table.waiting == 3 and bench.scheduler.pending == 3
    for sequence, expected in ((1, urgent), (2, soon), (5, late)):
        bench.send(sequence, end=True)
        bench.settle()
        assert bench.value(expected) == bits(expected)
    assert bench.value(first[0]) is not None
    assert [[row for batch in each.batches for row in batch["x"]] for each in bench.sessions] in (
        [[0, 5, 4, 7, 2], [1, 6, 3]],
        [[1, 6, 3], [0, 5, 4, 7, 2]],
    )


def test_rows_stand_at_their_slots_and_the_others_are_not_ready() -> None:
    bench = SequenceBench(slots=4, padded=True)
    for sequence in range(4):
        bench.send(sequence + 1, start=True)
    bench.settle()
    third = bench.send(3)
    bench.settle()
    both = [bench.send(4), bench.send(1)]
    bench.settle()
    _, one, two = bench.sessions[0].batches
    assert (one["x"], one["READY"], one["START"]) == ([0, 0, third], [-1, -1, 1], [-1, -1, -1])
    assert (two["x"], two["READY"]) == ([both[1], 0, 0, both[0]], [1, -1, -1, 1])
    assert bench.value(third) == bits(2, third) and bench.value(both[0]) == bits(3, both[0])


def test_an_idle_sequence_loses_its_slot_and_its_next_step_is_told() -> None:
    bench = SequenceBench(slots=1)
    bench.send(1, start=True)
    waits = bench.send(2, start=True)
    bench.settle()
    assert bench.value(waits) is None
    bench.clock.advance(IDLE_S - 0.1)
    assert bench.value(bench.send(1)) is None
    bench.settle()
    bench.clock.advance(IDLE_S)
    bench.settle()
    assert bench.value(waits) == bits(waits) and bench.ended() == {"idle": 1}
    late = bench.send(1)
    assert START_MISSING in bench.text(late) and bench.text(late).endswith("lost, because no step came for 5 s")
    other = bench.send(3)
    assert bench.text(other).endswith(START_MISSING)


def test_a_start_closes_the_sequence_before_it() -> None:
    bench = SequenceBench()
    old = [bench.send(1, start=True), bench.send(1)]
    new = [bench.send(1, start=True), bench.send(1, end=True)]
    after = bench.send(1)
    bench.settle()
    assert [bench.value(each) for each in old + new] == [
        bits(old[0]),
        bits(*old),
        bits(new[0]),
        bits(*new),
    ]
    assert bench.text(after).endswith(START_MISSING) and bench.ended() == {"restarted": 1, "end": 1}


def test_a_late_step_ends_its_sequence_also_while_it_waits() -> None:
    bench = SequenceBench(slots=1)
    first = bench.send(1, start=True)
    late, after = bench.send(1, timeout_s=2), bench.send(1)
    waiting = bench.send(2, start=True, timeout_s=1)
    bench.clock.run()
    bench.clock.advance(3)
    assert isinstance(bench.error(late), DeadlineExceeded) and isinstance(bench.error(waiting), DeadlineExceeded)
    assert "was lost, because a step of it was not done by its deadline" in bench.text(after)
    bench.settle()
    assert bench.value(first) == bits(first), "it ran already"
    assert "not done by its deadline" in bench.text(bench.send(1))
    assert bench.ended() == {"expired": 2} and bench.scheduler.table.holding == 0


def test_a_step_that_is_late_while_it_runs_ends_its_sequence() -> None:
    bench = SequenceBench(slots=1)
    late = bench.send(1, start=True, timeout_s=2)
    waits = bench.send(2, start=True)
    bench.clock.run()
    bench.clock.advance(3)
    assert isinstance(bench.error(late), DeadlineExceeded)
    bench.settle()
    assert bench.value(waits) == bits(waits)


def test_callers_who_leave_end_their_sequences() -> None:
    bench = SequenceBench(slots=1)
    runs, waits, other = bench.send(1, start=True), bench.send(1), bench.send(2, start=True)
    bench.clock.run()
    bench.leave(runs)
    bench.settle()
    assert bench.replies[runs] == [] and "the caller of a step left" in bench.text(waits)
    assert bench.value(other) == bits(other)
    gone = bench.send(3, start=True)
    bench.leave(gone)
    bench.send(2, end=True)
    bench.settle()
    assert bench.replies[gone] == [] and bench.ended() == {"left": 2, "end": 1}
    assert bench.statistics.failures[CallerLeft.outcome] == 2
    assert not bench.scheduler.caller_left(bench.calls[gone])


def test_an_instance_that_died_has_lost_its_sequences_and_no_others() -> None:
    """A step that waits for the instance would be executed without what the model remembered."""
    bench = SequenceBench(instances=2, slots=2)
    first = [bench.send(each, start=True) for each in (1, 2, 3)]
    closed = bench.send(1, start=True)
    bench.clock.run()
    bench.settle()
    runs, waits, other = bench.send(1), bench.send(1), bench.send(2)
    free = bench.send(4, start=True)
    bench.scheduler.instance_died(0)
    bench.settle()
    assert [bench.value(each) for each in (*first, closed)] == [bits(each) for each in (*first, closed)]
    assert isinstance(bench.error(runs), InferenceError) and "the model's process died" in bench.text(waits)
    assert bench.value(other) == bits(first[1], other) and bench.value(free) == bits(free)
    assert "because the model's process died" in bench.text(bench.send(3))


def test_a_failed_step_ends_its_sequence_and_no_other() -> None:
    bench = SequenceBench()
    bench.bad.add(1)
    one, bad = bench.send(1, start=True), bench.send(2, start=True)
    more = bench.send(2)
    bench.settle()
    assert bench.value(one) == bits(one) and "a bad step" in bench.text(bad)
    assert "was lost, because a step of it failed" in bench.text(more)
    assert bench.ended() == {"failed": 1}


def test_tenants_with_the_same_id_never_meet() -> None:
    bench = SequenceBench()
    ours, theirs = bench.send(1, start=True, tenant="a"), bench.send(1, start=True, tenant="b")
    more = bench.send(1, tenant="a")
    bench.settle()
    assert bench.value(more) == bits(ours, more) and bench.value(theirs) == bits(theirs)
    assert bench.text(bench.send(1, tenant="c")).endswith(START_MISSING)


def test_where_the_model_sees_ids_another_tenant_cannot_use_one_that_is_in_use() -> None:
    bench = SequenceBench(corrid=True)
    bench.send(1, start=True, tenant="a")
    bench.settle()
    for start in (False, True):
        assert "sequence 1 of model 'sum' is in use by another tenant" in bench.text(
            bench.send(1, start=start, tenant="b")
        )
    bench.send(1, end=True, tenant="a")
    bench.settle()
    free = bench.send(1, start=True, tenant="b")
    bench.settle()
    assert bench.value(free) == bits(free)


def test_steps_that_wait_are_bounded_and_urgent_ones_take_the_room_of_others() -> None:
    bench = SequenceBench(slots=1, max_items=2)
    bench.send(1, start=True)
    waits = [bench.send(each, start=True, band=1) for each in (2, 3)]
    full = bench.send(4, start=True, band=1)
    assert isinstance(bench.error(full), QueueFull)
    urgent = bench.send(5, start=True)
    assert "a more urgent request took the place" in bench.text(waits[1])
    bench.send(1, end=True)
    bench.settle()
    assert bench.replies[waits[0]] == [] or bench.value(urgent) is not None
    assert "the queue had no place for a step of it" in bench.text(bench.send(3))


def test_one_sequence_has_a_bounded_number_of_waiting_steps() -> None:
    bench = SequenceBench(slots=1)
    bench.send(1, start=True)
    bench.clock.run()
    steps = [bench.send(1) for _ in range(257)]
    assert isinstance(bench.error(steps[-1]), QueueFull)
    assert all("the queue had no place for a step of it" in bench.text(each) for each in steps[:-1])


def test_states_are_bounded_together() -> None:
    bench = SequenceBench(max_bytes=2)
    one, two = bench.send(1, start=True), bench.send(2, start=True)
    bench.settle()
    assert bench.value(one) == bits(one) and "no memory left for another state" in bench.text(two)
    assert bench.scheduler.table.states.held == 8


def test_a_tenant_without_state_displaces_one_of_the_tenant_with_most() -> None:
    bench = SequenceBench(slots=4, max_bytes=6)
    ours = [bench.send(each, start=True, tenant="a") for each in (1, 2, 3)]
    bench.settle()
    theirs = bench.send(4, start=True, tenant="b")
    bench.settle()
    assert bench.value(theirs) == bits(theirs) and bench.ended() == {"refused": 1}
    more = [bench.send(each, tenant="a") for each in (1, 2, 3)]
    bench.settle()
    assert [bench.value(each) for each in more[:2]] == [bits(ours[0], more[0]), bits(ours[1], more[1])]
    assert "or the memory none for its state" in bench.text(more[2])


def test_padding_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oriel_inference.sequences.controls.MAX_PADDED_BYTES", 60)
    bench = SequenceBench(slots=4, padded=True)
    for each in (1, 2, 3):
        bench.send(each, start=True)
    bench.settle()
    first, third = bench.send(2), bench.send(3)
    bench.settle()
    assert bench.value(first) == bits(1, first) and "a batch of 3 slots needs 0 MiB" in bench.text(third)


def test_a_scheduler_that_is_closed_keeps_no_states() -> None:
    bench = SequenceBench()
    bench.send(1, start=True)
    bench.settle()
    running = bench.send(2, start=True)
    bench.clock.run()
    bench.scheduler.close()
    bench.settle()
    assert bench.value(running) == bits(running)
    assert (bench.scheduler.table.holding, bench.scheduler.table.states.held) == (0, 0)
    assert bench.ended() == {"stopped": 2}


def test_a_caller_who_leaves_before_its_step_runs_is_forgotten() -> None:
    """Caller and call refer to each other, so that the garbage collector alone would find them."""
    bench = SequenceBench(slots=1)
    bench.send(1, start=True)
    waits = bench.send(2, start=True)
    bench.clock.run()
    bench.leave(waits)
    assert bench.calls[waits].ticket.payload is None


def test_hopeless_sequences_do_not_nest() -> None:
    """Thousands that wait for a slot and fail at once were one call in another."""
    bench = SequenceBench(slots=1)
    first = bench.send(1, start=True)
    waiting = [bench.send(each, start=True, timeout_s=30) for each in range(2, 2002)]
    bench.clock.run()
    bench.scheduler.close()
    assert all(isinstance(bench.error(each), InferenceError) for each in waiting)
    bench.settle()
    assert bench.value(first) == bits(first)
    assert "shutting down" in bench.text(bench.send(3, start=True))


@pytest.mark.parametrize("more", [0, 1])
def test_a_lost_restart_does_not_let_the_sequence_before_it_overlap_with_the_next(more: int) -> None:
    """Steps of an older sequence still wait when the one that was to follow it is lost. more: a third START follows."""
    bench = SequenceBench(instances=2, slots=1, corrid=True)
    old = [bench.send(1, start=True, tenant="a"), bench.send(1, tenant="a")]
    bench.clock.run()
    lost = bench.send(1, start=True, tenant="a")
    following = [bench.send(1, start=True, tenant="a") for _ in range(more)]
    bench.leave(lost)
    foreign = bench.send(1, start=True, tenant="b")
    following.append(bench.send(1, start=True, tenant="a"))
    bench.clock.run()
    assert bench.scheduler.table.holding == 1, "two sequences with one id run at the same time"
    assert "in use by another tenant" in bench.text(foreign)
    bench.settle()
    assert [bench.value(each) for each in (*old, *following)] == [bits(old[0]), bits(*old), *map(bits, following)]
    bench.send(1, end=True, tenant="a")
    bench.settle()
    assert bench.scheduler.table.holding == 0
    bench.send(1, start=True, tenant="b")
    bench.settle()
    assert bench.scheduler.table.holding == 1 and bench.scheduler.pending == 0


@dataclass
class Run:
    """The steps of one sequence as a client understands it."""

    steps: list[int] = field(default_factory=list)
    ended: bool = False


Action = tuple[str, Any]
SEND = st.tuples(
    st.just("send"),
    st.fixed_dictionaries(
        {
            "sequence": st.sampled_from([1, 2, "a"]),
            "tenant": st.sampled_from(["", "t"]),
            "start": st.sampled_from([True, False, False]),
            "end": st.sampled_from([True, False, False, False]),
            "band": st.sampled_from([0, 1]),
            "timeout_s": st.sampled_from([1.0, 30.0, 30.0]),
        }
    ),
)
OTHER = st.one_of(
    st.tuples(st.just("step"), st.none()),
    st.tuples(st.just("advance"), st.sampled_from([0.4, 1.1, IDLE_S + 0.1])),
    st.tuples(st.just("leave"), st.integers(0, 40)),
    st.tuples(st.just("bad"), st.integers(0, 40)),
    st.tuples(st.just("die"), st.integers(0, 1)),
)


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.one_of(SEND, SEND, SEND, OTHER), max_size=40),
    shape=st.sampled_from([(1, 1, False), (1, 2, False), (2, 1, False), (1, 4, True), (2, 2, True)]),
    max_bytes=st.sampled_from([4, 1 << 20]),
)
def test_no_step_sees_another_state_and_each_is_answered_once(
    actions: list[Action], shape: tuple[int, int, bool], max_bytes: int
) -> None:
    """The reference knows only the order in which steps were sent, per tenant and id."""
    instances, slots, padded = shape
    bench = SequenceBench(instances=instances, slots=slots, padded=padded, max_items=6, max_bytes=max_bytes)
    runs: dict[tuple[str, int | str], Run] = {}
    every: list[Run] = []
    left: set[int] = set()
    for kind, value in actions:
        if kind == "send":
            key = value["tenant"], value["sequence"]
            number = bench.send(**value)
            if value["start"]:
                runs[key] = Run()
                every.append(runs[key])
            run = runs.get(key)
            if run is None or run.ended:
                assert isinstance(bench.error(number), InvalidRequest)
                continue
            run.steps.append(number)
            run.ended = value["end"]
        elif kind == "step":
            bench.step()
        elif kind == "advance":
            bench.clock.advance(value)
        elif kind == "leave" and value < len(bench.calls) and not bench.replies[value]:
            bench.leave(value)
            left.add(value)
        elif kind == "bad":
            bench.bad.add(value)
        elif kind == "die":
            bench.scheduler.instance_died(value)
    bench.settle()
    bench.clock.advance(100)
    bench.settle()
    for run in every:
        seen = [bench.value(number) for number in run.steps]
        good = [value for value in seen if value is not None]
        assert seen[: len(good)] == good, "a step was answered behind one that was lost"
        assert good == [bits(*run.steps[: index + 1]) for index in range(len(good))]
    for number, replies in bench.replies.items():
        assert len(replies) == (number not in left)
    table = bench.scheduler.table
    assert (table.holding, table.waiting, table.states.held, bench.scheduler.pending) == (0, 0, 0, 0)
    assert bench.scheduler._steps == {} and sum(bench.ended().values()) == len(every)
