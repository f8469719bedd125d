"""Encodings and plans that are kept from call to call give the same result as new ones."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.client.codec import MAX_KEPT, ModelCodec
from oriel_logic.client.models import ModelSpec, TensorSpec
from oriel_logic.errors import ModelFailed, ModelInputWrong
from oriel_wire.engine.client import HttpResponse
from oriel_wire.h1.response import ResponseMemo, parse_response_head
from oriel_wire.v2.http import decode_request, encode_response
from oriel_wire.v2.messages import InferRequest, InferResponse, tensor

SPEC = ModelSpec(
    name="m",
    inputs={
        "a": TensorSpec("a", "FP32", (-1, 3)),
        "b": TensorSpec("b", "INT64", (-1,)),
        "words": TensorSpec("words", "BYTES", (-1,)),
    },
    outputs={},
)


def said(encoded: Any) -> InferRequest:
    body = b"".join(encoded.body)
    length = dict(line.split(": ") for line in encoded.headers.split("\r\n") if line)["inference-header-content-length"]
    return decode_request("m", "", body, int(length))


def answer(*outputs: Any, binary: bool = True, version: str = "1") -> HttpResponse:
    parts, length = encode_response(
        InferResponse(model_name="m", model_version=version, outputs=[tensor(*each) for each in outputs]),
        InferRequest(model_name="m", binary_default=binary),
    )
    body = b"".join(bytes(part) for part in parts)
    lines = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}"
    if length is not None:
        lines += f"\r\ninference-header-content-length: {length}"
    return HttpResponse(parse_response_head(lines.encode(), ResponseMemo()), body)


def test_an_array_from_a_worker_is_sent_behind_the_kept_head() -> None:
    """It has a dtype of its own, equal to the model's and another object, and each call made its head anew."""
    codec = ModelCodec(SPEC)
    array = np.ones((2, 3), np.float32)
    head = codec.encode({"a": array}, None).body[0]
    from_worker = pickle.loads(pickle.dumps(array, protocol=5))
    assert from_worker.dtype is not array.dtype
    assert codec.encode({"a": from_worker}, None).body[0] is head


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_a_call_like_an_earlier_one_is_encoded_like_the_first(calls: list[tuple[int, int, bool, bool]]) -> None:
    codec = ModelCodec(SPEC)
    for rows, count, named, words in calls:
        inputs: dict[str, Any] = {
            "a": np.random.default_rng(rows).random((rows, 3)).astype(np.float32),
            "b": np.arange(count),
        }
        if words:
            inputs["words"] = np.array([b"x" * rows] * count, object)
        wanted = ["y"] if named else None
        again, anew = said(codec.encode(inputs, wanted)), said(ModelCodec(SPEC).encode(inputs, wanted))
        assert [each.array.tolist() for each in again.inputs] == [value.tolist() for value in inputs.values()]
        assert (again.binary_default, again.outputs) == (anew.binary_default, anew.outputs)
        assert [(e.name, e.datatype, e.shape) for e in again.inputs] == [
            (e.name, e.datatype, e.shape) for e in anew.inputs
        ]


def test_a_wrong_array_is_found_among_right_ones() -> None:
    codec = ModelCodec(SPEC)
    right = np.zeros((1, 3), np.float32)
    codec.encode({"a": right}, None)
    for wrong in (right.astype(np.float64), np.zeros((1, 4), np.float32), right[0], right.astype(">i4")):
        with pytest.raises(ModelInputWrong, match="input 'a' of model 'm'"):
            codec.encode({"a": wrong}, None)
    with pytest.raises(ModelInputWrong, match="no input 'z'"):
        codec.encode({"z": right}, None)
    with pytest.raises(ModelInputWrong, match="needs inputs"):
        codec.encode({}, None)
    turned = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert said(codec.encode({"a": turned}, None)).inputs[0].array.tolist() == turned.tolist()
    foreign = np.array([[1, 2, 3]], ">f4")
    assert said(codec.encode({"a": foreign}, None)).inputs[0].array.tolist() == [[1, 2, 3]]


def test_large_arrays_are_not_copied() -> None:
    rows = np.zeros((10_000, 3), np.float32)
    for _ in range(2):
        encoded = ModelCodec(SPEC).encode({"a": rows}, None)
        assert isinstance(encoded.body[1], memoryview) and encoded.body[1].nbytes == rows.nbytes


def test_answers_are_read_the_same_again_and_again() -> None:
    codec = ModelCodec(SPEC)
    for value in (1.0, 2.0, 3.0):
        found = codec.decode(answer(("y", np.full((2, 2), value, np.float32)), ("k", np.array([int(value)]))))
        assert (found["y"].tolist(), found["k"].tolist()) == ([[value] * 2] * 2, [int(value)])
        assert (found.model, found.model_version) == ("m", "1") and not found["y"].flags.writeable
    words = np.array([b"a", b"longer"], object)
    for _ in range(2):
        assert codec.decode(answer(("w", words)))["w"].tolist() == [b"a", b"longer"]
    for value in (4, 5):
        assert codec.decode(answer(("y", np.array([value])), binary=False))["y"].tolist() == [value]


def test_an_answer_shorter_or_longer_than_its_text_says_is_refused() -> None:
    codec = ModelCodec(SPEC)
    right = answer(("y", np.zeros(4, np.float32)))
    codec.decode(right)
    for body in (right.body[:-1], right.body + b"x"):
        right.body = body
        with pytest.raises(ModelFailed, match="the answer of model 'm' cannot be read"):
            codec.decode(right)


def test_what_is_kept_is_bounded() -> None:
    codec = ModelCodec(SPEC)
    for rows in range(3 * MAX_KEPT):
        codec.encode({"a": np.zeros((rows, 3), np.float32)}, None)
        codec.decode(answer(("y", np.zeros(rows, np.float32))))
    assert len(codec._requests) <= MAX_KEPT and len(codec._answers) <= MAX_KEPT
    small = ModelCodec(SPEC, max_kept_bytes=16)
    small.encode({"a": np.zeros((1, 3), np.float32)}, None)
    small.decode(answer(("y", np.zeros(1, np.float32))))
    assert not small._requests and not small._answers


def told(codec: ModelCodec, response: HttpResponse) -> Any:
    try:
        found = codec.decode(response)
    except ModelFailed as error:
        return error.message
    return {name: (each.dtype, each.shape, repr(each.tolist())) for name, each in found.items()}, found.model_version


@given(
    st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=3)), max_size=2),
    st.integers(-3, 3),
    st.integers(-9, 9),
)
def test_what_is_kept_never_changes_what_an_answer_says(edits: list[tuple[int, bytes]], cut: int, moved: int) -> None:
    """Answers that were damaged on their way, or by a server that is out of its mind."""
    codec = ModelCodec(SPEC)
    right = answer(("y", np.arange(4, dtype=np.int64)), ("k", np.ones((1, 2), np.float32)))
    codec.decode(right)
    body = right.body[: len(right.body) + cut] if cut < 0 else right.body + b"x" * cut
    for place, data in edits:
        body = body[:place] + data + body[place + len(data) :]
    length = int(right.get("inference-header-content-length") or 0) + moved
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\ninference-header-content-length: {length}"
    wrong = HttpResponse(parse_response_head(head.encode(), ResponseMemo()), body)
    assert told(codec, wrong) == told(ModelCodec(SPEC), wrong)
    assert told(codec, right) == told(ModelCodec(SPEC), right)
