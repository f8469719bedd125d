"""Requests and answers that change between JSON and binary data say the same afterwards."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2 import http
from oriel_wire.v2.messages import InferRequest, InferResponse, tensor

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT8": st.integers(0, 255),
    "BOOL": st.booleans(),
    "BYTES": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
}
PLAIN = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab\u00e9", max_size=4)
)
PARAMETERS = st.dictionaries(st.sampled_from(["a", "b", "timeout"]), PLAIN, max_size=2)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    inputs = []
    for name in draw(st.lists(st.sampled_from("xyz"), unique=True, max_size=3)):
        datatype = draw(st.sampled_from(sorted(VALUES)))
        data = draw(st.lists(VALUES[datatype], max_size=5))
        entry = {"name": name, "datatype": datatype, "shape": [1, len(data)], "data": data}
        inputs.append({**entry, "parameters": draw(PARAMETERS)} if draw(st.booleans()) else entry)
    found: dict[str, Any] = {"inputs": inputs}
    if draw(st.booleans()):
        flags = st.fixed_dictionaries({}, optional={"binary_data": st.booleans(), "classification": st.integers(0, 9)})
        found["outputs"] = [{"name": name, "parameters": draw(flags)} for name in draw(st.sets(st.sampled_from("uv")))]
    if draw(st.booleans()):
        found["parameters"] = draw(PARAMETERS) | draw(st.sampled_from([{}, {"binary_data_output": True}]))
    if draw(st.booleans()):
        found["id"] = draw(st.text("ab\u00e9\0", max_size=4))
    return found


@settings(max_examples=40)
@given(documents())
def test_request_with_binary_inputs_is_the_same_request(document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    one = http.decode_request("m", "1", body, None)
    parts, length = http.to_binary_request(body, None)
    other = http.decode_request("m", "1", b"".join(parts), length)
    for mine, theirs in zip(one.inputs, other.inputs, strict=True):
        np.testing.assert_array_equal(mine.array, theirs.array)
        assert mine.array.dtype == theirs.array.dtype
        assert (mine.name, mine.datatype, mine.shape, mine.parameters) == (
            theirs.name,
            theirs.datatype,
            theirs.shape,
            theirs.parameters,
        )
    for each in (one, other):
        each.inputs = []
    assert one == other


def test_data_is_not_decoded_if_its_shape_says_that_it_is_too_large() -> None:
    body = b'{"inputs": [{"name": "x", "shape": [3, 1000], "datatype": "FP64", "data": ["no number"]}]}'
    with pytest.raises(TooLarge, match="the inputs have 24000 bytes as binary data, at most 23999 are accepted"):
        http.to_binary_request(body, None, 23999)


@pytest.mark.parametrize("values", [[1.5, 2.0], [float("nan"), float("inf")], []])
def test_response_in_json_is_what_would_have_been_written(values: list[float]) -> None:
    outputs = [tensor("y", np.array(values, np.float32)), tensor("n", np.arange(3))]
    response = InferResponse(model_name="m", model_version="2", id="me", parameters={"a": 1}, outputs=outputs)
    parts, length = http.encode_response(response, InferRequest(model_name="m", binary_default=True))
    assert length is not None
    expected, none = http.encode_response(response, InferRequest(model_name="m"))
    assert none is None
    assert b"".join(http.to_json_response(b"".join(parts), length)) == b"".join(expected)


def test_response_that_json_cannot_carry_is_refused() -> None:
    outputs = [tensor("y", np.zeros(2, np.float16))]
    parts, length = http.encode_response(
        InferResponse(model_name="m", outputs=outputs), InferRequest(model_name="m", binary_default=True)
    )
    assert length is not None
    with pytest.raises(BadMessage, match="'y': FP16 cannot travel as JSON"):
        http.to_json_response(b"".join(parts), length)
