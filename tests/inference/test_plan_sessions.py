"""Sessions of TensorRT plans without a server, on the stand-ins, which note every misuse."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.backends import NeededBytes, OutsideProfile, find_backend
from oriel_inference.backends.gpu_work import BATCHES, OPENINGS
from oriel_inference.backends.tensorrt.backend import TensorRt
from oriel_inference.errors import BackendFailed, InvalidRequest, LoadFailed
from oriel_inference.model import EngineOptions, Gpu
from oriel_inference.repository.instances import Place
from oriel_inference.repository.outline import HOST, gpu_name
from oriel_inference.repository.plans import opener

from .plan_server import ON_GPU, VERSIONS, classifier, double, stand_in

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(params=list(VERSIONS))
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with stand_in(request.param) as found:
        yield found
        assert found.misuses == [] and found.is_empty


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.plan"
    path.write_bytes(data)
    return path


def test_a_session_computes_what_the_plan_says(tmp_path: Path, machine: Any) -> None:
    session = TensorRt().open(write(tmp_path, double()), ON_GPU)
    try:
        assert [(each.name, each.datatype, each.shape) for each in session.inputs] == [("x", "FP32", (-1, 4))]
        assert session.provider == "TensorRT" and session.rows == 8
        first = session.run({"x": X}, ["y"])[0]
        second = session.run({"x": X + 1}, ["y"])[0]
        np.testing.assert_array_equal(first, 2 * X, "a later batch does not change an earlier answer")
        np.testing.assert_array_equal(second, 2 * X + 2)
        assert session.run({"x": X}, []) == []
        strided = np.arange(16, dtype=np.float32).reshape(2, 8)[:, ::2]
        np.testing.assert_array_equal(session.run({"x": strided}, ["y"])[0], 2 * strided)
    finally:
        session.close()


def test_a_plan_uses_the_gpu_inside_of_the_gates(tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of a CUDA graph closes them: CUDA would fail what a plan does meanwhile."""
    backend, inside, enter = TensorRt(), list[tuple[int, int]](), machine.enter

    def watched(name: str) -> Any:
        inside.append((OPENINGS._inside, BATCHES._inside))
        return enter(name)

    monkeypatch.setattr(machine, "enter", watched)
    session = backend.open(write(tmp_path, double()), ON_GPU)
    opened = len(inside)
    session.run({"x": X}, ["y"])
    session.close()
    assert opened and set(inside[:opened]) == {(1, 0)}
    assert len(inside) > opened and set(inside[opened:]) == {(0, 1)}


def test_a_batch_of_the_same_shape_is_not_prepared_again(tmp_path: Path, machine: Any) -> None:
    session = TensorRt().open(write(tmp_path, double()), ON_GPU)
    try:
        session.run({"x": X}, ["y"])
        machine.calls.clear()
        session.run({"x": X}, ["y"])
        assert machine.calls == ["cudaMemcpyAsync", "cudaMemcpyAsync", "cudaStreamSynchronize"]
    finally:
        session.close()


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ({"x": X.astype(np.int64)}, InvalidRequest, "input 'x' is INT64, and the model takes FP32"),
        ({}, InvalidRequest, "the model also needs input 'x'"),
        ({"x": np.zeros((9, 4), np.float32)}, OutsideProfile, r"input 'x' has shape \[9, 4\], its profile takes"),
        ({"x": np.zeros((4,), np.float32)}, OutsideProfile, r"input 'x' has shape \[4\]"),
    ],
)
def test_wrong_inputs_are_the_callers_fault(
    tmp_path: Path, machine: Any, inputs: Any, error: type[Exception], text: str
) -> None:
    session = TensorRt().open(write(tmp_path, double()), ON_GPU)
    try:
        with pytest.raises(error, match=text):
            session.run(inputs, ["y"])
        np.testing.assert_array_equal(session.run({"x": X}, ["y"])[0], 2 * X)
    finally:
        session.close()


def test_a_session_that_failed_runs_the_next_batch(tmp_path: Path, machine: Any) -> None:
    session = TensorRt().open(write(tmp_path, double()), ON_GPU)
    errors = sys.modules["cuda.bindings.runtime"].cudaError_t
    try:
        for function in ("cudaMemcpyAsync", "cudaStreamSynchronize"):
            machine.fails[function] = errors.cudaErrorLaunchFailure
            with pytest.raises(BackendFailed, match=f"{function} failed: unspecified launch failure"):
                session.run({"x": X}, ["y"])
            machine.fails.clear()
            np.testing.assert_array_equal(session.run({"x": X}, ["y"])[0], 2 * X)
    finally:
        session.close()


@pytest.mark.parametrize(
    "function", ["cudaSetDevice", "cudaMemGetInfo", "cudaStreamCreateWithFlags", "cudaMalloc", "cudaHostAlloc"]
)
def test_a_session_that_cannot_be_opened_takes_nothing(tmp_path: Path, machine: Any, function: str) -> None:
    machine.fails[function] = sys.modules["cuda.bindings.runtime"].cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(LoadFailed, match=f"model.plan: {function} failed: out of memory") as kept:
        TensorRt().open(write(tmp_path, double()), ON_GPU)
    assert machine.is_empty, "even while the error is kept"
    assert kept.value.__context__ is None


def test_many_threads_may_run_one_session_and_several_sessions_share_an_engine(tmp_path: Path, machine: Any) -> None:
    backend = TensorRt()
    path = write(tmp_path, double())
    sessions = [backend.open(path, ON_GPU) for _ in range(3)]
    assert (machine.engines, machine.contexts) == (1, 3)

    def run(number: int) -> bool:
        rows = np.full((1 + number % 8, 4), number, np.float32)
        (found,) = sessions[number % 3].run({"x": rows}, ["y"])
        return bool((found == 2 * number).all()) and found.shape == rows.shape

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(120)))
    for session in sessions:
        assert not machine.is_empty
        session.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("oriel-tensorrt")]


@settings(max_examples=30)
@given(shapes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 600)), min_size=1, max_size=8))
def test_whatever_the_shapes_of_the_batches_the_answers_are_right_or_refused(shapes: list[tuple[int, int]]) -> None:
    profiles = [((1, 1), (1, 64), (1, 64)), ((1, 65), (1, 512), (1, 512)), ((2, 1), (8, 64), (8, 128))]
    with stand_in("face_11") as machine, TemporaryDirectory() as folder:
        session = TensorRt().open(write(Path(folder), classifier(*profiles)), ON_GPU)
        try:
            for rows, length in shapes:
                ids = np.arange(rows * length, dtype=np.int32).reshape(rows, length) % 50
                inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
                fits = length <= 512 if rows == 1 else length <= 128
                try:
                    (found,) = session.run(inputs, ["logits"])
                except OutsideProfile:
                    assert not fits
                else:
                    assert fits
                    wanted = ids.astype(np.float32).sum(1, keepdims=True) * np.arange(25, dtype=np.float32)
                    np.testing.assert_array_equal(found, wanted)
        finally:
            session.close()
        assert machine.misuses == [] and machine.is_empty


def test_a_batch_that_no_profile_takes_is_not_kept(tmp_path: Path, machine: Any) -> None:
    """The reference runs such batches all the time, and the collector of cycles runs rarely."""
    session = TensorRt().open(write(tmp_path, double()), ON_GPU)
    large = np.zeros((9, 4), np.float32)
    kept = ref(large)
    gc.disable()
    try:
        try:
            session.run({"x": large}, ["y"])
        except OutsideProfile:
            del large
        session.run({"x": X}, ["y"])  # the thread has done with the batch before
        assert kept() is None
    finally:
        gc.enable()
        session.close()


def test_what_a_session_needs_is_reported_before_it_is_taken(tmp_path: Path, machine: Any) -> None:
    data = double(context_bytes=5000)
    needed: list[tuple[NeededBytes, int, int]] = []

    def reserve(one: NeededBytes) -> None:
        needed.append((one, machine.contexts, len(machine.device_memory)))

    TensorRt().open_within(write(tmp_path, data), ON_GPU, reserve).close()
    weights = {"gpu": 0, "shared": len(data)}
    assert needed == [
        (NeededBytes(**weights, per_session=5000 + 128, host_per_session=128), 0, 0),
        (NeededBytes(**weights, per_session=5000 + 256, host_per_session=256), 1, 0),
    ]

    def refuse(one: NeededBytes) -> None:
        raise LoadFailed("no room")

    with pytest.raises(LoadFailed, match="no room"):
        TensorRt().open_within(write(tmp_path, data), ON_GPU, refuse)


def test_what_is_planned_for_all_instances_does_not_shrink_while_they_are_opened(tmp_path: Path, machine: Any) -> None:
    data, planned = double(context_bytes=5000), list[dict[str, int]]()
    places = [Place(options=ON_GPU, filename="model.plan")] * 2
    open_one = opener(
        TensorRt(), places, {"model.plan": write(tmp_path, data)}, lambda sizes: planned.append(dict(sizes))
    )
    for session in [open_one(place) for place in places]:
        session.close()
    first, whole = ({gpu_name(0): len(data) + 2 * (5000 + each), HOST: 2 * each} for each in (128, 256))
    assert planned == [first, whole, whole, whole]


def test_plans_run_on_gpus_only(tmp_path: Path, machine: Any) -> None:
    machine.total_bytes, machine.capability = {0: 1 << 30, 1: 1 << 30}, (8, 6)
    backend = find_backend("tensorrt")
    assert backend.gpus() == [Gpu(number=0, capability="8.6"), Gpu(number=1, capability="8.6")]
    with pytest.raises(LoadFailed, match=r"model.plan is a TensorRT plan, which runs on a GPU only"):
        backend.open(write(tmp_path, double()), EngineOptions())
    path = write(tmp_path, double(capability="8.6"))
    session = backend.open(path, EngineOptions(providers=(("TensorRT", {"device_id": "1"}),)))
    assert {device for device, _ in machine.device_memory.values()} == {1}
    session.close()


@pytest.mark.parametrize(("version", "works"), [("8.6.1", False), ("10.0.1", True), ("11.4.0.106", True)])
def test_versions_before_10_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, works: bool) -> None:
    with stand_in("face_10"):
        monkeypatch.setattr(import_module("tensorrt"), "__version__", version)
        if works:
            assert TensorRt().name == "tensorrt"
            return
        with pytest.raises(LoadFailed, match=f"TensorRT {version} is installed, and this server runs plans with 10"):
            TensorRt()


def test_a_package_that_cannot_be_imported_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text('raise OSError("libnvinfer.so.10: cannot open shared object file")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LoadFailed, match="TensorRT is installed, but cannot be imported: libnvinfer.so.10: cannot"):
        TensorRt()


def _older(face: str) -> dict[str, str]:
    return {"built_with": "10.3.0.26" if face == "face_10" else "10.16.1.11"}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (lambda _: b"no plan at all", "magicTag does not match"),
        (lambda _: b"", "model.plan is empty"),
        (lambda face: double(**_older(face)), "is not compatible with this version of TensorRT"),
        (lambda _: double(capability="8.6"), "generated on an incompatible device, expecting compute 8.6"),
        (lambda _: double(no_context=True), "TensorRT made no execution context of model.plan: IExecutionContext:"),
        (lambda _: double(host_tensors=["x"]), "tensor 'x' of the plan is a shape tensor"),
        (lambda _: double(formats={"y": "CHW32"}), "tensor 'y' of the plan has the layout CHW32"),
        (lambda _: double(datatype="FP8"), "tensor 'x' of the plan has type FP8, which the v2 protocol cannot carry"),
        (lambda _: double(no_shapes="Broken"), "TensorRT cannot tell the shapes of outputs: Broken"),
        (lambda _: double(odd_shapes=True), "output 'y' of the plan has a shape that depends on the values of inputs"),
    ],
)
@pytest.mark.parametrize("face", list(VERSIONS))
def test_a_plan_that_cannot_run_says_why_and_keeps_no_memory(
    tmp_path: Path, face: str, data: Callable[[str], bytes], text: str
) -> None:
    with stand_in(face) as machine:
        with pytest.raises(LoadFailed) as failed:
            TensorRt().open(write(tmp_path, data(face)), ON_GPU)
        assert text in failed.value.reason and machine.is_empty
        TensorRt().open(write(tmp_path, double()), ON_GPU).close()
        assert machine.misuses == []


def test_instances_that_may_not_share_a_profile_are_refused_with_tensorrts_reason(tmp_path: Path, machine: Any) -> None:
    """Plans of TensorRT 10 and 11 share profiles; should one not, this is no crash and no wrong answer."""
    backend, path = TensorRt(), write(tmp_path, double(shares_profiles=False))
    first = backend.open(path, ON_GPU)
    with pytest.raises(LoadFailed, match="profile 0 is in use by another context"):
        backend.open(path, ON_GPU)
    first.close()


def test_a_batch_that_tensorrt_does_not_execute_fails_with_its_reason(tmp_path: Path, machine: Any) -> None:
    session = TensorRt().open(write(tmp_path, double(no_execution="enqueueV3: Error Code 1: Cask")), ON_GPU)
    with pytest.raises(BackendFailed, match="TensorRT did not execute the batch: enqueueV3: Error"):
        session.run({"x": X}, ["y"])
    session.close()
