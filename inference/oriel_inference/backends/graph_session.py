"""Sessions whose batches of known shapes run as CUDA graphs: the GPU is given all kernels of a batch by one call.

ONNX Runtime's documented rules, and what follows here:

- A graph reads and writes the addresses that it was captured with. So each graph has inputs and outputs of its own in
  the memory of the GPU, which stay bound; a batch is copied into them and out of them.
- The run option `gpu_graph_id` chooses the graph, one for each shape, and the first run with a new id captures it. Runs
  with the id -1 use none: so run batches of other shapes.
- A model of which a part runs on the CPU, or with control flow, is refused when the session is opened.

Its source adds (1.31): a graph belongs to the thread that captured it, so a session has a thread of its
own; and a capture excludes all other work of CUDA in the process, see `gpu_work`. An input that the model reads on the
CPU would keep the value of the capture: such inputs are refused, and each graph is compared with a run without it
before the model serves.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np

from oriel_inference.backends import Session, without_folders
from oriel_inference.backends.device_tensor import Value
from oriel_inference.backends.gpu_work import BATCHES, DRAIN_S, capturing, opened_in
from oriel_inference.errors import BackendFailed, InferenceError, LoadFailed
from oriel_policies.artefacts.comparison import disagreement
from oriel_policies.artefacts.differences import measure_all
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array

GRAPH_ID = "gpu_graph_id"
WITHOUT_GRAPH = "-1"
SEED = 20_240_117
_UNUSABLE = ("BYTES", "BF16")
# Kernels may sum in another order from run to run. A graph that answers with old values is far outside of this.
_PRECISION = "FP16"

Shapes = Mapping[str, tuple[int, ...]]
_Key = tuple[tuple[tuple[int, ...], "np.dtype[Any]"], ...]


class Runtime(Protocol):
    """ONNX Runtime, as far as one session needs it.

    open: the session.
    plain: makes a session of ours of it, whose runs use no graph.
    settings: returns the options of the runs with a graph. identity: the number of the graph, from 1.
    value: returns a new tensor in the memory of the GPU.
    """

    def open(self) -> Any: ...

    def plain(self, session: Any) -> Session: ...

    def settings(self, identity: int) -> Any: ...

    def value(self, shape: Sequence[int], dtype: "np.dtype[Any]") -> Value: ...


class GraphSession(Session):
    """A session with graphs, in a thread of its own. A batch of a shape without a graph runs as it would without them.

    drain_s: seconds that batches of other sessions may take to end before a capture. No other batch begins meanwhile.
    Raises LoadFailed, and has then released everything.
    """

    def __init__(self, runtime: Runtime, name: str, *, drain_s: float = DRAIN_S) -> None:
        self._runtime = runtime
        self._drain_s = drain_s
        self._graphs: dict[_Key, _Graph] = {}
        self._identities = count(1)  # 0 is for ONNX Runtime itself
        self._thread = ThreadPoolExecutor(1, f"oriel-graphs-{name}")
        self._session, self._plain = opened_in(self._thread, partial(_opened, runtime))
        plain = self._plain
        self.provider, self.inputs, self.outputs = plain.provider, plain.inputs, plain.outputs
        self._required = [info for info in self.inputs if not info.optional]

    def capture(self, shapes: Sequence[Shapes]) -> None:
        """Capture a graph for each of these shapes of all required inputs, and compare its outputs with those of a run
        without it; blocks. Raises LoadFailed.
        """
        for info in (*self._required, *self.outputs):
            if info.datatype in _UNUSABLE:
                reason = f"tensor {info.name[:64]!r} is {info.datatype}, which a graph cannot hold"
                raise LoadFailed(f"no CUDA graph: {reason}")
        for info, memory in zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True):
            if memory.name.lower().startswith("cpu") or "pinned" in memory.name.lower():
                reason = "is read on the CPU, and a graph would always use its first value"
                raise LoadFailed(f"no CUDA graph: input {info.name[:64]!r} {reason}")
        for each in shapes:
            if wrong := self._thread.submit(self._capture, each).result():
                shown = ", ".join(f"{name} {list(shape)}" for name, shape in each.items())[:200]
                raise LoadFailed(f"no CUDA graph for {shown}: {wrong}")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; see `Session`."""
        return self._thread.submit(self._run, inputs, outputs).result()

    def close(self) -> None:
        """Release the graphs with their memory, and the session."""
        self._thread.submit(self._free).result()
        self._thread.shutdown()

    # In the thread of the session -----------------------------------------------------------------------------------

    def _run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        graph = self._graphs.get(self._key(inputs)) if len(inputs) == len(self._required) else None
        if graph is None:
            return self._plain.run(inputs, outputs)
        with BATCHES.entered():
            return graph.run(inputs, outputs)

    def _key(self, inputs: Mapping[str, Array]) -> _Key:
        """Return shapes and types of a batch. `update_inplace` compares only the number of elements."""
        return tuple([(inputs[info.name].shape, inputs[info.name].dtype) for info in self._required])

    def _capture(self, shapes: Shapes) -> str:
        """Return why there is no graph, "" if there is one. An error that is kept would keep the graph's memory."""
        names = [info.name for info in self.outputs]
        zeros = {info.name: np.zeros(shapes[info.name], DATATYPES[info.datatype].dtype) for info in self._required}
        others = {info.name: _other_values(zeros[info.name]) for info in self._required}
        try:
            # Without a graph first, which takes memory and chooses kernels while other models go on.
            made, expected = self._plain.run(zeros, names), self._plain.run(others, names)
            with BATCHES.entered():
                graph = self._new_graph(zeros, dict(zip(names, made, strict=True)))
            with capturing(self._drain_s):
                graph.run(zeros, names)
            with BATCHES.entered():
                found = graph.run(others, names)
        except InferenceError as error:
            return error.detail or error.message
        except TimeoutError:
            return f"batches of other models on the GPUs did not end within {self._drain_s:g} s, so try again"
        outputs = [(info.name, info.datatype) for info in self.outputs]
        if difference := disagreement(measure_all(outputs, [(found, expected)], _PRECISION)):
            return f"its outputs differ from those of a run without it: {difference}"
        self._graphs[self._key(zeros)] = graph
        return ""

    def _new_graph(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> "_Graph":
        """Return a graph with memory for tensors like these. Raises BackendFailed."""
        try:
            return _Graph(
                self._session,
                self._runtime.settings(next(self._identities)),
                {name: self._runtime.value(array.shape, array.dtype) for name, array in inputs.items()},
                {name: self._runtime.value(array.shape, array.dtype) for name, array in outputs.items()},
            )
        except Exception as error:
            # ONNX Runtime's exceptions have no common base class below Exception.
            detail = without_folders(str(error))[:300]
            raise BackendFailed("the GPU has no memory for a CUDA graph", detail) from error

    def _free(self) -> None:
        self._graphs.clear()
        self._session = None
        self._plain.close()


class _Graph:
    """One graph, with its inputs and outputs in the memory of the GPU. Its first run captures it."""

    def __init__(self, session: Any, settings: Any, inputs: Mapping[str, Value], outputs: Mapping[str, Value]) -> None:
        self._session = session
        self._settings = settings
        self._inputs = inputs
        self._outputs = outputs
        self._binding = session.io_binding()
        for name, value in inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Replay the graph. inputs: arrays of its shapes and types. Raises BackendFailed."""
        try:
            for name, value in self._inputs.items():
                value.update_inplace(inputs[name])
            self._session.run_with_iobinding(self._binding, self._settings)
            return [self._outputs[name].numpy() for name in outputs]
        except Exception as error:
            # ONNX Runtime's exceptions have no common base class below Exception.
            detail = without_folders(str(error))[:300]
            raise BackendFailed("the model could not be executed as a CUDA graph", detail) from error


def _opened(runtime: Runtime) -> tuple[Any, Session]:
    session = runtime.open()
    return session, runtime.plain(session)


def _other_values(zeros: Array) -> Array:
    """Return values that differ from zeros everywhere and that most models take: ones, and random numbers."""
    if zeros.dtype.kind != "f":
        return np.ones_like(zeros)
    return np.asarray(np.random.default_rng(SEED).standard_normal(zeros.shape), zeros.dtype)
