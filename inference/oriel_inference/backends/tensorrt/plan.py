"""Reads what a plan's engine says of itself: its tensors and its optimisation profiles."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from oriel_inference.errors import LoadFailed
from oriel_inference.model import TensorInfo
from oriel_policies.upstreams.engine_profiles import Profile, Shape, Span, most_rows
from oriel_wire.v2.datatypes import DATATYPES

# TensorRT's name -> that of the v2 protocol, which has no other types of at most 8 bits.
_DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """An input or output. shape: -1 is variable."""

    name: str
    datatype: str
    dtype: "np.dtype[Any]"
    shape: Shape

    @property
    def info(self) -> TensorInfo:
        """Return the tensor's name, datatype and shape."""
        return TensorInfo(name=self.name, datatype=self.datatype, shape=self.shape)

    def size_bytes(self, shape: Shape) -> int:
        """Return the bytes of a tensor of this type."""
        return prod(shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine's description of itself.

    context_bytes: memory of the GPU that one execution context takes for the values between layers.
    """

    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    profiles: tuple[Profile, ...]
    context_bytes: int

    @property
    def rows(self) -> int:
        """Return the most rows that a batch may have; 0 if an input has no dimension."""
        return most_rows(self.profiles)

    def input_bytes(self, tensor: PlanTensor) -> int:
        """Return the bytes of an input at its largest."""
        return max(tensor.size_bytes(each.spans[tensor.name].largest) for each in self.profiles)


def read_plan(engine: Any, tensorrt: Any) -> Plan:
    """Read an engine. Raises LoadFailed for one that this server cannot run."""
    inputs: list[PlanTensor] = []
    outputs: list[PlanTensor] = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        is_input = engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT
        (inputs if is_input else outputs).append(_read_tensor(engine, tensorrt, name))
    if not inputs or not outputs:
        raise LoadFailed("the plan has no inputs or no outputs")
    profiles = tuple(
        Profile({tensor.name: _read_span(engine, tensor, index) for tensor in inputs})
        for index in range(engine.num_optimization_profiles)
    )
    if not profiles:
        raise LoadFailed("the plan has no optimisation profile")
    return Plan(tuple(inputs), tuple(outputs), profiles, int(engine.device_memory_size_v2))


def _read_tensor(engine: Any, tensorrt: Any, name: str) -> PlanTensor:
    shown = name[:128]
    if engine.get_tensor_location(name) != tensorrt.TensorLocation.DEVICE:
        raise LoadFailed(f"tensor {shown!r} of the plan is a shape tensor, which this server does not run")
    if engine.get_tensor_format(name) != tensorrt.TensorFormat.LINEAR:
        layout = engine.get_tensor_format(name).name
        raise LoadFailed(f"tensor {shown!r} of the plan has the layout {layout}, and this server runs LINEAR ones only")
    kind = engine.get_tensor_dtype(name).name
    if kind not in _DATATYPES:
        raise LoadFailed(f"tensor {shown!r} of the plan has type {kind}, which the v2 protocol cannot carry here")
    datatype = _DATATYPES[kind]
    return PlanTensor(name, datatype, DATATYPES[datatype].dtype, tuple(engine.get_tensor_shape(name)))


def _read_span(engine: Any, tensor: PlanTensor, index: int) -> Span:
    if -1 not in tensor.shape:
        return Span(tensor.shape, tensor.shape, tensor.shape)
    smallest, best, largest = (tuple(shape) for shape in engine.get_tensor_profile_shape(tensor.name, index))
    return Span(smallest, best, largest)
