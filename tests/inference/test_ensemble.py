"""The scheduler of an ensemble, in virtual time."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.batching.assemble import concatenate
from oriel_inference.batching.call import Answer, BatchTimes, Call
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.catalog import ServingModel
from oriel_inference.errors import (
    BackendFailed,
    DeadlineExceeded,
    InferenceError,
    Outcome,
    QueueFull,
    ServerStopping,
    StepFailed,
)
from oriel_inference.model import QueueRules
from oriel_wire.context import read_headers
from oriel_wire.v2.messages import InferRequest, RequestedOutput
from oriel_wire.v2.proto import model_config_pb2 as pb

from .ensembles import DIAMOND, Flights, ensemble, model, tensor

CONTEXT = read_headers(lambda _: None, trusted=False).at(0.0, 1e9)

CHAIN = (("a", {"x": "in"}, {"y": "t"}), ("b", {"x": "t"}, {"y": "out"}))


def chain(**more: object) -> Flights:
    return Flights(ensemble(CHAIN, outputs=["out"]), **more)  # type: ignore[arg-type]


def test_a_call_goes_through_the_graph_and_gets_its_rows() -> None:
    flights = Flights(ensemble(DIAMOND))
    numbers = [flights.call(2) for _ in range(3)]
    flights.settle()
    for number in numbers:
        left, out = flights.answer(number).outputs
        assert left.shape == out.shape == (2, 2)
        assert (left == 4 * number).all() and (out == 8 * number).all()
    assert flights.at_rest()


def test_branches_run_at_the_same_time() -> None:
    flights = Flights(ensemble(DIAMOND))
    flights.call()
    flights.step()
    assert len(flights.workers.jobs) == 2  # b and c are both on their devices
    assert flights.batchers["b"].running == flights.batchers["c"].running == 1


def test_steps_of_many_calls_share_batches() -> None:
    flights = chain()
    for _ in range(6):
        flights.call()
    flights.settle()
    assert flights.batches("a") == flights.batches("b") == [6]


def test_tensors_are_passed_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = chain()
    made: dict[str, np.ndarray] = {}
    taken: dict[str, np.ndarray] = {}
    for name, session in flights.sessions.items():

        def run(inputs, outputs, name=name, run=session.run):  # type: ignore[no-untyped-def]
            taken[name] = inputs["x"]
            (made[name],) = found = run(inputs, outputs)
            return found

        monkeypatch.setattr(session, "run", run)
    sent = np.ones((3, 2), np.int64)
    number = flights.call(3, inputs={"in": sent})
    flights.settle()
    assert np.shares_memory(taken["a"], sent)
    assert np.shares_memory(taken["b"], made["a"])
    assert np.shares_memory(flights.answer(number).outputs[0], made["b"])


def test_a_batch_goes_into_the_next_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = chain()
    made: list[np.ndarray] = []
    taken: list[np.ndarray] = []
    first, second = flights.sessions["a"], flights.sessions["b"]

    def makes(inputs, outputs, run=first.run):  # type: ignore[no-untyped-def]
        if made:
            flights.leave(numbers.pop(4))  # a gap: what is left is gathered
        made.append(run(inputs, outputs)[0])
        return [made[-1]]

    def takes(inputs, outputs, run=second.run):  # type: ignore[no-untyped-def]
        taken.append(inputs["x"])
        return run(inputs, outputs)

    monkeypatch.setattr(first, "run", makes)
    monkeypatch.setattr(second, "run", takes)
    numbers = [flights.call(rows) for rows in (1, 3, 2)]
    flights.settle()
    assert taken[0].shape == (6, 2) and np.shares_memory(taken[0], made[0])
    numbers += [flights.call(), flights.call(2), flights.call()]
    flights.settle()
    assert not np.shares_memory(taken[1], made[1])
    assert [int(flights.answer(n).outputs[0][0, 0]) for n in numbers] == [4 * n for n in numbers]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5), st.sampled_from("ifOs"))
def test_gathering_rows_is_concatenating_them(cuts: list[tuple[int, int]], kind: str) -> None:
    base = np.arange(36).reshape(12, 3).astype({"i": np.int64, "f": np.float32, "O": object, "s": np.int16}[kind])
    parts = [{"x": base[start : start + rows]} for start, rows in cuts]
    gathered = concatenate(parts, [tensor("x", (3,))], batched=True)["x"]
    np.testing.assert_array_equal(gathered, np.concatenate([part["x"] for part in parts]))
    assert gathered.flags.c_contiguous and gathered.flags.aligned


def stands_in(serving: ServingModel, submit: Callable[[Call], None]) -> None:
    """Give a model a batcher with another `submit`: the methods of a compiled one cannot be replaced."""

    class StandIn:
        def __getattr__(self, name: str) -> object:
            return submit if name == "submit" else getattr(own, name)

    own, serving.batcher = serving.batcher, cast(Scheduler, StandIn())


def test_the_deadline_the_band_the_tenant_and_the_level_go_with_every_step() -> None:
    rules = QueueRules(priority_levels=3, default_priority=2)
    flights = Flights(ensemble(CHAIN, outputs=["out"]), {"b": model("b", queue=rules)})
    seen: dict[str, Call] = {}
    for name, serving in flights.serving.items():

        def submit(call: Call, name: str = name, own: Scheduler = serving.batcher) -> None:
            seen[name] = call
            own.submit(call)

        stands_in(serving, submit)
    number = flights.call(timeout_s=7, band=2, tenant="t", level=3)
    flights.settle()
    outer = flights.calls[number]
    for call in seen.values():
        assert (call.deadline, call.ticket.band, call.ticket.tenant) == (outer.deadline, 2, "t")
        assert call.ticket.admitted
    assert [seen[name].level for name in "ab"] == [0, 3]  # the model without levels has no use for it
    flights.call()
    flights.settle()
    assert seen["b"].level == 2


def test_a_full_queue_refuses_no_step() -> None:
    flights = chain(step_items=1)
    numbers = [flights.call() for _ in range(5)]
    flights.settle()
    assert all(flights.answer(number) for number in numbers)
    # what comes to the model itself still finds its bounds, and displaces no step
    flights.call()
    flights.clock.run()
    waiting = [flights.call(band=5) for _ in range(3)]
    assert flights.batchers["a"].pending == 3
    direct = flights.calls[0]
    flights.settle()
    assert all(flights.answer(number) for number in waiting) and direct.finished


def test_the_ensembles_own_bounds_hold() -> None:
    flights = chain(max_items=4, max_bytes=1000)
    numbers = [flights.call(band=1) for _ in range(4)]
    assert isinstance(flights.error(numbers[3]), QueueFull)  # the last quarter is for the most urgent
    urgent = flights.call(band=0)
    assert isinstance(flights.error(flights.call(band=0)), QueueFull)
    flights.settle()
    assert all(flights.answer(number) for number in (*numbers[:3], urgent))
    assert isinstance(flights.error(flights.call(size_bytes=1001)), QueueFull)
    held = flights.call(8, size_bytes=900)
    flights.step()  # a has run: 128 bytes more are held
    assert flights.ensemble._size_bytes == 900 + 8 * 2 * 8
    assert isinstance(flights.error(flights.call(size_bytes=50)), QueueFull)
    flights.settle()
    assert flights.answer(held) and flights.at_rest()


def test_what_is_used_up_is_dropped() -> None:
    long = tuple((f"m{i}", {"x": f"t{i}"}, {"y": f"t{i + 1}"}) for i in range(4))
    flights = Flights(ensemble(long, inputs=["t0"], outputs=["t4"]))
    flights.call(4)
    for _ in range(3):
        flights.step()
    assert flights.ensemble._size_bytes == 4 * 2 * 8  # only the tensor between two steps
    flights.settle()
    assert flights.at_rest()


@pytest.mark.parametrize(
    ("asked", "ran", "given"),
    [(["left"], "ab", [4, None]), (["out"], "acd", [None, 8]), (["out", "left"], "abcd", [4, 8])],
)
def test_steps_that_no_requested_output_needs_do_not_run(asked: list[str], ran: str, given: list[int | None]) -> None:
    flights = Flights(ensemble(DIAMOND))
    request = InferRequest(model_name="e", outputs=[RequestedOutput(name) for name in asked])
    flights.call()
    number = flights.call(source=(request, CONTEXT))
    flights.settle()
    assert [None if rows is None else int(rows[0, 0]) for rows in flights.answer(number).outputs] == given
    assert "".join(name for name in "abcd" if sum(flights.batches(name)) == 2) == ran
    assert flights.at_rest()


# --- endings ------------------------------------------------------------------------------------------------------


def test_a_failing_step_ends_the_call_once_and_its_other_steps() -> None:
    flights = Flights(ensemble(DIAMOND))
    flights.sessions["b"].fail = True
    number = flights.call()
    flights.step()
    waiting = flights.workers.jobs.pop()  # c stays on its device
    flights.step()
    error = flights.error(number)
    assert isinstance(error, StepFailed) and error.outcome is Outcome.BACKEND_FAILED
    assert "in ensemble 'e', model 'b'" in error.message
    waiting()
    flights.settle()
    assert len(flights.replies[number]) == 1 and flights.batches("d") == [] and flights.at_rest()
    assert flights.batchers["c"].statistics.failures[Outcome.CALLER_LEFT] == 1


def test_a_caller_that_leaves_frees_every_place() -> None:
    flights = Flights(ensemble(DIAMOND), cores=1)
    stays, leaves = flights.call(), flights.call(8)
    flights.step()
    flights.leave(leaves)
    assert flights.ensemble.running == 1
    flights.settle()
    assert flights.answer(stays) and flights.replies[leaves] == [] and flights.at_rest()
    assert flights.ensemble.statistics.failures[Outcome.CALLER_LEFT] == 1
    flights.leave(leaves)
    flights.leave(stays)
    assert flights.ensemble.statistics.failures[Outcome.CALLER_LEFT] == 1


def test_a_deadline_that_passes_between_two_steps_ends_the_call_there() -> None:
    flights = chain()
    number = flights.call(timeout_s=1)
    flights.clock.run()
    job = flights.workers.jobs.pop()
    flights.clock.advance(0.999)
    job()
    flights.batchers["b"]._idle, idle = [], flights.batchers["b"]._idle  # b is not to be had
    flights.clock.run()
    flights.clock.advance(0.002)
    error = flights.error(number)
    assert isinstance(error, DeadlineExceeded) and error.stage == "queue"
    flights.batchers["b"]._idle = idle
    flights.settle()
    assert flights.batches("b") == [] and flights.at_rest()


def test_a_deadline_that_passes_while_a_step_is_computed_is_answered_on_time() -> None:
    flights = chain()
    number = flights.call(timeout_s=1)
    flights.step()
    flights.clock.advance(1.001)
    error = flights.error(number)
    assert isinstance(error, DeadlineExceeded) and error.stage == "compute"
    flights.settle()
    assert flights.at_rest()


def test_closing_fails_what_is_under_way_and_refuses_what_comes() -> None:
    flights = chain()
    number = flights.call()
    flights.clock.run()
    flights.ensemble.close()
    assert isinstance(flights.error(number), ServerStopping)
    assert isinstance(flights.error(flights.call()), ServerStopping)
    flights.settle()
    assert flights.at_rest()


def test_a_call_holds_the_versions_it_began_with() -> None:
    flights = chain()
    flights.call()
    held = flights.serving["b"]
    assert held.holds == 1
    newer = chain(clock=flights.clock)
    flights.ensemble.bind([flights.serving["a"], newer.serving["b"]])
    flights.settle()
    assert flights.batches("b") == [1] and held.holds == 0
    flights.call()
    flights.settle()
    newer.settle()
    assert flights.batches("b") == [1] and newer.batches("b") == [1]


# --- max_inflight_requests ----------------------------------------------------------------------------------------


def test_max_inflight_requests_bounds_each_step_and_keeps_the_order() -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"], max_inflight=2))
    first = [flights.call() for _ in range(2)]
    low, late, soon = flights.call(timeout_s=4, band=1), flights.call(timeout_s=50), flights.call(timeout_s=5)
    later = flights.call(timeout_s=55)
    flights.settle()
    assert flights.batches("a") == flights.batches("b") == [2, 2, 2]
    assert flights.order == [*first, soon, late, later, low]
    assert flights.at_rest()


def test_a_deadline_passes_while_a_step_waits_for_its_turn() -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"], max_inflight=1))
    first, second = flights.call(), flights.call(timeout_s=1)
    leaves = flights.call()
    flights.clock.run()
    flights.leave(leaves)
    flights.clock.advance(1.001)
    assert isinstance(flights.error(second), DeadlineExceeded)
    flights.settle()
    assert flights.answer(first) and flights.batches("a") == [1] and flights.at_rest()


def test_a_turn_that_comes_too_late_goes_to_the_next() -> None:
    flights = Flights(ensemble(CHAIN[:1], outputs=["t"], max_inflight=1))
    first, second, third = (flights.call() for _ in range(3))
    flights.calls[first].reply = lambda _: flights.leave(second)  # it has the turn by now and has not run
    flights.settle()
    assert flights.answer(third) and flights.batches("a") == [1, 1] and flights.at_rest()


def test_a_stream_that_has_waited_for_its_turn_outlives_its_first_deadline() -> None:
    """The timer of the wait ended it, while each response gives its reader more time."""
    parts = {"a": model("a", decoupled=True, bounds=None)}
    flights = Flights(ensemble(CHAIN[:1], outputs=["t"], max_inflight=1), parts)
    asked: list[Call] = []
    stands_in(flights.serving["a"], asked.append)
    seen: list[int] = []
    first, second = flights.call(), flights.call(emit=lambda outputs, consumed: seen.append(int(outputs[0][0, 0])))
    ends = Answer([], BatchTimes(0.0, 0.0, 0.0, 0.0, 1), 0)
    asked[0].reply(ends)
    flights.settle()
    for number, seconds in enumerate((50.0, 20.0, 20.0)):
        flights.clock.advance(seconds)
        assert asked[1].emit is not None
        asked[1].emit([np.full((1, 2), number)], lambda: None)
    asked[1].reply(ends)
    assert seen == [0, 1, 2] and flights.answer(first) and flights.answer(second) and flights.at_rest()


# --- shapes -------------------------------------------------------------------------------------------------------


def test_a_model_without_a_batch_dimension_takes_a_batch_of_one() -> None:
    parts = {"a": model("a", inputs=(tensor("x", (2,)),), outputs=(tensor("y", (2,)),), max_rows=0)}
    flights = Flights(ensemble(CHAIN, outputs=["out"]), parts)
    number = flights.call(1)
    flights.settle()
    assert flights.answer(number).outputs[0].shape == (1, 2)
    refused = flights.call(2)
    flights.settle()
    error = flights.error(refused)
    assert error.outcome is Outcome.INVALID_REQUEST and "tensor 'in' has 2 rows where only one fits" in error.message
    assert flights.at_rest()


def test_a_shape_that_only_the_request_decides_is_judged_when_it_comes() -> None:
    parts = {"b": model("b", inputs=(tensor("x", (3,)),), outputs=(tensor("y", (3,)),))}
    flights = Flights(ensemble(CHAIN, outputs=["out"]), parts)
    number = flights.call()
    flights.settle()
    error = flights.error(number)
    assert error.outcome is Outcome.INVALID_REQUEST and "Expected [-1,3], got [1,2]" in error.message
    assert flights.at_rest()


def test_optional_inputs_that_are_left_out_are_left_out_of_the_step() -> None:
    part = model(
        "a",
        inputs=(tensor("x"), tensor("z", optional=True)),
        outputs=(tensor("y"), tensor("w")),
    )
    spec = ensemble(
        (("a", {"x": "in", "z": "more"}, {"y": "out"}),),
        inputs=["in", tensor("more", optional=True)],
        outputs=["out"],
    )
    flights = Flights(spec, {"a": part})
    flights.sessions["a"].run = lambda inputs, outputs: [inputs["x"] + len(inputs)] * len(outputs)  # type: ignore[method-assign]
    row = np.zeros((1, 2), np.int64)
    without, both = flights.call(inputs={"in": row}), flights.call(inputs={"in": row, "more": row})
    flights.settle()
    assert (flights.answer(without).outputs[0] == 1).all() and (flights.answer(both).outputs[0] == 2).all()


def test_an_ensemble_is_a_step_of_another() -> None:
    inner = Flights(ensemble(CHAIN, outputs=["out"]), max_items=1)
    outer = ensemble(
        (("e", {"in": "start"}, {"out": "half"}), ("c", {"x": "half"}, {"y": "end"})), inputs=["start"], outputs=["end"]
    )
    flights = Flights(outer, inner={"e": inner}, clock=inner.clock)
    numbers = [flights.call() for _ in range(3)]  # the inner one's bound of one call refuses no step
    for _ in range(10):
        inner.settle()
        flights.settle()
    assert [int(flights.answer(number).outputs[0][0, 0]) for number in numbers] == [0, 8, 16]
    inner.sessions["b"].fail = True
    number = flights.call()
    for _ in range(4):
        inner.settle()
        flights.settle()
    error = flights.error(number)
    assert error.outcome is Outcome.BACKEND_FAILED
    assert error.message.startswith("in ensemble 'e', in ensemble 'e', model 'b': ")
    assert inner.at_rest() and flights.at_rest()


# --- what is counted ----------------------------------------------------------------------------------------------


def test_statistics_and_the_answer_count_the_steps() -> None:
    flights = Flights(ensemble(DIAMOND))
    number = flights.call(3)
    flights.step()
    flights.clock.advance(0.5)
    flights.settle()
    answer = flights.answer(number)
    assert sorted(step.model for step in answer.steps) == ["a", "b", "c", "d"]
    assert answer.cost_us == sum(step.answer.cost_us for step in answer.steps)
    assert answer.times.split_s - answer.times.started_s >= 0.5
    message = flights.ensemble.statistics.message("e", "1")
    assert (message.inference_count, message.execution_count) == (3, 1)
    assert message.inference_stats.success.count == message.inference_stats.compute_infer.count == 1
    flights.call(timeout_s=0)
    assert flights.ensemble.statistics.failures[Outcome.DEADLINE_EXCEEDED] == 1


def test_the_expected_wait_is_that_of_the_slowest_way_through(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = Flights(ensemble(DIAMOND))
    waits: dict[str, float | None] = {"a": 1.0, "b": 10.0, "c": 2.0, "d": 3.0}
    for name, serving in flights.serving.items():
        waiting = SimpleNamespace(expected_wait_s=lambda band, name=name: waits[name])
        monkeypatch.setattr(serving, "batcher", waiting)
    assert flights.ensemble.expected_wait_s(0) == 11.0
    waits["d"] = 30.0
    assert flights.ensemble.expected_wait_s(0) == 33.0
    waits["b"] = None
    assert flights.ensemble.expected_wait_s(0) is None


# --- conservation -------------------------------------------------------------------------------------------------

scripts = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(1, 4), st.sampled_from([0.01, 0.5, 60.0]), st.integers(0, 2)),
        st.tuples(st.just("leave"), st.integers(0, 40)),
        st.tuples(st.just("fail"), st.sampled_from("abcd")),
        st.tuples(st.just("heal"), st.sampled_from("abcd")),
        st.tuples(st.just("advance"), st.sampled_from([0.001, 0.02, 1.0])),
        st.tuples(st.just("device"), st.integers(0, 3)),
        st.tuples(st.just("loop")),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(scripts, st.integers(0, 2), st.integers(1, 3), st.sampled_from([2, 6]))
def test_every_caller_gets_its_own_rows_exactly_once_under_any_order_of_events(
    script: list[tuple], max_inflight: int, cores: int, max_items: int
) -> None:
    flights = Flights(ensemble(DIAMOND, max_inflight=max_inflight), cores=cores, step_items=1, max_items=max_items)
    left: set[int] = set()
    for event in script:
        match event:
            case ("call", rows, timeout_s, band):
                only_left = (InferRequest(model_name="e", outputs=[RequestedOutput("left")]), CONTEXT)
                more = {"tenant": "ab"[rows % 2], "size_bytes": rows, "source": only_left if rows == 3 else None}
                flights.call(rows, timeout_s=timeout_s, band=band, **more)
            case ("leave", number) if number < len(flights.calls):
                if not flights.replies[number]:
                    left.add(number)
                flights.leave(number)
            case ("fail" | "heal", name):
                flights.sessions[name].fail = event[0] == "fail"
            case ("advance", seconds):
                flights.clock.advance(seconds)
            case ("device", which) if flights.workers.jobs:
                flights.workers.jobs.pop(which % len(flights.workers.jobs))()
            case ("loop",):
                flights.clock.run()
        assert flights.ensemble.running <= max_items
        if max_inflight:
            for name, batcher in flights.batchers.items():
                assert batcher.pending <= max_inflight, name
    for _ in range(30):
        flights.settle()
        flights.clock.advance(0.05)
    assert flights.at_rest()
    for number, call in enumerate(flights.calls):
        assert len(flights.replies[number]) == (0 if number in left else 1)
        assert call.finished
        for reply in flights.replies[number]:
            if isinstance(reply, Answer):
                asked = reply.outputs[:1] if call.rows == 3 else reply.outputs
                for rows, factor in zip(asked, (4, 8), strict=call.rows != 3):
                    assert rows.shape[0] == call.rows and (rows == factor * number).all()
            else:
                assert isinstance(reply, InferenceError) and not isinstance(reply, BackendFailed)
                if isinstance(reply, StepFailed):
                    assert reply.outcome is Outcome.BACKEND_FAILED  # never for a full queue


@pytest.mark.parametrize("decoupled", ["a", "b"])
def test_a_call_goes_on_when_a_step_gets_a_decoupled_version(decoupled: str) -> None:
    flights = chain()
    number = flights.call()
    flights.ensemble.bind(
        [
            ServingModel(model(name, decoupled=name == decoupled), pb.ModelConfig(), flights.batchers[name], (), 0.0)
            for name in "ab"
        ]
    )
    flights.settle()
    assert (flights.answer(number).outputs[0] == 4 * number).all() and flights.at_rest()
