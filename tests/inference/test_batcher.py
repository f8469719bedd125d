import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.batching.call import Answer
from oriel_inference.batching.service_times import INLINE_SAMPLES
from oriel_inference.errors import (
    BackendFailed,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    Outcome,
    QueueFull,
    QueueTimeout,
    ServerStopping,
)
from oriel_inference.model import QueuePolicy

from .bench import Bench, Linear, spec


def test_a_lone_call_runs_at_once_and_gets_its_rows() -> None:
    bench = Bench(spec())
    number = bench.call(3)
    bench.settle()
    np.testing.assert_array_equal(bench.answer(number).outputs[0], np.zeros((3, 2), dtype=np.int64))
    assert bench.batches == [3]


def test_calls_that_arrive_together_run_together() -> None:
    bench = Bench(spec(max_rows=8))
    numbers = [bench.call(2) for _ in range(3)]
    bench.settle()
    assert bench.batches == [6]
    assert [int(bench.answer(n).outputs[0][0, 0]) for n in numbers] == [0, 2, 4]


def test_calls_gather_while_a_batch_runs() -> None:
    bench = Bench(spec(max_rows=8))
    bench.call()
    bench.clock.run()  # the first is on the device
    for _ in range(10):
        bench.call()
    bench.settle()
    assert bench.batches == [1, 8, 2]


def test_the_next_batch_begins_before_the_answers_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, seen = Bench(spec(max_rows=2)), list[tuple[int, list[int]]]()
    monkeypatch.setattr(bench.workers, "let_begin", lambda: seen.append((len(bench.workers.jobs), list(bench.order))))
    for _ in range(4):
        bench.call()
    bench.step()
    assert seen == [(1, [])] and bench.order == [0, 1]


def test_without_batching_every_call_runs_alone() -> None:
    bench = Bench(spec(alone=True))
    for _ in range(3):
        bench.call(2)
    bench.settle()
    assert bench.batches == [2, 2, 2]


def test_calls_of_other_shapes_never_share_a_batch() -> None:
    bench = Bench(spec())
    numbers = [bench.call(1, width=width) for width in (2, 2, 3, 3, 2)]
    bench.settle()
    assert bench.batches == [2, 2, 1]
    assert [bench.answer(n).outputs[0].shape for n in numbers] == [(1, 2), (1, 2), (1, 3), (1, 3), (1, 2)]


def test_the_more_urgent_band_goes_first_then_the_earlier_deadline() -> None:
    bench = Bench(spec(alone=True))
    first = bench.call()
    bench.clock.run()
    silver = bench.call(timeout_s=1, band=1)
    late = bench.call(timeout_s=9)
    early = bench.call(timeout_s=5)
    bench.settle()
    assert bench.order == [first, early, late, silver]


def test_levels_order_a_tenants_own_calls_and_nobody_elses() -> None:
    bench = Bench(spec(alone=True))
    first = bench.call(tenant="a")
    bench.clock.run()
    later = bench.call(tenant="a", level=2, timeout_s=5)
    other = bench.call(tenant="b", level=9, timeout_s=50)
    sooner = bench.call(tenant="a", level=1, timeout_s=9)
    bench.settle()
    assert bench.order[0] == first
    assert bench.order.index(sooner) < bench.order.index(later)
    assert bench.order.index(other) < bench.order.index(later)


def test_instances_run_at_the_same_time() -> None:
    bench = Bench(spec(instances=2, alone=True))
    bench.call()
    bench.call()
    bench.clock.run()
    assert len(bench.workers.jobs) == 2


def test_delay_holds_a_batch_open_until_its_time_or_until_it_is_full() -> None:
    bench = Bench(spec(max_rows=4, delay_s=0.5))
    bench.call()
    bench.settle()
    bench.clock.advance(0.4)
    bench.call()
    bench.settle()
    assert bench.batches == []
    bench.clock.advance(0.11)
    bench.settle()
    assert bench.batches == [2]
    for _ in range(4):
        bench.call()
    bench.settle()
    assert bench.batches == [2, 4]


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_expired_call_is_answered_on_time_while_a_long_batch_runs_and_is_never_executed() -> None:
    bench = Bench(spec())
    bench.call()
    bench.clock.run()  # on the device until the test says otherwise
    number = bench.call(timeout_s=0.05)
    bench.clock.advance(0.049)
    assert bench.replies[number] == []
    bench.clock.advance(0.002)
    error = bench.error(number)
    assert isinstance(error, DeadlineExceeded) and error.stage == "queue"
    bench.settle()
    assert bench.batches == [1]


def test_expiry_of_a_later_arrival_with_an_earlier_deadline_is_on_time() -> None:
    bench = Bench(spec())
    bench.call()
    bench.clock.run()
    slow, fast = bench.call(timeout_s=10), bench.call(timeout_s=1)
    bench.clock.advance(1.001)
    assert isinstance(bench.error(fast), DeadlineExceeded)
    bench.clock.advance(9.0)
    assert isinstance(bench.error(slow), DeadlineExceeded)


def test_call_that_expires_on_the_device_is_answered_on_time_and_others_get_their_rows() -> None:
    bench = Bench(spec())
    short, long = bench.call(timeout_s=0.1), bench.call(timeout_s=5)
    bench.clock.run()
    bench.clock.advance(0.2)
    error = bench.error(short)
    assert isinstance(error, DeadlineExceeded) and error.stage == "compute"
    bench.settle()
    assert int(bench.answer(long).outputs[0][0, 0]) == 2 * long


def test_call_that_arrives_late_is_refused_without_queueing() -> None:
    bench = Bench(spec())
    number = bench.call(timeout_s=0.0)
    assert isinstance(bench.error(number), DeadlineExceeded)
    assert bench.batcher.pending == 0


# --- leaving, bounds, failures ------------------------------------------------------------------------------------


def test_leaving_caller_frees_its_place_at_once() -> None:
    bench = Bench(spec(), max_items=1)
    bench.call()
    bench.clock.run()
    waiting = bench.call()
    assert isinstance(bench.error(bench.call()), QueueFull)
    bench.leave(waiting)
    assert bench.batcher.pending == 0
    accepted = bench.call()
    bench.settle()
    assert bench.answer(accepted)
    assert bench.replies[waiting] == []
    assert bench.batches == [1, 1]


def test_leaving_twice_or_after_the_answer_changes_nothing() -> None:
    bench = Bench(spec())
    number = bench.call()
    bench.settle()
    bench.leave(number)
    bench.leave(number)
    assert bench.answer(number)
    assert bench.batcher.statistics.failures[Outcome.CALLER_LEFT] == 0


def test_queue_is_bounded_in_bytes() -> None:
    bench = Bench(spec(), max_bytes=100)
    bench.call()
    bench.clock.run()
    bench.call(size_bytes=60)
    assert isinstance(bench.error(bench.call(size_bytes=60)), QueueFull)


def test_a_more_urgent_call_displaces_the_newest_of_the_lowest_band() -> None:
    bench = Bench(spec(), max_items=2)
    bench.call()
    bench.clock.run()
    older, newer = bench.call(band=2), bench.call(band=2)
    urgent = bench.call(band=0)
    assert isinstance(bench.error(newer), QueueFull)
    bench.settle()
    assert bench.answer(older) and bench.answer(urgent)


def test_the_models_queue_size_wins_over_the_servers() -> None:
    bench = Bench(spec(policy=QueuePolicy(max_items=1)))
    bench.call()
    bench.clock.run()
    bench.call()
    assert isinstance(bench.error(bench.call()), QueueFull)


def test_closing_fails_what_waits_and_refuses_what_comes() -> None:
    bench = Bench(spec())
    running = bench.call()
    bench.clock.run()
    waiting = bench.call()
    bench.batcher.close()
    assert isinstance(bench.error(waiting), ServerStopping)
    assert isinstance(bench.error(bench.call()), ServerStopping)
    bench.settle()
    assert bench.answer(running)


def test_batches_known_to_be_short_run_on_the_loop() -> None:
    bench = Bench(spec(), inline_s=10.0)
    for _ in range(INLINE_SAMPLES):
        bench.call()
        bench.settle()
    number = bench.call()
    bench.clock.run()
    assert bench.workers.jobs == []
    assert bench.answer(number)


def test_one_that_waits_long_keeps_no_record_of_all_that_came_after_it() -> None:
    bench = Bench(spec(max_rows=2, delay_s=0.01, alone=False), max_items=10)
    bench.call(band=1, level=5)
    for _ in range(500):
        bench.call(rows=2)
        bench.settle()
    assert len(bench.batcher._waiting._arrivals) <= 64 + 2 * 10


# --- conservation -------------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("call"),
            st.integers(1, 4),
            st.sampled_from([0.01, 0.5, 60.0]),
            st.integers(0, 2),
            st.integers(1, 2),
            st.integers(1, 2),
            st.sampled_from([False, False, False, True]),
        ),
        st.tuples(st.just("leave"), st.integers(0, 40)),
        st.tuples(st.just("advance"), st.sampled_from([0.001, 0.02, 1.0])),
        st.tuples(st.just("device"), st.integers(1, 3)),
        st.tuples(st.just("loop")),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(
    steps,
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
    st.integers(1, 3),
    st.sampled_from(["none", "reject", "delay", "levels", "ordered"]),
    st.sampled_from([40, 1000]),
    st.sampled_from([0.0, 0.004]),
)
def test_every_caller_gets_its_own_rows_exactly_once_under_any_order_of_events(
    script: list[tuple],
    instances: int,
    alone: bool,
    delay_s: float,
    cores: int,
    policy: str,
    max_batch_bytes: int,
    per_row_s: float,
) -> None:
    queue: dict[str, object] = {"preserve_ordering": policy == "ordered"}
    if policy == "levels":
        small = QueuePolicy(max_items=2, timeout_s=0.05, delays=True)
        queue = {"policy": QueuePolicy(max_items=3), "by_level": {1: small}, "priority_levels": 2}
    model = spec(max_rows=4, instances=instances, alone=alone, delay_s=delay_s, **queue)  # type: ignore[arg-type]
    bench = Bench(model, cores=cores, max_items=6, max_batch_bytes=max_batch_bytes, curve=Linear(0.0, per_row_s))
    patience_s = 0.05 if policy in ("reject", "delay", "levels") else None
    left: set[int] = set()
    for step in script:
        match step:
            case ("call", rows, timeout_s, band, width, level, bad):
                if bad:
                    bench.bad.add(len(bench.calls))
                delays = policy == "delay" or (policy == "levels" and level == 1)
                bench.call(
                    rows,
                    timeout_s=timeout_s,
                    band=band,
                    width=width,
                    tenant="ab"[rows % 2],
                    give_up_s=patience_s if delays or policy == "reject" else None,
                    delays=delays,
                    level=level if policy == "levels" else 0,
                    caller="cde"[len(bench.calls) % 3],
                )
            case ("leave", number) if number < len(bench.calls):
                if not bench.replies[number]:
                    left.add(number)
                bench.leave(number)
            case ("advance", seconds):
                bench.clock.advance(seconds)
            case ("device", count):
                for _ in range(min(count, len(bench.workers.jobs))):
                    bench.workers.run_next()
            case ("loop",):
                bench.clock.run()
        assert bench.batcher.pending <= 6
    for _ in range(100):
        bench.settle()
        bench.clock.advance(0.05)
    assert bench.batcher.pending == 0 and bench.batcher.running == 0 and bench.batcher._waiting.rows == 0
    assert bench.cores.free == bench.cores.total
    assert all(rows <= 4 for rows in bench.batches)
    if bench.batcher._levels is not None:
        assert not any(bench.batcher._levels._waiting.values())
    if bench.batcher._line is not None:
        assert not bench.batcher._line._lines
        for key in {(call.ticket.band, call.ticket.tenant) for call in bench.calls}:
            own = [n for n in bench.order if (bench.calls[n].ticket.band, bench.calls[n].ticket.tenant) == key]
            answered = [n for n in own if isinstance(bench.replies[n][0], Answer)]
            assert answered == sorted(answered)
    for number, call in enumerate(bench.calls):
        assert len(bench.replies[number]) == (0 if number in left else 1)
        if call.started_s:
            assert call.started_s < call.deadline
            if policy == "reject":
                assert call.started_s < call.ticket.deadline <= call.arrived_s + 0.05
        for reply in bench.replies[number]:
            assert not (isinstance(reply, Answer) and number in bench.bad)
            assert not isinstance(reply, InvalidRequest) or number in bench.bad
            if isinstance(reply, Answer):
                rows = reply.outputs[0]
                assert rows.shape[0] == call.rows and (rows == 2 * number).all()
            else:
                assert isinstance(reply, InferenceError)
                assert policy == "reject" or not isinstance(reply, QueueTimeout)


def test_calls_that_end_on_the_way_to_their_thread_are_not_executed() -> None:
    bench = Bench(spec(max_rows=8))
    late, live = bench.call(2, timeout_s=1), bench.call(3)
    bench.clock.run()  # handed over, the thread has not begun
    assert len(bench.workers.jobs) == 1
    bench.clock.advance(2)
    bench.settle()
    assert isinstance(bench.error(late), DeadlineExceeded)
    assert bench.batches == [3]
    assert bench.answer(live).outputs[0].shape[0] == 3


def test_a_batch_nobody_waits_for_any_more_is_not_executed() -> None:
    bench = Bench(spec())
    bench.call(2, timeout_s=1)
    bench.clock.run()
    bench.clock.advance(2)
    bench.settle()
    assert bench.batches == []
    following = bench.call(1)
    bench.settle()
    assert bench.answer(following).outputs[0].shape[0] == 1


def test_callers_who_come_back_share_batches_again() -> None:
    bench = Bench(spec(max_rows=8), curve=Linear(0.050, 0.001))
    bench.call()
    bench.clock.run()
    for _ in range(7):  # one runs, seven wait: two groups
        bench.call()
    seen = 0
    for _ in range(60):
        bench.clock.advance(0.06)
        bench.workers.run_all()
        bench.clock.run()
        answered, seen = len(bench.order) - seen, len(bench.order)
        for _ in range(answered):  # whoever is answered asks again at once
            bench.call()
        bench.clock.run()
    assert list(bench.batches[:4]) == [1, 7, 1, 7]
    assert list(bench.batches[-3:]) == [8, 8, 8]


def test_an_answer_that_cannot_be_delivered_is_a_failure_and_not_silence() -> None:
    bench = Bench(spec())
    told: list[object] = []

    def reply(result: object) -> None:
        told.append(result)
        if isinstance(result, Answer):
            raise ValueError("surprise")

    number = bench.call()
    bench.calls[number].reply = reply
    other = bench.call()
    bench.settle()
    assert isinstance(told[0], Answer) and isinstance(told[1], BackendFailed) and len(told) == 2
    assert isinstance(bench.answer(other), Answer)
