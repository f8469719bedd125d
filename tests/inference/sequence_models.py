"""Models whose requests belong together, and clients that send them step by step."""

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from . import models

INT32 = TensorProto.INT32
TENSORS = """
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
STATE = 'state [ { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ] %s } ]'
FLAGS = " ".join(
    f'control_input [ {{ name: "{kind}" control [ {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} ] }} ]'
    for kind in ("START", "READY", "END")
)
CORRID = 'control_input [ { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } ] } ]'


def accumulator(shape=("n", 1)):  # type: ignore[no-untyped-def]
    """Return a model OUTPUT = STATE_OUT = STATE_IN + INPUT."""
    nodes = [
        helper.make_node("Add", ["STATE_IN", "INPUT"], ["OUTPUT"]),
        helper.make_node("Identity", ["OUTPUT"], ["STATE_OUT"]),
    ]
    return models.graph(
        nodes,
        [("INPUT", INT32, shape), ("STATE_IN", INT32, shape)],
        [("OUTPUT", INT32, shape), ("STATE_OUT", INT32, shape)],
    )


def observer():  # type: ignore[no-untyped-def]
    """Return a model that returns the number of rows of its batch and the row's controls: per row OUTPUT = [ready rows,
    rows, place of the row, START, READY, END, CORRID] and the input as a state.
    """
    shape = ["n", 1]
    axes = models.numpy_helper.from_array(np.array([0]), "axes")
    zero = models.numpy_helper.from_array(np.array(0, np.int32), "zero")
    first = models.numpy_helper.from_array(np.array(0), "first")
    nodes = [
        helper.make_node("ReduceSum", ["READY", "axes"], ["ready_rows"], keepdims=1),
        helper.make_node("Expand", ["ready_rows", "shape"], ["ready_column"]),
        helper.make_node("Shape", ["READY"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["rows64"]),
        helper.make_node("Cast", ["rows64"], ["rows32"], to=INT32),
        helper.make_node("Expand", ["rows32", "shape"], ["rows_column"]),
        helper.make_node("CumSum", ["ones", "first"], ["places"]),
        helper.make_node("Add", ["READY_zero", "one"], ["ones"]),
        helper.make_node("Mul", ["READY", "zero"], ["READY_zero"]),
        helper.make_node("Cast", ["CORRID"], ["corrid32"], to=INT32),
        helper.make_node(
            "Concat",
            ["ready_column", "rows_column", "places", "START", "READY", "END", "corrid32", "INPUT"],
            ["OUTPUT"],
            axis=1,
        ),
    ]
    order = [2, 0, 1, 3, 4, 5, 8, 7, 6, 9, 10]
    one = models.numpy_helper.from_array(np.array(1, np.int32), "one")
    controls = [(name, INT32, shape) for name in ("INPUT", "START", "READY", "END")]
    return models.graph(
        [nodes[each] for each in order],
        [*controls, ("CORRID", TensorProto.INT64, shape)],
        [("OUTPUT", INT32, ["n", 8])],
        [axes, zero, first, one],
    )


def put(
    root: Path,
    name: str,
    batching: str,
    *,
    rows: int = 4,
    more: str = "",
    model: Any = None,
    tensors: str = TENSORS,
) -> Path:
    """Write a sequence model; an accumulator unless `model` is another one."""
    config = f'backend: "onnxruntime" max_batch_size: {rows} {tensors} {more} sequence_batching {{ {batching} }}'
    return models.put(root, name, model or accumulator(), config)


class Client:
    """Sends the steps of sequences with tritonclient, over HTTP or gRPC."""

    def __init__(self, module: Any, address: str, name: str = "sum") -> None:
        self.module, self.address = module, address
        self.client = module.InferenceServerClient(address)
        self.name = name

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def inputs(self, value: int, rows: int = 1) -> list[Any]:
        shape = [1] if self.name == "alone" else [rows, 1]
        tensor = self.module.InferInput("INPUT", shape, "INT32")
        tensor.set_data_from_numpy(np.full(shape, value, np.int32))
        return [tensor]

    def step(self, sequence: int | str, value: int, *, start: bool = False, end: bool = False, **more: Any) -> int:
        """Send one step; return the first number of the answer."""
        flags = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        found = self.client.infer(more.pop("name", self.name), self.inputs(value), **flags, **more)
        return int(found.as_numpy("OUTPUT").flat[0])

    def row(self, sequence: int | str, value: int, **flags: Any) -> list[int]:
        """Send one step; return its row of the answer."""
        flags = {f"sequence_{name}": value for name, value in flags.items()}
        found = self.client.infer(self.name, self.inputs(value), sequence_id=sequence, **flags)
        return [int(each) for each in found.as_numpy("OUTPUT")[0]]


RECURRENT = """
input [ { name: "chunk" data_type: TYPE_FP32 dims: [ %d ] } ]
output [ { name: "speech" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
HIDDEN = 'state [ { input_name: "hidden" output_name: "hidden_out" data_type: TYPE_FP32 dims: [ %d ] } ]'


class Recurrent:
    """A model that detects speech: hidden' = tanh(chunk W + hidden U), speech = hidden' V. batched: it has rows."""

    def __init__(self, width: int, units: int, *, layers: int = 1, batched: bool = True) -> None:
        random = np.random.default_rng(7)
        self.width, self.units, self.layers, self.batched = width, units, layers, batched
        self.w = (random.normal(size=(width, units)) / np.sqrt(width)).astype(np.float32)
        self.u = (random.normal(size=(units, units)) / np.sqrt(units)).astype(np.float32)
        self.v = (random.normal(size=(units, 1)) / np.sqrt(units)).astype(np.float32)

    def proto(self) -> Any:
        """Return the ONNX model."""
        lead, end = (["n"], "") if self.batched else ([], "_")
        axis = models.numpy_helper.from_array(np.array([0]), "axis")
        alone = [] if self.batched else ["chunk", "hidden"]
        nodes = [helper.make_node("Unsqueeze", [name, "axis"], [f"{name}_"]) for name in alone]
        nodes += [
            helper.make_node("MatMul", [f"chunk{end}", "w"], ["of_chunk"]),
            helper.make_node("MatMul", [f"hidden{end}", "u"], ["of_hidden"]),
            helper.make_node("Add", ["of_chunk", "of_hidden"], ["both"]),
            helper.make_node("Tanh", ["both"], ["deep0"]),
        ]
        for layer in range(1, self.layers):
            nodes += [
                helper.make_node("MatMul", [f"deep{layer - 1}", "u"], [f"wide{layer}"]),
                helper.make_node("Tanh", [f"wide{layer}"], [f"deep{layer}"]),
            ]
        last = f"deep{self.layers - 1}"
        nodes.append(helper.make_node("MatMul", [last, "v"], [f"speech{end}"]))
        if alone:
            nodes.append(helper.make_node("Squeeze", ["speech_", "axis"], ["speech"]))
            nodes.append(helper.make_node("Squeeze", [last, "axis"], ["hidden_out"]))
        else:
            nodes.append(helper.make_node("Identity", [last], ["hidden_out"]))
        fp32 = TensorProto.FLOAT
        return models.graph(
            nodes,
            [("chunk", fp32, [*lead, self.width]), ("hidden", fp32, [*lead, self.units])],
            [("speech", fp32, [*lead, 1]), ("hidden_out", fp32, [*lead, self.units])],
            [axis, *[models.numpy_helper.from_array(getattr(self, name), name) for name in "wuv"]],
        )

    def put(self, root: Path, name: str, batching: str, *, model: Any = None) -> Path:
        """Write the model with `batching` beside its state."""
        return put(
            root,
            name,
            f"{batching} {HIDDEN % self.units}",
            rows=8 if self.batched else 0,
            model=model or self.proto(),
            tensors=RECURRENT % self.width,
        )

    def loop(self, chunks: Any, hidden: Any = None) -> tuple[Any, Any]:
        """Return the outputs of all steps, and the last state, as numpy computes them."""
        state = np.zeros((1, self.units), np.float32) if hidden is None else hidden
        speech = []
        for chunk in chunks:
            state = np.tanh(chunk[np.newaxis] @ self.w + state @ self.u)
            for _ in range(1, self.layers):
                state = np.tanh(state @ self.u)
            speech.append(state @ self.v)
        return np.concatenate(speech), state
