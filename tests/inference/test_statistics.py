"""The statistics extension through unmodified clients, and the counters' own rules."""

import asyncio
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import MessageToDict

from oriel_inference.app import Unit
from oriel_inference.batching.call import BatchTimes
from oriel_inference.batching.statistics import MAX_BATCH_SIZES, MAX_RESPONSES, Ledger, Statistics
from oriel_wire.observe.telemetry import Histogram
from oriel_wire.v2.proto import v2_pb2

from ..waiting import until
from .bench import Bench, spec
from .streams import Fakes, streaming

METRICS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def both(unit: Unit, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(over HTTP, over gRPC), both as the clients give them."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{unit.http_port}") as client:
        (over_http,) = client.get_inference_statistics(model)["model_stats"]
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
        (over_grpc,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return over_http, over_grpc


def number(duration: dict[str, Any]) -> int:
    return int(duration.get("count", 0))


async def test_statistics_over_both_protocols_say_the_same(unit: Unit) -> None:
    def ask() -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
            for rows in (1, 3, 3):
                given = tritonclient.grpc.InferInput("x", [rows, 4], "FP32")
                given.set_data_from_numpy(np.ones((rows, 4), np.float32))
                client.infer("double", [given])
            with pytest.raises(tritonclient.grpc.InferenceServerException):
                client.infer("double", [given], headers={"x-oriel-timeout-ms": "0"})

    await asyncio.to_thread(ask)
    over_http, over_grpc = await asyncio.to_thread(both, unit, "double")
    for found in (over_http, over_grpc):
        assert (found["name"], found["version"]) == ("double", "1")
        assert (int(found["inference_count"]), int(found["execution_count"])) == (7, 3)
        assert int(found["last_inference"]) > 1_700_000_000_000
        counts = {name: number(each) for name, each in found["inference_stats"].items()}
        answered = dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 3)
        assert counts == {**answered, "fail": 1, "cache_hit": 0, "cache_miss": 0}
        sizes = {int(each["batch_size"]): number(each["compute_infer"]) for each in found["batch_stats"]}
        assert sizes == {1: 1, 3: 2}
        assert not found.get("memory_usage") and not found.get("response_stats")


async def test_responses_of_decoupled_models_are_told_apart(tmp_path: Path) -> None:
    fakes = Fakes()

    def ask(port: int, *numbers: int) -> None:
        answers: queue.Queue[Any] = queue.Queue()
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.start_stream(callback=lambda result, error: answers.put(error))
            for count in numbers:
                given = tritonclient.grpc.InferInput("n", [1], "INT32")
                given.set_data_from_numpy(np.array([count], np.int32))
                client.async_stream_infer("count", [given], enable_empty_final_response=True)
                for _ in range(count + 1):
                    answers.get(timeout=60)

    async with streaming(tmp_path, fakes) as unit:
        await asyncio.to_thread(ask, unit.grpc_port, 3, 1)
        fakes.session("fake-count").fail = True
        await asyncio.to_thread(ask, unit.grpc_port, 1)
        statistics = unit.catalog.get("count").batcher.statistics
        await until(lambda: sum(each.fail.count for each in statistics.responses) == 1)
        over_http, over_grpc = await asyncio.to_thread(both, unit, "count")
    for found in (over_http, over_grpc):
        stages = {
            key: {name: number(each) for name, each in response.items() if number(each)}
            for key, response in found["response_stats"].items()
        }
        assert stages == {
            "0": {"compute_infer": 3, "compute_output": 3, "success": 3},
            "1": {"compute_infer": 3, "compute_output": 1, "success": 1, "empty_response": 1, "fail": 1},
            "2": {"compute_infer": 1, "compute_output": 1, "success": 1},
            "3": {"compute_infer": 1, "empty_response": 1},
        }


async def test_response_that_nobody_waits_for_is_a_cancelled_one(tmp_path: Path) -> None:
    fakes = Fakes()
    async with streaming(tmp_path, fakes) as unit:
        gate = fakes.by_name["fake-count"].gate
        gate.close()

        def leave_after_one() -> None:
            answers: queue.Queue[Any] = queue.Queue()
            with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
                client.start_stream(callback=lambda result, error: answers.put(error))
                given = tritonclient.grpc.InferInput("n", [1], "INT32")
                given.set_data_from_numpy(np.array([5], np.int32))
                client.async_stream_infer("count", [given])
                gate.step()
                answers.get(timeout=60)
                client.stop_stream(cancel_requests=True)

        await asyncio.to_thread(leave_after_one)
        batcher = unit.catalog.get("count").batcher
        await until(lambda: batcher.statistics.fail.count == 1)
        gate.open()
        await until(lambda: not batcher.running)
        responses = batcher.statistics.responses
    assert [(each.success.count, each.cancel.count) for each in responses] == [(1, 0), (0, 1)]


# --- the counters by themselves -----------------------------------------------------------------------------------

TIMES = BatchTimes(started_s=1.0, assembled_s=1.5, computed_s=2.5, split_s=2.75, rows=4)


def test_a_request_is_charged_its_whole_batch() -> None:
    statistics = Statistics()
    statistics.executed(TIMES, 2)
    message = statistics.message("m", "1")
    assert MessageToDict(message.inference_stats.compute_infer) == {"count": "2", "ns": "2000000000"}
    (batch,) = message.batch_stats
    assert (batch.batch_size, batch.compute_output.ns) == (4, 250_000_000)


def test_compute_counts_who_was_answered() -> None:
    """A regression: a caller that left while its batch ran was counted in `compute_infer` but not in `success`."""
    bench = Bench(spec())
    first, second = bench.call(), bench.call()
    session = bench.sessions[0]

    def leaving(inputs: Any, outputs: Any, run: Any = session.run) -> Any:
        bench.leave(second)
        return run(inputs, outputs)

    session.run = leaving  # type: ignore[method-assign]
    bench.settle()
    assert bench.answer(first)
    statistics = bench.batcher.statistics
    assert (statistics.executions, statistics.stages.infer.count, statistics.success.count) == (1, 1, 1)
    assert (statistics.inferences, statistics.fail.count, statistics.sizes.total) == (2, 1, 2)


def test_mean_batch_of_what_nobody_waited_for_is_not_below_one() -> None:
    """A regression: a batch whose callers all left counted as 0 rows in 1 batch."""
    bench = Bench(spec())
    numbers = [bench.call(rows=2), bench.call(rows=3)]
    session = bench.sessions[0]

    def leaving(inputs: Any, outputs: Any, run: Any = session.run) -> Any:
        for number in numbers:
            bench.leave(number)
        return run(inputs, outputs)

    session.run = leaving  # type: ignore[method-assign]
    bench.settle()
    message = bench.batcher.statistics.message("m", "1")
    assert (message.inference_count, message.execution_count) == (5, 1)
    assert (message.inference_stats.success.count, message.inference_stats.fail.count) == (0, 2)


def test_the_buckets_of_the_histograms_are_the_published_ones() -> None:
    """Those who draw or alert on a bucket name it: one that moves breaks their queries without an error."""
    statistics = Statistics()

    def bounds(histogram: Histogram) -> list[str]:
        return [bound for bound, _ in histogram.buckets()]

    latency = "0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 30.0 60.0 +Inf"
    rows = "1.0 2.0 4.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 +Inf"
    assert bounds(statistics.tier("gold").latency) == latency.split()
    assert bounds(statistics.sizes) == rows.split()
    assert bounds(statistics.first_response) == ["100.0", "500.0", "2000.0", "5000.0", "+Inf"]
    (line,) = [each for each in METRICS.read_text().splitlines() if "nv_inference_first_response_histogram_ms" in each]
    assert "else 100, 500, 2000, 5000 |" in line


def test_sizes_and_responses_are_bounded() -> None:
    statistics = Statistics()
    for rows in range(1, MAX_BATCH_SIZES + 50):
        statistics.executed(BatchTimes(0.0, 0.0, 0.0, 0.0, rows), 1)
    assert len(statistics.batches) == MAX_BATCH_SIZES
    assert statistics.executions == statistics.sizes.count == MAX_BATCH_SIZES + 49
    assert statistics.response(MAX_RESPONSES - 1) is not None and statistics.response(MAX_RESPONSES) is None
    assert isinstance(statistics.message("m", "1"), v2_pb2.ModelStatistics)


def test_ledger_keeps_what_serves_and_forgets_the_oldest_that_does_not() -> None:
    serving: set[tuple[str, int]] = set()
    ledger = Ledger(lambda name, version: (name, version) in serving, max_versions=2)
    first = ledger.open("a", 1)
    serving.add(("a", 1))
    second = ledger.open("b", 1)
    third = ledger.open("c", 1)
    assert ledger.open("a", 1) is first, "it serves"
    assert ledger.open("c", 1) is third
    assert ledger.open("b", 1) is not second
