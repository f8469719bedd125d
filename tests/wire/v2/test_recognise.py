"""Recognised texts say what the full decoder and encoder say."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.v2.http import decode_request, encode_response
from oriel_wire.v2.messages import InferRequest, InferResponse, tensor
from oriel_wire.v2.recognise import MAX_BYTES, MAX_ELEMENTS, MAX_TEMPLATES, AnswerText, Templates

NUMBERS = {
    "BOOL": st.booleans(),
    "FP32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "FP64": st.floats(allow_nan=False, allow_infinity=False),
}
NUMBERS |= {f"INT{bits}": st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
NUMBERS |= {f"UINT{bits}": st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64)}


def body(data: list[Any], datatype: str = "FP32", **members: Any) -> bytes:
    one = {"name": "x", "shape": [1, len(data)], "datatype": datatype, "data": data}
    return json.dumps({"inputs": [one], **members}).encode()


def learn(templates: Templates, text: bytes) -> bool:
    """Show it twice, as two requests would."""
    request = decode_request("m", "", text, None)
    templates.learn(text, request)
    return templates.learn(text, request) is not None


@given(st.data(), st.sampled_from(sorted(NUMBERS)), st.integers(1, 8), st.sampled_from([None, "a", 'ü"]', "data"]))
def test_a_known_text_with_other_numbers_is_the_full_decoders(
    data: st.DataObject, datatype: str, size: int, name: str | None
) -> None:
    lists = st.lists(NUMBERS[datatype], min_size=size, max_size=size)
    members = {"id": name} if name else {}
    templates = Templates()
    assert learn(templates, body(data.draw(lists), datatype, **members))
    text = body(data.draw(lists), datatype, **members)
    expected = decode_request("m", "", text, None)
    found = templates.find(text)
    assert found is not None
    template, array = found
    assert template.request.id == expected.id
    assert template.request.outputs == expected.outputs
    wanted = expected.inputs[0].array
    assert array.dtype == wanted.dtype and array.shape == wanted.shape and np.array_equal(array, wanted)


ELEMENT = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@given(st.lists(ELEMENT, max_size=5), st.sampled_from(sorted(NUMBERS)))
def test_what_is_recognised_is_valid(values: list[Any], datatype: str) -> None:
    templates = Templates()
    assert learn(templates, body([0, 1, 1] if datatype != "BOOL" else [True, False, True], datatype))
    text = body(values, datatype).replace(b'"shape": [1, %d]' % len(values), b'"shape": [1, 3]')
    found = templates.find(text)
    try:
        expected = decode_request("m", "", text, None).inputs[0].array
    except BadMessage:
        assert found is None
        return
    assert found is None or np.array_equal(found[1], expected)


@pytest.mark.parametrize(
    "text",
    [
        # a string before the place, a member nobody reads, a list of another object, data given twice
        b'{"id": "data", "inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}',
        b'{"data": [1], "inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"data": [1], "name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"name": "data", "shape": [1], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [[1]]}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["1"]}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]},'
        b' {"name": "y", "shape": [1], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"name": "x", "shape": [0], "datatype": "FP32", "data": []}]}',
    ],
)
def test_texts_that_are_not_learned(text: bytes) -> None:
    assert not learn(Templates(), text)


def test_data_before_the_other_members_is_learned() -> None:
    text = b'{"inputs": [{"data": [1.5, 2], "name": "x", "shape": [1, 2], "datatype": "FP32"}], "id": "7"}'
    templates = Templates()
    assert learn(templates, text)
    found = templates.find(text.replace(b"1.5", b"-3e2"))
    assert found is not None and found[1].tolist() == [[-300.0, 2.0]]


def test_memory_is_bounded() -> None:
    templates = Templates()
    assert not learn(templates, body([0.5] * (MAX_ELEMENTS + 1)))
    assert not learn(templates, body([0.5], id="i" * 5000))
    assert learn(templates, body([0.25]))
    assert templates.find(body([0.25]).replace(b"0.25", b"0.25" + b"0" * 10)) is not None
    assert templates.find(body([0.25]).replace(b"0.25", b"0.25" + b"0" * MAX_BYTES)) is None
    for number in range(3 * MAX_TEMPLATES):
        assert learn(templates, body([0.5], id=str(number)))
    assert len(templates._known) <= MAX_TEMPLATES
    assert len(templates._seen) <= 256


def test_a_text_seen_once_is_not_kept() -> None:
    templates = Templates()
    text = body([1.0])
    assert templates.learn(text, decode_request("m", "", text, None)) is None
    assert templates.find(text) is None


@given(st.data(), st.lists(st.sampled_from(sorted(NUMBERS)), min_size=1, max_size=3), st.text(max_size=4))
def test_answers_are_the_full_encoders(data: st.DataObject, datatypes: list[str], id: str) -> None:
    outputs = []
    for index, datatype in enumerate(datatypes):
        shape = data.draw(st.sampled_from([(1, 2), (2, 1), (2,), (1, 0)]))
        values = data.draw(st.lists(NUMBERS[datatype], min_size=shape[0] * (shape[-1] if len(shape) > 1 else 1)))
        size = int(np.prod(shape))
        array = np.array(values[:size] if len(values) >= size else [0] * size, tensor("t", [0], datatype).array.dtype)
        outputs.append(tensor(f'o{index}"', array.reshape(shape), datatype))
    response = InferResponse(model_name="m", model_version="3", id=id, outputs=outputs)
    text = AnswerText("m", "3", id, [(each.name, each.datatype) for each in outputs])
    parts, _ = encode_response(response, InferRequest(model_name="m"))
    assert text.encode([each.array for each in outputs]) == b"".join(parts)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_without_json_are_left_to_the_full_encoder(value: float) -> None:
    text = AnswerText("m", "1", "", [("y", "FP32")])
    assert text.encode([np.array([[1.0, value]], np.float32)]) is None
    assert text.encode([np.array([[1.0, 2.0]], np.float64)]) is None
    assert not AnswerText.fits([("y", "FP16")]) and not AnswerText.fits([("y", "BYTES")]) and not AnswerText.fits([])
