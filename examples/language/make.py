"""A language model small enough to read: a decoder with random weights; its tokenizer and handler file are in services.

What it says means nothing; how it is served is how a real one is. The ONNX graph has the inputs and outputs of Hugging
Face's exports with an attention cache (`past_key_values.0.key`, `present.0.key`, ...). Needs numpy, onnx, tokenizers.

    python examples/language/make.py FOLDER      writes FOLDER/models/tiny and FOLDER/services/tiny.py
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SERVICES = Path(__file__).with_name("services")
LAYERS, HEADS, WIDTH, CONTEXT, SEED = 2, 2, 32, 256, 11
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The weather is lovely today. It's so sunny outside! He drove to the stadium.",
    "system user assistant: a request carries one deadline and one tier from the first byte to the last.",
]
CONFIG = """\
name: "tiny"
backend: "onnxruntime"
max_batch_size: 0
"""
Weights = dict[str, np.ndarray[Any, Any]]


def tokenizer() -> Any:
    """Byte-level BPE, so that every text has tokens; trained on two lines."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=320, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def weights(vocabulary: int) -> Weights:
    random = np.random.default_rng(SEED)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    made = {
        "words": normal(vocabulary, WIDTH) * 8,
        "places": normal(CONTEXT, WIDTH) * 8,
        "head": normal(WIDTH, vocabulary) * 3,
    }
    for layer in range(LAYERS):
        for name, shape in {
            "query": (WIDTH, WIDTH),
            "key": (WIDTH, WIDTH),
            "value": (WIDTH, WIDTH),
            "out": (WIDTH, WIDTH),
            "up": (WIDTH, 2 * WIDTH),
            "down": (2 * WIDTH, WIDTH),
        }.items():
            made[f"{name}{layer}"] = normal(*shape)
    return made


class Graph:
    def __init__(self, given: Weights) -> None:
        self.nodes: list[Any] = []
        self.constants = {name: numpy_helper.from_array(value, name) for name, value in given.items()}

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        output = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name


def build(given: Weights) -> bytes:
    """The ONNX file: embeddings, then per layer causal attention over past and present, and a feed-forward block."""
    graph = Graph(given)
    op, constant = graph.op, graph.constant
    ones, minus = constant(np.ones(WIDTH, np.float32)), constant(np.float32(-1e9))
    split, joined = constant(np.array([0, 0, HEADS, WIDTH // HEADS])), constant(np.array([0, 0, WIDTH]))
    scale = constant(np.float32((WIDTH // HEADS) ** -0.5))
    value = op("Add", op("Gather", "words", "input_ids"), op("Gather", "places", "position_ids"))
    # A token sees those before it and itself: keys are counted from the first one of the past.
    seen = op("Squeeze", op("Shape", "attention_mask", start=1, end=2))
    keys = op("Range", constant(np.int64(0)), seen, constant(np.int64(1)))
    allowed = op("LessOrEqual", keys, op("Unsqueeze", "position_ids", constant(np.array([1, 3]))))
    real = op("Cast", op("Unsqueeze", "attention_mask", constant(np.array([1, 2]))), to=TensorProto.BOOL)
    mask = op("Where", op("And", allowed, real), constant(np.float32(0)), minus)
    for layer in range(LAYERS):
        normed = op("LayerNormalization", value, ones)
        query, key, each = (
            op("Transpose", op("Reshape", op("MatMul", normed, f"{name}{layer}"), split), perm=[0, 2, 1, 3])
            for name in ("query", "key", "value")
        )
        past, present = f"past_key_values.{layer}", f"present.{layer}"
        key = op("Concat", f"{past}.key", key, name=f"{present}.key", axis=2)
        each = op("Concat", f"{past}.value", each, name=f"{present}.value", axis=2)
        scores = op("Mul", op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2])), scale)
        heard = op("MatMul", op("Softmax", op("Add", scores, mask), axis=-1), each)
        heard = op("Reshape", op("Transpose", heard, perm=[0, 2, 1, 3]), joined)
        value = op("Add", value, op("MatMul", heard, f"out{layer}"))
        inner = op("Relu", op("MatMul", op("LayerNormalization", value, ones), f"up{layer}"))
        value = op("Add", value, op("MatMul", inner, f"down{layer}"))
    op("MatMul", op("LayerNormalization", value, ones), "head", name="logits")
    vocabulary = given["head"].shape[1]

    def info(name: str, kind: int, *shape: str | int) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [info(name, TensorProto.INT64, "rows", "new") for name in ("input_ids", "position_ids")]
    inputs.append(info("attention_mask", TensorProto.INT64, "rows", "seen"))
    outputs = [info("logits", TensorProto.FLOAT, "rows", "new", vocabulary)]
    for layer in range(LAYERS):
        for part in ("key", "value"):
            shape = ("rows", HEADS, "past", WIDTH // HEADS)
            inputs.append(info(f"past_key_values.{layer}.{part}", TensorProto.FLOAT, *shape))
            outputs.append(info(f"present.{layer}.{part}", TensorProto.FLOAT, "rows", HEADS, "seen", WIDTH // HEADS))
    made = helper.make_graph(graph.nodes, "tiny", inputs, outputs, list(graph.constants.values()))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return bytes(model.SerializeToString())


def write(repository: Path) -> None:
    """The model, in a model repository."""
    model = repository / "tiny"
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "1" / "model.onnx").write_bytes(build(weights(tokenizer().get_vocab_size())))
    (model / "config.pbtxt").write_text(CONFIG)


def write_all(folder: Path) -> None:
    """The model repository and the services folder, both under `folder`."""
    write(folder / "models")
    shutil.copytree(SERVICES, folder / "services", dirs_exist_ok=True)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
