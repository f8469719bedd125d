"""Stands in for TensorRT's Python module, where there is no GPU, and is stricter than TensorRT.

A plan is a text that names one of the functions below, so that a context computes real results. Failures are reported
as TensorRT does: None or False, and a line to the logger. Whatever the documentation forbids, or this project has ruled
out, is entered in the `misuses` of the stand-in of CUDA and raised: a context that runs before its profile, its shapes
or its addresses are set, in another thread than the one that made it, or on the default stream; an engine that is
released before its contexts; a name that TensorRT 11 removed.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any

import numpy as np
from cuda.bindings.runtime import OK, cudaError_t, machine
from tensorrt_onnx import functions_of

MAGIC = b"stand-in plan\n"
# What TensorRT 11 removed, and what stands for it in 10 here.
REMOVED_IN_11 = {
    "device_memory_size": "device_memory_size_v2",
    "create_execution_context_without_device_memory": "create_execution_context",
}

Shape = tuple[int, ...]
Arrays = dict[str, "np.ndarray[Any, Any]"]


# --- The functions that plans name ----------------------------------------------------------------------------------


def _double_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {"y": shapes["x"]}


def _double(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] + inputs["x"]}


def _classify_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {"logits": (shapes["input_ids"][0], 25)}


def _classify(inputs: Arrays) -> Arrays:
    """logits[b, k] = k * (the sum of the row's ids where its mask is 1)."""
    sums = (inputs["input_ids"].astype(np.float32) * inputs["attention_mask"].astype(np.float32)).sum(1, keepdims=True)
    return {"logits": sums * np.arange(25, dtype=np.float32)}


def _tag_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {"logits": (*shapes["input_ids"], 25)}


def _tag(inputs: Arrays) -> Arrays:
    """logits[b, s, k] = k * (the id at that position where the mask is 1)."""
    ids = inputs["input_ids"].astype(np.float32) * inputs["attention_mask"].astype(np.float32)
    return {"logits": ids[..., None] * np.arange(25, dtype=np.float32)}


FUNCTIONS: dict[str, tuple[Callable[[Mapping[str, Shape]], dict[str, Shape]], Callable[[Arrays], Arrays]]] = {
    "double": (_double_shapes, _double),
    "classify": (_classify_shapes, _classify),
    "tag": (_tag_shapes, _tag),
}


def functions(plan: Mapping[str, Any]) -> Any:
    """Return the function of shapes and that of values of a plan."""
    return functions_of(plan["model"]) if plan["function"] == "onnx" else FUNCTIONS[plan["function"]]


def write_plan(
    function: str,
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    outputs: Mapping[str, tuple[str, Sequence[int]]],
    profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]],
    **more: Any,
) -> bytes:
    """Return the bytes of a plan.

    inputs, outputs: name -> (TensorRT's data type, shape). profiles: input -> [smallest, best, largest shape].
    more: `built_with`, `version_compatible`, `capability`, `context_bytes`, `shares_profiles`, `host_tensors`,
    `formats`, and what goes wrong: `no_context`, `no_execution`, `no_shapes`, `fails_on_gpu` and `odd_shapes`.
    """
    return (
        MAGIC
        + json.dumps(
            {"function": function, "inputs": inputs, "outputs": outputs, "profiles": profiles, **more}
        ).encode()
    )


# --- The API --------------------------------------------------------------------------------------------------------


class DataType(Enum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4 = range(10)


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(Enum):
    DEVICE, HOST = range(2)


class TensorFormat(Enum):
    LINEAR, CHW2, CHW4, CHW32 = range(4)


_NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "BF16": np.uint16,
    "INT64": np.int64,
}


class Dims:
    """A shape as TensorRT returns it: a sequence, and no tuple."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> int:
        return self._sizes[index]


class Severity(IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self) -> None:
        self._initialised = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    return True


class Runtime:
    """Loads plans. `version` is set by the face."""

    version = ""

    def __init__(self, logger: ILogger) -> None:
        if not getattr(logger, "_initialised", False):
            raise TypeError("ILogger.__init__ was not called")
        self.logger = logger
        self.engine_host_code_allowed = False
        self._engines = _Count()

    def deserialize_cuda_engine(self, serialized_engine: Any) -> "Engine | None":
        data = bytes(memoryview(serialized_engine))
        text = f"Loaded engine size: {len(data)} bytes"
        self.logger.log(Severity.INFO, text)
        device = machine.device()
        wrong = self._wrong(data)
        if not wrong and not machine.take(device, len(data)):
            wrong = "[defaultAllocator.cpp::allocate] Error Code 1: Cuda Runtime (out of memory)"
        if wrong:
            self.logger.log(Severity.ERROR, wrong)
            return None
        self._engines.value += 1
        machine.engines += 1
        return Engine(json.loads(data.removeprefix(MAGIC)), self.logger, device, len(data), self._engines, self.version)

    def _wrong(self, data: bytes) -> str:
        if not data.startswith(MAGIC):
            return "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (magicTag does not match)"
        plan = json.loads(data.removeprefix(MAGIC))
        built, compatible = plan.get("built_with", self.version), plan.get("version_compatible", False)
        newer = [int(part) for part in built.split(".")] > [int(part) for part in self.version.split(".")]
        if built != self.version and (not compatible or newer):
            return (
                "IRuntime::deserializeCudaEngine: Error Code 1: The engine plan file is not compatible with this "
                f"version of TensorRT, expecting library version {self.version} got {built}, please rebuild."
            )
        if compatible and not self.engine_host_code_allowed:
            return "IRuntime::deserializeCudaEngine: Error Code 3: the plan has host code, and it is not allowed"
        capability = plan.get("capability", "9.0")
        if capability != "{}.{}".format(*machine.capability):
            return f"The engine plan file is generated on an incompatible device, expecting compute {capability}"
        return ""

    def __del__(self) -> None:
        if getattr(self, "_engines", None) and self._engines.value:
            machine.misuses.append("a runtime is released before its engines")


class _Count:
    def __init__(self) -> None:
        self.value = 0


class Engine:
    """An ICudaEngine."""

    def __init__(
        self, plan: dict[str, Any], logger: ILogger, device: int, size_bytes: int, engines: _Count, version: str
    ) -> None:
        self._plan = plan
        self._logger = logger
        self._device = device
        self._size_bytes = size_bytes
        self._engines = engines
        self._version = version
        self._contexts = _Count()
        self._profiles_in_use: dict[int | None, int] = {}
        self._names = [*plan["inputs"], *plan["outputs"]]

    def __getattr__(self, name: str) -> Any:
        if name not in REMOVED_IN_11:
            raise AttributeError(name)
        if self._version.startswith("10."):
            return getattr(self, REMOVED_IN_11[name])
        machine.misuses.append(f"ICudaEngine.{name} is used, which TensorRT 11 removed")
        raise AttributeError(name)

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._plan["profiles"])

    @property
    def device_memory_size_v2(self) -> int:
        return int(self._plan.get("context_bytes", 4096))

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._plan["inputs"] else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._tensor(name)[0]]

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self._tensor(name)[1])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name in self._plan.get("host_tensors", ()) else TensorLocation.DEVICE

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self._plan.get("formats", {}).get(name, "LINEAR")]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        if name not in self._plan["inputs"]:
            raise machine.misuse(f"the profile of {name!r}, which is no input")
        return [Dims(shape) for shape in self._plan["profiles"][profile_index][name]]

    def create_execution_context(self) -> "Context | None":
        size_bytes = self.device_memory_size_v2
        if self._plan.get("no_context") or not machine.take(self._device, size_bytes):
            self._logger.log(Severity.ERROR, "IExecutionContext: Error Code 2: OutOfMemory (no memory for activations)")
            return None
        self._contexts.value += 1
        machine.contexts += 1
        return Context(self._plan, self._logger, self._device, self._contexts, self._profiles_in_use, size_bytes)

    def _tensor(self, name: str) -> Any:
        return self._plan["inputs"].get(name) or self._plan["outputs"][name]

    def __del__(self) -> None:
        if self._contexts.value:
            machine.misuses.append("an engine is released before its execution contexts")
        machine.take(self._device, -self._size_bytes)
        self._engines.value -= 1


class Context:
    """An IExecutionContext. It does not keep its engine, as the documentation leaves that to its user."""

    def __init__(
        self,
        plan: dict[str, Any],
        logger: ILogger,
        device: int,
        contexts: _Count,
        profiles_in_use: dict[int | None, int],
        size_bytes: int,
    ) -> None:
        self._plan = plan
        self._logger = logger
        self._device = device
        self._contexts = contexts
        self._in_use = profiles_in_use
        self._size_bytes = size_bytes
        self._thread = threading.get_ident()
        self._profile: int | None = None
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._check_thread()
        self._stream(stream_handle)
        if not 0 <= profile_index < len(self._plan["profiles"]):
            return self._failed(f"setOptimizationProfileAsync: profile {profile_index} does not exist")
        if not self._plan.get("shares_profiles", True) and self._in_use.get(profile_index, id(self)) != id(self):
            return self._failed(f"setOptimizationProfileAsync: profile {profile_index} is in use by another context")
        self._leave_profile()
        self._in_use[profile_index] = id(self)
        self._profile = profile_index
        self._shapes.clear()
        self._addresses.clear()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._check_thread()
        if self._profile is None:
            raise machine.misuse("an input shape is set before an optimisation profile")
        if name not in self._plan["inputs"]:
            return self._failed(f"setInputShape: {name} is not an input")
        low, _, high = self._plan["profiles"][self._profile][name]
        sizes = tuple(shape)
        if len(sizes) != len(low) or not all(a <= b <= c for a, b, c in zip(low, sizes, high, strict=True)):
            return self._failed(
                f"IExecutionContext::setInputShape: Error Code 3: supplied dims {list(sizes)} for {name} do not "
                f"satisfy profile {self._profile}"
            )
        self._shapes[name] = sizes
        return True

    def infer_shapes(self) -> list[str]:
        self._check_thread()
        missing = [name for name in self._plan["inputs"] if name not in self._shapes]
        if not missing and self._plan.get("no_shapes"):
            raise RuntimeError(self._plan["no_shapes"])
        return missing

    def get_tensor_shape(self, name: str) -> Dims:
        self._check_thread()
        if name in self._plan["inputs"]:
            return Dims(self._shapes.get(name, self._plan["inputs"][name][1]))
        if self.infer_shapes() or self._plan.get("odd_shapes"):
            return Dims(self._plan["outputs"][name][1])
        return Dims(functions(self._plan)[0](self._shapes)[name])

    def get_max_output_size(self, name: str) -> int:
        self._check_thread()
        if self._profile is None or self.infer_shapes():
            return -1
        largest = {each: tuple(spans[2]) for each, spans in self._plan["profiles"][self._profile].items()}
        return self._bytes(name, functions(self._plan)[0](largest)[name])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._check_thread()
        if name not in self._plan["inputs"] and name not in self._plan["outputs"]:
            return self._failed(f"setTensorAddress: {name} is no tensor")
        if type(memory) is not int:
            raise TypeError("memory must be an int")
        machine.device_bytes(memory, 1, self._device)
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        self._check_thread()
        stream = self._stream(stream_handle)
        if self._profile is None or self.infer_shapes():
            raise machine.misuse("a context is executed before its shapes are set")
        names = (*self._plan["inputs"], *self._plan["outputs"])
        if missing := [name for name in names if name not in self._addresses]:
            raise machine.misuse(f"a context is executed without an address of {missing[0]!r}")
        if text := self._plan.get("no_execution"):
            return self._failed(text)
        shapes_of, compute = functions(self._plan)
        shapes = {**self._shapes, **shapes_of(self._shapes)}
        memory = {
            name: machine.device_bytes(self._addresses[name], self._bytes(name, shapes[name]), self._device)
            for name in names
        }

        def kernel() -> cudaError_t:
            if self._plan.get("fails_on_gpu"):
                return cudaError_t.cudaErrorLaunchFailure
            arrays = {
                name: memory[name].view(_NUMPY[kind]).reshape(shapes[name])
                for name, (kind, _) in self._plan["inputs"].items()
            }
            for name, result in compute(arrays).items():
                kind = self._plan["outputs"][name][0]
                memory[name][:] = np.frombuffer(result.astype(_NUMPY[kind]).tobytes(), np.uint8)
            return OK

        stream.work.append(kernel)
        machine.executed.append((self._thread, self._profile))
        return True

    def _bytes(self, name: str, shape: Shape) -> int:
        kind = (self._plan["inputs"].get(name) or self._plan["outputs"][name])[0]
        return int(np.prod(shape, dtype=np.int64)) * np.dtype(_NUMPY[kind]).itemsize

    def _stream(self, handle: int) -> Any:
        if type(handle) is not int:
            raise TypeError("stream_handle must be an int")
        return machine.stream(handle)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise machine.misuse("an execution context is used in another thread than the one that made it")

    def _leave_profile(self) -> None:
        if self._in_use.get(self._profile) == id(self):
            del self._in_use[self._profile]

    def _failed(self, text: str) -> bool:
        self._logger.log(Severity.ERROR, text)
        return False

    def __del__(self) -> None:
        self._leave_profile()
        machine.take(self._device, -self._size_bytes)
        self._contexts.value -= 1
        if threading.get_ident() != self._thread:
            machine.misuses.append("an execution context is released in another thread than the one that made it")


def face(version: str) -> dict[str, Any]:
    """Return the names of one version of the module."""
    from tensorrt_builder import builder_names

    runtime = type("Runtime", (Runtime,), {"version": version})
    return {
        **builder_names(version),
        "__version__": version,
        "DataType": DataType,
        "Dims": Dims,
        "ILogger": ILogger,
        "Runtime": runtime,
        "TensorFormat": TensorFormat,
        "TensorIOMode": TensorIOMode,
        "TensorLocation": TensorLocation,
        "init_libnvinfer_plugins": init_libnvinfer_plugins,
    }
