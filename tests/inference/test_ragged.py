"""Ragged batches of ONNX models: what the model gets, what each request gets back, and how they are configured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from oriel_inference.backends import find_backend
from oriel_inference.batching import batcher
from oriel_inference.batching.assemble import execute
from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.batching.device import Devices
from oriel_inference.batching.ragged import ragged_inputs, scattered
from oriel_inference.errors import BackendFailed, LoadFailed
from oriel_inference.fitting import RequestFitter
from oriel_inference.model import BatchInput, RaggedRules, TensorSpec
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.messages import InferRequest, tensor

from . import models
from .bench import Bench, spec

CONFIG = """
backend: "onnxruntime" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
input { name: "k" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "twice" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "end" data_type: TYPE_FP32 dims: [ 1 ] }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "x" }
batch_output { target_name: "twice" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }
"""
COMPILED = 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }'
WARM = """
model_warmup { name: "w" batch_size: 2
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } }
  inputs { key: "k" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }
"""


def model() -> Any:
    """Return a model twice = x + x over all elements, end = k + ends for each request."""
    shape = numpy_helper.from_array(np.array([-1, 1]), "column")
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"]),
        helper.make_node("Reshape", ["ends", "column"], ["rows"]),
        helper.make_node("Add", ["k", "rows"], ["end"]),
    ]
    one = TensorProto.FLOAT
    inputs = [("x", one, ["e"]), ("k", one, ["n", 1]), ("ends", one, ["n"])]
    return models.graph(nodes, inputs, [("twice", one, ["e"]), ("end", one, ["n", 1])], [shape])


def load(root: Path, config: str) -> LoadedVersion | LoadFailed | None:
    models.put(root, "ragged", model(), config)
    try:
        found = load_model(Loading(LocalStore(root), "ragged", find_backend=find_backend, cores=1, models=1))
    except LoadFailed as failure:
        return failure
    return found[1]


def test_requests_of_unequal_shapes_are_one_batch_and_get_their_own_elements(tmp_path: Path) -> None:
    loaded = load(tmp_path, CONFIG + WARM)
    assert isinstance(loaded, LoadedVersion), loaded
    fitter, calls = RequestFitter(loaded.spec), []
    for count in (3, 4, 5):
        x, k = np.full((1, count), count, np.float32), np.full((1, 1), 100, np.float32)
        fitted = fitter.fit(InferRequest(model_name="ragged", inputs=[tensor("x", x), tensor("k", k)]))
        call = Call(
            inputs=fitted.inputs,
            rows=fitted.rows,
            signature=fitted.signature,
            arrived_s=0.0,
            deadline=9.0,
            reply=lambda result: None,
        )
        calls.append(call)
    assert len({call.signature for call in calls}) == 1
    for batch in (calls, calls[1:2]):
        ((_, outcome),) = execute(loaded.sessions[0], loaded.spec, ["twice", "end"], batch, lambda: 1.0, Devices().host)
        assert isinstance(outcome, tuple) and isinstance(outcome[1], BatchTimes) and outcome[1].rows == len(batch)
        ends = np.cumsum([call.inputs["x"].size for call in batch])
        for call, end, (twice, its_end) in zip(batch, ends, outcome[0], strict=True):
            np.testing.assert_array_equal(twice, 2 * call.inputs["x"])
            np.testing.assert_array_equal(its_end, [[100 + end]])
    loaded.close()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 4]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 6),
        ("BATCH_ITEM_SHAPE", [[1, 3], [1, 3], [2, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [1, 3, 1, 3, 2, 2]),
    ],
)
def test_each_kind_describes_the_batch_as_triton_does(kind: str, value: list[Any]) -> None:
    rules = RaggedRules(inputs=(BatchInput(kind, ("a", "b"), "x", "int32"),), outputs={})
    parts = [{"x": np.zeros((2, 1, 3))}, {"x": np.zeros((1, 2, 2))}]
    found = ragged_inputs(parts, spec(), rules)
    assert found["a"].dtype == np.int32 and found["a"].tolist() == found["b"].tolist() == value


def test_an_output_has_the_dims_that_clients_know() -> None:
    output = TensorSpec(name="y", datatype="FP32", dims=(1, 2), engine_dims=(2,))
    rules, parts = RaggedRules(inputs=(), outputs={}), [{"x": np.zeros((2, 2))}, {"x": np.zeros((1, 3))}]
    found = scattered([np.arange(6).reshape(3, 2)], replace(spec(), outputs=(output,)), rules, parts, [2, 1])
    assert [each[0].tolist() for each in found] == [[[[0, 1]], [[2, 3]]], [[[4, 5]]]]


def test_ragged_models_get_no_tensors_on_a_device_after_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Bench(replace(spec(), ragged=RaggedRules(inputs=(), outputs={})))
    monkeypatch.setattr(batcher, "resident_memory", lambda sessions: "cuda")
    at.batcher.swap(at.sessions)
    assert at.batcher.resident is None


def test_an_output_of_another_size_fails_the_batch() -> None:
    rules = RaggedRules(inputs=(), outputs={"y": "x"})
    parts = [{"x": np.zeros((1, 2))}, {"x": np.zeros((1, 3))}]
    assert [each[0].shape for each in scattered([np.arange(5)], spec(), rules, parts, [1, 1])] == [(1, 2), (1, 3)]
    for array in (np.arange(4), np.array(1)):
        with pytest.raises(BackendFailed, match="elements for a batch of 5"):
            scattered([array], spec(), rules, parts, [1, 1])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("max_batch_size: 8", "max_batch_size: 0", "batch_input: is for ONNX models with a max_batch_size"),
        ('data_type: TYPE_FP32 source_input: "x"', 'data_type: TYPE_FP64 source_input: "x"', "TYPE_FP32 or TYPE_INT32"),
        ('TYPE_FP32 source_input: "x" }', 'TYPE_FP32 source_input: "z" }', "must name one input that is not optional"),
        ('target_name: "ends"', "", "batch_input.target_name: is missing"),
        ('target_name: "ends"', 'target_name: "k"', "batch_input: must be TYPE_FP32 or TYPE_INT32, and no input of"),
        ('target_name: "ends"', 'target_name: "no"', "batch_input: 'no'.name: the model file has no input"),
        ('target_name: "twice"', 'target_name: "no"', "batch_output.target_name: must name outputs with as"),
        (" allow_ragged_batch: true", "", "input[0].dims: [-1] does not fit the model file's []"),
        ("backend:", f"{COMPILED} backend:", "batch_input: does not go with a compiler"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert CONFIG.count(old) == 1
    failure = load(tmp_path, CONFIG.replace(old, new))
    assert isinstance(failure, LoadFailed) and reason in failure.reason
