"""One execution context with a stream and buffers of its own. Only the thread that made it may use it.

No local variable here holds TensorRT's own objects: the traceback of an error would keep them, and their memory.

Memory is planned before it is taken, in two steps, because the sizes of outputs are known only to a context: first the
context and the inputs, then the outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from oriel_inference.backends import OutsideProfile
from oriel_inference.backends.tensorrt.device import Buffer, CudaFailed, Device
from oriel_inference.backends.tensorrt.engine import NO_REASON, Engine
from oriel_inference.backends.tensorrt.library import PlanLog
from oriel_inference.backends.tensorrt.plan import PlanTensor
from oriel_inference.errors import BackendFailed, InvalidRequest, LoadFailed
from oriel_policies.upstreams.engine_profiles import Shape, smallest_fitting, why_outside
from oriel_wire.v2.datatypes import name_of
from oriel_wire.v2.messages import Array


class PlanContext:
    """Runs batches of one engine.

    plan_bytes: called with what one instance needs on the GPU and in pinned memory of the host, before each step takes
    its part of it; may raise LoadFailed.
    Raises LoadFailed and CudaFailed, and has then taken nothing.
    """

    def __init__(self, engine: Engine, device: Device, log: PlanLog, plan_bytes: Callable[[int, int], None]) -> None:
        self._device = device
        self._log = log
        self._plan = plan = engine.plan
        self._outputs = {tensor.name: tensor for tensor in plan.outputs}
        self._buffers: dict[str, Buffer] = {}
        self._context: Any = None
        self._profile: int | None = None
        self._shapes: dict[str, Shape] | None = None
        self._output_shapes: dict[str, Shape] = {}
        inputs = {tensor.name: plan.input_bytes(tensor) for tensor in plan.inputs}
        self._require(plan.context_bytes + sum(inputs.values()))
        plan_bytes(plan.context_bytes + sum(inputs.values()), sum(inputs.values()))
        self._stream = device.open_stream()
        try:
            log.pop_errors()
            self._context = engine.create_context()
            if self._context is None:
                raise LoadFailed(f"TensorRT made no execution context of {engine.path.name}: {self._reason()}")
            outputs = self._largest_outputs()
            sizes = inputs | outputs
            self._require(sum(sizes.values()))
            plan_bytes(plan.context_bytes + sum(sizes.values()), sum(sizes.values()))
            for name, size_bytes in sizes.items():
                self._buffers[name] = device.allocate(size_bytes)
            self._profile = self._shapes = None
        except BackendFailed as failed:
            self.free()
            raise LoadFailed(f"{engine.path.name}: {failed.message}") from failed
        except BaseException:
            self.free()
            raise

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch and wait for it. Raises OutsideProfile, InvalidRequest and BackendFailed."""
        plan, device, stream = self._plan, self._device, self._stream
        shapes = {tensor.name: _checked(tensor, inputs) for tensor in plan.inputs}
        try:
            if shapes != self._shapes:
                self._shape(shapes)
            for tensor in plan.inputs:
                array, buffer = inputs[tensor.name], self._buffers[tensor.name]
                size_bytes = tensor.size_bytes(array.shape)
                np.copyto(buffer.view(tensor.dtype, array.shape, size_bytes), array)
                device.send(buffer, size_bytes, stream)
            self._log.pop_errors()
            if not self._context.execute_async_v3(int(stream)):
                raise BackendFailed(f"TensorRT did not execute the batch: {self._reason()}")
            for name in outputs:
                size_bytes = self._outputs[name].size_bytes(self._output_shapes[name])
                device.fetch(self._buffers[name], size_bytes, stream)
            device.wait(stream)
            return [self._read(name) for name in outputs]
        except BackendFailed:
            self._recover()
            raise
        except CudaFailed as failure:
            self._recover()
            raise BackendFailed(f"the GPU could not execute the batch: {failure}") from failure

    def free(self) -> None:
        """Release the context, then its buffers and its stream. Errors are logged."""
        device = self._device
        device.ignore_errors("cudaStreamSynchronize", self._stream)
        self._context = None
        while self._buffers:
            device.free(self._buffers.popitem()[1])
        device.ignore_errors("cudaStreamDestroy", self._stream)

    def _read(self, name: str) -> Array:
        """Return a copy of an output, because the next batch writes into the same buffer."""
        tensor, shape = self._outputs[name], self._output_shapes[name]
        return self._buffers[name].view(tensor.dtype, shape, tensor.size_bytes(shape)).copy()

    def _largest_outputs(self) -> dict[str, int]:
        """Return the bytes of each output at its largest, over all profiles."""
        found = {tensor.name: 0 for tensor in self._plan.outputs}
        for index, profile in enumerate(self._plan.profiles):
            self._select(index)
            self._set_shapes({name: span.largest for name, span in profile.spans.items()})
            for tensor in self._plan.outputs:
                bound = int(self._context.get_max_output_size(tensor.name))
                needed = tensor.size_bytes(self._output_shapes[tensor.name])
                found[tensor.name] = max(found[tensor.name], bound, needed)
        return found

    def _shape(self, shapes: dict[str, Shape]) -> None:
        """Prepare the context for a batch with other shapes than the one before. Raises OutsideProfile."""
        index = smallest_fitting(self._plan.profiles, shapes)
        if index is None:
            raise OutsideProfile(why_outside(self._plan.profiles, shapes))
        self._shapes = None
        if index != self._profile:
            self._select(index)
            for name, buffer in self._buffers.items():
                self._done(self._context.set_tensor_address(name, buffer.device), f"the address of {name[:64]!r}")
        self._set_shapes(shapes)
        for tensor in self._plan.outputs:
            if tensor.size_bytes(self._output_shapes[tensor.name]) > self._buffers[tensor.name].size_bytes:
                raise BackendFailed(f"output {tensor.name[:64]!r} is larger than TensorRT said it could become")
        self._shapes = shapes

    def _select(self, index: int) -> None:
        self._profile = None
        selected = self._context.set_optimization_profile_async(index, int(self._stream))
        self._done(selected, f"profile {index}")
        self._device.wait(self._stream)
        self._profile = index

    def _set_shapes(self, shapes: Mapping[str, Shape]) -> None:
        for name, shape in shapes.items():
            self._done(self._context.set_input_shape(name, shape), f"shape {list(shape)} of input {name[:64]!r}")
        unknown, wrong = list[str](), ""
        try:
            unknown = list(self._context.infer_shapes())
        except RuntimeError as error:
            wrong = self._log.pop_errors() or str(error)
        if wrong:
            raise BackendFailed(f"TensorRT cannot tell the shapes of outputs: {wrong}")
        if unknown:
            raise BackendFailed(f"TensorRT cannot tell the shape of {unknown[0][:64]!r}: {self._reason()}")
        for tensor in self._plan.outputs:
            shape = tuple(self._context.get_tensor_shape(tensor.name))
            if min(shape, default=0) < 0:
                reason = "has a shape that depends on the values of inputs, which this server does not run"
                raise BackendFailed(f"output {tensor.name[:64]!r} of the plan {reason}")
            self._output_shapes[tensor.name] = shape

    def _done(self, worked: bool, what: str) -> None:
        if not worked:
            raise BackendFailed(f"TensorRT refuses {what}: {self._reason()}")

    def _reason(self) -> str:
        return self._log.pop_errors() or NO_REASON

    def _require(self, size_bytes: int) -> None:
        free = self._device.free_bytes()
        if size_bytes > free:
            raise LoadFailed(f"the plan needs {size_bytes} more bytes of the GPU's memory, of which {free} are free")

    def _recover(self) -> None:
        """Wait for the copies that were begun: the next batch writes into the same buffers."""
        self._shapes = None
        self._device.ignore_errors("cudaStreamSynchronize", self._stream)


def _checked(tensor: PlanTensor, inputs: Mapping[str, Array]) -> Shape:
    array = inputs.get(tensor.name)
    if array is None:
        raise InvalidRequest(f"the model also needs input {tensor.name[:64]!r}")
    if array.dtype != tensor.dtype:
        given = name_of(array.dtype)
        raise InvalidRequest(f"input {tensor.name[:64]!r} is {given}, and the model takes {tensor.datatype}")
    return array.shape
