"""A double of ONNX Runtime with CUDA graphs. It computes real results on the CPU, and is strict about what graphs
demand.

What it keeps from the documentation and the source of ONNX Runtime 1.31: the first run with a new `gpu_graph_id`
captures; a graph reads and writes the tensors that were bound at its capture, whatever is bound later; it belongs to
the thread that captured it; while one is captured, every other use of the GPU fails and breaks it.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from onnx import save_model

from oriel_inference.backends.gpu_work import BATCHES
from oriel_inference.backends.graph_session import GRAPH_ID, WITHOUT_GRAPH
from oriel_inference.backends.onnx_runtime import GpuSession, open_session, session_settings
from oriel_inference.model import EngineOptions
from oriel_wire.v2.messages import Array

OPTIONS = EngineOptions(intra_op_threads=1)
BROKEN = "CUDA failure 900: operation not permitted when stream is capturing"


class Machine:
    """The GPU of a test.

    captures: (thread, graph) of each capture. replays: graphs in the order of their runs.
    alive: how many tensors are in its memory. room: how many there may be.
    during_capture: called inside of each capture.
    """

    def __init__(self) -> None:
        self.captures: list[tuple[int, str]] = []
        self.replays: list[str] = []
        self.alive = 0
        self.room = 1000
        self.during_capture: Callable[[], None] = lambda: None
        self._capturing: int | None = None
        self._broken = False

    def use(self) -> None:
        """Do something on the GPU in this thread."""
        assert BATCHES._inside or BATCHES._is_closed, "the GPU is used outside of the gates"
        if self._capturing not in (None, threading.get_ident()):
            self._broken = True
            raise RuntimeError(BROKEN)

    def capture(self, identity: str) -> None:
        self.use()
        self._capturing, self._broken = threading.get_ident(), False
        try:
            self.during_capture()
        finally:
            self._capturing = None
        if self._broken:
            raise RuntimeError(BROKEN)
        self.captures.append((threading.get_ident(), identity))


class DeviceValue:
    """A tensor in the memory of the GPU."""

    def __init__(self, machine: Machine, shape: Sequence[int], dtype: "np.dtype[Any]") -> None:
        machine.use()
        if machine.alive >= machine.room:
            raise RuntimeError("Failed to allocate memory for requested buffer")
        machine.alive += 1
        self._machine = machine
        self.array = np.full(shape, 99, dtype)

    def __del__(self) -> None:
        if hasattr(self, "array"):
            self._machine.alive -= 1

    def update_inplace(self, data: Array) -> None:
        self._machine.use()
        if data.size != self.array.size:
            raise RuntimeError("The input size of numpy arrays does not match the size of the OrtValue.")
        self.array[...] = data.reshape(self.array.shape)

    def numpy(self) -> Array:
        self._machine.use()
        return self.array.copy()


class Binding:
    def __init__(self) -> None:
        self.inputs: dict[str, DeviceValue] = {}
        self.outputs: dict[str, DeviceValue] = {}

    def bind_ortvalue_input(self, name: str, value: DeviceValue) -> None:
        self.inputs[name] = value

    def bind_ortvalue_output(self, name: str, value: DeviceValue) -> None:
        self.outputs[name] = value


class CapturingInference:
    """An `InferenceSession` with the option `enable_cuda_graph`.

    on_host: inputs that the model reads on the CPU: a graph keeps their values. shows_memory: whether it says so.
    broken_graph: added to what graphs compute.
    """

    def __init__(self, session: Any, machine: Machine) -> None:
        self._session = session
        self._machine = machine
        self._graphs: dict[tuple[int, str], tuple[Binding, dict[str, Array]]] = {}
        self.on_host: tuple[str, ...] = ()
        self.shows_memory = True
        self.broken_graph = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get_input_memory_infos(self) -> list[Any]:
        on_cpu = self.on_host if self.shows_memory else ()
        return [SimpleNamespace(name="Cpu" if each.name in on_cpu else "Cuda") for each in self.get_inputs()]

    def run(self, outputs: Sequence[str], inputs: Any, settings: Any) -> list[Array]:
        self._machine.use()
        assert settings.get_run_config_entry(GRAPH_ID) == WITHOUT_GRAPH, "a graph would read another batch's tensors"
        found: list[Array] = self._session.run(outputs, inputs)
        return found

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding, settings: Any) -> None:
        self._machine.use()
        identity = settings.get_run_config_entry(GRAPH_ID)
        assert int(identity) > 0, "0 is for ONNX Runtime itself"
        key = (threading.get_ident(), identity)
        if key not in self._graphs:
            assert not any(known == identity for _, known in self._graphs), "a graph is replayed by another thread"
            self._machine.capture(identity)
            self._graphs[key] = (binding, {name: binding.inputs[name].array.copy() for name in self.on_host})
        self._machine.replays.append(identity)
        bound, baked = self._graphs[key]
        inputs = {name: baked.get(name, value.array) for name, value in bound.inputs.items()}
        outputs = self._session.run(list(bound.outputs), inputs)
        for value, made in zip(bound.outputs.values(), outputs, strict=True):
            if made.shape == value.array.shape:  # a graph always writes the shape of its capture
                value.array[...] = made + np.asarray(self.broken_graph, made.dtype)


class GraphRuntime:
    """ONNX Runtime, for `GraphSession`. The attributes are those of the session that it opens."""

    def __init__(self, folder: Path, model: Any, machine: Machine) -> None:
        self._path = folder / "graphs.onnx"
        save_model(model, str(self._path))
        self.machine = machine
        self.on_host: tuple[str, ...] = ()
        self.shows_memory = True
        self.broken_graph = 0

    def open(self) -> CapturingInference:
        found = CapturingInference(open_session(self._path, session_settings(OPTIONS), OPTIONS), self.machine)
        found.on_host, found.shows_memory, found.broken_graph = self.on_host, self.shows_memory, self.broken_graph
        return found

    def plain(self, session: Any) -> GpuSession:
        return GpuSession(session, EngineOptions(run_entries={GRAPH_ID: WITHOUT_GRAPH}), ("cuda", 0))

    def settings(self, identity: int) -> Any:
        entries = {GRAPH_ID: str(identity)}
        return SimpleNamespace(get_run_config_entry=entries.__getitem__)

    def value(self, shape: Sequence[int], dtype: "np.dtype[Any]") -> DeviceValue:
        return DeviceValue(self.machine, shape, dtype)
