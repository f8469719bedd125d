"""Runs the ONNX file from which the stand-in's builder has made a plan."""

import base64
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import onnxruntime

Shape = tuple[int, ...]
_NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


@cache
def functions_of(
    model: str,
) -> tuple[Callable[[Mapping[str, Shape]], dict[str, Shape]], Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Return the function of shapes and that of values. model: the file in base64."""
    session = onnxruntime.InferenceSession(base64.b64decode(model), providers=["CPUExecutionProvider"])
    dtypes = {each.name: _NUMPY[each.type] for each in session.get_inputs()}
    names = [each.name for each in session.get_outputs()]

    def compute(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    def shapes_of(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        zeros = {name: np.zeros(shape, dtypes[name]) for name, shape in shapes.items()}
        return {name: array.shape for name, array in compute(zeros).items()}

    return shapes_of, compute
