"""Any tensor survives every way of sending it, bit for bit."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oriel_wire.errors import BadMessage
from oriel_wire.v2 import grpc, grpc_messages, http
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, Tensor
from oriel_wire.v2.proto import v2_pb2

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
NAMES = st.text(min_size=1, max_size=12)
PARAMETERS = st.dictionaries(
    st.text(min_size=1, max_size=8).map(lambda name: "p-" + name),
    st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    max_size=3,
)


@st.composite
def tensors(draw: st.DrawFn, name: str, as_json: bool) -> Tensor:
    entry = DATATYPES[draw(st.sampled_from([each for each, row in DATATYPES.items() if row.json or not as_json]))]
    shape = draw(SHAPES)
    if entry.size:
        array = draw(hnp.arrays(entry.dtype, shape))
    else:
        elements = st.text().map(str.encode) if as_json else st.binary()
        array = draw(hnp.arrays(np.dtype(object), shape, elements=elements, fill=st.nothing()))
    return Tensor(name, entry.name, array.shape, array, draw(PARAMETERS))


@st.composite
def requests(draw: st.DrawFn, as_json: bool = False) -> InferRequest:
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    outputs = draw(st.none() | st.lists(NAMES, min_size=1, max_size=3, unique=True))
    return InferRequest(
        model_name="m",
        model_version=draw(st.sampled_from(["", "3"])),
        id=draw(st.text(max_size=8)),
        parameters=draw(PARAMETERS),
        inputs=[draw(tensors(name, as_json)) for name in names],
        outputs=outputs
        and [RequestedOutput(name, not as_json, draw(st.integers(0, 5)), draw(PARAMETERS)) for name in outputs],
        binary_default=not as_json and outputs is None,
    )


def responses(as_json: bool = False) -> st.SearchStrategy[InferResponse]:
    return requests(as_json).map(
        lambda each: InferResponse(
            model_name="m",
            model_version=each.model_version,
            id=each.id,
            parameters=each.parameters,
            outputs=each.inputs,
        )
    )


def assert_same_tensors(got: list[Tensor], sent: list[Tensor]) -> None:
    assert [(each.name, each.datatype, each.shape, each.parameters) for each in got] == [
        (each.name, each.datatype, each.shape, each.parameters) for each in sent
    ]
    for left, right in zip(got, sent, strict=True):
        assert left.array.shape == left.shape
        assert left.array.dtype == right.array.dtype
        if left.datatype == "BYTES":
            assert left.array.tolist() == right.array.tolist()
        elif left.array.dtype.kind == "f":  # a NaN's payload has no JSON form
            assert np.array_equal(left.array, right.array, equal_nan=True)
            signs = [np.signbit(each.array[~np.isnan(each.array)]) for each in (left, right)]
            assert np.array_equal(*signs)
        else:
            assert left.array.tobytes() == right.array.tobytes()


@pytest.mark.parametrize("binary", [True, False])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_http_request(binary: bool, data: st.DataObject) -> None:
    sent = data.draw(requests(as_json=not binary))
    if not binary and not all(np.isfinite(each.array).all() for each in sent.inputs if each.array.dtype.kind == "f"):
        with pytest.raises(BadMessage, match="neither NaN nor infinities"):
            http.encode_request(sent, binary=False)
        return
    parts, header_length = http.encode_request(sent, binary=binary)
    got = http.decode_request(sent.model_name, sent.model_version, b"".join(parts), header_length)
    assert_same_tensors(got.inputs, sent.inputs)
    assert (got.id, got.parameters, got.outputs, got.model_version) == (
        sent.id,
        sent.parameters,
        sent.outputs,
        sent.model_version,
    )
    assert got.binary_default == sent.binary_default


@pytest.mark.parametrize("binary", [True, False])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_http_response(binary: bool, data: st.DataObject) -> None:
    sent = data.draw(responses(as_json=not binary))
    parts, header_length = http.encode_response(sent, InferRequest(model_name="m", binary_default=binary))
    assert (header_length is not None) == (binary and bool(sent.outputs))
    got = http.decode_response(b"".join(parts), header_length)
    assert_same_tensors(got.outputs, sent.outputs)
    assert (got.model_name, got.model_version, got.id, got.parameters) == (
        sent.model_name,
        sent.model_version,
        sent.id,
        sent.parameters,
    )


@given(sent=requests())
@settings(max_examples=40, deadline=None)
def test_grpc_request(sent: InferRequest) -> None:
    wire = grpc.encode_infer_request(sent).SerializeToString()
    got = grpc.decode_infer(v2_pb2.ModelInferRequest.FromString(wire))
    assert_same_tensors(got.inputs, sent.inputs)
    assert got.parameters == sent.parameters
    assert (got.model_name, got.model_version, got.id, got.outputs) == ("m", sent.model_version, sent.id, sent.outputs)


@given(sent=requests())
@settings(max_examples=40, deadline=None)
def test_a_clients_grpc_request_is_the_same_without_copies(sent: InferRequest) -> None:
    message = v2_pb2.ModelInferRequest.FromString(b"".join(grpc_messages.encode_request(sent)))
    assert message == grpc.encode_infer_request(sent)


@given(sent=responses())
@settings(max_examples=40, deadline=None)
def test_a_clients_grpc_answer_is_read_without_copies(sent: InferResponse) -> None:
    wire = v2_pb2.ModelStreamInferResponse(infer_response=grpc.encode_infer(sent)).SerializeToString()
    error, got = grpc_messages.read_stream_answer(wire)
    assert not error
    assert_same_tensors(got.outputs, sent.outputs)
    assert (got.model_name, got.model_version, got.id, got.parameters) == (
        "m",
        sent.model_version,
        sent.id,
        sent.parameters,
    )
    held = np.frombuffer(wire, np.uint8)
    for each in got.outputs:
        assert each.datatype == "BYTES" or not each.array.size or np.shares_memory(each.array, held)


@given(sent=responses())
@settings(max_examples=40, deadline=None)
def test_grpc_response(sent: InferResponse) -> None:
    wire = grpc.encode_infer(sent).SerializeToString()
    got = grpc.decode_infer_response(v2_pb2.ModelInferResponse.FromString(wire))
    assert_same_tensors(got.outputs, sent.outputs)
    assert (got.model_name, got.model_version, got.id, got.parameters) == (
        "m",
        sent.model_version,
        sent.id,
        sent.parameters,
    )


@pytest.mark.parametrize("datatype", DATATYPES)
def test_binary_tensor_is_a_view_of_the_body(datatype: str) -> None:
    entry = DATATYPES[datatype]
    array = np.arange(6).astype(entry.dtype).reshape(2, 3) if entry.size else np.array([b"a", b""], dtype=object)
    request = InferRequest(model_name="m", inputs=[Tensor("x", datatype, array.shape, array)])
    parts, header_length = http.encode_request(request)
    body = b"".join(parts)
    got = http.decode_request("m", "", body, header_length).inputs[0].array
    assert got.tolist() == array.tolist()
    if entry.size:
        assert np.shares_memory(got, np.frombuffer(body, np.uint8))
        assert got.flags.aligned
        assert not got.flags.writeable


@settings(max_examples=40)
@given(flat=hnp.arrays(np.dtype("<f4"), 12, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_nested_and_flat_json_are_the_same(flat: np.ndarray) -> None:
    def body(data: object) -> bytes:
        return json.dumps({"inputs": [{"name": "x", "shape": [1, 3, 4], "datatype": "FP32", "data": data}]}).encode()

    forms = [flat.tolist(), flat.reshape(1, 3, 4).tolist(), flat.reshape(3, 4).tolist()]
    for form in forms:
        got = http.decode_request("m", "", body(form), None).inputs[0].array
        assert got.shape == (1, 3, 4)
        assert np.array_equal(got.reshape(-1), flat)
