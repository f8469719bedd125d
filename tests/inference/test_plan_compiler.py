"""TensorRT as a compiler, on the stand-ins: the server builds a plan, checks it, serves with it, and leaves other
shapes to the model itself.
"""

import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from oriel_inference.backends.tensorrt import half
from oriel_inference.backends.tensorrt.compiler import ENTRY, TensorRtCompiler, profiles_of
from oriel_inference.backends.tensorrt.library import find_library
from oriel_inference.errors import CompilerMissing, LoadFailed
from oriel_inference.model import EngineOptions, Gpu
from oriel_inference.repository.outline import gpu_name
from oriel_policies.artefacts.devices import lacking, parse_targets
from oriel_policies.upstreams.engine_profiles import Shape, parse_shapes

from ..waiting import until
from . import models
from .artefact_server import outcomes, served, state, until_state
from .config_rows import accelerator, option
from .plan_server import VERSIONS, stand_in

SHAPES = {"profile_min_shapes": "x:1x4", "profile_max_shapes": "x:4x4"}


@pytest.fixture(params=list(VERSIONS))
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with stand_in(request.param) as found:
        yield found
        assert found.misuses == [] and found.is_empty


def setting(name: str, value: str) -> str:
    return f'parameters {{ key: "oriel.compile{name}" value {{ string_value: "{value}" }} }}\n'


def compiled_config() -> str:
    return models.DOUBLE + setting("", "tensorrt") + "".join(setting(f".{key}", each) for key, each in SHAPES.items())


async def answers(one: Any, rows: int) -> None:
    values = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
    tensor = {"name": "x", "shape": [rows, 4], "datatype": "FP32", "data": values.ravel().tolist()}
    answer = await one.client.post("/v2/models/double/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == (2 * values).ravel().tolist()


@pytest.mark.parametrize("machine", ["face_11"], indirect=True)
async def test_a_plan_is_built_checked_and_serves_and_other_shapes_are_left_to_the_model(
    tmp_path: Path, machine: Any
) -> None:
    models.put(tmp_path / "models", "double", models.double(), compiled_config())
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        machine.executed.clear()
        await answers(one, 4)
        assert len(machine.executed) == 1
        await answers(one, 8)
        assert len(machine.executed) == 1 and state(one.unit) == "serving", "the artefact is not to blame"
        await answers(one, 1)
        assert len(machine.executed) == 2 and outcomes(one) == {"built": 1}
        (line,) = (await one.lines()).values()
        assert line[0] == "READY" and line[1].startswith("compiled by tensorrt: serving, largest error 0 absolute")
    assert len(list((tmp_path / "home").rglob("tensorrt-11.4.0.106.timing"))) == 1


@pytest.mark.parametrize("machine", ["face_10"], indirect=True)
async def test_the_accelerator_of_a_triton_configuration_is_compiled_where_its_provider_is_missing(
    tmp_path: Path, machine: Any
) -> None:
    parameters = " ".join(
        option(key, value)
        for key, value in (
            ("precision_mode", "FP16"),
            ("trt_profile_min_shapes", "x:1x4"),
            ("trt_profile_max_shapes", "x:8x4"),
        )
    )
    models.put(
        tmp_path / "models", "double", models.double(), models.DOUBLE + accelerator("gpu", "tensorrt", parameters)
    )
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        machine.executed.clear()
        await answers(one, 8)
        assert len(machine.executed) == 1
        (line,) = (await one.lines()).values()
        assert "runs on the CPU" not in line[1]
    (plan,) = (tmp_path / "artefacts").rglob(ENTRY)
    assert b'"flags": ["FP16"]' in plan.read_bytes()


@pytest.mark.parametrize("machine", ["face_10"], indirect=True)
@pytest.mark.parametrize("precision", ["BF16", "INT8"])
async def test_a_precision_in_which_no_plan_is_built_is_refused_and_other_options_are_reported(
    tmp_path: Path, machine: Any, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They were dropped, and a plan in FP32 was built without a word."""
    parameters = " ".join(
        option(key, value)
        for key, value in (
            ("precision_mode", precision),
            ("trt_profile_min_shapes", "x:1x4"),
            ("trt_profile_max_shapes", "x:8x4"),
            ("trt_dla_enable", "1"),
            ("trt_sparsity_enable", "0"),
        )
    )
    models.put(
        tmp_path / "models", "double", models.double(), models.DOUBLE + accelerator("gpu", "tensorrt", parameters)
    )
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_reason(one, f"refused, a plan that the server builds computes in FP32 or FP16, not in {precision}")
        await answers(one, 2)
        assert outcomes(one) == {"not_compiled": 1}
    (warning,) = [line for line in caplog.messages if line.endswith("has no effect on a plan that the server builds")]
    assert "gpu_execution_accelerator[0].parameters: trt_dla_enable " in warning


@pytest.mark.parametrize("machine", ["face_11"], indirect=True)
async def test_a_plan_counts_towards_the_budget_of_its_gpu(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as memory of the host, so that a full GPU took it and a full host did not."""
    monkeypatch.setattr("oriel_inference.assembly.list_gpus", lambda: (Gpu(number=0, capability="9.0"),))
    models.put(tmp_path / "models", "double", models.double(), compiled_config())
    async with served(tmp_path / "models", tmp_path / "artefacts", gpu_memory_bytes=1 << 30) as one:
        await until_state(one, "serving")
        (plan,) = (tmp_path / "artefacts").rglob(ENTRY)
        memory = one.unit.surface.control.memory
        assert memory.bytes[gpu_name(0)][:2] == (1 << 30, plan.stat().st_size)
    async with served(tmp_path / "models", tmp_path / "artefacts", gpu_memory_bytes=1) as one:
        await until_reason(one, "there is no room in the memory budget of gpu0")
        await answers(one, 2)


async def test_without_tensorrt_the_model_serves_and_says_so(tmp_path: Path) -> None:
    models.put(tmp_path / "models", "double", models.double(), compiled_config())
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_reason(one, "TensorRT plans need TensorRT, which is not installed")
        await answers(one, 2)
        assert state(one.unit) == "absent" and outcomes(one) == {"not_installed": 1}


async def until_reason(one: Any, text: str) -> None:
    async def reached() -> bool:
        return any(line[0] == "READY" and text in line[1] for line in (await one.lines()).values())

    await until(reached)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "the shape of input 'x' is variable: profile_min_shapes and profile_max_shapes have to name it"),
        ({**SHAPES, "profile_max_shapes": "x:4x5"}, r"profile 0 has no shapes of input 'x' that fit \[-1, 4\]"),
        ({**SHAPES, "profile_min_shapes": "z:1x4"}, "profile 0 has no shapes of input 'x'"),
        ({**SHAPES, "profile_min_shapes": "x:5x4"}, "TensorRT refuses the shapes of input 'x'"),
        ({**SHAPES, "profile_max_shapes": "x:4x4;x:8x4"}, "hold the same number of profiles"),
    ],
)
def test_a_build_without_fitting_profiles_says_what_is_missing(
    tmp_path: Path, machine: Any, given: dict[str, str], text: str
) -> None:
    models.save_model(models.double(), str(tmp_path / "model.onnx"))
    with pytest.raises(LoadFailed, match=text):
        TensorRtCompiler().build(tmp_path / "model.onnx", EngineOptions(compiler_settings=given), tmp_path)


def test_fp16_is_a_setting_of_10_and_a_conversion_for_11(tmp_path: Path, machine: Any) -> None:
    models.save_model(weighted(), str(tmp_path / "model.onnx"))
    options = EngineOptions(compiler_settings={**SHAPES, "precision": "FP16"})
    compiler, work = TensorRtCompiler(), tmp_path / "work"
    work.mkdir()
    found = compiler.identity(options)
    assert compiler.build(tmp_path / "model.onnx", options, work) == ENTRY
    assert [path.name for path in work.iterdir()] == [ENTRY], "nothing is left of the conversion"
    plan = (work / ENTRY).read_bytes()
    converts = found.compiler_version.startswith("11.")
    assert (b'"flags": ["FP16"]' in plan) is not converts
    assert found.precision == "FP16"
    assert (found.options == f"fp16=onnxruntime-{onnxruntime.__version__}/onnx-{onnx.__version__}") is converts
    session = compiler.open(work / ENTRY, options)
    values = np.full((2, 4), 1 / 3, dtype=np.float32)
    (answer,) = session.run({"x": values}, ["y"])
    session.close()
    assert answer.dtype == np.float32
    exact = values @ weights()
    assert np.allclose(answer, exact, rtol=1e-2, atol=1e-2)
    assert np.allclose(answer, exact, rtol=1e-5, atol=1e-6) is not converts


def weights() -> Any:
    return np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def weighted(size: int = 4) -> Any:
    """Return a model y = x @ w, with [n, size] and weights that FP16 rounds."""
    w = numpy_helper.from_array(np.resize(weights(), (size, size)), "w")
    node = models.helper.make_node("MatMul", ["x", "w"], ["y"])
    shape = ["n", size]
    return models.graph([node], [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)], [w])


@pytest.mark.parametrize("machine", ["face_11"], indirect=True)
def test_without_the_converter_fp16_says_what_to_install(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(half.metadata, "version", missing)
    fp16 = EngineOptions(compiler_settings={**SHAPES, "precision": "FP16"})
    with pytest.raises(CompilerMissing, match=r"FP16 with TensorRT 11 needs onnx, .* pip install 'onnx>=1\.19'"):
        TensorRtCompiler().identity(fp16)
    assert TensorRtCompiler().identity(EngineOptions(compiler_settings=SHAPES)).options == ""


@pytest.mark.parametrize("apart", [False, True])
def test_a_conversion_keeps_inputs_and_outputs_and_halves_the_weights(tmp_path: Path, apart: bool) -> None:
    (tmp_path / "half").mkdir()
    source = tmp_path / "model.onnx"
    onnx.save_model(weighted(64), str(source), save_as_external_data=apart, location="data" if apart else None)
    path = half.convert(source, tmp_path / "half")
    assert sorted(each.name for each in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert path.with_name("model.onnx.data").stat().st_size == 64 * 64 * 2
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    types = [each.type for each in (*session.get_inputs(), *session.get_outputs())]
    assert types == ["tensor(float)", "tensor(float)"]


@pytest.mark.parametrize("machine", ["face_11"], indirect=True)
def test_a_file_that_cannot_be_converted_is_refused_with_the_reason(tmp_path: Path, machine: Any) -> None:
    (tmp_path / "model.onnx").write_bytes(b"junk")
    options = EngineOptions(compiler_settings={**SHAPES, "precision": "FP16"})
    with pytest.raises(LoadFailed, match=r"model\.onnx cannot be converted to FP16: \w+"):
        TensorRtCompiler().build(tmp_path / "model.onnx", options, tmp_path)


def test_timings_are_kept_and_a_damaged_file_of_them_is_replaced(tmp_path: Path, machine: Any) -> None:
    models.save_model(models.double(), str(tmp_path / "model.onnx"))
    options = EngineOptions(compiler_settings=SHAPES)
    for damaged in (False, True, False):
        assert TensorRtCompiler().build(tmp_path / "model.onnx", options, tmp_path) == ENTRY
        (kept,) = (tmp_path / "home" / ".cache" / "oriel" / "engines").iterdir()
        assert kept.read_bytes().startswith(b"timings of 1")
        if damaged:
            kept.write_bytes(b"junk")


def test_what_is_no_onnx_file_is_refused_with_the_parsers_errors(tmp_path: Path, machine: Any) -> None:
    (tmp_path / "model.onnx").write_bytes(b"junk")
    with pytest.raises(LoadFailed, match="TensorRT cannot read model.onnx: In node -1"):
        TensorRtCompiler().build(tmp_path / "model.onnx", EngineOptions(), tmp_path)


def test_tensorrts_bindings_alone_are_enough(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = import_module("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_bindings", alone)
    assert find_library().version == alone.__version__


def test_the_fingerprint_names_what_a_plan_depends_on(machine: Any) -> None:
    options = EngineOptions(compiler_settings={**SHAPES, "optimization_level": "5"})
    found = TensorRtCompiler().identity(options)
    assert (found.device, found.driver, found.precision) == ("9.0", "13", "FP32")
    h100, l4 = parse_targets("h100,nvidia-l4")
    assert lacking(h100, "tensorrt", found.device) == ""
    assert "this machine builds for compute capability 9.0" in lacking(l4, "tensorrt", found.device)
    assert found.options == "optimization_level=5" and "profile_max_shapes=x:4x4" in found.profiles
    machine.capability = (8, 6)
    assert TensorRtCompiler().identity(options).device == "8.6"
    elsewhere = EngineOptions(providers=(("CUDAExecutionProvider", {"device_id": "3"}),))
    with pytest.raises(CompilerMissing, match="does not find GPU 3"):
        TensorRtCompiler().identity(elsewhere)


@given(
    st.lists(
        st.dictionaries(
            st.from_regex(r"[a-z][a-z.:/]{0,5}", fullmatch=True), st.lists(st.integers(0, 999), min_size=1)
        ),
        max_size=3,
    ).filter(lambda profiles: all(profiles))
)
def test_shapes_are_read_as_they_were_written(profiles: list[dict[str, list[int]]]) -> None:
    text = ";".join(
        ",".join(f"{name}:{'x'.join(map(str, sizes))}" for name, sizes in each.items()) for each in profiles
    )
    if any(len(sizes) > 16 for each in profiles for sizes in each.values()):
        with pytest.raises(ValueError, match="must be shapes"):
            parse_shapes(text)
        return
    assert parse_shapes(text) == [{name: tuple(sizes) for name, sizes in each.items()} for each in profiles]


@pytest.mark.parametrize("text", ["x", "x:", ":1", "x:1xa", "x:-1", "x:1,", ";", "x:99999999999", "x:1;" * 17 + "x:1"])
def test_other_texts_are_no_shapes(text: str) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_shapes(text)


def test_inputs_of_fixed_shapes_need_no_profile() -> None:
    inputs: dict[str, Shape] = {"x": (2, 4)}
    assert profiles_of(inputs, {}) == []
    (found,) = profiles_of({**inputs, "y": (-1,)}, {"profile_min_shapes": "y:1", "profile_max_shapes": "y:9"})
    assert found.spans["y"] == ((1,), (9,), (9,)) and list(found.spans) == ["y"]
