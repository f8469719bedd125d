"""Sessions of TensorRT plans without a server, on the stand-ins; and that the stand-ins refuse what they should."""

import gc
import sys
import threading
from collections.abc import Iterator
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


# --- The stand-ins are strict ---------------------------------------------------------------------------------------


class Bench:
    """An execution context of the stand-in and what it needs, made in this thread."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.tensorrt = import_module("tensorrt")
        self.cuda = import_module("cuda.bindings.runtime")
        self.cuda.cudaSetDevice(0)
        _, self.stream = self.cuda.cudaStreamCreateWithFlags(1)

        class Log(self.tensorrt.ILogger):  # type: ignore[misc, name-defined]
            def log(self, severity: Any, message: str) -> None:
                pass

        self.runtime = self.tensorrt.Runtime(Log())
        self.engine = self.runtime.deserialize_cuda_engine(double())
        self.context = self.engine.create_execution_context()

    def ready(self, *, without: str = "") -> None:
        """Prepare an execution, without one of its steps."""
        handle = int(self.stream)
        if without != "profile":
            assert self.context.set_optimization_profile_async(0, handle)
        if without != "shape":
            assert self.context.set_input_shape("x", (1, 4))
        for name in ("x", "y"):
            if without != name:
                assert self.context.set_tensor_address(name, self.cuda.cudaMalloc(128)[1])

    def misused(self, text: str, action: Any) -> None:
        with pytest.raises(self.cuda.Misuse, match=text):
            action()
        assert self.machine.misuses and text in self.machine.misuses[-1]
        self.machine.misuses.clear()


@pytest.fixture(params=list(VERSIONS))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with stand_in(request.param) as machine:
        yield Bench(machine)


@pytest.mark.parametrize(
    ("without", "text"),
    [
        ("shape", "executed before its shapes are set"),
        ("x", "executed without an address of 'x'"),
        ("y", "executed without an address of 'y'"),
    ],
)
def test_the_stand_in_refuses_an_execution_that_is_not_prepared(bench: Bench, without: str, text: str) -> None:
    bench.ready(without=without)
    bench.misused(text, lambda: bench.context.execute_async_v3(int(bench.stream)))


def test_the_stand_in_refuses_what_the_documentation_forbids(bench: Bench) -> None:
    bench.misused("before an optimisation profile", lambda: bench.ready(without="profile"))
    bench.ready()
    bench.misused("the default stream", lambda: bench.context.execute_async_v3(0))
    with pytest.raises(TypeError):
        bench.context.execute_async_v3(bench.stream)
    cuda, kind = bench.cuda, bench.cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
    _, device = cuda.cudaMalloc(16)
    _, host = cuda.cudaHostAlloc(16, 0)
    bench.misused("not pinned", lambda: cuda.cudaMemcpyAsync(device, host + 1, 4, kind, bench.stream))
    bench.misused("of a buffer of 16", lambda: cuda.cudaMemcpyAsync(device, host, 17, kind, bench.stream))
    cuda.cudaFree(device)
    bench.misused("was freed", lambda: cuda.cudaMemcpyAsync(device, host, 4, kind, bench.stream))
    bench.misused("was freed before", lambda: cuda.cudaFree(device))
    bench.misused("was freed", lambda: bench.context.set_tensor_address("x", device))
    assert not bench.context.set_input_shape("x", (9, 4))
    assert not bench.context.set_optimization_profile_async(1, int(bench.stream))
    assert bench.context.set_optimization_profile_async(0, int(bench.stream)), "this forgets the shapes"
    bench.misused("before its shapes are set", lambda: bench.context.execute_async_v3(int(bench.stream)))


def test_the_stand_in_refuses_other_threads(bench: Bench) -> None:
    bench.ready()
    with ThreadPoolExecutor(1) as other:
        for action, text in (
            (bench.context.infer_shapes, "an execution context is used in another thread"),
            (lambda: bench.cuda.cudaMalloc(1), "a thread uses CUDA without having set its device"),
            (lambda: bench.cuda.cudaStreamSynchronize(bench.stream), "a stream is used in another thread"),
        ):
            bench.misused(text, other.submit(action).result)


def test_the_stand_in_notices_an_engine_that_goes_before_its_contexts(bench: Bench) -> None:
    bench.engine = None
    assert bench.machine.misuses == ["an engine is released before its execution contexts"]
    bench.context = None


def test_results_are_there_only_after_the_stream_was_waited_for(bench: Bench) -> None:
    cuda = bench.cuda
    _, host = cuda.cudaHostAlloc(16, 0)
    _, device = cuda.cudaMalloc(16)
    memory = np.frombuffer(bench.machine.pinned[host], np.uint8)
    bench.machine.device_memory[device][1][:] = 7
    cuda.cudaMemcpyAsync(host, device, 16, cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost, bench.stream)
    assert (memory == cuda.GARBAGE).all()
    cuda.cudaStreamSynchronize(bench.stream)
    assert (memory == 7).all()


def test_names_that_11_removed_are_there_in_10_only() -> None:
    for face in VERSIONS:
        with stand_in(face) as machine:
            bench = Bench(machine)
            assert hasattr(bench.engine, "device_memory_size") == (face == "face_10")
            assert bool(machine.misuses) == (face == "face_11")
