"""The models every contender serves, as ONNX with seeded weights, and one request's inputs for each.

- tiny: a 16 -> 32 -> 4 perceptron; all that is measured is the way to it and back.
- encoder: token ids through eight transformer layers, about 5 ms for one row on one thread; batches help because
  the weights are read once.
- shallow: the same with two layers, at most sixteen rows in a batch.
- image: one 3 x 224 x 224 FP32 tensor (602 KB) into a single strided convolution and a mean.
- mlp: a perceptron of 35 million weights; one row reads them all, sixty-four rows hardly take longer to read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

__all__ = ["MODELS", "Model", "document", "save", "write"]

Array = NDArray[Any]
OPSET = 17
IR_VERSION = 9
TOKENS, WIDTH, HEADS, INNER, LAYERS, VOCABULARY = 4, 512, 8, 2048, 8, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """datatype, dims: of the one input x, without the batch dimension; outputs: dims of the one output y."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    outputs: tuple[int, ...]
    max_batch: int
    graph: Callable[[], onnx.GraphProto]

    def row(self) -> Array:
        """One request's input, the same in every run: [1, *dims]."""
        rng = np.random.default_rng(11)
        if self.datatype == "INT64":
            return rng.integers(0, VOCABULARY, (1, *self.dims), dtype=np.int64)
        return rng.standard_normal((1, *self.dims), np.float32)


class _Graph:
    """Collects nodes and weights; every method gives the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self._rng = np.random.default_rng(7)

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        result = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [result], **attributes))
        return result

    def constant(self, value: Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name

    def weight(self, *shape: int) -> str:
        scale = np.float32(shape[0] ** -0.5)
        return self.constant(self._rng.standard_normal(shape, np.float32) * scale)

    def dense(self, x: str, inner: int, outer: int) -> str:
        return self.node("Add", self.node("MatMul", x, self.weight(inner, outer)), self.weight(outer))

    def normed(self, x: str) -> str:
        ones, zeros = self.constant(np.ones(WIDTH, np.float32)), self.constant(np.zeros(WIDTH, np.float32))
        return self.node("LayerNormalization", x, ones, zeros, axis=-1)

    def heads(self, x: str, order: tuple[int, ...]) -> str:
        split = self.constant(np.array([0, TOKENS, HEADS, WIDTH // HEADS], np.int64))
        return self.node("Transpose", self.node("Reshape", x, split), perm=order)

    def finished(self, last: str, model: "Model") -> onnx.GraphProto:
        self.nodes.append(helper.make_node("Identity", [last], ["y"]))
        kinds = {"INT64": TensorProto.INT64, "FP32": TensorProto.FLOAT}
        return helper.make_graph(
            self.nodes,
            model.name,
            [helper.make_tensor_value_info("x", kinds[model.datatype], ["n", *model.dims])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *model.outputs])],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )


def _perceptron(model: "Model", *widths: int) -> onnx.GraphProto:
    graph, x = _Graph(), "x"
    for index, (inner, outer) in enumerate(zip(widths, widths[1:], strict=False)):
        x = graph.node("Gemm", x, graph.weight(inner, outer), graph.weight(outer))
        if index < len(widths) - 2:
            x = graph.node("Relu", x)
    return graph.finished(x, model)


def _encoder(model: "Model", layers: int = LAYERS) -> onnx.GraphProto:
    graph = _Graph()
    x = graph.node("Gather", graph.weight(VOCABULARY, WIDTH), "x", axis=0)
    scale = graph.constant(np.array((WIDTH // HEADS) ** -0.5, np.float32))
    joined = graph.constant(np.array([0, TOKENS, WIDTH], np.int64))
    for _ in range(layers):
        given = graph.normed(x)
        query, value = (graph.heads(graph.dense(given, WIDTH, WIDTH), (0, 2, 1, 3)) for _ in range(2))
        key = graph.heads(graph.dense(given, WIDTH, WIDTH), (0, 2, 3, 1))
        weights = graph.node("Softmax", graph.node("Mul", graph.node("MatMul", query, key), scale), axis=-1)
        mixed = graph.node("Transpose", graph.node("MatMul", weights, value), perm=(0, 2, 1, 3))
        attended = graph.dense(graph.node("Reshape", mixed, joined), WIDTH, WIDTH)
        x = graph.node("Add", x, attended)
        inner = graph.node("Relu", graph.dense(graph.normed(x), WIDTH, INNER))
        x = graph.node("Add", x, graph.dense(inner, INNER, WIDTH))
    pooled = graph.node("ReduceMean", graph.normed(x), axes=[1], keepdims=0)
    return graph.finished(graph.dense(pooled, WIDTH, model.outputs[0]), model)


def _image(model: "Model") -> onnx.GraphProto:
    graph = _Graph()
    kernel = graph.weight(8, 3, 7, 7)
    x = graph.node("Relu", graph.node("Conv", "x", kernel, strides=[4, 4]))
    pooled = graph.node("ReduceMean", x, axes=[2, 3], keepdims=0)
    return graph.finished(graph.node("Gemm", pooled, graph.weight(8, model.outputs[0])), model)


TINY = Model(
    name="tiny",
    datatype="FP32",
    dims=(16,),
    outputs=(4,),
    max_batch=64,
    graph=lambda: _perceptron(TINY, 16, 32, 4),
)
ENCODER = Model(
    name="encoder",
    datatype="INT64",
    dims=(TOKENS,),
    outputs=(16,),
    max_batch=64,
    graph=lambda: _encoder(ENCODER),
)
SHALLOW = Model(
    name="shallow",
    datatype="INT64",
    dims=(TOKENS,),
    outputs=(16,),
    max_batch=16,
    graph=lambda: _encoder(SHALLOW, 2),
)
IMAGE = Model(
    name="image",
    datatype="FP32",
    dims=(3, 224, 224),
    outputs=(10,),
    max_batch=16,
    graph=lambda: _image(IMAGE),
)
MLP = Model(
    name="mlp",
    datatype="FP32",
    dims=(256,),
    outputs=(16,),
    max_batch=64,
    graph=lambda: _perceptron(MLP, 256, 4096, 4096, 4096, 16),
)
MODELS = {model.name: model for model in (TINY, ENCODER, SHALLOW, IMAGE, MLP)}


def write(model: Model, path: Path) -> Path:
    """Save `model` as an ONNX file."""
    return save(model.graph(), path)


def save(graph: onnx.GraphProto, path: Path) -> Path:
    """Save a graph as an ONNX file."""
    path.write_bytes(document(graph))
    return path


def document(graph: onnx.GraphProto) -> bytes:
    """The bytes of an ONNX file."""
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())
