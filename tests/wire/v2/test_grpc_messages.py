from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.grpc import decode_infer, decode_infer_response, encode_infer, encode_infer_request
from oriel_wire.v2.grpc_messages import (
    MAX_FIELDS,
    MAX_HEADS,
    MAX_SHAPES,
    InferMessages,
    RawAnswers,
    cut,
    read,
    read_stream_answer,
)
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


def decode(messages: InferMessages, data: bytes) -> InferRequest:
    known = messages.find(data)
    if known is not None:
        return known[0].request(data, known[1])
    request = decode_infer(*read(data))
    messages.remember(data, request)
    return request


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
@settings(max_examples=100, deadline=None)
def test_bytes_are_read_as_protobuf_reads_them(found: list[bytes]) -> None:
    messages = InferMessages()
    for wire in found * 2:  # the second time from what was remembered
        expected = outcome(lambda wire=wire: decode_infer(v2_pb2.ModelInferRequest.FromString(wire)))  # type: ignore[misc]
        assert outcome(lambda wire=wire: decode(messages, wire)) == expected  # type: ignore[misc]


@given(tensors())
@settings(max_examples=50, deadline=None)
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
        [got] = decode(messages, data).inputs
        assert np.shares_memory(got.array, np.frombuffer(data, np.uint8))


def test_remembered_requests_share_nothing_that_changes() -> None:
    messages = InferMessages()
    data = wire(parameters={"a": 1}, outputs=[RequestedOutput("y")])
    for _ in range(3):
        got = decode(messages, data)
        assert (got.parameters, len(got.outputs or ()), len(got.inputs)) == ({"a": 1}, 1, 1)
        got.parameters.clear()
        assert got.outputs is not None
        got.outputs.clear()
        got.inputs.clear()


def test_equal_heads_with_other_contents_are_checked_again() -> None:
    messages = InferMessages()
    data = wire()
    decode(messages, data)
    short = data[:-9] + b"\x07" + data[-7:]
    with pytest.raises(BadMessage, match="Expected 8, got 7"):
        decode(messages, short)
    with pytest.raises(BadMessage, match="1 inputs have 2 raw contents"):
        decode(messages, data + data[-10:])


def test_memory_is_bounded() -> None:
    messages, answers = InferMessages(), RawAnswers("m", "1", [("y", "FP32")])
    for rows in range(2 * MAX_HEADS):
        decode(messages, wire(rows))
        answers.encode([np.zeros(rows, np.float32)])
    assert 0 < len(messages._heads) <= MAX_HEADS
    assert 0 < len(answers._heads) <= MAX_SHAPES
    known = len(messages._heads)
    decode(messages, wire(id="never the same"))
    decode(messages, wire(parameters={"long": "x" * 5000}))
    assert len(messages._heads) == known


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a\x00" * (MAX_FIELDS + 1),
        b"\x3a\x05ab",  # ends too early
        b"\x3a",
        b"\x3a\xff\xff\xff\xff\xff\xff\x01",
        b"\x7b\x7c",  # a group
        b"\xba\x00\x01a",  # a tag in more bytes than it needs
        b"\x40",
        b"\x42\x05ab",
        b"\x41\x00",
        b"\xff" * 12,
    ],
    ids=lambda data: data[:12].hex(),
)
def test_what_is_unusual_is_left_to_protobuf(data: bytes) -> None:
    assert cut(data) is None


def test_large_messages_with_many_fields_are_not_left_to_protobuf() -> None:
    """It would copy their raw contents."""
    data = wire(rows=20_000)
    assert len(read(b"\x40\x01" * 4000 + data)[1] or ()) == 1
    with pytest.raises(TooLarge, match="more than 4160 fields, without those of its inputs and outputs"):
        read(b"\x40\x01" * 4160 + data)
    assert read(b"\x40\x01" * 4160 + wire())[1] is None


def test_head_that_is_too_large_is_not_copied() -> None:
    name = b"\x0a\x81\x80\x80\x02" + b"n" * ((4 << 20) + 1)
    assert cut(name) == (name, [])
    for data in (name + b"\x3a\x00", b"\x3a\x00" + name):
        with pytest.raises(TooLarge, match="besides its raw contents is more than 4194304 bytes"):
            read(data)


@pytest.mark.parametrize(
    "other",
    [b"\x38\x01", b"\x42\x00", b"\x42\x02ab", b"\x41" + b"\1" * 8, b"\x45" + b"\1" * 4, b"\xf8\x07\x80\x01"],
)
def test_fields_nobody_knows_are_left_to_protobuf_without_the_tensors(other: bytes) -> None:
    """Raw contents are not copied because of them. The first: field 7, but a number."""
    data = other + wire(rows=3) + other
    found = cut(data)
    assert found is not None and [data[start : start + size] for start, size in found[1]] == [
        np.arange(3, dtype=np.float32).tobytes()
    ]
    message, raw = read(data)
    assert raw and not message.raw_input_contents
    assert said(decode_infer(message, raw)) == said(decode_infer(v2_pb2.ModelInferRequest.FromString(data)))


def test_many_inputs_are_read_without_copies() -> None:
    inputs = [tensor(f"x{n}", np.arange(2, dtype=np.float32)) for n in range(1000)]
    data = encode_infer_request(InferRequest(model_name="m", inputs=inputs)).SerializeToString()
    assert cut(data) is None
    message, raw = read(data)
    assert raw is not None and len(raw) == 1000 and not message.raw_input_contents
    assert decode_infer(message, raw).inputs[999].array.tolist() == [0, 1]


# A client's answers --------------------------------------------------------------------------------------------------


@st.composite
def stream_answers(draw: st.DrawFn) -> bytes:
    """The bytes of a ModelStreamInferResponse, some with two answers, an error, typed contents, or damaged."""
    message = encode_infer(InferResponse(model_name="m", parameters=draw(PARAMETERS), outputs=draw(tensors())))
    if draw(st.booleans()):
        message.outputs.add(name="typed", datatype="INT32", shape=[1]).contents.int_contents.append(7)
    error = draw(st.sampled_from(["", "", "failed"]))
    wire = v2_pb2.ModelStreamInferResponse(error_message=error, infer_response=message).SerializeToString()
    if draw(st.integers(0, 3)) == 0:
        wire += v2_pb2.ModelStreamInferResponse(infer_response=message).SerializeToString()
    if wire and draw(st.integers(0, 2)) == 0:
        at = draw(st.integers(0, len(wire) - 1))
        wire = wire[:at] + draw(st.binary(max_size=2)) + wire[at + draw(st.integers(0, 2)) :]
    return wire


@given(wire=stream_answers())
@settings(max_examples=300, deadline=None)
def test_a_clients_answer_is_what_protobuf_reads(wire: bytes) -> None:
    check_answer(wire)


@given(text=st.binary(max_size=3), at=st.integers(0, 32), byte=st.integers(0, 255), answer=st.sampled_from("mn"))
@settings(max_examples=1000, deadline=None)
def test_a_clients_answer_of_one_text_is_read_by_those_before_it(text: bytes, at: int, byte: int, answer: str) -> None:
    output = tensor("t", [[text]], "BYTES")
    message = encode_infer(InferResponse(model_name=answer, parameters={"p": 1}, outputs=[output]))
    wire = v2_pb2.ModelStreamInferResponse(infer_response=message).SerializeToString()
    for _ in range(2):
        check_answer(wire)
    check_answer(wire[:at] + bytes((byte,)) + wire[at + 1 :])


def check_answer(wire: bytes) -> None:
    try:
        message = v2_pb2.ModelStreamInferResponse.FromString(wire)
        expected: Any = message.error_message, decode_infer_response(message.infer_response)
    except (DecodeError, BadMessage):
        expected = None
    try:
        found: Any = read_stream_answer(wire)
    except BadMessage:
        found = None
    assert repr(found) == repr(expected)
