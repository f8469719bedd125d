"""Writes the model every contender serves: a 16 -> 32 -> 4 perceptron, seeded, as ONNX. Argument: the file."""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

rng = np.random.default_rng(7)
weights = {
    "w1": rng.standard_normal((16, 32), np.float32),
    "b1": rng.standard_normal(32, np.float32),
    "w2": rng.standard_normal((32, 4), np.float32),
    "b2": rng.standard_normal(4, np.float32),
}
graph = helper.make_graph(
    [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"]),
    ],
    "tiny",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    [numpy_helper.from_array(value, name) for name, value in weights.items()],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
onnx.save(model, sys.argv[1])
