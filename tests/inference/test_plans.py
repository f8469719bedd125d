"""TensorRT plans over HTTP, on stand-ins of TensorRT and CUDA: nothing here ran on a GPU."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oriel_inference.model import Gpu
from oriel_inference.repository.defaults import LoadDefaults

from . import models
from .plan_server import (
    CLASSIFIER,
    DOUBLE,
    VERSIONS,
    classifier,
    double,
    expected_logits,
    logits,
    put,
    serving,
    stand_in,
)

ROW = [[1.0, 2.0, 3.0, 4.0]]
DEMAND = 'parameters { key: "oriel.load" value { string_value: "demand" } }'


@pytest.fixture(params=list(VERSIONS))
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine(face: str) -> Iterator[Any]:
    """A machine with one GPU. At the end nothing was misused, and everything was given back."""
    with stand_in(face) as found:
        yield found
        assert found.misuses == []
        assert found.is_empty, (found.device_memory.keys(), found.taken, len(found.streams), len(found.pinned))


# --- The case from the field ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "output"), [("classify", (-1, 25)), ("tag", (-1, -1, 25))])
async def test_the_classifier_from_the_field_loads_as_it_is(
    tmp_path: Path, machine: Any, function: str, output: tuple[int, ...]
) -> None:
    put(tmp_path, "classifier", classifier(function=function, output=output), CLASSIFIER)
    async with serving(tmp_path) as served:
        assert await served.state("classifier") == ("READY", "")
        for length in (1, 7, 512):
            ids = np.arange(length).reshape(1, length)
            found = logits(await served.classify("classifier", ids))
            np.testing.assert_array_equal(found, expected_logits(ids, function))
        config = (await served.client.get("/v2/models/classifier/config")).json()
        assert config["max_batch_size"] == 1 and config["platform"] == "tensorrt_plan"
        assert [group["count"] for group in config["instance_group"]] == [2]
        metadata = (await served.client.get("/v2/models/classifier")).json()
        assert [each["shape"] for each in metadata["inputs"]] == [[-1, -1], [-1, -1]]
        assert metadata["outputs"][0]["shape"] == list(output)
        assert (machine.engines, machine.contexts) == (1, 2), "the instances share the weights"


async def test_the_second_folder_from_the_field_serves_on_a_machine_without_a_gpu_and_says_so(tmp_path: Path) -> None:
    wants = (
        'optimization { execution_accelerators { gpu_execution_accelerator : [ { name : "tensorrt" '
        'parameters { key: "precision_mode" value: "FP16" } } ] } }'
    )
    models.put(tmp_path, "double", models.double(), models.DOUBLE + wants)
    async with serving(tmp_path) as served:
        state, reason = await served.state("double")
        assert state == "READY" and reason.startswith("runs on the CPU: ") and "'tensorrt'" in reason
        assert (await served.double("double", ROW)).json()["outputs"][0]["data"] == [2, 4, 6, 8]


# --- Profiles and batches -------------------------------------------------------------------------------------------


async def test_each_batch_runs_on_the_smallest_profile_that_takes_it(tmp_path: Path, machine: Any) -> None:
    profiles = [((1, 1), (8, 512), (8, 512)), ((1, 1), (1, 64), (1, 64)), ((1, 65), (1, 512), (1, 512))]
    config = CLASSIFIER.replace("count: 2", "count: 1")
    put(tmp_path, "classifier", classifier(*profiles), config)
    async with serving(tmp_path) as served:
        machine.executed.clear()
        for rows, length in ((1, 64), (1, 65), (2, 8), (8, 512), (1, 1), (1, 512)):
            ids = np.arange(rows * length).reshape(rows, length) % 97
            np.testing.assert_array_equal(logits(await served.classify("classifier", ids)), expected_logits(ids))
        assert [profile for _, profile in machine.executed] == [1, 2, 0, 0, 1, 2]


async def test_a_folder_without_a_configuration_is_completed_from_the_plan(tmp_path: Path, machine: Any) -> None:
    put(tmp_path, "double", double(), None)
    put(tmp_path, "fixed", double(((2, 4), (2, 4), (2, 4)), shape=(2, 4)), None)
    async with serving(tmp_path) as served:
        config = (await served.client.get("/v2/models/double/config")).json()
        assert config["max_batch_size"] == 8 and config["backend"] == "tensorrt"
        assert (await served.double("double", ROW * 8)).json()["outputs"][0]["shape"] == [8, 4]
        assert (await served.client.get("/v2/models/fixed/config")).json()["max_batch_size"] == 0
        assert (await served.double("fixed", ROW * 2)).json()["outputs"][0]["data"] == [2, 4, 6, 8] * 2
        assert (await served.double("fixed", ROW)).status_code == 400


# --- The ONNX file beside a plan ------------------------------------------------------------------------------------


def onnx_classifier() -> Any:
    """The classifier as PyTorch exports it: with INT64 inputs."""
    helper, to = models.helper, models.FLOAT
    nodes = [
        helper.make_node("Mul", ["input_ids", "attention_mask"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["floats"], to=to),
        helper.make_node("ReduceSum", ["floats", "axis"], ["sums"], keepdims=1),
        helper.make_node("Mul", ["sums", "classes"], ["logits"]),
    ]
    weights = [
        models.numpy_helper.from_array(np.array([1]), "axis"),
        models.numpy_helper.from_array(np.arange(25, dtype=np.float32), "classes"),
    ]
    inputs = [(name, models.INT64, ["b", "s"]) for name in ("input_ids", "attention_mask")]
    return models.graph(nodes, inputs, [("logits", models.FLOAT, ["b", 25])], weights)


async def test_a_length_outside_the_profile_is_served_by_the_onnx_file_beside_the_plan(
    tmp_path: Path, machine: Any
) -> None:
    folder = put(tmp_path, "classifier", classifier(), CLASSIFIER)
    models.save_model(onnx_classifier(), str(folder / "model.onnx"))
    async with serving(tmp_path) as served:
        machine.executed.clear()
        for length, executed in ((512, 1), (513, 1), (700, 1), (9, 2)):
            ids = np.arange(length).reshape(1, length)
            found = logits(await served.classify("classifier", ids))
            np.testing.assert_allclose(found, expected_logits(ids), rtol=1e-6)
            assert found.dtype == np.float32 and len(machine.executed) == executed
        assert (await served.classify("classifier", [[1]], datatype="INT64")).status_code == 400


@pytest.mark.parametrize("face", ["face_10"], indirect=True)
@pytest.mark.parametrize("beside", ["another model", "no model"])
async def test_a_file_beside_the_plan_that_is_not_its_model_serves_nothing(
    tmp_path: Path, machine: Any, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = put(tmp_path, "classifier", classifier(), CLASSIFIER)
    if beside == "another model":
        models.save_model(models.double(), str(folder / "model.onnx"))
    else:
        (folder / "model.onnx").write_bytes(b"no model")
    async with serving(tmp_path) as served:
        assert await served.state("classifier") == ("READY", "")
        assert (await served.classify("classifier", np.ones((1, 513), int))).status_code == 400
        assert "classifier/1/model.onnx cannot run the requests that the plan" in caplog.text


# --- What is missing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("tensorrt", "TensorRT plans need TensorRT, which is not installed: pip install 'oriel-serving[tensorrt]'"),
        ("cuda", "TensorRT plans need cuda-bindings, which is not installed: pip install 'oriel-serving[tensorrt]'"),
        ("gpu", "TensorRT plans need an NVIDIA GPU with its driver: no CUDA-capable device is detected"),
        ("driver", "TensorRT plans need an NVIDIA GPU with its driver: CUDA driver version is insufficient"),
    ],
)
@pytest.mark.parametrize("face", ["face_11"], indirect=True)
async def test_what_is_missing_is_named_and_the_other_models_serve(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch, missing: str, text: str
) -> None:
    put(tmp_path, "classifier", classifier(), CLASSIFIER)
    models.put(tmp_path, "onnx", models.double(), models.DOUBLE.replace('"double"', '"onnx"'))
    if missing in ("gpu", "driver"):
        errors = sys.modules["cuda.bindings.runtime"].cudaError_t
        machine.count_error = errors.cudaErrorNoDevice if missing == "gpu" else errors.cudaErrorInsufficientDriver
    else:
        monkeypatch.setattr(sys, "path", [each for each in sys.path if "stand_ins" not in each])
        if missing == "tensorrt":
            sys.modules.pop("tensorrt", None)
        else:
            monkeypatch.setattr(sys, "path", [*sys.path, *_without_cuda(tmp_path / "path")])
            for name in ("cuda.bindings.runtime", "cuda.bindings", "cuda"):
                sys.modules.pop(name, None)
    async with serving(tmp_path) as served:
        state, reason = await served.state("classifier")
        assert state == "UNAVAILABLE" and reason.startswith(f"classifier/config.pbtxt: backend: {text}")
        assert (await served.double("onnx", ROW)).json()["outputs"][0]["data"] == [2, 4, 6, 8]


def _without_cuda(folder: Path) -> list[str]:
    """Return a path with a TensorRT and nothing of CUDA."""
    (folder / "tensorrt").mkdir(parents=True)
    (folder / "tensorrt" / "__init__.py").write_text('__version__ = "11.4.0.106"\n')
    sys.modules.pop("tensorrt", None)
    return [str(folder)]


# --- What TensorRT refuses ------------------------------------------------------------------------------------------


async def test_plans_with_host_code_run_only_where_the_operator_allows_it(tmp_path: Path) -> None:
    with stand_in("face_11") as machine:
        put(tmp_path, "double", double(built_with="10.16.1.11", version_compatible=True))
        async with serving(tmp_path) as served:
            state, reason = await served.state("double")
            assert state == "UNAVAILABLE" and "the plan has host code, and it is not allowed" in reason
        async with serving(tmp_path, load_defaults=LoadDefaults(engine_host_code=True)) as served:
            assert (await served.double("double", ROW)).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        assert machine.misuses == [] and machine.is_empty
    with stand_in("face_10") as machine:  # what 11 has built does not run on 10
        put(tmp_path, "double", double(built_with="11.4.0.106", version_compatible=True))
        async with serving(tmp_path, load_defaults=LoadDefaults(engine_host_code=True)) as served:
            assert "expecting library version 10.16.1.11 got 11.4.0.106" in (await served.state("double"))[1]
        assert machine.misuses == [] and machine.is_empty


@pytest.mark.parametrize("face", ["face_10"], indirect=True)
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (DOUBLE + "instance_group { kind: KIND_CPU }", "instance_group[0].kind: is KIND_CPU, and TensorRT plans run"),
        (DOUBLE + "instance_group { gpus: [ 1 ] }", "instance_group[0].gpus: GPU 1 cannot be used here, only 0"),
        (DOUBLE.replace("max_batch_size: 8", "max_batch_size: 9"), "max_batch_size: 9 is more than the 8 rows"),
        (DOUBLE.replace("TYPE_FP32", "TYPE_INT32"), "input[0].data_type: the model file has TYPE_FP32"),
        (DOUBLE.replace("[ 4 ]", "[ 5 ]"), "input[0].dims: [5] does not fit the model file's [4]"),
        (
            DOUBLE + 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }',
            "models of backend 'onnxruntime' only",
        ),
    ],
)
async def test_a_configuration_that_contradicts_the_plan_is_refused(
    tmp_path: Path, machine: Any, config: str, text: str
) -> None:
    put(tmp_path, "double", double(), config)
    async with serving(tmp_path) as served:
        state, reason = await served.state("double")
        assert state == "UNAVAILABLE" and text in reason


# --- Memory ---------------------------------------------------------------------------------------------------------


async def test_a_plan_that_does_not_fit_the_gpu_takes_nothing(tmp_path: Path, machine: Any) -> None:
    put(tmp_path, "large", double(context_bytes=2 << 30))
    put(tmp_path, "wide", double(((1, 4), (1, 4), (1 << 25, 4))), DOUBLE)
    put(tmp_path, "double", double())
    async with serving(tmp_path) as served:
        reason = (await served.state("large"))[1]
        assert f"the plan needs {(2 << 30) + 128} more bytes of the GPU's memory, of which " in reason
        reason = (await served.state("wide"))[1]
        assert f"the plan needs {1 << 30} more bytes" in reason, "its output is not known before its context is"
        assert (await served.double("double", ROW)).status_code == 200
        assert machine.calls.count("cudaMalloc") == 2


@pytest.fixture
def gpu_budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """A server with a budget for the memory of its GPU; room for one model of the tests below."""
    monkeypatch.setattr("oriel_inference.assembly.list_gpus", lambda: (Gpu(number=0, capability="9.0"),))
    return 3 << 20


async def test_the_memory_of_all_instances_is_planned_within_the_budget_before_it_is_taken(
    tmp_path: Path, machine: Any, gpu_budget: int
) -> None:
    data = double(context_bytes=1 << 20)
    put(tmp_path, "two", data, DOUBLE + "instance_group { count: 2 }")
    async with serving(tmp_path, gpu_memory_bytes=gpu_budget) as served:
        assert await served.state("two") == ("READY", "")
        # Two contexts, each with 8 rows of 4 values in and out, and the weights once.
        used = 2 * ((1 << 20) + 2 * 128) + len(data)
        assert served.unit.surface.control.memory.bytes["gpu0"][:2] == (gpu_budget, used)
        assert machine.total_bytes[0] - machine.free_bytes(0) == used
    put(tmp_path, "two", data, DOUBLE + "instance_group { count: 3 }")
    machine.calls.clear()
    async with serving(tmp_path, gpu_memory_bytes=gpu_budget) as served:
        state, reason = await served.state("two")
        assert state == "UNAVAILABLE" and "model 'two' cannot be loaded: it needs " in reason
        assert machine.contexts == 2 and "cudaMalloc" not in machine.calls, "only the engine was opened"


async def test_a_plan_on_demand_takes_another_out_of_memory_once_it_is_known_what_it_needs(
    tmp_path: Path, machine: Any, gpu_budget: int
) -> None:
    for name in ("one", "other"):
        put(tmp_path, name, double(context_bytes=2 << 20), DOUBLE + DEMAND)
    young = {"young_s": 0.0, "young_loads": 0.0}
    async with serving(tmp_path, gpu_memory_bytes=gpu_budget, **young) as served:
        for name in ("one", "other", "one"):
            answer = await served.double(name, ROW)
            assert answer.status_code == 200, answer.text
            assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]
            assert [each for each in ("one", "other") if (await served.state(each))[0] == "READY"] == [name]


# --- Life -----------------------------------------------------------------------------------------------------------


async def test_what_is_unloaded_gives_everything_back(tmp_path: Path, machine: Any) -> None:
    put(tmp_path, "double", double(), DOUBLE + "instance_group { count: 2 }")
    async with serving(tmp_path, control_mode="explicit") as served:
        for _ in range(2):
            assert (await served.client.post("/v2/repository/models/double/load")).status_code == 200
            assert (await served.double("double", ROW)).status_code == 200
            assert len(machine.streams) == 2 and len(machine.device_memory) == 4 and len(machine.pinned) == 4
            assert (await served.client.post("/v2/repository/models/double/unload")).status_code == 200
            await served.until_closed()
            assert machine.is_empty


@pytest.mark.parametrize("face", ["face_11"], indirect=True)
async def test_a_plan_is_tried_in_another_process_before_the_server_opens_it(tmp_path: Path, machine: Any) -> None:
    put(tmp_path, "double", double())
    put(tmp_path, "broken", b"no plan")
    async with serving(tmp_path, checked=True) as served:
        assert (await served.double("double", ROW)).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        assert "magicTag does not match" in (await served.state("broken"))[1]
        assert machine.engines == 1, "this process opened only the good one"
