"""The response cache: which requests are equal, what is kept and for how long, and what clients and operators see."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from oriel_inference.backends import Outputs
from oriel_inference.batching import response_cache
from oriel_inference.batching.call import Call
from oriel_inference.batching.response_cache import MAX_REQUEST_BYTES, ModelCache, _kept
from oriel_inference.errors import DeadlineExceeded
from oriel_policies.upstreams.answer_cache import AnswerCache
from oriel_wire.context import CallContext
from oriel_wire.v2.messages import Array, InferRequest, RequestedOutput

from . import models
from .bench import Bench, context, spec
from .conftest import settings_of
from .thread_unit import unit_in_thread

CACHED = models.DOUBLE + "response_cache { enable: true }"


def bench(max_bytes: int = 1 << 20, **options: Any) -> Bench:
    return Bench(replace(spec(), cached=True), answers=AnswerCache(max_bytes=max_bytes, owner_share=1.0), **options)


def ask(
    at: Bench, array: Any, *, timeout_s: float = 60.0, size_bytes: int = 0, source: InferRequest | None = None
) -> int:
    """Submit a call, run what is due, and return its number."""
    number, now = len(at.calls), at.clock.now()
    context_: CallContext = context("acme")
    at.submit(
        Call(
            inputs={"x": np.array(array)},
            rows=len(array),
            signature=None,
            arrived_s=now,
            deadline=now + timeout_s,
            reply=lambda result: at.replied(number, result),
            size_bytes=size_bytes,
            source=None if source is None else (source, context_),
        )
    )
    at.settle()
    return number


def counts(at: Bench) -> tuple[int, int, int, int]:
    """Return hits, misses, answers and executions."""
    found = at.batcher.statistics
    return found.cache_hit.count, found.cache_miss.count, found.success.count, found.executions


def test_an_equal_request_is_answered_without_an_execution() -> None:
    at = bench()
    first, second = ask(at, [[1, 2]]), ask(at, [[1, 2]])
    np.testing.assert_array_equal(at.answer(second).outputs[0], at.answer(first).outputs[0])
    assert counts(at) == (1, 1, 2, 1) and at.batcher.statistics.inferences == 1
    assert (at.answer(second).cost_us, at.answer(second).device_ns, at.answer(second).times.steps) == (0, 0, 0)


@pytest.mark.parametrize(
    "other",
    [[[1, 3]], [[1], [2]], np.array([[1, 2]], np.int32), np.array([[1 + (2 << 32)]])],
    ids=["value", "shape", "datatype", "bytes"],
)
def test_requests_that_differ_are_executed(other: Any) -> None:
    at = bench()
    ask(at, np.array([[1, 2]], np.int64))
    ask(at, other)
    assert counts(at) == (0, 2, 2, 2)


@pytest.mark.parametrize(("one", "two"), [(["ab", "c"], ["a", "bc"]), ([b"1"], ["1"])])
def test_texts_are_equal_only_one_by_one(one: list[str], two: list[str]) -> None:
    at = bench()
    keys = {_cache_of(at)._digest(_call({"x": np.array(each, object)})) for each in (one, two, list(one))}
    assert len(keys) == 2


def test_inputs_of_other_names_are_another_request() -> None:
    """Optional inputs of a model may have equal values."""
    digest = _cache_of(bench())._digest
    assert digest(_call({"x": np.zeros(1)})) != digest(_call({"z": np.zeros(1)}))


def test_a_caller_that_leaves_before_a_kept_answer_gets_none() -> None:
    at = bench()
    ask(at, [[0, 0]])
    left = at.submit(_call({"x": np.zeros((1, 2), np.int64)}))
    at.leave(left)
    at.settle()
    assert not at.replies[left] and counts(at) == (1, 1, 1, 1)


def _cache_of(at: Bench) -> ModelCache:
    assert at.batcher._answers is not None
    return at.batcher._answers


def _call(inputs: Mapping[str, Array]) -> Call:
    return Call(inputs=inputs, rows=1, signature=None, arrived_s=0.0, deadline=1e9, reply=lambda result: None)


def test_models_that_see_the_request_get_only_equal_requests_together() -> None:
    """A Python model may answer by a parameter, and leaves outputs out that nobody asked for."""
    at, plain = bench(), InferRequest(model_name="double", id="1")
    for equal in (
        InferRequest(model_name="double", id="2", parameters={"priority": 2, "timeout": 9}),
        InferRequest(model_name="double", outputs=[RequestedOutput("y")]),
    ):
        ask(at, [[1, 2]], source=plain)
        ask(at, [[1, 2]], source=equal)
    assert counts(at)[1] == 1
    ask(at, [[1, 2]], source=InferRequest(model_name="double", parameters={"user": "b"}))
    ask(at, [[1, 2]], source=InferRequest(model_name="double", outputs=[]))
    assert counts(at)[1] == 3


def test_failed_answers_are_not_kept() -> None:
    at = bench()
    at.bad.add(1)
    at.error(ask(at, [[1, 2]]))
    at.bad.clear()
    at.answer(ask(at, [[1, 2]]))
    assert counts(at)[:2] == (0, 2)


def test_a_late_request_is_refused_though_its_answer_is_there() -> None:
    at = bench()
    ask(at, [[1, 2]])
    assert isinstance(at.error(ask(at, [[1, 2]], timeout_s=0.0)), DeadlineExceeded)


def test_the_bound_holds_and_the_oldest_answers_go_first() -> None:
    at = bench(max_bytes=10_000)
    cache = _cache_of(at)._cache
    for number in range(20):
        ask(at, [[number, 0]])
        assert cache.size_bytes <= 10_000
    assert len(cache) == 4 and cache.evicted == 16
    ask(at, [[19, 0]])
    ask(at, [[0, 0]])
    assert counts(at)[:2] == (1, 21)


def test_answers_are_forgotten_with_their_load() -> None:
    at = bench()
    cache = _cache_of(at)._cache
    other = ModelCache(cache, at.batcher.spec, at.batcher._answers._machine, at.batcher.statistics)  # type: ignore[union-attr]
    ask(at, [[1, 2]])
    assert not other.takes(_call({"x": np.array([[1, 2]])})), "the answers of another load"
    running = at.call()
    at.clock.run()
    at.batcher.close()
    at.settle()
    assert at.answer(running) and len(cache) == 0, "what was running is not kept either"


def test_a_kept_answer_holds_no_more_memory_than_it_counts() -> None:
    """A row of a batch is a view that would keep the whole batch."""
    batch = np.zeros((64, 1024))
    kept, size = _kept([batch[:1]]) or ([], 0)
    assert kept[0].base is None and 8192 < size < 16_384
    outputs, size = _kept(Outputs([None, np.array([b"x" * 5000], object)], {"a": "b"})) or (Outputs(), 0)
    assert isinstance(outputs, Outputs) and outputs.parameters == {"a": "b"} and size > 5000
    assert (_kept(Outputs([None], {str(number): number for number in range(100)})) or ([], 0))[1] > 20_000
    assert (_kept([np.array(["\U0001f600" * 5000], object)]) or ([], 0))[1] > 20_000, "4 bytes for each letter"
    assert _kept([np.zeros(response_cache.MAX_ANSWER_BYTES, np.uint8)]) is None
    assert _kept([np.array([b""] * (response_cache.MAX_TEXTS + 1), object)]) is None


def test_large_requests_are_executed_within_their_deadline() -> None:
    at = bench()
    for _ in range(2):
        ask(at, [[1, 2]], size_bytes=MAX_REQUEST_BYTES + 1)
    assert counts(at) == (0, 0, 2, 2)


# Whole paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
async def test_clients_get_the_same_answer_and_see_the_hit(kind: ModuleType, tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), CACHED)
    models.put(tmp_path, "twice", None, ENSEMBLE)
    x = np.array([[1, 2, 3, 4]], np.float32)

    def use() -> None:
        with unit_in_thread(replace(settings_of(tmp_path), cache_bytes=1 << 20)) as unit:
            port = unit.http_port if kind is tritonclient.http else unit.grpc_port
            client = kind.InferenceServerClient(f"127.0.0.1:{port}")
            given = kind.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(x)
            for number in range(3):
                answer = client.infer("double", [given], request_id=f"r{number}")
                np.testing.assert_array_equal(answer.as_numpy("y"), x + x)
            np.testing.assert_array_equal(client.infer("twice", [given]).as_numpy("z"), 4 * x)
            options = {} if kind is tritonclient.http else {"as_json": True}
            (found,) = client.get_inference_statistics("double", **options)["model_stats"]
            assert (int(found["inference_count"]), int(found["execution_count"])) == (2, 2)
            stats = found["inference_stats"]
            assert [int(stats[each]["count"]) for each in ("success", "cache_hit", "cache_miss")] == [5, 3, 2]
            assert int(stats["cache_hit"]["ns"]) > 0 and int(stats["cache_miss"]["ns"]) > 0
            metrics = httpx.get(f"http://127.0.0.1:{unit.metrics_port}/metrics").text
            assert 'nv_cache_num_hits_per_model{model="double",version="1"} 3' in metrics
            assert 'nv_cache_num_misses_per_model{model="double",version="1"} 2' in metrics
            assert "nv_cache_num_entries 2" in metrics
            client.close()

    await asyncio.to_thread(use)


ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "z" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling {
  step { model_name: "double" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "m" } }
  step { model_name: "double" model_version: -1 input_map { key: "x" value: "m" } output_map { key: "y" value: "z" } }
}
"""
