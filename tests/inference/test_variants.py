"""Variants of a model in other precisions: each serves only if its outputs are those of the model's own file."""

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.offline import build_ahead, compilations
from oriel_inference.artefacts.process import ArtefactRefused, BuildBounds, kind_of
from oriel_inference.repository.compiling import Compilation
from oriel_policies.artefacts.lifecycle import RefusalKind

from . import models
from .artefact_server import only_artefact, outcomes, served, state, until_state
from .control_server import put, times
from .hostile_models import refusal

DOCS = Path(__file__).parents[2] / "docs/compiled-artefacts.md"
DENSE = """
backend: "onnxruntime" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 16 ] } ]
"""


def variant(name: str) -> str:
    return f'parameters {{ key: "oriel.variant" value {{ string_value: "{name}" }} }}\n'


def put_variant(root: Path, name: str, model: Any) -> None:
    models.save_model(model, str(root / "double/1" / f"model.{name}.onnx"))


def dense() -> Any:
    """Return a model of two layers whose outputs are of the order of 1."""
    values = np.random.default_rng(7)
    weights = [
        models.numpy_helper.from_array(values.standard_normal(shape).astype(np.float32) * shape[0] ** -0.5, name)
        for name, shape in (("w1", (64, 128)), ("w2", (128, 16)))
    ]
    nodes = [
        models.helper.make_node("MatMul", ["x", "w1"], ["h"]),
        models.helper.make_node("Relu", ["h"], ["r"]),
        models.helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    return models.graph(nodes, [("x", models.FLOAT, ["n", 64])], [("y", models.FLOAT, ["n", 16])], weights)


def silent(phase: str, seconds: float) -> None:
    """Report nothing."""


def build(root: Path, **bounds: Any) -> str:
    """Return what is found when the artefact of the only model is built and checked. Raises ArtefactRefused."""
    ((_, one),) = compilations(root)
    assert isinstance(one, Compilation), one
    _, manifest = build_ahead(one, ArtefactFolder(root.parent / "a", max_bytes=1 << 30), BuildBounds(**bounds), silent)
    return manifest.errors


async def test_a_model_quantised_as_the_page_shows_serves(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    folder = models.put(tmp_path / "models", "dense", dense(), DENSE + variant("int8")) / "1"
    subprocess.run([sys.executable, "-c", block], cwd=folder, check=True, capture_output=True)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving", "dense")
        (line,) = (await one.lines()).values()
        assert line[1].startswith("compiled by variant-int8: serving, largest error ")
        artefact = only_artefact(tmp_path / "artefacts")
        assert (artefact / "model.int8.onnx").read_bytes() == (folder / "model.int8.onnx").read_bytes()
        body = {"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}
        answer = (await one.client.post("/v2/models/dense/infer", json=body)).json()["outputs"][0]["data"]
        reference = one.unit.catalog.get("dense").sessions[-1]
        (expected,) = reference.run({"x": np.full((1, 64), 0.5, np.float32)}, ["y"])
        assert np.allclose(answer, expected, rtol=0.1, atol=0.1)
        assert not np.array_equal(np.array(answer, np.float32), expected[0]), "it is the variant that answers"


async def test_the_variant_fp32_is_the_models_own_file(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + variant("fp32"))
    put_variant(tmp_path / "models", "int8", times(5.0))
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        assert await one.answer() == 2.0
        assert state(one.unit) == "" and outcomes(one) == {}


@pytest.mark.parametrize(("name", "factor", "agrees"), [("fp16", 2.1, False), ("int8", 2.1, True)])
def test_each_precision_has_its_tolerance(tmp_path: Path, name: str, factor: float, agrees: bool) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + variant(name))
    put_variant(tmp_path / "models", name, times(factor))
    try:
        assert build(tmp_path / "models").startswith("largest error ") and agrees
    except ArtefactRefused as refused:
        assert refused.kind is RefusalKind.OUTPUTS_DIFFER and not agrees


def test_a_file_that_cannot_be_written_is_no_crash_of_the_build(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + variant("int8"))
    put_variant(tmp_path / "models", "int8", times(2.0))
    with pytest.raises(ArtefactRefused, match="its files cannot be written: File too large") as refused:
        build(tmp_path / "models", artefact_bytes=16)
    assert refused.value.kind is RefusalKind.TOO_LARGE
    assert kind_of(OSError(errno.ENOSPC, "")) is RefusalKind.NO_SPACE
    assert kind_of(OSError(errno.EACCES, "")) is None


def test_the_owner_may_give_a_tolerance(tmp_path: Path) -> None:
    own = 'parameters { key: "oriel.compile.tolerance" value { string_value: "relative=0.3" } }\n'
    put(tmp_path / "models", 2.0, config=models.DOUBLE + variant("int8") + own)
    put_variant(tmp_path / "models", "int8", times(2.5))
    assert build(tmp_path / "models").startswith("largest error ")


def test_a_variant_that_is_not_there_is_named(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + variant("fp16"))
    with pytest.raises(ArtefactRefused, match="there is no model.fp16.onnx beside model.onnx"):
        build(tmp_path / "models")


@pytest.mark.parametrize("where", ["../2/model.onnx", "weights"])
def test_a_variant_may_only_refer_to_weights_whose_names_begin_with_its_own(tmp_path: Path, where: str) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + variant("int8"))
    (tmp_path / "models/double/1/weights").write_bytes(bytes(16))
    made = times(5.0)
    (weight,) = made.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=where)
    (tmp_path / "models/double/1/model.int8.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ArtefactRefused) as refused:
        build(tmp_path / "models")
    assert refused.value.kind is RefusalKind.NOT_COMPILED
    assert "double/1/model.int8.onnx refers to weights " in refused.value.reason


def test_weights_beside_the_variant_come_with_it(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=models.DOUBLE + variant("fp16"))
    models.save_model(
        times(2.0),
        str(tmp_path / "models/double/1/model.fp16.onnx"),
        save_as_external_data=True,
        location="model.fp16.onnx.data",
        size_threshold=0,
    )
    assert build(tmp_path / "models") == "largest error 0 absolute, 0 relative over 2 samples"
    artefact = only_artefact(tmp_path / "a")
    assert sorted(path.name for path in artefact.iterdir()) == [
        "manifest.json",
        "model.fp16.onnx",
        "model.fp16.onnx.data",
    ]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (variant("int4"), "parameters['oriel.variant']: 'int4' is not one of fp32, fp16, bf16, int8"),
        (
            variant("int8") + 'parameters { key: "oriel.compile" value { string_value: "openvino" } }',
            "parameters['oriel.variant']: does not go with parameters['oriel.compile']",
        ),
        (
            'parameters { key: "oriel.compile" value { string_value: "variant-int8" } }',
            "parameters['oriel.compile']: 'variant-int8' is not one of onnxruntime-graph, openvino",
        ),
        (variant("int8") + "model_transaction_policy { decoupled: true }", "does not go with a decoupled model"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(tmp_path: Path, config: str, reason: str) -> None:
    put(tmp_path, 2.0, config=models.DOUBLE + config)
    assert reason in refusal(tmp_path)
