"""Models that are loaded by the first call for them, over HTTP and gRPC, and that make room for one another."""

import asyncio
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from fake_backend import FakeBackend
from tritonclient.utils import InferenceServerException

from oriel_inference import assembly
from oriel_inference.errors import Outcome
from oriel_inference.model import Gpu, TensorInfo

from ..waiting import until
from . import control_server, python_calls
from .demand_server import BUDGET, CONFIG, DEMAND, MODEL_BYTES, PINNED, ROW, Demanded, demanded, put, put_ensemble

ON_DEMAND = ("UNAVAILABLE", "available on demand: it is loaded by the first call for it")
X = np.array([[1, 2, 3, 4]], dtype=np.float32)


def grpc_input() -> list[Any]:
    tensor = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(X)
    return [tensor]


async def grpc_infer(served: Demanded, name: str, **more: Any) -> np.ndarray[Any, Any]:
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{served.unit.grpc_port}") as client:
        return (await client.infer(name, grpc_input(), **more)).as_numpy("y")


def http_infer(served: Demanded, name: str) -> np.ndarray[Any, Any]:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.unit.http_port}") as client:
        tensor = tritonclient.http.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(X)
        return client.infer(name, [tensor]).as_numpy("y")


def still_open(served: Demanded) -> int:
    return sum(not each.closed for each in served.fake.sessions)


async def test_two_of_three_models_fit_and_all_calls_in_turn_are_answered(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path, name)
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:
        for name in "abc":
            assert await served.state(name) == ON_DEMAND
        assert (await served.client.get("/v2/health/ready")).status_code == 200
        for _ in range(3):
            for name in "abc":
                assert (await asyncio.to_thread(http_infer, served, name)).tolist() == (2 * X).tolist()
                assert (await grpc_infer(served, name)).tolist() == (2 * X).tolist()
                assert (await served.state(name))[0] == "READY"
        assert served.fake.most_open == 2
        text = await served.metrics()
        assert f'oriel_model_memory_budget_bytes{{device="host"}} {BUDGET}' in text
        assert f'oriel_model_memory_used_bytes{{device="host"}} {2 * MODEL_BYTES}' in text
        evictions = [
            int(line.split()[1]) for line in text.splitlines() if line.startswith("oriel_model_evictions_total{")
        ]
        assert sum(evictions) == len(served.fake.sessions) - 2 > 0
        assert not any(line.startswith("oriel_model_unavailable{") for line in text.splitlines())


async def test_nothing_is_lost_when_calls_and_evictions_meet(tmp_path: Path) -> None:
    for name in "abcd":
        put(tmp_path, name)
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:

        async def calls(number: int) -> None:
            for step in range(12):
                name = "abcd"[(number * 5 + step * (1 + number % 3)) % 4]
                while (answer := await served.infer(name)).status_code == 503:
                    assert answer.json()["reason"] == "model_memory_full", answer.text
                assert answer.status_code == 200, answer.text
                assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]

        await asyncio.gather(*(calls(number) for number in range(8)))
        assert served.fake.most_open <= 2 and served.waiting == {}

        async def closed() -> bool:
            return sum(not each.closed for each in served.fake.sessions) <= 2

        await until(closed)


async def test_many_callers_wait_for_one_load_and_those_that_leave_free_their_places(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path) as served:
        served.fake.loads.close()
        callers = [asyncio.create_task(served.infer("a")) for _ in range(12)]
        callers += [asyncio.create_task(grpc_infer(served, "a")) for _ in range(4)]
        await until(lambda: served.waiting == {"a": 16})
        assert 'oriel_model_load_queue_depth{model="a"} 16' in await served.metrics()

        async def loading() -> bool:
            return (await served.state("a"))[0] == "LOADING"

        await until(loading)
        for caller in callers[:3] + callers[-1:]:
            caller.cancel()
        await until(lambda: served.waiting == {"a": 12})
        served.fake.loads.open()
        done: list[Any] = await asyncio.gather(*callers, return_exceptions=True)
        assert [each.status_code for each in done[3:12]] == [200] * 9
        assert all(each.tolist() == (2 * X).tolist() for each in done[12:15])
        assert len(served.fake.sessions) == 1
        assert served.unit.surface.meter.refused["a", "", Outcome.CALLER_LEFT] == 4


async def test_a_call_whose_deadline_passes_during_the_load_is_answered_then(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path) as served:
        served.fake.loads.close()
        answer = await served.infer("a", {"x-request-timeout-ms": "50"})
        assert answer.status_code == 504 and answer.json()["reason"] == "deadline_exceeded"
        assert "loaded" in answer.json()["error"]
        with pytest.raises(InferenceServerException, match="waited for the model to be loaded"):
            await grpc_infer(served, "a", client_timeout=None, headers={"x-request-timeout-ms": "50"})
        served.fake.loads.open()
        assert (await served.infer("a")).status_code == 200
        assert len(served.fake.sessions) == 1


async def test_a_load_that_fails_answers_all_with_its_reason_until_the_files_change(tmp_path: Path) -> None:
    put(tmp_path, "a", "max_batch_size: -3")
    (tmp_path / "a/config.pbtxt").write_text((tmp_path / "a/config.pbtxt").read_text().replace("max_batch_size: 8", ""))
    async with demanded(tmp_path) as served:
        answers = await asyncio.gather(*(served.infer("a") for _ in range(5)))
        for answer in answers:
            assert answer.status_code == 404 and answer.json()["reason"] == "no_available_version"
            assert "max_batch_size" in answer.json()["error"]
        with pytest.raises(InferenceServerException, match="max_batch_size") as refused:
            await grpc_infer(served, "a")
        assert refused.value.status() == "StatusCode.NOT_FOUND"
        assert "max_batch_size" in (await served.state("a"))[1]
        assert 'oriel_model_load_failures_total{model="a",reason="config"} 1' in await served.metrics()
        (tmp_path / "a/config.pbtxt").write_text((tmp_path / "a/config.pbtxt").read_text().replace("-3", "8"))

        async def answered() -> bool:
            return (await served.infer("a")).status_code == 200

        await until(answered)


async def test_a_model_without_room_is_refused_with_the_true_wait_and_reported(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path, name)
    async with demanded(tmp_path, model_memory_bytes=BUDGET, young_s=600.0) as served:
        for name in "ab":
            assert (await served.infer(name)).status_code == 200
        answer = await served.infer("c")
        assert (answer.status_code, answer.json()["reason"]) == (503, "model_memory_full")
        assert 300 < int(answer.headers["retry-after"]) <= 600
        with pytest.raises(InferenceServerException, match="cannot be loaded") as refused:
            await grpc_infer(served, "c")
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        state, reason = await served.state("c")
        assert state == "UNAVAILABLE" and "on demand" in reason and "bytes on host" in reason
        text = await served.metrics()
        refusals = next(line for line in text.splitlines() if line.startswith("oriel_model_memory_refusals_total{"))
        assert 'model="c"' in refusals and int(refusals.split()[1]) in (1, 2)  # the second came soon after the first
        wanted = next(line for line in text.splitlines() if line.startswith("oriel_model_memory_wanted_bytes{"))
        assert int(wanted.split()[1]) >= MODEL_BYTES
        assert (await served.infer("a")).status_code == 200


async def test_refused_calls_are_demand_and_a_model_that_is_called_more_comes_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused calls counted for nothing: a model whose place another one had taken was refused for a minute."""
    monkeypatch.setattr("oriel_inference.models.demand.FULL_PAUSE_S", 600.0)
    for name in "abc":
        put(tmp_path, name)
    async with demanded(tmp_path, model_memory_bytes=BUDGET, young_s=60.0) as served:
        for name in "aab":
            assert (await served.infer(name)).status_code == 200
        assert (await served.infer("c")).json()["error"].endswith("too young to go for it now")
        answers = [(await served.infer("c")).status_code for _ in range(30)]
        assert set(answers) == {503}
        served.unit.surface.control.demand.changed("c")  # the pause between two tries is over
        assert (await served.infer("c")).status_code == 200
        assert (await served.state("b")) == ON_DEMAND and (await served.state("a"))[0] == "READY"


async def test_memory_is_returned_before_that_of_an_evicted_model_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator kept it, so that a server grew to twice its budget."""
    for name in "ab":
        put(tmp_path, name)
    open_at_return: list[int] = []
    async with demanded(tmp_path, model_memory_bytes=MODEL_BYTES * 3 // 2) as served:
        monkeypatch.setattr(assembly, "return_memory", lambda: open_at_return.append(still_open(served)))
        for name in "ab":
            assert (await served.infer(name)).status_code == 200
    assert open_at_return[:5] == [0, 1, 0, 0, 1], "before and after each load, and after the close of the first"


async def test_a_model_with_calls_is_not_evicted(tmp_path: Path) -> None:
    for name in "ab":
        put(tmp_path, name)
    async with demanded(tmp_path, model_memory_bytes=3 * MODEL_BYTES // 2) as served:
        served.fake.gate.close()
        call = asyncio.create_task(served.infer("a"))
        await asyncio.to_thread(served.fake.gate.wait_for_runs, 1)
        assert (await served.infer("b")).json()["reason"] == "model_memory_full"
        served.fake.gate.open()
        assert (await call).status_code == 200

        async def answered() -> bool:
            return (await served.infer("b")).status_code == 200

        await until(answered)
        assert served.fake.most_open == 1


async def test_an_ensemble_is_loaded_with_its_parts_and_leaves_with_them(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path, name)
    put_ensemble(tmp_path, "inner", "a", "b")
    put_ensemble(tmp_path, "outer", "inner", "b")
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:
        for _ in range(2):
            answer = await served.infer("outer")
            assert answer.status_code == 200, answer.text
            assert answer.json()["outputs"][0]["data"] == [8, 16, 24, 32]
            assert (await served.infer("c")).status_code == 200
            assert await served.state("outer") == ON_DEMAND and await served.state("inner") == ON_DEMAND
        assert (await asyncio.to_thread(http_infer, served, "inner")).tolist() == (4 * X).tolist()
        assert served.fake.most_open == 2


async def test_an_ensemble_whose_parts_find_no_room_is_refused(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path, name)
    put_ensemble(tmp_path, "all", "a", "b", "c")
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:
        answer = await served.infer("all")
        assert (answer.status_code, answer.json()["reason"]) == (503, "model_memory_full")

        async def answered() -> bool:  # parts that are being loaded cannot go yet
            return all([(await served.infer(name)).status_code == 200 for name in "abc"])

        await until(answered)


async def test_pinned_models_are_loaded_at_the_start_and_stay(tmp_path: Path) -> None:
    put(tmp_path, "a", PINNED)
    for name in "bc":
        put(tmp_path, name)
    async with demanded(tmp_path, model_memory_bytes=BUDGET, load_models=("c",)) as served:
        assert (await served.state("a"))[0] == (await served.state("c"))[0] == "READY"
        for name in "bcbc":
            assert (await served.infer(name)).status_code == 200
            assert (await served.state("a"))[0] == "READY"
        assert served.fake.most_open == 2


async def test_a_configuration_may_ask_for_demand_in_mode_none(tmp_path: Path) -> None:
    put(tmp_path, "a", DEMAND)
    put(tmp_path, "b")
    put(tmp_path, "wrong", DEMAND.replace('"demand"', '"later"'))
    async with demanded(tmp_path, control_mode="none", strict_readiness=False) as served:
        assert await served.state("a") == ON_DEMAND and (await served.state("b"))[0] == "READY"
        assert 'must be "demand" or "pinned"' in (await served.state("wrong"))[1]
        assert (await served.infer("a")).status_code == 200
        assert (await served.state("a"))[0] == "READY"


async def test_what_is_known_of_a_model_that_is_not_loaded(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path) as served:
        client = served.client
        assert (await client.get("/v2/models/a/ready")).status_code == 400
        assert (await client.get("/v2/models/a")).json()["inputs"][0]["name"] == "x"
        assert (await client.get("/v2/models/a/config")).json()["max_batch_size"] == 8
        assert (await client.get("/v2/models/a/stats")).json()["reason"] == "model_not_ready"
        assert (await client.post("/v2/models/nope/infer", json=ROW)).json()["reason"] == "unknown_model"
        address = f"127.0.0.1:{served.unit.grpc_port}"
        async with tritonclient.grpc.aio.InferenceServerClient(address) as grpc:
            assert not await grpc.is_model_ready("a") and await grpc.is_server_ready()
            assert (await grpc.get_model_metadata("a")).inputs[0].name == "x"
            await grpc.infer("a", grpc_input())
            assert await grpc.is_model_ready("a")
        assert (await client.get("/v2/models/a")).json()["versions"] == ["1"]
        assert (await client.get("/v2/models/a/versions/7/ready")).status_code == 404


async def test_load_and_unload_by_request(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path) as served:
        for _ in range(2):
            assert (await served.client.post("/v2/repository/models/a/load")).status_code == 200
            assert (await served.state("a"))[0] == "READY"
        assert (await served.client.post("/v2/repository/models/a/unload")).status_code == 200
        await until(lambda: served.fake.sessions[0].closed)
        assert await served.state("a") == ON_DEMAND
        assert (await served.infer("a")).status_code == 200
        assert (await served.client.post("/v2/repository/models/nope/load")).status_code == 404


async def test_a_model_with_a_configuration_of_a_request_stays_until_it_is_unloaded(tmp_path: Path) -> None:
    for name in "ab":
        put(tmp_path, name)
    async with demanded(tmp_path, model_memory_bytes=3 * MODEL_BYTES // 2) as served:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.unit.http_port}") as client:
            config = (
                '{"backend":"onnxruntime","max_batch_size":4,"input":[{"name":"x","data_type":"TYPE_FP32","dims":[4]}],'
                '"output":[{"name":"y","data_type":"TYPE_FP32","dims":[4]}]}'
            )
            await asyncio.to_thread(client.load_model, "a", config=config)
        assert (await served.infer("b")).json()["reason"] == "model_memory_full"
        assert (await served.client.get("/v2/models/a/config")).json()["max_batch_size"] == 4
        assert (await served.client.post("/v2/repository/models/a/unload")).status_code == 200
        for name in "ba":

            async def answered(name: str = name) -> bool:
                return (await served.infer(name)).status_code == 200

            await until(answered)
        assert (await served.client.get("/v2/models/a/config")).json()["max_batch_size"] == 8


async def test_files_that_change_are_served_and_models_come_and_go(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path, model_memory_bytes=BUDGET) as served:
        assert (await served.infer("a")).json()["model_version"] == "1"
        put(tmp_path.parent / "beside", "a", version=2)
        (tmp_path.parent / "beside/a/2").rename(tmp_path / "a/2")

        async def second() -> bool:
            return (await served.infer("a")).json().get("model_version") == "2"

        await until(second)
        put(tmp_path.parent / "beside", "b")
        (tmp_path.parent / "beside/b").rename(tmp_path / "b")

        async def there() -> bool:
            return (await served.infer("b")).status_code == 200

        await until(there)
        (tmp_path / "b").rename(tmp_path.parent / "gone")

        async def gone() -> bool:
            return (await served.infer("b")).status_code == 404

        await until(gone)


async def test_messages_of_a_stream_wait_in_their_order(tmp_path: Path) -> None:
    for name in "ab":
        put(tmp_path, name)
    async with demanded(tmp_path) as served:
        assert (await served.infer("b")).status_code == 200
        served.fake.loads.close()
        answers: queue.Queue[Any] = queue.Queue()
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.unit.grpc_port}")
        try:
            await asyncio.to_thread(client.start_stream, lambda result, error: answers.put((result, error)))
            for number, name in enumerate("aba"):
                await asyncio.to_thread(client.async_stream_infer, name, grpc_input(), request_id=str(number))
            await until(lambda: served.waiting == {"a": 2})
            served.fake.loads.open()
            found = [await asyncio.to_thread(answers.get, True, 60) for _ in range(3)]
            assert [error for _, error in found] == [None] * 3
            assert [result.get_response().id for result, _ in found] == ["0", "1", "2"]
        finally:
            served.fake.loads.open()
            await asyncio.to_thread(client.close)


async def test_generate_waits_for_its_model(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path) as served:
        answer = await served.client.post("/v2/models/a/generate", json={"x": [1, 2, 3, 4]})
        assert answer.status_code == 200 and answer.json()["y"] == [2, 4, 6, 8]


async def test_a_server_that_stops_refuses_what_waits_for_a_load(tmp_path: Path) -> None:
    put(tmp_path, "a")
    async with demanded(tmp_path, drain_s=0.1) as served:
        served.fake.loads.close()
        call = asyncio.create_task(served.infer("a"))
        await until(lambda: served.waiting == {"a": 1})
        served.unit.surface.control.demand.close()
        assert (await call).json()["reason"] == "server_stopping"
        assert (await served.infer("a")).json()["reason"] == "server_stopping"


async def test_a_python_model_calls_a_model_that_is_not_loaded(tmp_path: Path) -> None:
    put(tmp_path, "a")
    config = CONFIG.replace("onnxruntime", "python")
    python_calls.put(tmp_path, "relay", "relay", config + 'parameters { key: "to" value { string_value: "a" } }')
    # The ensemble leads back to the model that calls it, which is known only once it is loaded.
    python_calls.put(tmp_path, "round", "relay", config + 'parameters { key: "to" value { string_value: "all" } }')
    put_ensemble(tmp_path, "all", "a", "round")
    async with demanded(tmp_path) as served:
        answer = await served.infer("relay")
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]
        answer = await served.infer("round")
        assert answer.status_code != 200 and "would wait for itself" in answer.json()["error"]


async def test_each_gpu_has_a_budget_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(number=0, capability="9.0"), Gpu(number=1, capability="9.0")]
    tensors = [(TensorInfo(name=name, datatype="FP32", shape=(-1, 4)),) for name in "xy"]
    fake = FakeBackend(*tensors, gpus=gpus)

    def used() -> dict[int, int]:
        opened = zip(fake.opened, fake.sessions, strict=True)
        on = [options.providers[0][1]["device_id"] for (_, options), session in opened if not session.closed]
        return {gpu.number: MODEL_BYTES * on.count(str(gpu.number)) for gpu in gpus}

    monkeypatch.setattr("oriel_inference.assembly.list_gpus", lambda: gpus)
    monkeypatch.setattr("oriel_inference.assembly.gpu_used_bytes", used)
    for name, gpu in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 1)):
        put(tmp_path, name, f"instance_group {{ kind: KIND_GPU gpus: [ {gpu} ] }}")
    async with demanded(tmp_path, fake, gpu_memory_bytes=BUDGET) as served:
        for name in "abdecabdec":
            assert (await served.infer(name)).status_code == 200
            assert all(size <= BUDGET for size in used().values())
        budgets = served.unit.surface.control.memory.bytes
        assert budgets == {"gpu0": (BUDGET, 2 * MODEL_BYTES, 0), "gpu1": (BUDGET, 2 * MODEL_BYTES, 0)}
        assert sum(served.unit.surface.control.memory.evictions[name] for name in "de") == 0


async def test_a_part_that_cannot_be_loaded_is_not_tried_by_every_call(tmp_path: Path) -> None:
    put(tmp_path, "a")
    put(tmp_path, "bad")
    (tmp_path / "bad/1/model.onnx").unlink()
    put_ensemble(tmp_path, "all", "a", "bad")
    async with demanded(tmp_path) as served:
        for _ in range(3):
            answer = await served.infer("all")
            assert answer.json()["reason"] == "no_available_version" and "bad" in answer.json()["error"]
        assert 'oriel_model_load_failures_total{model="bad",reason="model"} 1' in await served.metrics()


async def test_real_models_are_measured(tmp_path: Path) -> None:
    """What a session takes is not reported by ONNX Runtime: the process is measured, and the files count at least."""
    for name in "ab":
        weights = control_server.models.slow(repeats=1, width=1024)  # 4 MiB
        control_server.models.put(tmp_path, name, weights, None)
    file_bytes = (tmp_path / "a/1/model.onnx").stat().st_size
    async with control_server.serving(tmp_path, "demand", model_memory_bytes=256 << 20) as served:
        row = {"inputs": [{"name": "x", "shape": [1, 1024], "datatype": "FP32", "data": [1.0] * 1024}]}
        for name in "ab":
            answer = await served.client.post(f"/v2/models/{name}/infer", json=row)
            assert answer.status_code == 200, answer.text
        _, used, wanted = served.unit.surface.control.memory.bytes["host"]
        assert 2 * file_bytes <= used <= 256 << 20 and wanted == 0
