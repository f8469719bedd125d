"""Recognised texts say what the full decoder and encoder say."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.v2.answers import BinaryAnswers, JsonAnswers
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.http import decode_request, encode_request, encode_response
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, Tensor, tensor
from oriel_wire.v2.recognise import MAX_BYTES, MAX_ELEMENTS, MAX_TEMPLATES, Templates

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
    templates.learn(text, None, request)
    return templates.learn(text, None, request) is not None


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
    found = templates.find(text, None)
    assert found is not None
    template, inputs = found
    array = inputs["x"]
    assert template.request.id == expected.id
    assert template.request.outputs == expected.outputs
    wanted = expected.inputs[0].array
    assert array.dtype == wanted.dtype and array.shape == wanted.shape and np.array_equal(array, wanted)


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
    found = templates.find(text.replace(b"1.5", b"-3e2"), None)
    assert found is not None and found[1]["x"].tolist() == [[-300.0, 2.0]]
    assert templates.find(text.replace(b'"7"', b'"8"'), None) is None, "another end"


def test_memory_is_bounded() -> None:
    templates = Templates()
    assert not learn(templates, body([0.5] * (MAX_ELEMENTS + 1)))
    assert not learn(templates, body([0.5], id="i" * 5000))
    assert learn(templates, body([0.25]))
    assert templates.find(body([0.25]).replace(b"0.25", b"0.25" + b"0" * 10), None) is not None
    assert templates.find(body([0.25]).replace(b"0.25", b"0.25" + b"0" * MAX_BYTES), None) is None
    for number in range(3 * MAX_TEMPLATES):
        assert learn(templates, body([0.5], id=str(number)))
    assert len(templates._lists) <= MAX_TEMPLATES
    assert len(templates._seen) <= 256


def test_a_text_seen_once_is_not_kept() -> None:
    templates = Templates()
    text = body([1.0])
    assert templates.learn(text, None, decode_request("m", "", text, None)) is None
    assert templates.find(text, None) is None


ARRAYS = st.sampled_from(
    [
        tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3)),
        tensor("b", np.array([[True], [False]])),
        tensor("c", np.zeros((1, 0), np.int64)),
        tensor("d", [[b"one", b""]], "BYTES"),
        tensor("e", np.ones((2, 1), np.float16)),
    ]
)


@given(st.lists(ARRAYS, min_size=1, max_size=4, unique_by=lambda each: each.name), st.booleans())
def test_a_known_json_part_with_other_bytes_behind_it(inputs: list[Tensor], binary_outputs: bool) -> None:
    def wire(scale: int) -> tuple[bytes, int]:
        changed = [Tensor(t.name, t.datatype, t.shape, t.array if scale else np.zeros_like(t.array)) for t in inputs]
        outputs = [RequestedOutput("y", binary=True)] if binary_outputs else None
        parts, length = encode_request(InferRequest(model_name="m", inputs=changed, outputs=outputs))
        assert length is not None
        return b"".join(parts), length

    templates = Templates()
    body, length = wire(1)
    request = decode_request("m", "", body, length)
    assert templates.learn(body, length, request) is None
    assert templates.learn(body, length, request) is not None
    other, same = wire(0) if all(t.datatype != "BYTES" for t in inputs) else (body, length)
    assert same == length
    found = templates.find(other, length)
    assert found is not None
    expected = decode_request("m", "", other, length)
    assert found[0].request.outputs == expected.outputs
    assert list(found[1]) == [each.name for each in expected.inputs]
    for each in expected.inputs:
        assert found[1][each.name].dtype == each.array.dtype
        assert np.array_equal(found[1][each.name], each.array)
    assert templates.find(other + b"x", length) is None
    assert templates.find(other[:-1], length) is None if len(other) > length else True
    assert templates.find(other, length - 1) is None


def test_json_parts_with_data_in_them_are_not_known_as_binary() -> None:
    entry = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    text = json.dumps({"inputs": [entry]}).encode()
    templates = Templates()
    request = decode_request("m", "", text, len(text))
    templates.learn(text, len(text), request)
    assert templates.learn(text, len(text), request) is None


def test_known_json_part_with_wrong_bytes_elements() -> None:
    parts, length = encode_request(InferRequest(model_name="m", inputs=[tensor("d", [b"abc"], "BYTES")]))
    assert length is not None
    body = b"".join(parts)
    templates = Templates()
    for _ in range(2):
        templates.learn(body, length, decode_request("m", "", body, length))
    with pytest.raises(BadMessage):
        templates.find(body[:length] + b"\xff" * 7, length)


SHAPES = st.sampled_from([(1, 2), (2, 1), (2,), (1, 0), ()])


@given(st.data(), st.lists(st.sampled_from(sorted(NUMBERS)), min_size=1, max_size=3), st.text(max_size=4))
def test_answers_are_the_full_encoders(data: st.DataObject, datatypes: list[str], id: str) -> None:
    outputs = []
    for index, datatype in enumerate(datatypes):
        shape = data.draw(SHAPES)
        size = int(np.prod(shape))
        values = data.draw(st.lists(NUMBERS[datatype], min_size=size, max_size=size))
        array = np.array(values, DATATYPES[datatype].dtype).reshape(shape)
        outputs.append(tensor(f'o{index}"', array, datatype))
    response = InferResponse(model_name="m", model_version="3", id=id, outputs=outputs)
    names = [(each.name, each.datatype) for each in outputs]
    arrays = [each.array for each in outputs]
    for binary, answers in ((False, JsonAnswers("m", "3", id, names)), (True, BinaryAnswers("m", "3", id, names))):
        for _ in range(2):
            expected, length = encode_response(response, InferRequest(model_name="m", binary_default=binary))
            found = answers.encode(arrays)
            assert found is not None
            body = found[0] if isinstance(found[0], bytes) else b"".join(found[0])
            assert (body, found[1]) == (b"".join(expected), length)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_without_json_are_left_to_the_full_encoder(value: float) -> None:
    answers = JsonAnswers("m", "1", "", [("y", "FP32")])
    assert answers.encode([np.array([[1.0, value]], np.float32)]) is None
    assert answers.encode([np.array([[1.0, 2.0]], np.float64)]) is None
    assert BinaryAnswers("m", "1", "", [("y", "FP32")]).encode([np.array([[1.0, 2.0]], np.float64)]) is None


def test_outputs_only_the_full_encoder_writes() -> None:
    for kind in (JsonAnswers, BinaryAnswers):
        assert not kind.fits([("y", "FP32"), ("z", "BYTES")]) and not kind.fits([])
    assert not JsonAnswers.fits([("y", "FP16")]) and BinaryAnswers.fits([("y", "FP16")])
