"""A BERT encoder's published weights as an ONNX model in a Triton-style repository, without torch.

Reads `config.json` and `model.safetensors` as Hugging Face lays them out (BertModel) and writes the same arithmetic
as ONNX nodes: embeddings, then for each layer self-attention and a feed-forward block, each with its residual and
layer norm. Inputs `input_ids`, `attention_mask`, `token_type_ids` INT64 [rows, tokens]; output `last_hidden_state`
FP32 [rows, tokens, width]. Needs numpy, onnx and safetensors.

    python convert.py MODEL_FOLDER REPOSITORY NAME
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save
from safetensors.numpy import load_file

CONFIG = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: 32
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] }}
]
output [ {{ name: "last_hidden_state" data_type: TYPE_FP32 dims: [ -1, {width} ] }} ]
dynamic_batching {{ }}
"""


class Graph:
    """Nodes and constants as they are added; each `op` gives the name of its value."""

    def __init__(self, weights: dict[str, np.ndarray[Any, Any]]) -> None:
        self.weights = weights
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, name: str, value: Any) -> str:
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def weight(self, name: str) -> str:
        return self.constant(name, self.weights[name].astype(np.float32))

    def linear(self, value: str, name: str) -> str:
        matrix = self.constant(f"{name}.weight.T", self.weights[f"{name}.weight"].astype(np.float32).T)
        return self.op("Add", self.op("MatMul", value, matrix), self.weight(f"{name}.bias"))

    def norm(self, value: str, name: str, epsilon: float) -> str:
        return self.op(
            "LayerNormalization", value, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), epsilon=epsilon
        )


def build(config: dict[str, Any], weights: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The ONNX model. Raises KeyError for weights that are no BertModel's, ValueError for a variant of it."""
    if config.get("hidden_act") != "gelu" or config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError("only BERT with exact GELU and absolute positions is known here")
    width, heads, epsilon = config["hidden_size"], config["num_attention_heads"], config["layer_norm_eps"]
    graph = Graph(weights)
    tokens = graph.op("Shape", "input_ids", start=1, end=2)
    table = graph.weight("embeddings.position_embeddings.weight")
    positions = graph.op("Slice", table, graph.constant("first", np.array([0])), tokens)
    words, types = [
        graph.op("Gather", graph.weight(f"embeddings.{name}_embeddings.weight"), ids)
        for name, ids in (("word", "input_ids"), ("token_type", "token_type_ids"))
    ]
    value = graph.norm(graph.op("Add", graph.op("Add", words, positions), types), "embeddings.LayerNorm", epsilon)
    # What is no token gets the least weight there is: 0 for a token, -3e38 for padding.
    absent = graph.op("Sub", graph.constant("1f", np.float32(1)), graph.op("Cast", "attention_mask", to=1))
    mask = graph.op("Mul", absent, graph.constant("least", np.float32(np.finfo(np.float32).min)))
    mask = graph.op("Unsqueeze", mask, graph.constant("axes", np.array([1, 2])))
    split = graph.constant("split", np.array([0, 0, heads, width // heads]))
    joined = graph.constant("joined", np.array([0, 0, width]))
    scale = graph.constant("scale", np.float32((width // heads) ** -0.5))
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        query, key, each = [
            graph.op("Reshape", graph.linear(value, f"{layer}.attention.self.{part}"), split)
            for part in ("query", "key", "value")
        ]
        query, each = (graph.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, each))
        scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 2, 3, 1]))
        weighed = graph.op("Softmax", graph.op("Add", graph.op("Mul", scores, scale), mask), axis=-1)
        seen = graph.op("Transpose", graph.op("MatMul", weighed, each), perm=[0, 2, 1, 3])
        seen = graph.linear(graph.op("Reshape", seen, joined), f"{layer}.attention.output.dense")
        value = graph.norm(graph.op("Add", seen, value), f"{layer}.attention.output.LayerNorm", epsilon)
        inner = graph.op("Gelu", graph.linear(value, f"{layer}.intermediate.dense"))
        inner = graph.linear(inner, f"{layer}.output.dense")
        value = graph.norm(graph.op("Add", inner, value), f"{layer}.output.LayerNorm", epsilon)
    graph.nodes.append(helper.make_node("Identity", [value], ["last_hidden_state"]))
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "tokens"]) for name in names]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["rows", "tokens", width])
    made = helper.make_graph(graph.nodes, "bert", inputs, [output], list(graph.constants.values()))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    checker.check_model(model)
    return model


def convert(source: Path, repository: Path, name: str) -> Path:
    """Write the model under `repository / name`, unless it is there; the folder."""
    folder = repository / name
    if not (folder / "config.pbtxt").is_file():
        config = json.loads((source / "config.json").read_text())
        (folder / "1").mkdir(parents=True, exist_ok=True)
        save(build(config, load_file(source / "model.safetensors")), folder / "1" / "model.onnx")
        (folder / "config.pbtxt").write_text(CONFIG.format(name=name, width=config["hidden_size"]))
    return folder


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
