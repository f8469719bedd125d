"""Runs ONNX models with ONNX Runtime, on the CPU and with the execution providers that a configuration names.

The requested providers are verified after loading: ONNX Runtime falls back to its CPU provider without an error, and a
deployment that is meant to run elsewhere would never notice.
"""

import contextlib
import ctypes
import logging
import re
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from oriel_inference.backends import Backend, Session, without_folders
from oriel_inference.backends.cuda import list_gpus
from oriel_inference.backends.device_tensor import DeviceTensor, Memory, Value, on_host
from oriel_inference.backends.gpu_work import BATCHES, OPENINGS
from oriel_inference.backends.graph_session import GRAPH_ID, WITHOUT_GRAPH, GraphSession
from oriel_inference.backends.providers import CUDA, TENSORRT, missing, prepare, verify
from oriel_inference.errors import BackendFailed, InvalidRequest, LoadFailed
from oriel_inference.model import EngineOptions, Gpu, TensorInfo
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
# y = Identity(x), opset 17. Opening a session on it shows whether a provider starts.
_TINY = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a02"
    "0801620f0a0179120a0a08080112040a02080142040a001011"
)
_REFUSALS = (ort.capi.onnxruntime_pybind11_state.InvalidArgument,)
_SEVERITY_ERROR = 3
# ONNX Runtime would print every failed run on standard error. The exceptions say what failed, and the batcher logs
# them.
_SEVERITY_FATAL = 4
_ONNX_BFLOAT16 = 16
_PREFIX = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")

_alone, _asking = threading.Lock(), threading.Lock()

_log = logging.getLogger(__name__)


class OnnxRuntime(Backend):
    """Opens `.onnx` files."""

    name = "onnxruntime"

    def open(self, path: Path, options: EngineOptions) -> Session:
        memory = _gpu_memory(options)
        if memory is None:
            return OnnxRuntimeSession(open_session(path, session_settings(options), options), options)
        if options.cuda_graphs:
            return GraphSession(_GraphRuntime(path, options, memory), f"gpu{memory[1]}")
        return GpuSession(open_session(path, session_settings(options), options), options, memory)

    def gpus(self) -> Sequence[Gpu]:
        return _gpus()

    def lacks(self, provider: str) -> str:
        return missing(provider)


class OnnxRuntimeSession(Session):
    """One `InferenceSession`; ONNX Runtime allows concurrent runs."""

    def __init__(self, session: Any, options: EngineOptions) -> None:
        self._session = session
        # The library's own `run` also looks for missing inputs and for values of other sessions, which takes as long as
        # a tiny model. Values of other sessions are never given, and inputs are looked for where some are left out.
        self._run = (session._sess if type(session) is ort.InferenceSession else session).run
        self._settings = _run_settings(options.run_entries)
        self.provider = session.get_providers()[0]
        defaults = [node for node in session.get_overridable_initializers() if node.type in _DATATYPES]
        self.inputs = (
            *(_info(node) for node in session.get_inputs()),
            *(replace(_info(node), optional=True) for node in defaults),
        )
        self.outputs = tuple(_info(node) for node in session.get_outputs())
        self._text_inputs = frozenset(info.name for info in self.inputs if info.datatype == "BYTES")
        self._text_outputs = any(info.datatype == "BYTES" for info in self.outputs)
        self._brain_floats = frozenset(info.name for info in (*self.inputs, *self.outputs) if info.datatype == "BF16")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        if self._text_inputs:
            inputs = {name: _to_text(a, name) if name in self._text_inputs else a for name, a in inputs.items()}
        try:
            results: list[Array]
            if self._brain_floats:
                results = self._run_values(inputs, outputs)
            else:
                run = self._run if len(inputs) == len(self.inputs) else self._session.run
                results = run(outputs, inputs, self._settings)
        except _REFUSALS as error:
            raise InvalidRequest(f"the model refuses the inputs{_for_clients(error)}", _plain(error)) from error
        except Exception as error:
            # ONNX Runtime's exceptions have no common base class below Exception.
            raise BackendFailed(f"the model could not be executed{_for_clients(error)}", _plain(error)) from error
        return [_from_text(array) for array in results] if self._text_outputs else results

    def _run_values(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run a model that uses BF16. numpy has no BF16, so the bits travel as uint16 in values that carry ONNX's own
        type.
        """
        values = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _ONNX_BFLOAT16)
            if name in self._brain_floats
            else ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in inputs.items()
        }
        results = self._session.run_with_ort_values(outputs, values, self._settings)
        return [
            _bits(value) if name in self._brain_floats else value.numpy()
            for name, value in zip(outputs, results, strict=True)
        ]

    def close(self) -> None:
        self._session = self._run = None


class GpuSession(OnnxRuntimeSession):
    """A session on a GPU, whose inputs and outputs may stay in the memory of the GPU.

    `run` is that of any session: ONNX Runtime copies inputs and outputs inside of the run and without the interpreter's
    lock, which it keeps while it copies arrays that are bound.
    memory: the allocator of the GPU; None if the model has tensors of a type that numpy does not have, which always go
    to the host.
    """

    def __init__(self, session: Any, options: EngineOptions, memory: Memory) -> None:
        super().__init__(session, options)
        self._dtypes = {info.name: DATATYPES[info.datatype].dtype for info in self.outputs}
        self.memory = None if self._text_inputs or self._text_outputs or self._brain_floats else memory
        self._warned = False

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        with BATCHES.entered():
            return super().run(inputs, outputs)

    def run_resident(self, inputs: Mapping[str, Array], outputs: Sequence[str], kept: Collection[str]) -> list[Array]:
        """Do what `run` does, with some inputs and outputs in the memory of the GPU; see `Session`.

        A bound run does not say whether the caller or the server is to blame for a failure, and `run` does. So a batch
        that fails runs again with arrays of the host, which succeeds if only the binding was at fault, or if the memory
        of the GPU could not hold the outputs for longer than one run.
        """
        assert self.memory is not None
        if kept or any(isinstance(array, DeviceTensor) for array in inputs.values()):
            try:
                with BATCHES.entered():
                    return _run_bound(self._session, self._settings, inputs, outputs, kept, self.memory, self._dtypes)
            except Exception as error:
                # ONNX Runtime's exceptions have no common base class below Exception.
                if not self._warned:
                    self._warned = True
                    _log.warning("a batch failed on GPU tensors and is run again from host memory: %s", _plain(error))
        return self.run({name: on_host(array) for name, array in inputs.items()}, outputs)

    def close(self) -> None:
        with BATCHES.entered():
            super().close()


def _run_bound(
    session: Any,
    settings: Any,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    kept: Collection[str],
    memory: Memory,
    dtypes: Mapping[str, "np.dtype[Any]"],
) -> list[Array]:
    """Execute one batch of an `InferenceSession`; blocks until the device is done.

    settings: ONNX Runtime's options of the run, or None.
    inputs: arrays, or tensors in `memory` that are usable there. ONNX Runtime copies arrays to the device when they are
    bound, and keeps the interpreter's lock meanwhile.
    kept: the outputs that stay in `memory`; ONNX Runtime copies the others to the host inside of the run.
    dtypes: the types of the outputs.
    Raises ONNX Runtime's exceptions as they are: RuntimeError for whatever fails in the run.
    """
    name, number = memory
    binding = session.io_binding()
    for key, array in inputs.items():
        if isinstance(array, DeviceTensor):
            binding.bind_input(key, name, number, array.dtype.type, array.shape, array.address)
        else:
            binding.bind_cpu_input(key, array)
    for key in outputs:
        if key in kept:
            binding.bind_output(key, name, number)
        else:
            binding.bind_output(key)
    # The run option `disable_synchronize_execution_providers` is never set here. So the run ends when the device is
    # done, and a session with another stream may read the outputs.
    session.run_with_iobinding(binding, settings)
    found: list[Any] = []
    for key, value in zip(outputs, binding.get_outputs(), strict=True):
        # Where the device has no memory of its own, ONNX Runtime answers a request for it with an output on the host.
        if key in kept and value.device_name() == name:
            found.append(DeviceTensor.of(value, memory, dtypes[key], value.shape(), session))
        else:
            found.append(value.numpy())
    return found


class _GraphRuntime:
    """See `Runtime`."""

    def __init__(self, path: Path, options: EngineOptions, memory: Memory) -> None:
        self._path = path
        self._options = options
        self._memory = memory

    def open(self) -> Any:
        return open_session(self._path, session_settings(self._options), self._options)

    def plain(self, session: Any) -> Session:
        options = replace(self._options, run_entries={**self._options.run_entries, GRAPH_ID: WITHOUT_GRAPH})
        return GpuSession(session, options, self._memory)

    def settings(self, identity: int) -> Any:
        return _run_settings({**self._options.run_entries, GRAPH_ID: str(identity)})

    def value(self, shape: Sequence[int], dtype: "np.dtype[Any]") -> Value:
        name, number = self._memory
        found: Value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype.type, name, number)
        return found


def session_settings(options: EngineOptions) -> Any:
    """Return ONNX Runtime's options of a session, without its providers. Raises LoadFailed."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.intra_op_threads
    settings.inter_op_num_threads = options.inter_op_threads
    settings.graph_optimization_level = _GRAPH_LEVELS.get(options.graph_level, _GRAPH_LEVELS[0])
    settings.log_severity_level = _SEVERITY_FATAL
    settings.enable_cpu_mem_arena = options.memory_arena
    settings.enable_mem_pattern = options.memory_pattern
    if options.parallel_execution:
        settings.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # Threads that spin between batches take the cores that other models and the loop need.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    for key, value in options.session_entries.items():
        settings.add_session_config_entry(key, value)
    for library in options.operators:
        try:
            settings.register_custom_ops_library(library)
        except Exception as error:
            # ONNX Runtime's exceptions have no common base class below Exception.
            raise LoadFailed(
                f"ONNX Runtime cannot use the operators of {Path(library).name}: {_plain(error)}"
            ) from error
    return settings


def open_session(path: Path, settings: Any, options: EngineOptions) -> Any:
    """Open a session that is known to use the requested providers. Raises LoadFailed."""
    names = [name for name, _ in options.providers]
    providers = prepare(settings, options.providers)
    try:
        with _quiet(names):
            session = ort.InferenceSession(str(path), settings, providers=providers)
    except Exception as error:
        # ONNX Runtime's exceptions have no common base class below Exception.
        raise LoadFailed(f"ONNX Runtime cannot load {path.name}: {_plain(error)}") from error
    session.disable_fallback()
    verify(session, names)
    return session


@contextlib.contextmanager
def _quiet(names: Sequence[str]) -> Iterator[None]:
    """Silence ONNX Runtime while it tries providers: it warns and prints on standard output when a provider fails,
    before it falls back. This server reports the failure instead.

    Logging level and standard output belong to the whole process, so only one thread at a time may silence them.
    Sessions on the CPU never fall back and need not wait. Nor is a session opened on a GPU while a graph is captured.
    """
    if not names:
        yield
        return
    gate = OPENINGS.entered() if CUDA in names or TENSORRT in names else contextlib.nullcontext()
    with gate, _alone, warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        yield


def _gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that sessions run on. They are tried once per process, however many models are being loaded."""
    with _asking:
        return _tried_gpus()


@cache
def _tried_gpus() -> tuple[Gpu, ...]:
    """Try every GPU: one counts if a session really opens on it."""
    if CUDA not in ort.get_available_providers():
        return ()
    found = []
    for gpu in list_gpus():
        settings = ort.SessionOptions()
        settings.log_severity_level = _SEVERITY_ERROR
        providers = prepare(settings, [(CUDA, {"device_id": str(gpu.number)})])
        try:
            with _quiet([CUDA]):
                verify(ort.InferenceSession(_TINY, settings, providers=providers), [CUDA])
        except Exception as error:
            # ONNX Runtime's exceptions have no common base class below Exception.
            _log.warning("GPU %d cannot be used: %s", gpu.number, _plain(error))
        else:
            found.append(gpu)
    return tuple(found)


def _gpu_memory(options: EngineOptions) -> Memory | None:
    """Return the memory of the GPU that the first provider runs on; None if it runs on none."""
    name, given = options.providers[0] if options.providers else ("", {})
    return ("cuda", int(given.get("device_id", "0"))) if name in (CUDA, TENSORRT) else None


def _run_settings(entries: Mapping[str, str]) -> Any:
    """Return the options of a run; None, which costs nothing, if there are none."""
    if not entries:
        return None
    settings = ort.RunOptions()
    for key, value in entries.items():
        settings.add_run_config_entry(key, value)
    return settings


def _info(node: Any) -> TensorInfo:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise LoadFailed(f"tensor {node.name[:128]!r} has type {node.type}, which the v2 protocol cannot carry here")
    # The dimension is variable: a name or None.
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
    return TensorInfo(name=node.name, datatype=datatype, shape=shape)


def _to_text(array: Array, name: str) -> Array:
    texts = np.empty(array.size, dtype=object)
    try:
        texts[:] = [element.decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {name[:64]!r} holds bytes that are not UTF-8 text") from error
    return texts.reshape(array.shape)


def _from_text(array: Array) -> Array:
    if array.dtype.kind not in "OU":
        return array
    data = np.empty(array.size, dtype=object)
    data[:] = [str(element).encode() for element in array.flat]
    return data.reshape(array.shape)


def _bits(value: Any) -> Array:
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(data, np.uint16).reshape(value.shape())


def _plain(error: Exception) -> str:
    """Return the error text of the runtime without its prefix, its line breaks and the folders of this machine."""
    text = _PREFIX.sub("", str(error)).rpartition("Status Message: ")[2]
    return without_folders(text)[:300]


def _for_clients(error: Exception) -> str:
    """Return the same text for clients; a general one if it is about the internals of the runtime, which only the log
    shows.
    """
    text = _plain(error)
    return "" if "::" in text else f": {text}"
