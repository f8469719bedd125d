"""What an ensemble's configuration must say, and what its models must agree on."""

import re

import numpy as np
import pytest

from oriel_inference.ensembles.graph import fit_rank
from oriel_inference.errors import ConfigInvalid, InvalidRequest
from oriel_inference.repository.config import parse, validate

from .ensembles import DIAMOND, Step, config, ensemble, judged, model, tensor

ONE: tuple[Step, ...] = (("a", {"x": "in"}, {"y": "out"}),)


def load(text: str) -> None:
    validate(parse(text, "e/config.pbtxt"), "e", "e/config.pbtxt")


@pytest.mark.parametrize(
    "text",
    [
        config(ONE),
        config(ONE, head='backend: "ensemble" max_batch_size: 8'),
        config(ONE, head="max_batch_size: 8"),
        config(ONE, more="max_inflight_requests: 3"),
        config(ONE).replace("model_version: -1", "model_version: 7"),
        config(ONE).replace('model_name: "a"', 'model_name: "a" model_namespace: ""'),
        config(DIAMOND, outputs=["out", "left"]),
        config((*ONE, ("b", {"x": "in"}, {"y": "two"})), outputs=["out", "two"]),
    ],
)
def test_what_triton_takes_is_taken(text: str) -> None:
    parsed = parse(text, "e/config.pbtxt")
    assert validate(parsed, "e", "e/config.pbtxt") == []
    assert parsed.platform == "ensemble"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (config(()), "ensemble_scheduling.step: is missing"),
        (config(ONE, head='platform: "onnxruntime_onnx"'), "belongs to platform 'ensemble'"),
        (config(ONE, head='platform: "ensemble" backend: "python"'), "backend: 'python' contradicts platform"),
        ('platform: "ensemble"', "ensemble_scheduling.step: is missing"),
        (config(ONE) + "instance_group [ { count: 2 } ]", "instance_group: is not for ensembles"),
        (config(ONE) + "optimization { }", "optimization: is not for ensembles"),
        (config(ONE) + 'model_warmup [ { name: "w" } ]', "model_warmup: is not for ensembles"),
        (config(ONE) + "dynamic_batching { }", "config.pbtxt"),
        (config((("", {"x": "in"}, {"y": "out"}),)), "step[0].model_name: is missing"),
        (config((("a/b", {"x": "in"}, {"y": "out"}),)), "step[0].model_name: 'a/b' is not a valid model name"),
        (config((("e", {"x": "in"}, {"y": "out"}),)), "step[0].model_name: is the ensemble itself"),
        (config(ONE).replace("model_version: -1", "model_version: 0"), "step[0].model_version: must be a version"),
        (config(ONE).replace("model_version: -1", ""), "step[0].model_version: must be a version, or -1"),
        (config(ONE).replace('model_name: "a"', 'model_name: "a" model_namespace: "n"'), "model_namespace: is not"),
        (config((("a", {}, {"y": "out"}),)), "step[0].input_map: is missing"),
        (config((("a", {"x": "in"}, {}),)), "step[0].output_map: is missing"),
        (config(ONE * 257), "more than 256 are given"),
        (config((("a", {f"x{n}": "in" for n in range(1025)}, {"y": "out"}),)), "input_map: more than 1024 are given"),
        (
            config(ONE, inputs='name: "other" data_type: TYPE_FP32 dims: [ 4 ]'),
            "input_map['x']: nothing makes tensor 'in'",
        ),
        (config((*ONE, ("b", {"x": "in"}, {"y": "out"}))), "output_map['y']: tensor 'out' is also made by step 0"),
        (config((*ONE, ("b", {"x": "out"}, {"y": "in"}))), "output_map['y']: tensor 'in' is an input of the ensemble"),
        (config((*ONE, ("b", {"x": "in"}, {"y": "spare"}))), "tensor 'spare' is neither used by a step nor an output"),
        (config(ONE, outputs=["out", "left"]), "output: no step makes output 'left'"),
        (
            config(
                ONE,
                inputs='name: "in" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "i" data_type: TYPE_FP32 dims: [ 4 ]',
            ),
            "input: no step uses input 'i'",
        ),
        (
            config((("a", {"x": "in", "z": "u"}, {"y": "t"}), ("b", {"x": "t"}, {"y": "u", "w": "out"}))),
            "ensemble_scheduling.step: steps 0 (a), 1 (b) wait for one another",
        ),
        (re.sub(r"output \[.*\]", "", config(ONE)), "output: is missing: an ensemble has no model file"),
    ],
)
def test_what_cannot_work_is_named_by_field(text: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid) as refusal:
        load(text)
    assert refusal.value.reason.startswith("e/config.pbtxt") and reason in refusal.value.reason


FLOATS = model("a", inputs=(tensor("x", (4,), "FP32"),), outputs=(tensor("y", (4,), "FP32"),))
PLAIN = ensemble(ONE, outputs=["out"])


def changed(**more: object) -> dict[str, object]:
    return {"a": model("a", **more)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "models", "reason"),
    [
        (PLAIN, changed(max_rows=4), "max_batch_size: 8 is more than the 4 of its model 'a'"),
        (PLAIN, changed(inputs=(tensor("q"),)), "input_map['x']: model 'a' has no input 'x', only q"),
        (PLAIN, changed(outputs=(tensor("q"),)), "output_map['y']: model 'a' has no output 'y', only q"),
        (PLAIN, changed(inputs=(tensor("x"), tensor("z"))), "step[0].input_map: model 'a' also needs input 'z'"),
        (
            PLAIN,
            {"a": FLOATS},
            "input_map['x']: tensor 'in' is INT64 as the ensemble's input 'in' but FP32 as input 'x' of 'a'",
        ),
        (
            PLAIN,
            changed(inputs=(tensor("x", (2, 2)),)),
            "tensor 'in' is [-1, -1] as the ensemble's input 'in' but [-1, 2, 2]",
        ),
        (
            PLAIN,
            changed(outputs=(tensor("y", (2, 2)),)),
            "output[0]: tensor 'out' is [-1, 2, 2] as output 'y' of 'a' but [-1, -1] as the ensemble's output 'out'",
        ),
        (
            ensemble((("a", {"x": "in"}, {"y": "t"}), ("b", {"x": "t"}, {"y": "out"})), outputs=["out"]),
            {"a": model("a", outputs=(tensor("y", (3,)),)), "b": model("b", inputs=(tensor("x", (4,)),))},
            "step[1].input_map['x']: tensor 't' is [-1, 3] as output 'y' of 'a' but [-1, 4] as input 'x' of 'b'",
        ),
    ],
)
def test_what_does_not_fit_is_named_by_tensor_and_model(spec, models, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigInvalid) as refusal:
        judged(spec, models)
    assert reason in refusal.value.reason and len(refusal.value.reason) <= 500


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ({"inputs": (tensor("x", (4,)),)}, {}),  # variable on one side
        ({"max_rows": 0}, {}),  # a batch of one goes through
        (
            {"max_rows": 0, "inputs": (tensor("x", (-1, -1)),), "outputs": (tensor("y", (-1, -1)),)},
            {},
        ),  # the whole batch
        ({}, {"max_batch_size": 0}),
        ({"max_rows": 64}, {}),
        ({"inputs": (tensor("x"), tensor("z", optional=True)), "outputs": (tensor("y"), tensor("w"))}, {}),
    ],
)
def test_what_fits_is_let_through(inside: dict[str, object], outside: dict[str, object]) -> None:
    judged(ensemble(ONE, outputs=["out"], **outside), {"a": model("a", **inside)})  # type: ignore[arg-type]


def test_a_batch_of_one_is_unpacked_and_packed_without_a_copy() -> None:
    row = np.zeros((1, 3))
    for array, batched, shape in (
        (row, True, (1, 3)),
        (row[0], True, (1, 3)),
        (row, False, (3,)),
        (row[0], False, (3,)),
    ):
        fitted = fit_rank(array, (3,), batched=batched, tensor="t")
        assert fitted.shape == shape and np.shares_memory(fitted, row)
    with pytest.raises(InvalidRequest, match="'t' has 2 rows"):
        fit_rank(np.zeros((2, 3)), (3,), batched=False, tensor="t")
