"""One caller's bad values: what they cost others, counted in executions. Virtual time, but for the last tests."""

import json
import logging
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from oriel_inference.app import Unit
from oriel_inference.batching.failed_callers import LATELY_S, LOG_S, MAX_CALLERS, FailedCallers
from oriel_inference.errors import DeadlineExceeded, InvalidRequest
from oriel_wire.v2.proto import v2_pb2

from .bench import Bench, spec

LOOKUP = "/v2/models/lookup/infer"


def full_batch(bench: Bench, bad: set[int], callers: str = "") -> list[int]:
    """As many calls as a batch holds; those at the positions `bad` fail. callers: one letter each."""
    first = len(bench.calls)
    bench.bad.update(first + position for position in bad)
    return [bench.call(caller=callers[n] if callers else "") for n in range(8)]


@pytest.mark.parametrize(("bad", "most"), [(0, 7), (3, 7), (7, 5)])
def test_a_bad_call_among_eight_is_found_in_halves(bad: int, most: int) -> None:
    """A regression: one call at a time took nine executions for 8 calls, and 65 for 64."""
    bench = Bench(spec())
    numbers = full_batch(bench, {bad})
    bench.settle()
    assert len(bench.runs) <= most
    for position, number in enumerate(numbers):
        if position == bad:
            assert bench.error(number).message == f"the model refuses [{number}]"
        else:
            assert (bench.answer(number).outputs[0] == 2 * number).all()


def test_a_batch_of_bad_calls_only_tells_each_its_own_reason() -> None:
    bench = Bench(spec())
    numbers = full_batch(bench, set(range(8)))
    bench.settle()
    assert len(bench.runs) == 15
    assert [bench.error(number).message for number in numbers] == [f"the model refuses [{n}]" for n in numbers]


def test_a_second_half_that_fails_for_no_single_call_is_answered() -> None:
    """A batch may fail only because of its size: then both halves succeed, and no call is refused."""
    bench = Bench(spec())
    session = bench.sessions[0]
    run = session.run

    def small_only(inputs, outputs):  # type: ignore[no-untyped-def]
        if len(inputs["x"]) > 2:
            session.runs.append([])
            raise InvalidRequest("too large")
        return run(inputs, outputs)

    session.run = small_only
    numbers = full_batch(bench, set())
    bench.settle()
    assert all((bench.answer(number).outputs[0] == 2 * number).all() for number in numbers)


def test_a_call_that_expires_while_the_parts_run_is_not_executed_again() -> None:
    bench = Bench(spec())
    bench.bad.add(0)
    bench.call()
    late = bench.call(timeout_s=1.0)
    bench.clock.run()
    run, clock = bench.sessions[0].run, bench.clock

    def slow(inputs, outputs):  # type: ignore[no-untyped-def]
        clock.advance(2.0)
        return run(inputs, outputs)

    bench.sessions[0].run = slow
    bench.settle()
    assert isinstance(bench.error(late), DeadlineExceeded)
    assert bench.runs == [[late, 0], [0]]


@pytest.mark.parametrize("every", [1, 4])
def test_a_caller_whose_calls_fail_costs_the_others_one_execution_at_most_each(every: int) -> None:
    """PROMISES R40: others keep at least 90 % of their throughput, and no neighbour fails.

    A batch of seven good calls is one execution; it was eight, and one for every good call, while one caller failed.
    """
    bench = Bench(spec())
    rounds = 200
    good: list[int] = []
    for number in range(rounds):
        if number % every == 0:
            bench.bad.add(len(bench.calls))
            bench.call(caller="bad")
        good += [bench.call(caller=f"good {n}") for n in range(7)]
        bench.settle()
        bench.clock.advance(0.125)
    assert all(bench.answer(each) for each in good)
    shared = [run for run in bench.runs if set(run) - bench.bad]
    assert len(shared) <= rounds / 0.9
    assert sum(map(len, shared)) <= 7 * rounds / 0.9
    assert len(bench.runs) - len(shared) <= len(bench.bad) + 1


def test_callers_that_failed_lately_share_batches_with_one_another() -> None:
    """If the values of all are bad now and then, nobody is executed one by one."""
    bench = Bench(spec())
    full_batch(bench, set(range(8)), "abcdefgh")
    bench.settle()
    before = len(bench.runs)
    numbers = full_batch(bench, set(), "abcdefgh")
    bench.settle()
    assert bench.runs[before:] == [numbers]


def test_who_failed_is_executed_in_its_turn_whoever_else_comes() -> None:
    bench = Bench(spec())
    bench.bad.add(bench.call(caller="bad"))
    bench.settle()
    before = len(bench.runs)
    callers = ["bad" if place == 4 else "good" for place in range(17)]
    numbers = [bench.call(caller=caller, timeout_s=60.0 + place) for place, caller in enumerate(callers)]
    bench.settle()
    good = [*numbers[:4], *numbers[5:]]
    assert bench.runs[before:] == [good[:8], [numbers[4]], good[8:]]
    assert bench.answer(numbers[4])


def test_a_model_that_keeps_the_order_keeps_it() -> None:
    bench = Bench(spec(preserve_ordering=True))
    bench.bad.add(bench.call(caller="bad"))
    bench.settle()
    before = len(bench.runs)
    numbers = [bench.call(caller=caller) for caller in ("good", "bad", "good")]
    bench.settle()
    assert bench.runs[before:] == [[each] for each in numbers]
    assert bench.order[-3:] == numbers


def test_a_caller_is_forgiven_when_it_has_not_failed_for_a_while() -> None:
    bench = Bench(spec())
    bench.bad.add(bench.call(caller="bad"))
    bench.settle()
    bench.clock.advance(LATELY_S)
    numbers = [bench.call(caller="bad"), bench.call(caller="good")]
    bench.settle()
    assert bench.runs[1:] == [numbers]
    assert not bench.batcher._failed


def test_a_failure_that_is_not_the_models_makes_nobody_suspicious() -> None:
    bench = Bench(spec())
    bench.call(caller="late", timeout_s=1.0)
    bench.clock.run()
    bench.clock.advance(2.0)
    bench.settle()
    assert not bench.batcher._failed


def test_callers_are_bounded_and_the_log_has_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    bench = Bench(spec())
    for number in range(MAX_CALLERS + 10):
        bench.bad.add(bench.call(caller=f"caller {number}"))
        bench.settle()
    failed = bench.batcher._failed
    assert isinstance(failed, FailedCallers) and len(failed._until) == MAX_CALLERS
    assert not failed.lately(bench.calls[0]) and failed.lately(bench.calls[-1])
    assert len(caplog.records) == 1
    bench.clock.advance(LOG_S)
    bench.bad.add(bench.call(caller="caller 0"))
    bench.settle()
    (_, line) = caplog.messages
    assert line.startswith(
        f"model double version 1: executing it failed for {MAX_CALLERS + 10} request(s), 1 caller(s)"
    )


# --- through the servers -------------------------------------------------------------------------------------------


def asked(index: int) -> bytes:
    return json.dumps({"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [index]}]}).encode()


def grpc_message(index: int) -> bytes:
    message = v2_pb2.ModelInferRequest(model_name="lookup")
    message.inputs.add(name="index", datatype="INT64", shape=[1, 1])
    message.raw_input_contents.append(np.array([index], np.int64).tobytes())
    return message.SerializeToString()


async def test_a_caller_is_a_tenant_or_else_a_connection(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    monkeypatch.setattr(FailedCallers, "record_failure", lambda self, call, error: failures.append(call.caller))
    base = f"http://127.0.0.1:{unit.http_port}"
    async with (
        httpx.AsyncClient(base_url=base, trust_env=False) as one,
        httpx.AsyncClient(base_url=base, trust_env=False) as other,
        grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for client in (one, one, other):
            assert (await client.post(LOOKUP, content=asked(9))).status_code == 400
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError):
                await infer(grpc_message(9))
        headers = {"x-oriel-tenant": "acme"}
        for client in (one, other):
            assert (await client.post(LOOKUP, content=asked(9), headers=headers)).status_code == 400
    assert failures[0] == failures[1] != failures[2]
    assert failures[3] == failures[4] not in failures[:3] and all(failures)
    assert failures[5:] == ["acme", "acme"]


async def test_the_runtime_prints_nothing_and_the_log_one_line(
    unit: Unit, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, repository: Path
) -> None:
    """A regression: ONNX Runtime printed a line on standard error for every failed run."""
    capfd.readouterr()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unit.http_port}", trust_env=False) as client:
        for _ in range(20):
            refused = await client.post(LOOKUP, content=asked(9))
            assert refused.status_code == 400 and "out of data bounds" in refused.json()["error"]
    assert capfd.readouterr().err == ""
    lines = [line for line in caplog.messages if "executing it failed" in line]
    assert len(lines) == 1 and "out of data bounds" in lines[0] and str(repository) not in lines[0]
