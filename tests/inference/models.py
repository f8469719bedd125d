"""Small ONNX models and repositories for tests."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save_model

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def graph(nodes, inputs, outputs, weights=()):  # type: ignore[no-untyped-def]
    """Return a model. inputs, outputs: (name, type, shape)."""
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        list(weights),
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def double(shape=("n", 4)):  # type: ignore[no-untyped-def]
    """Return a model y = x + x."""
    return graph([helper.make_node("Add", ["x", "x"], ["y"])], [("x", FLOAT, shape)], [("y", FLOAT, shape)])


def two_inputs():  # type: ignore[no-untyped-def]
    """Return a model sum = a + b, difference = a - b."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    return graph(
        nodes,
        [("a", FLOAT, ["n", "m"]), ("b", FLOAT, ["n", "m"])],
        [("sum", FLOAT, ["n", "m"]), ("difference", FLOAT, ["n", "m"])],
    )


def echo():  # type: ignore[no-untyped-def]
    """Return a model that returns its text."""
    return graph(
        [helper.make_node("Identity", ["text"], ["said"])], [("text", STRING, ["n", 1])], [("said", STRING, ["n", 1])]
    )


def lookup():  # type: ignore[no-untyped-def]
    """Return a model that looks up row `index` in a table of three; an index outside of it fails the whole run."""
    table = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "table")
    return graph(
        [helper.make_node("Gather", ["table", "index"], ["row"])],
        [("index", INT64, ["n"])],
        [("row", FLOAT, ["n", 2])],
        [table],
    )


def slow(repeats: int = 400, width: int = 512):  # type: ignore[no-untyped-def]
    """Return a model that takes some hundred milliseconds of matrix products."""
    weight = numpy_helper.from_array(np.eye(width, dtype=np.float32), "w")
    loop_body = [helper.make_node("MatMul", [f"v{i}", "w"], [f"v{i + 1}"]) for i in range(repeats)]
    first = helper.make_node("Identity", ["x"], ["v0"])
    last = helper.make_node("Identity", [f"v{repeats}"], ["y"])
    return graph([first, *loop_body, last], [("x", FLOAT, ["n", width])], [("y", FLOAT, ["n", width])], [weight])


def endless():  # type: ignore[no-untyped-def]
    """Return a valid model whose first run takes longer than any test waits."""
    one = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["v", "v"], ["w"])],
        "body",
        [one("i", INT64, []), one("go", TensorProto.BOOL, []), one("v", FLOAT, ["n", 4])],
        [one("on", TensorProto.BOOL, []), one("w", FLOAT, ["n", 4])],
    )
    weights = [
        numpy_helper.from_array(np.array(1 << 62), "many"),
        numpy_helper.from_array(np.array(True), "yes"),
    ]
    loop = helper.make_node("Loop", ["many", "yes", "x"], ["y"], body=body)
    return graph([loop], [("x", FLOAT, ["n", 4])], [("y", FLOAT, ["n", 4])], weights)


def put(root: Path, name: str, model=None, config: str | None = None, version: int = 1) -> Path:  # type: ignore[no-untyped-def]
    """Write a model into a repository. The folder is renamed when it is complete, because a server may be polling.

    config: None leaves the file out, or leaves it as it is.
    """
    folder = root / name
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root.parent) as beside:
        new = Path(beside) / name
        (new / str(version)).mkdir(parents=True)
        if model is not None:
            save_model(model, str(new / str(version) / "model.onnx"))
        if config is not None:
            (new / "config.pbtxt").write_text(config)
        if not folder.exists():
            new.rename(folder)
            return folder
        if not (folder / str(version)).exists():
            (new / str(version)).rename(folder / str(version))
        elif model is not None:
            (new / str(version) / "model.onnx").replace(folder / str(version) / "model.onnx")
        if config is not None:
            (new / "config.pbtxt").replace(folder / "config.pbtxt")
    return folder


DOUBLE = """
name: "double" backend: "onnxruntime" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
