"""Two demo models with one set of weights: `mlp` is batched, `mlp_single` is not.

A multilayer perceptron with seeded random weights: its answers mean nothing, its cost does. Reading 5 MB of
weights dominates one row's arithmetic, so 32 rows at once cost far less than 32 times one row. That is the case
for batching, and `oriel demo` measures it.

Input `x` FP32 [-1, 1024], output `y` FP32 [-1, 256]. Needs the `onnx` package; takes well under a second.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

WIDTHS = (1024, 640, 640, 256)  # 1.2 million weights, 4.9 MB per model
SEED = 7
CONFIG = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: 32
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {inputs} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {outputs} ] }} ]
{scheduling}
"""
BATCHED = "dynamic_batching { }"
UNBATCHED = 'parameters { key: "oriel.batching" value { string_value: "off" } }'


def build() -> bytes:
    """The ONNX file: linear layers with ReLU between them."""
    import numpy as np
    from onnx import TensorProto, checker, helper, numpy_helper

    random = np.random.default_rng(SEED)
    nodes, weights = [], []
    value = "x"
    for layer, (rows, columns) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False), start=1):
        scale = np.sqrt(2.0 / rows)
        weight = (random.standard_normal((rows, columns), dtype=np.float32) * scale).astype(np.float32)
        bias = np.zeros(columns, dtype=np.float32)
        weights += [numpy_helper.from_array(weight, f"w{layer}"), numpy_helper.from_array(bias, f"b{layer}")]
        last = layer == len(WIDTHS) - 1
        linear = "y" if last else f"linear{layer}"
        nodes.append(helper.make_node("Gemm", [value, f"w{layer}", f"b{layer}"], [linear], name=f"layer{layer}"))
        if not last:
            value = f"hidden{layer}"
            nodes.append(helper.make_node("Relu", [linear], [value], name=f"relu{layer}"))
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTHS[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTHS[-1]])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return bytes(model.SerializeToString())


def write(repository: Path) -> None:
    """Put `mlp` and `mlp_single` into `repository`; what is already complete there is left alone.

    A model folder appears whole or not at all: it is written beside and renamed. Of two writers at once one wins.
    Raises OSError if the folder cannot be written.
    """
    schedules = {"mlp": BATCHED, "mlp_single": UNBATCHED}
    missing = [name for name in schedules if not is_complete(repository / name)]
    if not missing:
        return
    repository.mkdir(parents=True, exist_ok=True)
    model = build()
    for name in missing:
        config = CONFIG.format(name=name, inputs=WIDTHS[0], outputs=WIDTHS[-1], scheduling=schedules[name])
        publish(repository / name, config, model)


def is_complete(folder: Path) -> bool:
    return (folder / "config.pbtxt").is_file() and (folder / "1" / "model.onnx").is_file()


def publish(folder: Path, config: str, model: bytes) -> None:
    # The draft lies beside the repository, not in it: a server that polls the repository must never see half a model.
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent.parent))
    try:
        (draft / "1").mkdir()
        (draft / "1" / "model.onnx").write_bytes(model)
        (draft / "config.pbtxt").write_text(config)
        draft.chmod(0o755)
        if folder.exists():  # incomplete: left by something else
            shutil.rmtree(folder)
        try:
            os.rename(draft, folder)
        except OSError:
            if not is_complete(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
