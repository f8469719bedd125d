"""An unmodified client of another project as the judge: what it writes we read, what we write it reads."""

import json
import random
from typing import Any

import numpy as np
import pytest

from oriel_wire.errors import BadMessage
from oriel_wire.v2 import grpc, http
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, tensor
from oriel_wire.v2.proto import v2_pb2

triton_http = pytest.importorskip("tritonclient.http")
triton_grpc = pytest.importorskip("tritonclient.grpc")

ARRAYS: dict[str, np.ndarray] = {
    "BOOL": np.array([[True, False]]),
    "FP16": np.array([[1.5, -0.0, np.inf]], np.float16),
    "FP32": np.array([[0.1, -1e30, 3.4e38]], np.float32),
    "FP64": np.array([0.1, 1e300, 5e-324]),
    "BYTES": np.array([["h\u00e9llo", ""], ["x" * 300, "\u2028"]], dtype=object),
    **{f"INT{bits}": np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1], f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.array([0, 2**bits - 1], f"u{bits // 8}") for bits in (8, 16, 32, 64)},
}
BINARY = [(datatype, True) for datatype in ARRAYS]
AS_JSON = [(datatype, False) for datatype in ARRAYS if datatype != "FP16"]


def plain(array: np.ndarray) -> list[Any]:
    texts = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1).tolist()]
    return [array.shape, *texts]


@pytest.mark.parametrize(("datatype", "binary"), BINARY + AS_JSON)
def test_their_http_request_is_read(datatype: str, binary: bool) -> None:
    array = ARRAYS[datatype]
    each = triton_http.InferInput("x", list(array.shape), datatype)
    each.set_data_from_numpy(array, binary_data=binary)
    outputs = [triton_http.InferRequestedOutput("y", binary_data=binary, class_count=2)]
    body, length = triton_http.InferenceServerClient.generate_request_body(
        [each], outputs=outputs, request_id="7", priority=3, timeout=1000, parameters={"own": "kept"}
    )
    got = http.decode_request("m", "", body, length)
    assert (got.id, got.parameters) == ("7", {"priority": 3, "timeout": 1000, "own": "kept"})
    assert got.outputs == [RequestedOutput("y", binary, 2)]
    assert got.inputs[0].datatype == datatype
    assert plain(got.inputs[0].array) == plain(array)


def test_their_request_without_outputs_wants_binary() -> None:
    each = triton_http.InferInput("x", [1], "FP32")
    each.set_data_from_numpy(np.zeros(1, np.float32))
    got = http.decode_request("m", "", *triton_http.InferenceServerClient.generate_request_body([each]))
    assert got.binary_default
    assert got.outputs is None


def test_their_several_inputs_are_read_in_order() -> None:
    inputs = []
    for index, (datatype, array) in enumerate(ARRAYS.items()):
        each = triton_http.InferInput(f"x{index}", list(array.shape), datatype)
        each.set_data_from_numpy(array, binary_data=index % 3 > 0 or datatype == "FP16")
        inputs.append(each)
    random.Random(7).shuffle(inputs)
    got = http.decode_request("m", "", *triton_http.InferenceServerClient.generate_request_body(inputs))
    assert [each.name for each in got.inputs] == [each.name() for each in inputs]
    for each in got.inputs:
        assert plain(each.array) == plain(ARRAYS[each.datatype])


def test_their_nan_is_read_but_not_in_json() -> None:
    """What they write then is no JSON; binary is their default."""
    array = np.array([np.nan, -np.inf, 1], np.float32)
    each = triton_http.InferInput("x", [3], "FP32")
    each.set_data_from_numpy(array, binary_data=False)
    with pytest.raises(BadMessage, match="data holds NaN at position 0"):
        http.decode_request("m", "", *triton_http.InferenceServerClient.generate_request_body([each]))
    each.set_data_from_numpy(array)
    got = http.decode_request("m", "", *triton_http.InferenceServerClient.generate_request_body([each]))
    assert np.array_equal(got.inputs[0].array, array, equal_nan=True)


def test_their_shared_memory_is_refused_by_name() -> None:
    each = triton_http.InferInput("x", [3], "FP32")
    each.set_shared_memory("region", 12)
    with pytest.raises(BadMessage, match="input 'x' for model 'm': shared memory is not supported"):
        http.decode_request("m", "", *triton_http.InferenceServerClient.generate_request_body([each]))


@pytest.mark.parametrize(("datatype", "binary"), BINARY + AS_JSON)
def test_our_http_response_is_read(datatype: str, binary: bool) -> None:
    array = ARRAYS[datatype]
    response = InferResponse(
        model_name="m",
        model_version="1",
        id="7",
        outputs=[tensor("y", array), tensor("z", np.zeros((0, 2), np.float32))],
    )
    parts, length = http.encode_response(response, InferRequest(model_name="m", binary_default=binary))
    result = triton_http.InferenceServerClient.parse_response_body(b"".join(parts), header_length=length)
    assert result.as_numpy("y").dtype.kind == array.dtype.kind
    assert plain(result.as_numpy("y")) == plain(array)
    assert result.as_numpy("z").shape == (0, 2)
    assert {key: result.get_response()[key] for key in ("model_name", "model_version", "id")} == {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
    }


def test_our_nan_in_json_is_read() -> None:
    array = np.array([np.nan, -np.inf, 1], np.float32)
    response = InferResponse(model_name="m", outputs=[tensor("y", array)])
    parts, length = http.encode_response(response, InferRequest(model_name="m"))
    result = triton_http.InferenceServerClient.parse_response_body(b"".join(parts), header_length=length)
    assert np.array_equal(result.as_numpy("y"), array, equal_nan=True)


def test_our_http_request_is_what_they_would_have_written() -> None:
    array = ARRAYS["FP32"]
    each = triton_http.InferInput("x", list(array.shape), "FP32")
    each.set_data_from_numpy(array)
    theirs, their_length = triton_http.InferenceServerClient.generate_request_body([each], request_id="7")
    [head, data], length = http.encode_request(InferRequest(model_name="m", id="7", inputs=[tensor("x", array)]))
    assert json.loads(head) == json.loads(theirs[:their_length])
    assert bytes(data) == theirs[their_length:]
    assert length == len(head)


@pytest.mark.parametrize("datatype", ARRAYS)
def test_their_grpc_request_is_read_and_our_response_too(datatype: str) -> None:
    from tritonclient.grpc._utils import _get_inference_request

    array = ARRAYS[datatype]
    each = triton_grpc.InferInput("x", list(array.shape), datatype)
    each.set_data_from_numpy(array)
    theirs = _get_inference_request(
        model_name="m",
        inputs=[each],
        model_version="2",
        request_id="7",
        outputs=[triton_grpc.InferRequestedOutput("y", class_count=2)],
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=3,
        timeout=1000,
        parameters={"own": "kept"},
    )
    got = grpc.decode_infer(v2_pb2.ModelInferRequest.FromString(theirs.SerializeToString()))
    assert (got.model_name, got.model_version, got.id) == ("m", "2", "7")
    assert got.parameters == {"priority": 3, "timeout": 1000, "own": "kept"}
    assert got.outputs == [RequestedOutput("y", True, 2)]
    assert plain(got.inputs[0].array) == plain(array)

    response = InferResponse(model_name="m", model_version="2", id="7", outputs=[tensor("y", array)])
    wire = grpc.encode_infer(response).SerializeToString()
    result = triton_grpc.InferResult(triton_grpc.service_pb2.ModelInferResponse.FromString(wire))
    assert plain(result.as_numpy("y")) == plain(array)


def test_bf16_both_ways() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    each = triton_http.InferInput("x", [1, 2], "BF16")
    each.set_data_from_numpy(array)
    got = http.decode_request("m", "", *triton_http.InferenceServerClient.generate_request_body([each])).inputs[0]
    assert got.array.tolist() == array.view(np.uint16).tolist()
    response = InferResponse(model_name="m", outputs=[tensor("y", array)])
    assert response.outputs[0].datatype == "BF16"
    parts, length = http.encode_response(response, InferRequest(model_name="m", binary_default=True))
    result = triton_http.InferenceServerClient.parse_response_body(b"".join(parts), header_length=length)
    assert result.as_numpy("y").tolist() == array.tolist()
