"""The calls of a language model from their tensors to their ends: deadlines, departures, deaths, slow readers, charges;
in virtual time.
"""

import json

import numpy as np
import pytest

from oriel_inference.batching.call import Answer
from oriel_inference.errors import (
    BackendFailed,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    ModelNotReady,
    QueueFull,
    ServerStopping,
)
from oriel_inference.language.scheduler import MAX_UNREAD
from oriel_wire.v2.messages import Array

from .language_bench import OUTPUTS, Asked, LanguageBench


def texts(**values: str | bytes) -> dict[str, object]:
    """Inputs of text."""
    return {
        name: np.array([value if isinstance(value, bytes) else value.encode()], object)
        for name, value in values.items()
    }


def flags(**values: bool) -> dict[str, object]:
    return {name: np.array([value]) for name, value in values.items()}


def first(asked: Asked) -> dict[str, Array]:
    """The outputs of the first response that are there, by name."""
    return {name: each for name, each in zip(OUTPUTS, asked.responses[0], strict=True) if each is not None}


# Tensors ------------------------------------------------------------------------------------------------------------


def test_a_stream_has_a_response_for_each_step_that_gave_text_and_a_last_one_with_the_reason() -> None:
    bench = LanguageBench()
    asked = bench.ask(inputs=texts(text_input="<|user|>h\u00e9<|answer|>") | flags(stream=True))
    bench.settle()
    assert [each[0][0].decode() for each in asked.responses] == ["h", "\u00e9", ""]
    assert [each.last for each in asked.responses] == [False, False, True]
    assert asked.ending["finish_reason"] == "stop" and asked.ending["completion_tokens"] == 4  # 3 bytes and the end
    assert asked.responses[0].parameters == {} and list(first(asked)) == ["text_output"]


def test_a_whole_answer_is_one_response_that_begins_with_its_prompt() -> None:
    bench = LanguageBench()
    prompt = texts(text_input="<|user|>hello<|answer|>")
    asked = [bench.ask(inputs=prompt), bench.ask(inputs=prompt | flags(exclude_input_in_output=True))]
    bench.settle()
    assert [each.text for each in asked] == ["<|user|>hello<|answer|>hello", "hello"]
    assert [len(each.responses) for each in asked] == [1, 1]
    assert asked[0].ending == {
        **{"finish_reason": "stop", "prompt_tokens": 7, "completion_tokens": 6, "cached_tokens": 0},
        **{"paused": 0, "paused_ms": 0.0},
    }


def test_further_outputs_come_by_their_flags_or_names() -> None:
    bench = LanguageBench()
    wanted = {f"return_{each}": True for each in OUTPUTS[2:]}
    inputs = {"input_ids": np.array([259, *b"hi", 261])} | flags(stream=True, **wanted)
    asked = bench.ask(inputs=inputs, logprobs=1)
    named = bench.ask(inputs=texts(text_input="<|user|>hi<|answer|>"), outputs=["text_output", "output_ids"])
    bench.settle()
    found = first(asked)
    assert json.loads(found.pop("logprobs")[0]) == [{"id": 104, "logprob": -0.5, "bytes": [104]}]
    assert {name: each.tolist() for name, each in found.items()} == {
        **{"text_output": [b"h"], "output_ids": [104], "finish_reason": [b"None"]},
        **{"num_input_tokens": [4], "num_output_tokens": [1]},
    }
    assert asked.responses[-1][2].tolist() == [b"stop"]
    assert {name: each.tolist() for name, each in first(named).items()} == {
        **{"text_output": [b"<|user|>hi<|answer|>hi"], "output_ids": [104, 105, 257]}
    }


def test_stop_strings_end_a_call_in_the_engine_and_are_not_shown() -> None:
    bench = LanguageBench()
    said = texts(
        text_input="<|user|>one, two, three<|answer|>", sampling_parameters='{"stop": [", t"], "max_tokens": 99}'
    )
    asked = bench.ask(inputs=said | flags(stream=True))
    bench.settle()
    bench.run(1)
    assert asked.text == "one" and asked.ending["finish_reason"] == "stop" and asked.ending["completion_tokens"] == 6
    assert bench.decoder.sizes == [1] * 7, "six tokens, and the step that had begun when the last one was read"


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (texts(), "exactly one of"),
        (texts(text_input="a") | {"input_ids": np.array([1])}, "exactly one of"),
        ({"input_ids": np.array([], np.int64)}, "0 tokens"),
        ({"input_ids": np.arange(8192) % 9}, "8192 tokens"),
        ({"input_ids": np.array([-1])}, "vocabulary"),
        ({"input_ids": np.array([262])}, "vocabulary"),
        (texts(text_input=b"\xff"), "UTF-8"),
        (texts(text_input="a" * (32 * 8192 + 1)), "262145 bytes"),
        (texts(text_input="a" * 9000), "9000 tokens"),
        (texts(text_input=""), "empty"),
        (texts(text_input="a", sampling_parameters='{"max_tokens": 0}'), "max_tokens"),
        (texts(text_input="a") | flags(stream=True, exclude_input_in_output=False), "is not allowed"),
    ],
)
def test_inputs_that_cannot_be_answered_are_refused_with_the_reason(inputs: dict[str, object], why: str) -> None:
    bench = LanguageBench()
    refused = bench.ask(inputs=inputs)
    bench.settle()
    assert isinstance(refused.result, InvalidRequest) and why in refused.result.message
    again = bench.ask()
    bench.settle()
    assert isinstance(again.result, Answer) and not bench.served._calls


# Ends ---------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_told_so_also_under_a_short_deadline() -> None:
    bench = LanguageBench()
    bench.warm()
    asked = bench.ask(inputs=texts(text_input="x" * 60_000) | flags(stream=True), timeout_s=0.5)
    bench.settle()
    assert isinstance(asked.result, InvalidRequest) and "the prompt has 60000 tokens" in asked.result.message


def test_a_tenants_queue_does_not_refuse_the_calls_of_others() -> None:
    bench = LanguageBench()
    bench.warm()
    for each in range(30):
        bench.ask(f"many {each}", tenant="many", max_tokens=1000, ignore_eos=True, timeout_s=999)
    one = [bench.ask(f"one {each}", tenant="one", timeout_s=2.0) for each in range(3)]
    bench.run(2.1)
    assert all(each.times and each.times[0] < each.call.deadline for each in one)
    assert not {tenant for _, tenant in bench.served.order._waiting_us} - {"many"}
    late = bench.ask("many more", tenant="many", timeout_s=2.0)
    assert isinstance(late.result, QueueFull), "its own queue is longer than that"


@pytest.mark.parametrize(("band", "sampling"), [(1, {}), (0, {"presence_penalty": 0.5})])
def test_nobody_takes_turns_with_what_does_not_pause_for_it(band: int, sampling: dict[str, object]) -> None:
    bench = LanguageBench()
    bench.warm()
    for each in range(4):
        bench.ask(f"many {each}", tenant="many", max_tokens=2000, ignore_eos=True, timeout_s=999, **sampling)
    bench.run(0.5)
    refused = bench.ask("one", tenant="one", band=band, timeout_s=1.0).result
    assert isinstance(refused, QueueFull) and refused.retry_s > 20.0, "all slots are taken for 23 s"


def test_a_call_that_expires_in_the_queue_is_refused_at_once() -> None:
    bench = LanguageBench(max_running=1)
    bench.ask(max_tokens=200)
    bench.run(0.1)
    late = bench.ask(timeout_s=0.2)
    bench.run(0.1999)
    assert not late.replies
    bench.run(0.0002)
    assert isinstance(late.result, DeadlineExceeded) and late.result.stage == "queue"


def test_an_expired_stream_ends_at_its_token_and_says_so() -> None:
    bench = LanguageBench(max_running=1)
    running = bench.ask(stream_s=0.5, timeout_s=0.1, max_tokens=5000)
    whole = bench.ask(stream=False, timeout_s=1.0, max_tokens=5000)
    bench.run(0.5001)
    assert isinstance(running.result, Answer) and running.ids == running.undisturbed[: len(running.ids)]
    assert running.ending["finish_reason"] == "deadline" and running.ending["completion_tokens"] == len(running.ids)
    before = len(bench.decoder.sizes)
    bench.run(0.5)
    assert isinstance(whole.result, DeadlineExceeded) and whole.result.stage == "compute" and not whole.responses
    bench.run(1)
    assert 50 < len(bench.decoder.sizes) - before <= 56, "a step that had begun, and no more"


def test_a_paused_stream_that_expires_ends_with_what_it_has() -> None:
    bench = LanguageBench(max_running=1)
    bronze = bench.ask(band=1, stream_s=1.0, max_tokens=500)
    bench.run(0.5)
    bench.ask(max_tokens=500)
    bench.run(0.51)
    assert bronze.ending["finish_reason"] == "deadline" and bronze.ending["paused"] == 1
    assert bronze.ending["paused_ms"] == pytest.approx(500, abs=20)


def test_a_first_token_that_comes_after_the_pause_counts_for_the_deadline() -> None:
    bench = LanguageBench(max_running=1)
    bronze = bench.ask(band=1, timeout_s=0.5)
    bench.run(0.005)  # its first step
    bench.ask(max_tokens=100)
    bench.run(0.6)
    assert len(bronze.ids) == 1 and bench.served.states()[1] == [0, 0, 1]
    bench.settle()
    assert bronze.ids == bronze.undisturbed and bronze.ending["paused"] == 1


def test_callers_that_leave_free_their_places_at_once() -> None:
    bench = LanguageBench(max_running=1)
    gone, waiting, last = [bench.ask(f"call {each}", max_tokens=5000, timeout_s=900) for each in range(3)]
    bench.run(0.1)
    bench.leave(waiting)
    bench.leave(gone)
    assert bench.served.pending == 1 and not bench.served.caller_left(gone.call)
    bench.run(0.025)
    assert last.ids and not (gone.replies or waiting.replies)
    bench.leave(last)
    bench.run(0.1)
    steps = len(bench.decoder.sizes)
    bench.run(1)
    assert len(bench.decoder.sizes) == steps and bench.served.running == bench.served.pending == 0


def test_a_death_fails_what_runs_at_once_and_the_others_go_on_with_the_next_process() -> None:
    bench = LanguageBench(max_running=1)
    bronze = bench.ask("bronze", band=1)
    bench.run(0.2)
    gold = bench.ask("gold", max_tokens=400)
    waiting = bench.ask("waiting", timeout_s=90)
    bench.run(0.2)
    assert bronze in [
        each for each in bench.asked if each.call in [paused.call for paused in bench.served.order.paused]
    ]
    bench.decoder.die()
    assert isinstance(gold.result, BackendFailed) and "signal 9" in gold.result.message
    bench.run(1.0)
    assert not (bronze.replies or waiting.replies)
    bench.decoder.retry_s = 7.0
    refused = bench.ask("refused")
    assert isinstance(refused.result, ModelNotReady) and refused.result.retry_s == 7.0
    bench.decoder.restart()
    bench.settle()
    assert bronze.ids == bronze.undisturbed and waiting.ids == waiting.undisturbed
    assert bronze.ending["paused_ms"] > 1000
    host = bench.machine.devices.host
    assert host.read()[0] == host.read()[0], "no execution is open"


def test_a_model_that_is_unloaded_fails_what_waits_and_then_what_runs() -> None:
    bench = LanguageBench(max_running=1)
    running, waiting = bench.ask("running"), bench.ask("waiting")
    bench.run(0.1)
    bench.served.close()
    late = bench.ask("late")
    assert isinstance(waiting.result, ServerStopping) and isinstance(late.result, ServerStopping)
    bench.settle()
    assert running.ids == running.undisturbed
    cut = LanguageBench()
    asked = cut.ask()
    cut.run(0.1)
    cut.served.close()
    cut.decoder.die()
    assert isinstance(asked.result, ServerStopping)


def test_a_full_queue_refuses_the_less_urgent_and_never_what_was_paused() -> None:
    bench = LanguageBench(max_running=1, max_items=2)
    bronze = bench.ask("bronze", band=1, max_tokens=100)
    bench.run(0.1)
    gold = [bench.ask(f"gold {each}") for each in range(2)]
    bench.run(0.1)
    more = [bench.ask(f"more {each}", band=1) for each in range(3)]
    refused = [each for each in more if each.replies]
    assert refused and all(isinstance(each.result, QueueFull) for each in refused)
    bench.settle()
    assert all(each.ids == each.undisturbed for each in (bronze, *gold))


# Readers and charges ------------------------------------------------------------------------------------------------


def test_a_slow_reader_delays_nobody_and_gets_the_rest_together() -> None:
    bench = LanguageBench(max_running=2)
    slow, quick = bench.ask("slow", reads=False, max_tokens=100), bench.ask("quick", max_tokens=100)
    bench.run(0.5)
    assert len(slow.responses) == MAX_UNREAD and len(quick.responses) > 40
    slow.unread.pop(0)()
    assert len(slow.responses) == MAX_UNREAD + 1 and len(slow.ids) == len(quick.ids)
    bench.settle()
    assert slow.ids == slow.undisturbed and len(slow.responses) == MAX_UNREAD + 2
    assert slow.times[-1] == pytest.approx(quick.times[-1], abs=0.02)


def test_tokens_and_device_time_are_charged_to_those_they_were_made_for() -> None:
    bench = LanguageBench()
    rows = {}
    for tenant, stream in (("streams", True), ("whole", False), ("late", False), ("left", True)):
        asked = bench.ask("a prompt", tenant=tenant, stream=stream, timeout_s=0.3 if tenant == "late" else 60)
        rows[tenant] = asked.call.usage
        if tenant == "left":
            bench.run(0.1)
            bench.leave(asked)
    bench.settle()
    tokens = {tenant: (row.tokens_in, row.tokens_out) for tenant, row in rows.items()}
    assert tokens["streams"] == tokens["whole"] == (8, 40) and tokens["late"] == (0, 0)
    assert tokens["left"] == (8, len(bench.asked[-1].ids))
    assert rows["streams"].device_ns > 0 and rows["whole"].device_ns > 0 and not rows["late"].device_ns
    book = bench.machine.devices.book
    assert bench.machine.devices.host.read()[1] == book.device_ns
    assert {row.key.why for row in book.rows() if row.device_ns} == {"", "failed", "left"}
    counts = bench.statistics.language
    assert counts["prompt"] == 32 and counts["generated"] >= 80 + len(bench.asked[-1].ids)


def test_what_is_known_of_its_calls_is_shown_by_band() -> None:
    bench = LanguageBench(max_running=2)
    bench.ask(band=1, max_tokens=99)
    bench.ask(band=1, max_tokens=99)
    bench.run(0.1)
    for _ in range(3):
        bench.ask()
    bench.run(0.1)
    assert bench.served.states() == {0: [2, 1, 0], 1: [0, 0, 2]}  # those that run, wait and are paused
    assert [each[:2] for each in bench.served.depths()] == [(0, 1), (1, 2)] and bench.statistics.language["pauses"] == 2
    bench.settle()
    assert bench.statistics.first_response.count == 5
    result = bench.asked[0].result
    assert not isinstance(result, InferenceError) and result.decoding.pauses and result.decoding.first_token_s < 0.05
