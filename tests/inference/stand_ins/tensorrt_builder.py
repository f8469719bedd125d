"""The builder of the stand-in of TensorRT: it makes plans that run the ONNX file they were made from.

Strict as the rest: a network is built only if a parser has read it, every input with a variable shape needs shapes in
every profile, and what TensorRT 11 removed is not there.
"""

import base64
import threading
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from cuda.bindings.runtime import machine
from onnx.external_data_helper import load_external_data_for_model
from tensorrt_stand_in import Dims, ILogger, Severity, write_plan

_KINDS = {"tensor(float)": "FLOAT", "tensor(int64)": "INT64", "tensor(int32)": "INT32"}


class MemoryPoolType(Enum):
    WORKSPACE, TACTIC_SHARED_MEMORY = range(2)


class BuilderFlag10(Enum):
    FP16, TF32 = range(2)


class BuilderFlag11(Enum):
    TF32 = 1


class HostMemory(bytes):
    """Bytes that TensorRT owns."""


class Tensor:
    def __init__(self, name: str, kind: str, shape: Sequence[int]) -> None:
        self.name, self.kind, self.shape = name, kind, Dims(shape)


class Network:
    def __init__(self, builder: "Builder") -> None:
        self.builder = builder
        self.model = b""
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]


class OnnxParser:
    def __init__(self, network: Network, logger: ILogger) -> None:
        self._network = network
        self._errors: list[str] = []

    def parse(self, model: Any, path: str | None = None) -> bool:
        data = bytes(memoryview(model))
        try:
            loaded = onnx.load_model_from_string(data)
            if path is not None:
                load_external_data_for_model(loaded, str(Path(path).parent))
                data = loaded.SerializeToString()
            session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        except Exception as error:
            self._errors.append(f"In node -1 (importModel): INVALID_GRAPH: {type(error).__name__}")
            return False
        network = self._network
        network.model = data
        network.inputs = [_tensor(each) for each in session.get_inputs()]
        network.outputs = [_tensor(each) for each in session.get_outputs()]
        return True

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> str:
        return self._errors[index]


def _tensor(node: Any) -> Tensor:
    return Tensor(node.name, _KINDS[node.type], [dim if isinstance(dim, int) else -1 for dim in node.shape])


class OptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        if not len(min) == len(opt) == len(max) or any(not a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
            raise ValueError("the shapes are not in ascending order")
        self.shapes[input] = [tuple(min), tuple(opt), tuple(max)]


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> HostMemory:
        return HostMemory(self.data)


class BuilderConfig:
    def __init__(self) -> None:
        self.flags: set[Enum] = set()
        self.profiles: list[OptimizationProfile] = []
        self.builder_optimization_level = 3
        self.cache: TimingCache | None = None
        self.pools: dict[MemoryPoolType, int] = {}

    def set_flag(self, flag: Enum) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Enum) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        self.pools[pool] = size

    def add_optimization_profile(self, profile: OptimizationProfile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> TimingCache | None:
        return TimingCache(data) if not data or data.startswith(b"timings") else None

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return True

    def get_timing_cache(self) -> TimingCache | None:
        return self.cache


class Builder:
    version = ""

    def __init__(self, logger: ILogger) -> None:
        if not getattr(logger, "_initialised", False):
            raise TypeError("ILogger.__init__ was not called")
        machine.device()
        self._logger = logger
        self._thread = threading.get_ident()

    def create_network(self, flags: int) -> Network:
        if flags:
            raise machine.misuse("create_network with flags, of which TensorRT 11 removed the usual one")
        return Network(self)

    def create_builder_config(self) -> BuilderConfig:
        return BuilderConfig()

    def create_optimization_profile(self) -> OptimizationProfile:
        return OptimizationProfile()

    def build_serialized_network(self, network: Network, config: BuilderConfig) -> HostMemory | None:
        if threading.get_ident() != self._thread:
            raise machine.misuse("a builder is used in another thread than the one that made it")
        if network.builder is not self or not network.model:
            raise machine.misuse("a network is built that no parser has read")
        variable = [each for each in network.inputs if -1 in tuple(each.shape)]
        for tensor in variable:
            if not config.profiles or not all(tensor.name in each.shapes for each in config.profiles):
                text = f"Network has dynamic inputs, but no optimization profile has been defined for {tensor.name}"
                self._logger.log(Severity.ERROR, text)
                return None
        if config.cache is not None:
            config.cache.data = b"timings of " + self.version.encode()
        profiles = []
        for index in range(max(1, len(config.profiles))):
            own = config.profiles[index].shapes if config.profiles else {}
            profiles.append({each.name: own.get(each.name, [tuple(each.shape)] * 3) for each in network.inputs})
        return HostMemory(
            write_plan(
                "onnx",
                {each.name: (each.kind, tuple(each.shape)) for each in network.inputs},
                {each.name: (each.kind, tuple(each.shape)) for each in network.outputs},
                profiles,
                model=base64.b64encode(network.model).decode(),
                built_with=self.version,
                flags=sorted(flag.name for flag in config.flags),
            )
        )


def builder_names(version: str) -> dict[str, Any]:
    """Return the names of the module that are about building."""
    return {
        "Builder": type("Builder", (Builder,), {"version": version}),
        "BuilderFlag": BuilderFlag10 if version.startswith("10.") else BuilderFlag11,
        "MemoryPoolType": MemoryPoolType,
        "OnnxParser": OnnxParser,
    }
