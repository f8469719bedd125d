"""Runs ONNX Runtime sessions by IOBinding: inputs from the memory of a device, outputs that stay there."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from oriel_inference.backends.device_tensor import DeviceTensor, Memory
from oriel_wire.v2.messages import Array


def run_bound(
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
