"""Sessions that keep tensors in the memory of a device, for real: ONNX Runtime's CPU provider plays the device."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, save_model

from oriel_inference.backends.device_tensor import DeviceTensor
from oriel_inference.backends.onnx_runtime import GpuSession, open_session, session_settings
from oriel_inference.model import EngineOptions
from oriel_wire.v2.messages import Array

from . import models

OPTIONS = EngineOptions(intra_op_threads=1)
MEMORY = ("cpu", 0)


class Resident(GpuSession):
    """A session whose GPU is the CPU. taken: the inputs of its runs. kept: the outputs that each was to leave there."""

    def __init__(self, session: Any) -> None:
        super().__init__(session, OPTIONS, MEMORY)
        self.taken: list[dict[str, Any]] = []
        self.kept: list[frozenset[str]] = []

    def run_resident(self, inputs: Mapping[str, Array], outputs: Sequence[str], kept: Collection[str]) -> list[Array]:
        self.taken.append(dict(inputs))
        self.kept.append(frozenset(kept))
        return super().run_resident(inputs, outputs, kept)


class WithoutBinding:
    """An `InferenceSession` that cannot bind."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def io_binding(self) -> Any:
        raise RuntimeError("Error in execution: CUDA failure 700: an illegal memory access was encountered")


def opened(folder: Path, model: Any, *, binds: bool = True) -> Resident:
    path = folder / "resident.onnx"
    save_model(model, str(path))
    session = open_session(path, session_settings(OPTIONS), OPTIONS)
    return Resident(session if binds else WithoutBinding(session))


def doubles(kind: int = TensorProto.INT64) -> Any:
    """Return a model y = x + x on matrices."""
    return models.graph(
        [helper.make_node("Add", ["x", "x"], ["y"])], [("x", kind, ["n", "m"])], [("y", kind, ["n", "m"])]
    )


def same(kind: int) -> Any:
    """Return a model y = x on matrices."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return models.graph([node], [("x", kind, ["n", "m"])], [("y", kind, ["n", "m"])])


class HostValue:
    """A value of the runtime over an array. copies: how often it was copied to the host."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.copies = 0

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numpy(self) -> Array:
        self.copies += 1
        return self.array.copy()


def tensor(array: Array) -> tuple[DeviceTensor, HostValue]:
    value = HostValue(np.ascontiguousarray(array))
    return DeviceTensor.of(value, MEMORY, array.dtype, array.shape, None), value
