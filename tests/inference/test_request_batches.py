"""Sessions that take the requests of a batch one by one, in virtual time: who gets what, when an instance is free."""

import itertools
import math

import numpy as np
import pytest
from fake_backend import FakeRequestSession, Gate
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.backends import Execution, Outputs
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.device import Devices
from oriel_inference.batching.machine import Machine
from oriel_inference.errors import BackendFailed, DeadlineExceeded, InferenceError, InvalidRequest

from .bench import Bench, X, Y, spec


class Requests(Bench):
    """A batcher over sessions that take requests."""

    def __init__(
        self, *, instances: int = 1, max_rows: int = 8, decoupled: bool = False, devices: Devices | None = None
    ) -> None:
        super().__init__(spec(max_rows=max_rows, instances=instances, decoupled=decoupled), sessions=1)
        self.cores = Cores(instances)
        self.takers = [FakeRequestSession((X,), (Y,), gate=Gate()) for _ in range(instances)]
        self._served = self.batcher = Batcher(
            self.batcher.spec,
            self.takers,
            Machine(clock=self.clock, cores=self.cores, workers=self.workers, devices=devices or Devices()),
        )


@pytest.fixture
def bench() -> Requests:
    return Requests()


def test_each_request_of_a_batch_is_given_and_answered_by_itself(bench: Requests) -> None:
    first, second = bench.call(2), bench.call(1)
    bench.settle()
    (execution,) = bench.takers[0].under_way
    assert [request.inputs["x"].shape[0] for request in execution.requests] == [2, 1]
    bench.takers[0].finish()
    assert [row[0] for row in bench.answer(first).outputs[0]] == [0, 0]
    assert bench.answer(second).outputs[0][0, 0] == 2 and bench.answer(second).times.rows == 3


def test_an_error_of_one_fails_no_other_and_is_not_executed_again(bench: Requests) -> None:
    first, second = bench.call(), bench.call()
    bench.settle()
    bench.takers[0].finish({0: InvalidRequest("no")})
    assert isinstance(bench.error(first), InvalidRequest)
    assert bench.answer(second).outputs[0][0, 0] == 2
    bench.settle()
    assert not bench.takers[0].under_way
    assert bench.batcher.statistics.executions == 1


def test_an_instance_that_does_not_come_back_gets_nothing(bench: Requests) -> None:
    first = bench.call()
    bench.settle()
    execution = bench.takers[0].finish({0: BackendFailed("it died")}, back=False)
    assert isinstance(bench.error(first), BackendFailed)
    second = bench.call()
    bench.settle()
    assert not bench.takers[0].under_way and bench.batcher.pending == 1
    execution.returned()
    bench.takers[0].finish()
    assert bench.answer(second).outputs[0][0, 0] == 2


def test_the_session_is_told_who_does_not_wait_any_more(bench: Requests) -> None:
    first, second = bench.call(timeout_s=1.0), bench.call()
    bench.settle()
    (execution,) = bench.takers[0].under_way
    bench.clock.advance(1.0)
    assert isinstance(bench.error(first), DeadlineExceeded)
    assert bench.takers[0].left == [(execution, 0)]
    bench.leave(second)
    assert bench.takers[0].left == [(execution, 0), (execution, 1)]
    bench.takers[0].finish()
    assert not bench.replies[second] and not bench.batcher.running


def test_a_session_that_refuses_everything_at_once_is_not_asked_in_a_spiral(bench: Requests) -> None:
    taker = bench.takers[0]

    def refuse(execution: Execution) -> None:
        for index in range(len(execution.requests)):
            execution.answer(index, BackendFailed("no"))
        execution.returned()

    taker.execute = refuse  # type: ignore[method-assign]
    numbers = [bench.call(8) for _ in range(2000)]
    bench.settle()
    assert all(isinstance(bench.error(number), BackendFailed) for number in numbers)


def test_a_request_may_take_600_s_from_its_arrival_and_30_s_between_two_responses(bench: Requests) -> None:
    bench.call(8)
    bench.settle()
    bench.call(timeout_s=5.0)
    bench.clock.advance(2.0)
    bench.takers[0].finish()
    bench.settle()
    ((request,),) = [each.requests for each in bench.takers[0].under_way]
    assert (request.deadline, request.ends, request.idle_s) == (1005.0, 1600.0, 30.0)


@pytest.mark.parametrize("value", [math.nan, -1e12, 1e300])
def test_the_clock_of_a_models_process_may_be_wrong(bench: Requests, value: float) -> None:
    number = bench.call()
    bench.settle()
    bench.takers[0].under_way[0].computing(value, value)
    bench.takers[0].finish()
    times = bench.answer(number).times
    assert times.started_s <= times.assembled_s <= times.computed_s <= times.split_s


ROW = Outputs([np.zeros((1, 2), np.int64)])


@pytest.mark.parametrize(
    ("decoupled", "result", "failed"),
    [
        (True, None, False),
        (True, InvalidRequest("no"), True),
        (False, None, True),
        (False, InvalidRequest("no"), True),
        (False, ROW, False),
    ],
)
def test_who_gets_an_error_is_not_charged(
    decoupled: bool, result: Outputs | InferenceError | None, failed: bool
) -> None:
    devices = Devices(now_ns=itertools.count(1000, 1000).__next__)
    bench = Requests(decoupled=decoupled, devices=devices)
    number = bench.call(tenant="a")
    bench.settle()
    execution = bench.takers[0].under_way.pop()
    execution.answer(0, result)
    execution.returned()
    assert isinstance(bench.replies[number][0], InferenceError) is failed
    charged = {(row.key.tenant, row.key.why): row.device_ns for row in devices.book.rows() if row.device_ns}
    assert charged == ({("", "failed"): 1000} if failed else {("a", ""): 1000})


def test_responses_are_counted_while_the_caller_waits() -> None:
    bench = Requests(decoupled=True)
    number = bench.call()
    bench.settle()
    (execution,) = bench.takers[0].under_way
    bench.clock.advance(0.25)
    execution.respond(0, ROW, lambda: None)
    bench.clock.advance(0.5)
    execution.respond(0, ROW, lambda: None)
    bench.leave(number)
    execution.respond(0, ROW, lambda: None)
    counted = bench.batcher.statistics
    assert (counted.first_response.count, counted.first_response.total) == (1, 250.0)
    assert [each.infer.ns for each in counted.responses] == [250_000_000, 500_000_000]


def test_a_response_of_a_model_that_has_one_per_request_is_not_counted(bench: Requests) -> None:
    bench.call()
    bench.settle()
    (execution,) = bench.takers[0].under_way
    execution.respond(0, ROW, lambda: None)
    assert not bench.batcher.statistics.responses and not bench.batcher.statistics.first_response.count


def test_who_failed_shares_the_next_batch_of_requests_that_fail_one_by_one(bench: Requests) -> None:
    """Nothing is executed again for others, so that nobody has to be kept apart."""
    bench.call(caller="a")
    bench.settle()
    bench.takers[0].finish({0: InvalidRequest("no")})
    for caller in ("a", "b", "a"):
        bench.call(caller=caller)
    bench.settle()
    (execution,) = bench.takers[0].under_way
    assert len(execution.requests) == 3


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("call"), st.integers(1, 4)),
            st.tuples(st.just("leave"), st.integers(0, 50)),
            st.tuples(st.just("advance"), st.integers(1, 40)),
            st.tuples(st.just("finish"), st.integers(0, 7)),
            st.tuples(st.just("die"), st.integers(0, 1)),
            st.tuples(st.just("revive"), st.integers(0, 1)),
        ),
        max_size=60,
    )
)
def test_every_call_ends_exactly_once_with_its_own_rows(steps: list[tuple[str, int]]) -> None:
    bench = Requests(instances=2)
    left, dead = set(), []
    for step, value in steps:
        taker = bench.takers[value % 2]
        match step:
            case "call":
                bench.call(value, timeout_s=1.0 + value)
            case "leave" if bench.calls:
                number = value % len(bench.calls)
                if not bench.replies[number]:
                    left.add(number)
                bench.leave(number)
            case "advance":
                bench.clock.advance(value / 10)
            case "finish" if taker.under_way:
                taker.finish({value // 2: InvalidRequest("no")})
            case "die" if taker.under_way:
                errors = dict.fromkeys(range(8), BackendFailed("it died"))
                dead.append(taker.finish(errors, back=False))
            case "revive" if dead:
                dead.pop().returned()
        bench.settle()
    for execution in dead:
        execution.returned()
    bench.settle()
    while any(taker.under_way for taker in bench.takers):
        for taker in bench.takers:
            if taker.under_way:
                taker.finish()
        bench.settle()
    assert not bench.batcher.pending and not bench.batcher.running
    assert bench.cores.free == bench.cores.total
    for number, replies in bench.replies.items():
        assert len(replies) == (0 if number in left else 1)
        for reply in replies:
            if isinstance(reply, Answer):
                rows = bench.calls[number].rows
                assert np.array_equal(reply.outputs[0], np.full((rows, 2), 2 * number))
