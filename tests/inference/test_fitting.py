import numpy as np
import pytest

from oriel_inference.dataplane.dataplane import top_classes
from oriel_inference.errors import InvalidRequest
from oriel_inference.fitting import RequestFitter
from oriel_inference.model import ModelSpec, QueueRules, TensorSpec
from oriel_wire.v2.messages import InferRequest, RequestedOutput, Tensor, tensor


def fitter(*inputs: TensorSpec, max_batch_size: int = 4, **queue: int) -> RequestFitter:
    return RequestFitter(
        ModelSpec(
            name="m",
            version=1,
            platform="",
            backend="fake",
            max_batch_size=max_batch_size,
            inputs=inputs,
            outputs=(TensorSpec(name="y", datatype="FP32", dims=(1,)),),
            bounds=None,
            queue=QueueRules(**queue),  # type: ignore[arg-type]
        )
    )


def floats(name: str, *dims: int, optional: bool = False, ragged: bool = False) -> TensorSpec:
    return TensorSpec(name=name, datatype="FP32", dims=dims, optional=optional, ragged=ragged)


def request(*tensors: Tensor, **parameters: int | bool | str) -> InferRequest:
    return InferRequest(model_name="m", inputs=list(tensors), parameters=dict(parameters))


def zeros(name: str, *shape: int) -> Tensor:
    return tensor(name, np.zeros(shape, np.float32))


def test_fixed_shapes_share_one_signature_and_variable_ones_do_not() -> None:
    fixed = fitter(floats("x", 3))
    assert fixed.fit(request(zeros("x", 1, 3))).signature == fixed.fit(request(zeros("x", 2, 3))).signature
    variable = fitter(floats("x", -1))
    signatures = {variable.fit(request(zeros("x", 1, width))).signature for width in (2, 3, 3)}
    assert len(signatures) == 2
    ragged = fitter(floats("x", -1, ragged=True), floats("y", -1))
    found = {ragged.fit(request(zeros("x", 1, x), zeros("y", 1, y))).signature for x, y in ((2, 1), (3, 1), (3, 2))}
    assert len(found) == 2, "requests of unequal shapes share a batch as far as the model can take them"


def test_optional_inputs_may_be_left_out_and_then_share_no_batch_with_those_that_have_them() -> None:
    both = fitter(floats("x", 3), floats("hint", 1, optional=True))
    without, with_hint = both.fit(request(zeros("x", 1, 3))), both.fit(request(zeros("x", 1, 3), zeros("hint", 1, 1)))
    assert without.signature != with_hint.signature
    with pytest.raises(InvalidRequest, match="expected 1 inputs but got 1 inputs for model .* also needs input 'x'"):
        both.fit(request(zeros("hint", 1, 1)))


def test_an_output_that_is_requested_twice_is_refused() -> None:
    asked = request(zeros("x", 1, 3))
    asked.outputs = [RequestedOutput("y", True, 0), RequestedOutput("y", True, 0)]
    with pytest.raises(InvalidRequest, match="Duplicate output name 'y' is not allowed in a request"):
        fitter(floats("x", 3)).fit(asked)


def test_a_request_may_leave_out_every_input_that_is_optional() -> None:
    fitted = fitter(floats("hint", 1, optional=True)).fit(request())
    assert fitted.inputs == {} and fitted.rows == 1
    assert fitter().fit(request()).rows == 1


def test_inputs_of_unequal_batch_sizes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="input 'b' has batch size 1, the inputs before it have 2"):
        fitter(floats("a", 3), floats("b", 3)).fit(request(zeros("a", 2, 3), zeros("b", 1, 3)))


def test_model_without_batch_dimension_takes_its_shape_as_it_is() -> None:
    fitted = fitter(floats("x", -1, 3), max_batch_size=0).fit(request(zeros("x", 7, 3)))
    assert fitted.rows == 1
    with pytest.raises(InvalidRequest, match="expected"):
        fitter(floats("x", -1, 3), max_batch_size=0).fit(request(zeros("x", 1, 7, 3)))


@pytest.mark.parametrize(("given", "level"), [(0, 2), (1, 1), (3, 3), (9, 2)])
def test_priority_is_a_level_of_the_model_or_its_default(given: int, level: int) -> None:
    ranked = fitter(floats("x", 3), priority_levels=3, default_priority=2)
    assert ranked.fit(request(zeros("x", 1, 3), priority=given)).level == level


def test_priority_means_nothing_to_a_model_without_levels() -> None:
    assert fitter(floats("x", 3)).fit(request(zeros("x", 1, 3), priority=1)).level == 0


@pytest.mark.parametrize("value", [-1, True, "5"])
def test_timeouts_that_are_no_durations_are_refused(value: int | bool | str) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        fitter(floats("x", 3)).fit(request(zeros("x", 1, 3), timeout=value))


def test_timeout_is_in_microseconds() -> None:
    assert fitter(floats("x", 3)).fit(request(zeros("x", 1, 3), timeout=1500)).timeout_s == pytest.approx(0.0015)


def test_classes_are_ordered_by_value_then_index_and_capped_by_what_there_is() -> None:
    spec = TensorSpec(name="y", datatype="INT32", dims=(3,), labels=("a", "b"))
    found = top_classes(np.array([[1, 5, 5]], np.int32), spec, 9, batched=True)
    assert found.tolist() == [[b"5:1:b", b"5:2", b"1:0:a"]]
    text = TensorSpec(name="y", datatype="BYTES", dims=(1,))
    with pytest.raises(InvalidRequest, match="classes need numbers"):
        top_classes(np.array([[b"x"]], object), text, 1, batched=True)
