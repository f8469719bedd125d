"""Parameters of shared memory in v2 messages: what they are decoded to, and what is refused."""

import json
from typing import Any

import numpy as np
import pytest

from oriel_wire.errors import BadMessage
from oriel_wire.v2 import grpc
from oriel_wire.v2.grpc_messages import InferMessages
from oriel_wire.v2.http import decode_request, encode_response
from oriel_wire.v2.messages import InferRequest, InferResponse, SharedBytes, tensor
from oriel_wire.v2.proto import v2_pb2

X = np.arange(2, dtype=np.float32)
REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def read(place: SharedBytes) -> bytes:
    assert place.region == "r"
    return X.tobytes()[place.offset : place.offset + place.size_bytes]


def over_http(
    entry: dict[str, Any], output: dict[str, Any] | None = None, binary: bytes = b"", **options: Any
) -> InferRequest:
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], **entry}]}
    if output is not None:
        document["outputs"] = [{"name": "y", "parameters": output}]
    head = json.dumps(document).encode()
    return decode_request("m", "", head + binary, len(head), **{"read": read} | options)


def message(
    parameters: dict[str, Any], output: dict[str, Any] | None = None, raw: tuple[bytes, ...] = (), **contents: Any
) -> v2_pb2.ModelInferRequest:
    made = v2_pb2.ModelInferRequest(model_name="m", raw_input_contents=raw)
    found = [made.inputs.add(name="x", datatype="FP32", shape=[2], contents=contents or None).parameters]
    given = [parameters]
    if output is not None:
        found.append(made.outputs.add(name="y").parameters)
        given.append(output)
    for target, values in zip(found, given, strict=True):
        for name, value in values.items():
            kind = {str: "string_param", bool: "bool_param"}.get(type(value), "int64_param")
            setattr(target[name], kind, value)
    return made


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_places_are_read_and_kept_apart_from_other_parameters(transport: str) -> None:
    parameters = {**REGION, "shared_memory_offset": 0, "own": 1}
    output = {"shared_memory_region": "out", "shared_memory_byte_size": 2**40, "shared_memory_offset": 4}
    if transport == "http":
        request = over_http({"parameters": parameters}, output)
    else:
        request = grpc.decode_infer(message(parameters, output), None, read)
    (x,) = request.inputs
    assert x.array.tolist() == [0.0, 1.0] and x.parameters == {"own": 1}
    assert request.outputs is not None
    assert request.outputs[0].shared == SharedBytes("out", 4, 2**40) and request.outputs[0].parameters == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared_memory_byte_size": 7}, "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7"),
        ({"shared_memory_region": 3}, "must be a name"),
        ({"shared_memory_byte_size": "8"}, "whole numbers of bytes"),
        ({"shared_memory_byte_size": True}, "whole numbers of bytes"),
        ({"shared_memory_byte_size": -8}, "whole numbers of bytes"),
        ({"shared_memory_offset": -1}, "whole numbers of bytes"),
    ],
)
def test_wrong_parameters_are_refused(changes: dict[str, Any], said: str) -> None:
    for act in (
        lambda given: over_http({"parameters": given}),
        lambda given: grpc.decode_infer(message(given), None, read),
    ):
        with pytest.raises(BadMessage, match=said):
            act({**REGION, **changes})


def test_the_size_is_no_parameter_to_leave_out() -> None:
    with pytest.raises(BadMessage, match="whole numbers of bytes"):
        over_http({"parameters": {"shared_memory_region": "r"}})


def test_data_besides_a_region_is_refused() -> None:
    for entry, binary in (
        ({"data": [1, 2], "parameters": REGION}, b""),
        ({"parameters": {**REGION, "binary_data_size": 8}}, bytes(8)),
    ):
        with pytest.raises(BadMessage, match="input 'x' for model 'm': has data in the body and in shared memory"):
            over_http(entry, binary=binary)
    with pytest.raises(BadMessage, match="typed contents and a region of shared memory"):
        grpc.decode_infer(message(REGION, fp32_contents=[1, 2]), None, read)
    with pytest.raises(BadMessage, match="0 inputs have 1 raw contents"):
        grpc.decode_infer(message(REGION, raw=(bytes(8),)), None, read)


@pytest.mark.parametrize("output", [{**REGION, "classification": 1}])
def test_classes_are_not_written_to_regions(output: dict[str, Any]) -> None:
    with pytest.raises(BadMessage, match="output 'y': classes are not written to shared memory"):
        over_http({"data": [1, 2]}, output)
    with pytest.raises(BadMessage, match="output 'y': classes are not written to shared memory"):
        grpc.decode_infer(message({}, output, fp32_contents=[1, 2]), None, read)


def test_heads_with_regions_are_not_kept() -> None:
    """Not every sender of the same head may use shared memory."""
    for output, kept in (({}, True), (REGION, False)):
        sent = message({}, output, raw=(X.tobytes(),))
        data, heads = sent.SerializeToString(), InferMessages()
        heads.remember(data, grpc.decode_infer(sent, None, read))
        assert (heads.find(data) is not None) == kept


def test_outputs_in_regions_are_described_without_data() -> None:
    outputs = [tensor("y", X), tensor("z", X)]
    response = InferResponse(model_name="m", outputs=outputs, in_shared_memory={"y"})
    (body,), _ = encode_response(response, InferRequest(model_name="m"))
    y, z = json.loads(bytes(body))["outputs"]
    assert y == {"name": "y", "datatype": "FP32", "shape": [2]} and z["data"] == [0, 1]
    answer = grpc.encode_infer(response)
    assert list(answer.raw_output_contents) == [b"", X.tobytes()] and list(answer.outputs[0].shape) == [2]
