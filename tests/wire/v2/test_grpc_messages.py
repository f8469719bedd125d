from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.v2.grpc import decode_infer, encode_infer, encode_infer_request
from oriel_wire.v2.grpc_messages import MAX_FIELDS, MAX_HEADS, MAX_SHAPES, InferMessages, RawAnswers, cut
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, Tensor, tensor
from oriel_wire.v2.proto import v2_pb2

NAMES = st.text("abc", min_size=1, max_size=3)
PARAMETERS = st.dictionaries(NAMES, st.one_of(st.booleans(), st.integers(-9, 9), st.text("xy", max_size=3)), max_size=2)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    made = []
    for name in draw(st.lists(NAMES, max_size=3, unique=True)):
        rows = draw(st.integers(0, 3))
        kind = draw(st.sampled_from(["FP32", "INT64", "BYTES"]))
        values: Any = {
            "FP32": lambda rows=rows: np.arange(rows, dtype=np.float32),
            "INT64": lambda rows=rows: np.arange(rows, dtype=np.int64),
            "BYTES": lambda rows=rows: np.array([b"a" * 200] * rows, dtype=object),
        }[kind]()
        made.append(Tensor(name, kind, (rows,), values, draw(PARAMETERS)))
    return made


@st.composite
def wires(draw: st.DrawFn) -> bytes:
    """A request's bytes, some with its fields in another order, some damaged."""
    outputs = draw(st.none() | st.just([RequestedOutput("y"), RequestedOutput("z", classification=2)]))
    request = InferRequest(
        model_name=draw(NAMES),
        model_version=draw(st.sampled_from(["", "1"])),
        id=draw(st.sampled_from(["", "id"])),
        parameters=draw(PARAMETERS),
        inputs=draw(tensors()),
        outputs=outputs,
    )
    wire = encode_infer_request(request).SerializeToString()
    if draw(st.booleans()):
        other = v2_pb2.ModelInferRequest(raw_input_contents=[b"1234"], model_name="late").SerializeToString()
        wire = other + wire if draw(st.booleans()) else wire + other
    if wire and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(wire) - 1))
        wire = wire[:at] + draw(st.binary(max_size=2)) + wire[at + draw(st.integers(0, 2)) :]
    return wire


def said(request: InferRequest) -> Any:
    inputs = [(i.name, i.datatype, i.shape, i.array.tolist(), i.array.dtype, i.parameters) for i in request.inputs]
    return (request.model_name, request.model_version, request.id, request.parameters, request.outputs, inputs)


def outcome(read: Any) -> Any:
    try:
        return repr(said(read()))
    except DecodeError:
        return "the message is not what this method takes"
    except BadMessage as bad:
        return bad.message


@given(st.lists(wires(), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_bytes_are_read_as_protobuf_reads_them(found: list[bytes]) -> None:
    messages = InferMessages()
    for wire in found * 2:  # the second time from what was remembered
        expected = outcome(lambda wire=wire: decode_infer(v2_pb2.ModelInferRequest.FromString(wire)))  # type: ignore[misc]
        assert outcome(lambda wire=wire: messages.decode(wire)) == expected  # type: ignore[misc]


@given(tensors())
@settings(max_examples=100, deadline=None)
def test_answers_are_what_protobuf_writes(outputs: list[Tensor]) -> None:
    plain = [Tensor(each.name, each.datatype, each.shape, each.array) for each in outputs]
    answers = RawAnswers("m", "3", [(each.name, each.datatype) for each in plain])
    expected = encode_infer(InferResponse(model_name="m", model_version="3", outputs=plain))
    for _ in range(2):
        assert v2_pb2.ModelInferResponse.FromString(answers.encode([each.array for each in plain])) == expected


def test_answers_of_another_type_are_not_sent() -> None:
    with pytest.raises(BadMessage, match="output 'y': FP32 needs an array of float32"):
        RawAnswers("m", "1", [("y", "FP32")]).encode([np.zeros(1)])


def wire(rows: int = 2, **members: Any) -> bytes:
    x = tensor("x", np.arange(rows, dtype=np.float32))
    return encode_infer_request(InferRequest(model_name="m", inputs=[x], **members)).SerializeToString()


def test_raw_contents_are_views_of_the_message() -> None:
    data = wire(rows=1000)
    messages = InferMessages()
    for _ in range(2):
        [got] = messages.decode(data).inputs
        assert np.shares_memory(got.array, np.frombuffer(data, np.uint8))


def test_remembered_requests_share_nothing_that_changes() -> None:
    messages = InferMessages()
    data = wire(parameters={"a": 1}, outputs=[RequestedOutput("y")])
    for _ in range(3):
        got = messages.decode(data)
        assert (got.parameters, len(got.outputs or ()), len(got.inputs)) == ({"a": 1}, 1, 1)
        got.parameters.clear()
        assert got.outputs is not None
        got.outputs.clear()
        got.inputs.clear()


def test_equal_heads_with_other_contents_are_checked_again() -> None:
    messages = InferMessages()
    data = wire()
    messages.decode(data)
    short = data[:-9] + b"\x07" + data[-7:]
    with pytest.raises(BadMessage, match="FP32 \\[2\\] needs 8 bytes, 7 were given"):
        messages.decode(short)
    with pytest.raises(BadMessage, match="1 inputs have 2 raw contents"):
        messages.decode(data + data[-10:])


def test_memory_is_bounded() -> None:
    messages, answers = InferMessages(), RawAnswers("m", "1", [("y", "FP32")])
    for rows in range(2 * MAX_HEADS):
        messages.decode(wire(rows))
        answers.encode([np.zeros(rows, np.float32)])
    assert 0 < len(messages._heads) <= MAX_HEADS
    assert 0 < len(answers._heads) <= MAX_SHAPES
    known = len(messages._heads)
    messages.decode(wire(id="never the same"))
    messages.decode(wire(parameters={"long": "x" * 5000}))
    assert len(messages._heads) == known


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a\x00" * (MAX_FIELDS + 1),
        b"\x3a\x05ab",  # ends too early
        b"\x3a",
        b"\x3a\xff\xff\xff\xff\xff\xff\x01",
        b"\x38\x01",  # raw contents are no number
        b"\x42\x00",  # a field nobody knows
    ],
)
def test_what_is_unusual_is_left_to_protobuf(data: bytes) -> None:
    assert cut(data) is None
