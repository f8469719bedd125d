"""OpenVINO as a compiler. The tests with the package itself are skipped where it is not installed: pip install
'oriel-serving[openvino-compiler]'.
"""

import asyncio
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.offline import build_ahead, compilations
from oriel_inference.artefacts.process import ArtefactRefused, BuildBounds
from oriel_inference.artefacts.session import CompiledSession
from oriel_inference.backends import OutsideProfile, find_backend
from oriel_inference.backends.openvino_cpu import ENTRY, MISSING, OpenVino, OpenVinoSession, properties
from oriel_inference.backends.providers import OPENVINO, missing
from oriel_inference.errors import BackendFailed, CompilerMissing, InferenceError, LoadFailed
from oriel_inference.model import EngineOptions
from oriel_inference.repository.compiling import Compilation
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_policies.artefacts.lifecycle import RefusalKind

from ..inference import models
from ..inference.artefact_server import only_artefact, outcomes, served, state, until_state
from ..inference.config_rows import accelerator, option
from ..inference.control_server import Served, put
from ..waiting import until

without_provider = pytest.mark.skipif(
    not missing(OPENVINO), reason="ONNX Runtime has OpenVINO's provider here, which is then used"
)
needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason=MISSING)
COMPILE = 'parameters { key: "oriel.compile" value { string_value: "openvino" } }\n'
COMPILED = models.DOUBLE + COMPILE
TWO_THREADS = 'parameters { key: "intra_op_thread_count" value { string_value: "2" } }\n'

EITHER_WAY = pytest.mark.parametrize(
    "config",
    [
        pytest.param(COMPILED, id="parameter"),
        pytest.param(models.DOUBLE + accelerator("cpu", "openvino"), id="accelerator", marks=without_provider),
    ],
)


def setting(name: str, value: str) -> str:
    return f'parameters {{ key: "oriel.compile.{name}" value {{ string_value: "{value}" }} }}\n'


def loaded(root: Path, config: str, *, cores: int = 1) -> LoadedVersion | LoadFailed:
    put(root, 2.0, config=config)
    try:
        (found,) = load_model(
            Loading(LocalStore(root), "double", find_backend=find_backend, cores=cores, models=1)
        ).values()
    except LoadFailed as failure:
        return failure
    assert found is not None
    return found


def compilation(root: Path, config: str, *, cores: int = 1) -> Compilation:
    found = loaded(root, config, cores=cores)
    assert isinstance(found, LoadedVersion), found
    found.close()
    assert found.compilation is not None
    return found.compilation


def silent(phase: str, seconds: float) -> None:
    """Report nothing."""


# Settings


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(), {"INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "1"}),
        (
            EngineOptions(intra_op_threads=2, concurrent_runs=3),
            {"INFERENCE_NUM_THREADS": "6", "NUM_STREAMS": "3"},
        ),
        (
            EngineOptions(intra_op_threads=2, compiler_settings={"streams": "4", "threads": "5"}),
            {"INFERENCE_NUM_THREADS": "5", "NUM_STREAMS": "4"},
        ),
        (
            EngineOptions(compiler_settings={"hint": "THROUGHPUT", "precision": "BF16"}),
            {
                "INFERENCE_NUM_THREADS": "1",
                "PERFORMANCE_HINT": "THROUGHPUT",
                "INFERENCE_PRECISION_HINT": "bf16",
            },
        ),
    ],
)
def test_settings_become_openvinos_properties(options: EngineOptions, expected: dict[str, str]) -> None:
    defaults = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}
    assert properties(options) == {**defaults, **expected}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (setting("precision", "INT4"), "parameters['oriel.compile.precision']: must be one of FP32, FP16, BF16"),
        (setting("streams", "0"), "parameters['oriel.compile.streams']: must be a number from 1 to 256"),
        (setting("threads", "257"), "parameters['oriel.compile.threads']: must be a number from 1 to 256"),
        (setting("hint", "FAST"), "parameters['oriel.compile.hint']: must be one of LATENCY, THROUGHPUT"),
        (
            setting("workspace", "1"),
            "parameters['oriel.compile.workspace']: is not a setting of 'openvino', only tolerance, precision, ",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, config: str, reason: str) -> None:
    failure = loaded(tmp_path, COMPILED + config)
    assert isinstance(failure, LoadFailed) and reason in failure.reason


def test_a_session_runs_as_often_at_once_as_the_model_has_instances(tmp_path: Path) -> None:
    one = compilation(tmp_path, COMPILED + TWO_THREADS, cores=8)
    assert (one.place.options.intra_op_threads, one.place.options.concurrent_runs) == (2, 4)
    counted = compilation(tmp_path, COMPILED + "instance_group { count: 3 kind: KIND_CPU }", cores=8)
    assert counted.place.options.concurrent_runs == 1, "each instance has a session of its own"


# OpenVINO as an accelerator


@without_provider
def test_the_accelerator_is_the_compiler_where_onnx_runtime_has_no_such_provider(tmp_path: Path) -> None:
    more = option("precision", "ACCURACY") + option("num_streams", "2") + option("num_of_threads", "3")
    one = compilation(tmp_path, models.DOUBLE + accelerator("cpu", "openvino", more + option("cache_dir", "c")))
    assert one.compiler.name == "openvino" and one.place.options.providers == ()
    assert one.place.options.compiler_settings == {"precision": "FP32", "streams": "2", "threads": "3"}


@without_provider
def test_a_wrong_option_of_the_accelerator_is_refused_by_name(tmp_path: Path) -> None:
    failure = loaded(tmp_path, models.DOUBLE + accelerator("cpu", "openvino", option("num_streams", "-1")))
    assert isinstance(failure, LoadFailed)
    assert "cpu_execution_accelerator[0].parameters: streams: must be a number from 1 to 256" in failure.reason


# Without the package


async def until_absent(one: Served) -> None:
    """Wait until the reason why there is no artefact is known."""
    life = one.unit.catalog.get("double").artefact
    assert life is not None
    await until(lambda: life.reason)


@EITHER_WAY
async def test_the_model_serves_and_the_index_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)  # its import fails
    put(tmp_path / "models", 2.0, config=config)
    for _ in range(2):  # it is not remembered: it may be installed before the next start
        async with served(tmp_path / "models", tmp_path / "artefacts") as one:
            await until_absent(one)
            assert outcomes(one) == {"not_installed": 1}
            assert state(one.unit) == "absent"
            (line,) = (await one.lines()).values()
            assert line == ("READY", f"compiled by openvino: absent, {MISSING}")
            assert await one.answer() == 2.0
    assert list((tmp_path / "artefacts").iterdir()) == []


def test_a_build_without_the_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    put(tmp_path / "models", 2.0, config=COMPILED)
    ((_, one),) = compilations(tmp_path / "models")
    assert isinstance(one, Compilation)
    with pytest.raises(CompilerMissing, match="pip install"):
        build_ahead(one, ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), BuildBounds(), silent)


# With the package


@needs_openvino
@EITHER_WAY
async def test_an_artefact_is_swapped_in_under_load_and_found_by_the_next_start(tmp_path: Path, config: str) -> None:
    put(tmp_path / "models", 2.0, config=config)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:

        async def call_until_serving() -> None:
            while True:
                seen = state(one.unit)
                assert seen != "refused", await one.lines()
                assert await one.answer() == 2.0
                if seen == "serving":
                    return

        await asyncio.gather(*(call_until_serving() for _ in range(4)))
        statistics = one.unit.catalog.get("double").batcher.statistics
        assert sum(statistics.failures.values()) == 0
        assert outcomes(one) == {"built": 1}
        (line,) = (await one.lines()).values()
        assert line[1].startswith("compiled by openvino: serving, largest error ")
        assert {session.provider for session in one.unit.catalog.get("double").sessions} >= {"OpenVINO"}
        assert only_artefact(tmp_path / "artefacts").joinpath(ENTRY).is_file()
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        assert await one.answer() == 2.0
        assert outcomes(one) == {"found": 1}


@needs_openvino
def test_only_what_changes_the_artefact_changes_its_fingerprint(tmp_path: Path) -> None:
    one = compilation(tmp_path, COMPILED)
    source = tmp_path / "double/1/model.onnx"

    def fingerprint(**settings: str) -> str:
        options = replace(one.place.options, compiler_settings=settings)
        return replace(one, place=replace(one.place, options=options)).key(source).fingerprint

    plain = fingerprint()
    assert {fingerprint(streams="2"), fingerprint(threads="2"), fingerprint(hint="LATENCY")} == {plain}
    assert len({plain, fingerprint(precision="BF16"), fingerprint(precision="FP16")}) == 3


@needs_openvino
@pytest.mark.parametrize("precision", ["FP32", "BF16", "FP16"])
def test_another_precision_is_held_to_its_tolerance_or_refused_where_the_cpu_lacks_it(
    tmp_path: Path, precision: str
) -> None:
    weight = np.random.default_rng(3).standard_normal((64, 16)).astype(np.float32) / 8
    graph = models.graph(
        [models.helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", models.FLOAT, ["n", 64])],
        [("y", models.FLOAT, ["n", 16])],
        [models.numpy_helper.from_array(weight, "w")],
    )
    config = 'backend: "onnxruntime" max_batch_size: 8\n' + COMPILE + setting("precision", precision)
    models.put(tmp_path / "models", "dense", graph, config)
    ((_, one),) = compilations(tmp_path / "models")
    assert isinstance(one, Compilation)
    folder = ArtefactFolder(tmp_path / "a", max_bytes=1 << 30)
    try:
        _, manifest = build_ahead(one, folder, BuildBounds(), silent)
    except ArtefactRefused as refused:
        assert precision != "FP32" and refused.kind is RefusalKind.NOT_COMPILED
        assert f"OpenVINO does not compute in {precision} on this CPU" in refused.reason
        return
    assert manifest.key["precision"] == precision and "largest error" in manifest.errors


@needs_openvino
def test_what_the_protocol_cannot_carry_is_not_compiled(tmp_path: Path) -> None:
    models.put(tmp_path / "models", "echo", models.echo(), "max_batch_size: 4\n" + COMPILE)
    ((_, one),) = compilations(tmp_path / "models")
    assert isinstance(one, Compilation)
    with pytest.raises(ArtefactRefused) as refused:
        build_ahead(one, ArtefactFolder(tmp_path / "a", max_bytes=1 << 30), BuildBounds(), silent)
    assert refused.value.kind is RefusalKind.NOT_COMPILED and str(tmp_path) not in refused.value.reason


@needs_openvino
def test_outputs_come_in_the_order_in_which_they_were_asked_for(tmp_path: Path) -> None:
    models.save_model(models.two_inputs(), str(tmp_path / "model.onnx"))
    (tmp_path / "a").mkdir()
    entry = OpenVino().build(tmp_path / "model.onnx", EngineOptions(), tmp_path / "a")
    session = OpenVino().open(tmp_path / "a" / entry, EngineOptions())
    inputs = {name: np.full((2, 3), value, np.float32) for name, value in (("a", 5), ("b", 3))}
    for array in inputs.values():
        array.flags.writeable = False  # as views of a request's body are
    assert [float(each[0, 0]) for each in session.run(inputs, ["difference", "sum"])] == [2.0, 8.0]
    (only,) = session.run(inputs, ["sum"])
    assert only.shape == (2, 3) and float(only[1, 2]) == 8.0
    with pytest.raises(BackendFailed):
        session.run({**inputs, "z": inputs["a"]}, ["sum"])
    session.close()


@needs_openvino
def test_numbers_that_openvino_would_cut_off_are_left_to_the_reference(tmp_path: Path) -> None:
    node = models.helper.make_node("Add", ["x", "x"], ["y"])
    shape = ["n", 2]
    doubled = models.graph([node], [("x", models.INT64, shape)], [("y", models.INT64, shape)])
    models.save_model(doubled, str(tmp_path / "model.onnx"))
    (tmp_path / "a").mkdir()
    entry = OpenVino().build(tmp_path / "model.onnx", EngineOptions(), tmp_path / "a")
    session = OpenVino().open(tmp_path / "a" / entry, EngineOptions())
    (small,) = session.run({"x": np.array([[7, -(1 << 20)]])}, ["y"])
    assert small.dtype == np.int64 and small.tolist() == [[14, -(1 << 21)]]
    for number in (1 << 31, -(1 << 31) - 1):
        with pytest.raises(OutsideProfile, match="beyond 32 bits"):
            session.run({"x": np.array([[1, number]])}, ["y"])
    with pytest.raises(OutsideProfile, match="is empty"):
        session.run({"x": np.empty((0, 2), np.int64)}, ["y"])
    session.close()


def test_the_reference_runs_a_batch_that_openvino_would_cut_off_and_the_artefact_is_not_to_blame() -> None:
    kind = SimpleNamespace(get_type_name=lambda: "i64")
    scalar = type("Shape", (tuple,), {"rank": SimpleNamespace(is_dynamic=False)})()
    port = SimpleNamespace(get_names=lambda: {"x"}, get_element_type=lambda: kind, get_partial_shape=lambda: scalar)
    artefact: Any = OpenVinoSession(SimpleNamespace(inputs=[port], outputs=[port]))
    reference: Any = SimpleNamespace(run=lambda inputs, outputs: [inputs[name] for name in outputs])
    failures: list[InferenceError] = []
    batch = {"x": np.array([1, 1 << 40])}
    (found,) = CompiledSession(artefact, reference, failures.append).run(batch, ["x"])
    assert found is batch["x"] and failures == []


@needs_openvino
async def test_a_request_that_openvino_would_cut_off_is_answered_and_does_not_end_its_use(tmp_path: Path) -> None:
    """One client's number must not take the artefact from all others."""
    shape = ["n", 1]
    doubled = models.graph(
        [models.helper.make_node("Add", ["x", "x"], ["y"])], [("x", models.INT64, shape)], [("y", models.INT64, shape)]
    )
    models.put(tmp_path / "models", "doubled", doubled, "max_batch_size: 4\n" + COMPILE)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving", "doubled")
        for number in (7, 1 << 40, 8):
            body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT64", "data": [number]}]}
            answer = await one.client.post("/v2/models/doubled/infer", json=body)
            assert answer.json()["outputs"][0]["data"] == [2 * number]
        assert state(one.unit, "doubled") == "serving" and outcomes(one) == {"built": 1}


@needs_openvino
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(concurrent_runs=2), {"NUM_STREAMS": 2, "ENABLE_CPU_PINNING": False}),
        (EngineOptions(compiler_settings={"streams": "1", "threads": "1"}), {"INFERENCE_NUM_THREADS": 1}),
        (EngineOptions(compiler_settings={"hint": "THROUGHPUT"}), {"PERFORMANCE_HINT": "THROUGHPUT"}),
    ],
)
def test_openvino_applies_the_settings_to_an_artefact_that_was_built_without_them(
    tmp_path: Path, options: EngineOptions, expected: dict[str, object]
) -> None:
    models.save_model(models.double(), str(tmp_path / "model.onnx"))
    entry = OpenVino().build(tmp_path / "model.onnx", EngineOptions(), tmp_path)
    session = OpenVino().open(tmp_path / entry, options)
    assert {name: session._compiled.get_property(name) for name in expected} == expected
    session.close()
