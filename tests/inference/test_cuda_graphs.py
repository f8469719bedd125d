"""CUDA graphs: who gets one, what it answers, and that nothing else is on the GPU while it is captured.

There is no GPU here: ONNX Runtime with graphs is a double (`graph_runtime`), the rest of it is real.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from onnx import TensorProto, helper, numpy_helper, save_model

from oriel_inference.backends.device_tensor import DeviceTensor
from oriel_inference.backends.gpu_work import BATCHES, DRAIN_S, OPENINGS, Gate, capturing
from oriel_inference.backends.graph_session import GraphSession
from oriel_inference.backends.onnx_runtime import GpuSession, OnnxRuntime, _GraphRuntime, _quiet
from oriel_inference.errors import ConfigInvalid, InvalidRequest, LoadFailed
from oriel_inference.model import EngineOptions, Gpu, TensorInfo
from oriel_inference.repository.cuda_graphs import MAX_GRAPHS, graph_shapes
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

from . import models
from .config_rows import WORKS, Row, accelerator, group, optimization, option, write
from .graph_runtime import OPTIONS, GraphRuntime, Machine
from .resident import doubles, opened

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
GRAPH = "enable_cuda_graph"


def floats(*shape: int, first: float = 1) -> Array:
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture
def machine() -> Iterator[Machine]:
    found = Machine()
    yield found
    assert found.alive == 0, "memory of the GPU was not released"


# Sessions -----------------------------------------------------------------------------------------------------------


def test_batches_of_known_shapes_run_as_graphs_and_others_without(tmp_path: Path, machine: Machine) -> None:
    session = GraphSession(GraphRuntime(tmp_path, models.double(), machine), "test")
    session.capture([{"x": (1, 4)}, {"x": (3, 4)}])
    assert [identity for _, identity in machine.captures] == ["1", "2"]
    machine.replays.clear()
    answers = {rows: session.run({"x": floats(rows, 4)}, ["y"])[0] for rows in (3, 1, 2, 3)}
    assert machine.replays == ["2", "1", "2"], "2 rows have no graph"
    assert all(np.array_equal(found, 2 * floats(rows, 4)) for rows, found in answers.items())
    session.run({"x": floats(3, 4, first=100)}, ["y"])
    assert np.array_equal(answers[3], 2 * floats(3, 4)), "an answer is not overwritten by the next batch"
    session.close()


def test_every_thread_may_run_batches_and_one_thread_has_the_graphs(tmp_path: Path, machine: Machine) -> None:
    session = GraphSession(GraphRuntime(tmp_path, models.double(), machine), "test")
    session.capture([{"x": (2, 4)}])
    sent = [floats(2, 4, first=number) for number in range(16)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: session.run({"x": x}, ["y"])[0], sent))
    assert all(np.array_equal(y, 2 * x) for x, y in zip(sent, found, strict=True))
    assert len(machine.captures) == 1 and machine.captures[0][0] != threading.get_ident()
    session.close()


def test_outputs_are_those_that_were_asked_for(tmp_path: Path, machine: Machine) -> None:
    session = GraphSession(GraphRuntime(tmp_path, models.two_inputs(), machine), "test")
    session.capture([{"a": (2, 3), "b": (2, 3)}])
    machine.replays.clear()
    a, b = floats(2, 3), floats(2, 3, first=50)
    difference, total = session.run({"a": a, "b": b}, ["difference", "sum"])
    (alone,) = session.run({"b": b, "a": a}, ["difference"])
    assert np.array_equal(difference, a - b) and np.array_equal(total, a + b) and np.array_equal(alone, a - b)
    assert machine.replays == ["1", "1"]
    session.close()


def test_another_data_type_is_the_callers_fault_as_without_graphs(tmp_path: Path, machine: Machine) -> None:
    session = GraphSession(GraphRuntime(tmp_path, models.double(), machine), "test")
    session.capture([{"x": (2, 4)}])
    with pytest.raises(InvalidRequest):
        session.run({"x": np.zeros((2, 4), np.float64)}, ["y"])
    session.close()


def nonzero() -> Any:
    node = helper.make_node("NonZero", ["x"], ["y"])
    return models.graph([node], [("x", FLOAT, ["n", 4])], [("y", INT64, [2, "found"])])


def only_index_zero() -> Any:
    table = numpy_helper.from_array(np.ones((1, 2), np.float32), "table")
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    return models.graph([node], [("x", INT64, ["n"])], [("y", FLOAT, ["n", 2])], [table])


@pytest.mark.parametrize(
    ("model", "shapes", "reason"),
    [
        (models.echo(), {"text": (1, 1)}, "tensor 'text' is BYTES, which a graph cannot hold"),
        (nonzero(), {"x": (2, 4)}, "for x [2, 4]: its outputs differ from those of a run without it: output 'y'"),
        (only_index_zero(), {"x": (2,)}, "no CUDA graph for x [2]: "),
    ],
)
def test_a_model_that_has_no_graph_is_not_loaded(
    tmp_path: Path, machine: Machine, model: Any, shapes: dict[str, tuple[int, ...]], reason: str
) -> None:
    session = GraphSession(GraphRuntime(tmp_path, model, machine), "test")
    with pytest.raises(LoadFailed) as failed:
        session.capture([shapes])
    assert reason in failed.value.reason
    session.close()


def test_an_input_that_is_read_on_the_cpu_is_refused(tmp_path: Path, machine: Machine) -> None:
    runtime = GraphRuntime(tmp_path, models.two_inputs(), machine)
    runtime.on_host = ("b",)
    session = GraphSession(runtime, "test")
    with pytest.raises(LoadFailed, match="input 'b' is read on the CPU, and a graph would always use its first value"):
        session.capture([{"a": (2, 3), "b": (2, 3)}])
    assert not machine.captures
    session.close()


@pytest.mark.parametrize("fault", ["stale", "wrong"])
def test_a_graph_that_answers_otherwise_never_serves(tmp_path: Path, machine: Machine, fault: str) -> None:
    runtime = GraphRuntime(tmp_path, models.two_inputs(), machine)
    runtime.on_host, runtime.shows_memory = ("b",) if fault == "stale" else (), False
    runtime.broken_graph = 1 if fault == "wrong" else 0
    session = GraphSession(runtime, "test")
    with pytest.raises(
        LoadFailed, match="its outputs differ from those of a run without it: output 'sum' differs in"
    ) as kept:
        session.capture([{"a": (2, 3), "b": (2, 3)}])
    session.close()
    assert kept.value.reason and machine.alive == 0, "the error that is kept keeps no memory of the GPU"


def test_graphs_without_room_are_refused(tmp_path: Path, machine: Machine) -> None:
    machine.room = 3
    session = GraphSession(GraphRuntime(tmp_path, models.double(), machine), "test")
    with pytest.raises(LoadFailed, match=r"no CUDA graph for x \[2, 4\]: Failed to allocate memory"):
        session.capture([{"x": (1, 4)}, {"x": (2, 4)}])
    session.close()


def test_a_file_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    save_model(models.double(), str(tmp_path / "model.onnx"))
    options = EngineOptions(providers=(("CUDAExecutionProvider", {GRAPH: "1"}),))
    with pytest.raises(LoadFailed, match="CUDAExecutionProvider"):
        OnnxRuntime().open(tmp_path / "model.onnx", options)
    assert threading.active_count() == before


def test_onnx_runtimes_own_bindings_take_what_a_graph_binds(tmp_path: Path) -> None:
    """On the CPU, where the same calls run without a graph."""
    save_model(models.two_inputs(), str(tmp_path / "model.onnx"))

    class OnCpu(_GraphRuntime):
        def open(self) -> Any:
            session = super().open()
            session.get_input_memory_infos = lambda: [SimpleNamespace(name="Cuda")] * 2
            return session

    session = GraphSession(OnCpu(tmp_path / "model.onnx", OPTIONS, ("cpu", 0)), "test")
    session.capture([{"a": (2, 3), "b": (2, 3)}])
    a, b = floats(2, 3), floats(2, 3, first=9)
    a.flags.writeable = False  # as a view of a body is
    assert np.array_equal(session.run({"a": a, "b": b}, ["sum"])[0], a + b)
    session.close()


# Alone on the GPU -----------------------------------------------------------------------------------------------------


def test_a_closed_gate_waits_for_those_inside_and_holds_the_others_back() -> None:
    gate, order = Gate(), list[str]()
    inside, go = threading.Event(), threading.Event()

    def first() -> None:
        with gate.entered():
            inside.set()
            go.wait()
            order.append("first")

    def close(name: str) -> None:
        with gate.closed():
            order.append(f"{name} begins")
            order.append(f"{name} ends")

    def last() -> None:
        with gate.entered():
            order.append("last")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    inside.wait()
    threads += [threading.Thread(target=close, args=(name,)) for name in ("one", "two")]
    for each in threads[1:]:
        each.start()
    with gate._changed:
        gate._changed.wait_for(lambda: gate._is_closed)
    threads.append(threading.Thread(target=last))
    threads[-1].start()
    go.set()
    for each in threads:
        each.join()
    assert order[0] == "first" and sorted(order[1:]) == ["last", "one begins", "one ends", "two begins", "two ends"]
    for name in ("one", "two"):
        assert order[order.index(f"{name} begins") + 1] == f"{name} ends"


def test_a_capture_waits_for_an_opening_while_batches_go_on() -> None:
    captured = threading.Event()

    def capture() -> None:
        with capturing(DRAIN_S):
            captured.set()

    thread = threading.Thread(target=capture)
    with OPENINGS.entered():
        thread.start()
        with OPENINGS._changed:
            OPENINGS._changed.wait_for(lambda: OPENINGS._is_closed)
        with BATCHES.entered():
            assert not captured.is_set()
    thread.join()
    assert captured.is_set()


def test_a_batch_that_does_not_end_holds_the_others_back_for_a_while_only(tmp_path: Path, machine: Machine) -> None:
    session = GraphSession(GraphRuntime(tmp_path, models.double(), machine), "test", drain_s=0)
    with BATCHES.entered():
        with pytest.raises(
            LoadFailed, match=r"for x \[1, 4\]: batches of other models on the GPUs did not end within 0 s"
        ):
            session.capture([{"x": (1, 4)}])
        assert np.array_equal(session.run({"x": floats(1, 4)}, ["y"])[0], 2 * floats(1, 4)), "both gates are open again"
    session.capture([{"x": (1, 4)}])
    assert len(machine.captures) == 1
    with OPENINGS.entered():
        pass
    session.close()


class Watched:
    """An `InferenceSession`. inside: how many were inside of the gate of batches, for each run."""

    def __init__(self, session: Any) -> None:
        self._watched = session
        self.inside: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)

    def run(self, *given: Any) -> Any:
        self.inside.append(BATCHES._inside)
        return self._watched.run(*given)

    def run_with_iobinding(self, *given: Any) -> None:
        self.inside.append(BATCHES._inside)
        self._watched.run_with_iobinding(*given)


def test_what_uses_a_gpu_is_inside_of_a_gate(tmp_path: Path) -> None:
    session = opened(tmp_path, doubles())
    session._session = watched = Watched(session._session)
    session._run = watched.run
    (kept,) = session.run_resident({"x": np.ones((2, 3), np.int64)}, ["y"], {"y"})
    session.run({"x": np.ones((2, 3), np.int64)}, ["y"])
    assert isinstance(kept, DeviceTensor) and watched.inside == [1, 1]
    with BATCHES.closed():
        thread = threading.Thread(target=kept.host)
        thread.start()
        assert kept._held.copy is None
    thread.join()
    assert kept._held.copy is not None
    with _quiet(["CUDAExecutionProvider"]):
        assert OPENINGS._inside == 1
    assert OPENINGS._inside == BATCHES._inside == 0


def test_batches_of_other_models_wait_for_a_capture(tmp_path: Path, machine: Machine) -> None:
    """The double fails every other use of the GPU during a capture, and the capture with it."""
    other = GraphRuntime(tmp_path, models.double(), machine)
    beside = other.plain(other.open())
    session = GraphSession(GraphRuntime(tmp_path, models.double(), machine), "test")
    answers: list[Array] = []
    threads: list[threading.Thread] = []

    def run_beside(session: GpuSession) -> None:
        answers.extend(session.run({"x": floats(2, 4)}, ["y"]))

    def during_capture() -> None:
        threads.append(threading.Thread(target=run_beside, args=(beside,)))
        threads[-1].start()

    machine.during_capture = during_capture
    session.capture([{"x": (1, 4)}, {"x": (2, 4)}])
    for each in threads:
        each.join()
    assert len(machine.captures) == 2 and len(answers) == 2
    assert all(np.array_equal(found, 2 * floats(2, 4)) for found in answers)
    session.close()
    beside.close()


def test_a_capture_that_is_disturbed_is_a_load_that_failed(tmp_path: Path, machine: Machine) -> None:
    session = GraphSession(GraphRuntime(tmp_path, models.double(), machine), "test")

    def disturb() -> None:
        with pytest.raises(RuntimeError, match="CUDA failure 900"):
            machine.use()

    def during_capture() -> None:
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()

    machine.during_capture = during_capture
    with pytest.raises(LoadFailed, match="CUDA failure 900"):
        session.capture([{"x": (1, 4)}])
    session.close()


# Configurations -------------------------------------------------------------------------------------------------------


def loaded(root: Path, snippet: str, *, gpus: int = 2, shape: tuple[int, ...] = (-1, 4)) -> Any:
    """Return what a load returns on a machine with GPUs, and its backend."""
    write(root, Row("", snippet, WORKS))
    x, y = (TensorInfo(name=name, datatype="FP32", shape=shape) for name in "xy")
    backend = FakeBackend((x,), (y,), gpus=tuple(Gpu(number=number, capability="9.0") for number in range(gpus)))
    loading = Loading(LocalStore(root), "double", find_backend=lambda _: backend, cores=4, models=1)
    try:
        (version,) = load_model(loading).values()
    except LoadFailed as failure:
        return failure, backend
    return version, backend


BY_OPTION = accelerator("gpu", "cuda", option(GRAPH, "true"))
BY_FIELD = optimization("cuda { graphs: true }")


@pytest.mark.parametrize("asked", [BY_OPTION, BY_FIELD])
def test_each_instance_on_a_gpu_captures_its_graphs(tmp_path: Path, asked: str) -> None:
    version, backend = loaded(tmp_path, asked + group("kind: KIND_GPU") + group("kind: KIND_CPU"))
    assert isinstance(version, LoadedVersion), version
    assert [options.cuda_graphs for _, options in backend.opened] == [True, True, False]
    wanted = [{"x": (rows, 4)} for rows in (1, 2, 3, 4, 6, 8)]
    assert [session.captured for session in backend.sessions] == [wanted, wanted, []]


def test_on_the_cpu_graphs_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    version, backend = loaded(tmp_path, BY_FIELD + group("kind: KIND_CPU"))
    assert isinstance(version, LoadedVersion) and backend.sessions[0].captured == []
    assert caplog.text.count("optimization.cuda has no effect, because no instance runs on a GPU") == 1


@pytest.mark.parametrize(
    ("snippet", "field", "reason"),
    [
        (
            accelerator("gpu", "tensorrt", option("trt_cuda_graph_enable", "true")),
            "parameters['trt_cuda_graph_enable']",
            "would answer from the tensors of an earlier batch",
        ),
        (
            optimization(
                'cuda { graphs: true } execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } }'
            ),
            "optimization.cuda.graphs",
            "leave out the accelerator tensorrt",
        ),
        (
            BY_OPTION + 'parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "gpu:0" } }',
            "parameters['memory.enable_memory_arena_shrinkage']",
            "would take memory away from the graphs",
        ),
    ],
)
def test_what_does_not_go_with_graphs_is_refused(tmp_path: Path, snippet: str, field: str, reason: str) -> None:
    version, backend = loaded(tmp_path, snippet + group("kind: KIND_GPU"))
    assert isinstance(version, LoadFailed) and not backend.opened
    assert field in version.reason and reason in version.reason


def config(**more: Any) -> pb.ModelConfig:
    found = pb.ModelConfig(backend="onnxruntime", max_batch_size=4, **more)
    found.input.add(name="x", data_type=pb.TYPE_FP32, dims=[-1])
    found.input.add(name="mask", data_type=pb.TYPE_INT64, dims=[7])
    found.input.add(name="spare", data_type=pb.TYPE_INT64, dims=[-1], optional=True)
    found.optimization.cuda.graphs = True
    return found


def test_the_shapes_of_graph_spec_are_captured_once_each() -> None:
    asked = config()
    for rows, length in ((1, 16), (4, 16), (4, 32), (1, 16)):
        spec = asked.optimization.cuda.graph_spec.add(batch_size=rows)
        spec.input["x"].dim.append(length)
    wanted = [(1, 16), (4, 16), (4, 32)]
    assert graph_shapes(asked, "f") == [{"x": (rows, length), "mask": (rows, 7)} for rows, length in wanted]


def test_preferred_batch_sizes_are_captured_with_the_smallest_and_the_largest() -> None:
    asked = config()
    asked.input[0].dims[0] = 3
    asked.max_batch_size = 64
    asked.dynamic_batching.preferred_batch_size.extend([16, 32])
    assert [shapes["x"] for shapes in graph_shapes(asked, "f")] == [(1, 3), (16, 3), (32, 3), (64, 3)]
    asked.dynamic_batching.Clear()
    assert [shapes["x"][0] for shapes in graph_shapes(asked, "f")] == [1, 2, 3, 4, 6, 8, 12, 16, 64]
    asked.max_batch_size = 0
    assert graph_shapes(asked, "f") == [{"x": (3,), "mask": (7,)}]


def test_the_shape_of_the_model_counts_where_it_is_reshaped() -> None:
    asked = config()
    asked.input[0].dims[0] = 6
    asked.input[0].reshape.shape.extend([2, 3])
    assert graph_shapes(asked, "f")[0] == {"x": (1, 2, 3), "mask": (1, 7)}


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        (None, "optimization.cuda.graphs", "needs fixed shapes, and input 'x' has the dims [-1]"),
        ({"batch_size": 1}, "optimization.cuda.graph_spec[0]", "needs fixed shapes, and input 'x' has the dims [-1]"),
        ({}, "optimization.cuda.graph_spec[0].batch_size", "is missing"),
        ({"batch_size": 1, "mask": [8]}, "cuda.graph_spec[0].input['mask']", "[8] does not fit the dims [7]"),
        ({"batch_size": 2, "low": 1}, "optimization.cuda.graph_spec[0].graph_lower_bound", "is not supported"),
    ],
)
def test_shapes_that_do_not_follow_are_refused(spec: dict[str, Any] | None, field: str, reason: str) -> None:
    asked = config()
    if spec is not None:
        made = asked.optimization.cuda.graph_spec.add(batch_size=spec.get("batch_size", 0))
        if "mask" in spec:
            made.input["x"].dim.append(1)
            made.input["mask"].dim.extend(spec["mask"])
        if "low" in spec:
            made.graph_lower_bound.batch_size = spec["low"]
    with pytest.raises(ConfigInvalid) as refused:
        graph_shapes(asked, "f")
    assert field in refused.value.reason and reason in refused.value.reason


def test_more_graphs_than_an_instance_may_have_are_refused() -> None:
    asked = config()
    for length in range(1, MAX_GRAPHS + 2):
        asked.optimization.cuda.graph_spec.add(batch_size=1).input["x"].dim.append(length)
    with pytest.raises(ConfigInvalid, match=f"asks for {MAX_GRAPHS + 1} graphs, and an instance has at most"):
        graph_shapes(asked, "f")
