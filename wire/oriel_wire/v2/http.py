"""Decodes and encodes v2 infer bodies over HTTP: a JSON part, then the binary tensors in the order listed there.

`Inference-Header-Content-Length` is the length of the JSON part: absent when the body is JSON alone, 0 when
it is one tensor without any JSON (a raw request). Parameters that only steer the transport
(`binary_data_size`, `binary_data`, `binary_data_output`, `classification`) become fields and are not kept
among the parameters. JSON parts are padded with spaces so that the tensor behind them starts aligned.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import element_count, lookup, quoted, raw_view, shown
from oriel_wire.v2.document import DocumentDecoder, InferDocument, ResponseDocument, requested_outputs, take_flag
from oriel_wire.v2.jsondata import encode_data
from oriel_wire.v2.messages import (
    MAX_PARAMETERS,
    InferRequest,
    InferResponse,
    ParameterValue,
    ReadShared,
    RequestedOutput,
    Tensor,
    too_many,
)

JSON_LIMIT_BYTES = 1 << 20
RESPONSE_JSON_LIMIT_BYTES = 64 << 20
_ALIGNMENT = 16

BodyParts = list[bytes | memoryview]

_requests = DocumentDecoder(InferDocument, "inputs", "input", bounded=True)
_large_requests = DocumentDecoder(InferDocument, "inputs", "input", bounded=False)
_responses = DocumentDecoder(ResponseDocument, "outputs", "output", bounded=False)
_encoder = msgspec.json.Encoder()


def parse_header_length(value: str | None) -> int | None:
    """`Inference-Header-Content-Length` as a number, None if the header is absent. Raises BadMessage."""
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 19):
        raise BadMessage("Inference-Header-Content-Length must be a whole number")
    return int(value)


def decode_request(
    model: str,
    version: str,
    body: bytes | memoryview,
    header_length: int | None,
    *,
    json_limit: int = JSON_LIMIT_BYTES,
    read: ReadShared | None = None,
) -> InferRequest:
    """An infer request from its body.

    Binary tensors are views of `body`. A raw request (header_length 0) comes back with one input without
    name and datatype that holds the whole body as uint8: `resolve_raw` gives it the model's.
    read: reads tensors from shared memory; None refuses requests that name a region.
    Raises BadMessage; TooLarge if the JSON part is longer than `json_limit` bytes or has too many values.
    """
    if header_length == 0:
        raw = Tensor("", "", (len(body),), np.frombuffer(body, np.uint8))
        return InferRequest(model_name=model, model_version=version, inputs=[raw], binary_default=True)
    document, inputs = _requests.decode(body, header_length, json_limit, read=read, model=f" for model {quoted(model)}")
    parameters = document.parameters or {}
    if len(parameters) > MAX_PARAMETERS:
        raise too_many(parameters, MAX_PARAMETERS, "request: parameters")
    for name in parameters:
        if name.startswith("triton_"):
            raise BadMessage(f"parameter {quoted(name)}: names that start with triton_ are reserved")
    binary_default = take_flag(parameters, "binary_data_output", False, "request")
    return InferRequest(
        model_name=model,
        model_version=version,
        id=document.id or "",
        parameters=parameters or {},  # an emptied dict keeps its table
        inputs=inputs,
        outputs=requested_outputs(document.outputs, binary_default, may_share=read is not None),
        binary_default=binary_default,
    )


def resolve_raw(request: InferRequest, *, name: str, datatype: str, shape: Sequence[int]) -> None:
    """Give the input of a raw request its name, datatype and shape, in place.

    shape: the model's, with a batch dimension of 1. At most one dimension may be -1: the number of bytes decides it.
    For BYTES the whole body is one element, so the shape must have one element and no -1.
    Raises BadMessage if the bytes do not fill the shape.
    """
    body = request.inputs[0].array
    what = f"input {quoted(name)}"
    entry = lookup(datatype, what)
    variable = [axis for axis, dim in enumerate(shape) if dim < 0]
    if len(variable) > 1:
        reason = "can not be deduced because there are more than one variable-sized dimension: send a JSON header"
        raise BadMessage(f"The shape of the raw {what} {reason}")
    dims = [1 if dim < 0 else dim for dim in shape]
    if entry.size:
        unit = element_count(dims, what) * entry.size
        if variable and unit:
            dims[variable[0]] = body.size // unit
        if element_count(dims, what) * entry.size != body.size:
            raise BadMessage(f"{what}: {body.size} bytes do not fill {datatype} {shown(shape)}")
        array = body.view(entry.dtype).reshape(dims)
    else:
        if math.prod(shape) != 1:
            reason = f"the model must have input shape [1], not {shown(shape)}"
            raise BadMessage(f"For BYTE datatype raw {what}, {reason}: send a JSON header")
        array = np.empty(dims, dtype=object)
        array.reshape(-1)[0] = body.tobytes()
    request.inputs[0] = Tensor(name, datatype, tuple(dims), array)


def encode_response(response: InferResponse, request: InferRequest) -> tuple[BodyParts, int | None]:
    """A response's body parts, each output as the request asked for it, and the length of the JSON part.

    The length is None (no header to send) if everything is JSON. Parts are views of the outputs' arrays.
    Raises BadMessage if an output cannot travel the way it was asked for.
    """
    document: dict[str, Any] = {"model_name": response.model_name}
    if response.model_version:
        document["model_version"] = response.model_version
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    wanted = {output.name: output.binary for output in request.outputs or ()}
    binary: BodyParts = []
    document["outputs"] = [
        {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if output.name in response.in_shared_memory
        else _encode_tensor("output", output, wanted.get(output.name, request.binary_default), binary)
        for output in response.outputs
    ]
    return _body(document, binary)


def encode_request(request: InferRequest, *, binary: bool = True) -> tuple[BodyParts, int | None]:
    """A request's body parts and the length of the JSON part; inputs and answers travel binary, or all as JSON.

    Raises BadMessage if an array is not of its datatype, or cannot be JSON when `binary` is false.
    """
    document: dict[str, Any] = {}
    if request.id:
        document["id"] = request.id
    parameters: dict[str, ParameterValue] = dict(request.parameters)
    parts: BodyParts = []
    document["inputs"] = [_encode_tensor("input", each, binary, parts) for each in request.inputs]
    if request.outputs is not None:
        document["outputs"] = [_encode_requested(output, binary) for output in request.outputs]
    elif binary:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    return _body(document, parts)


def decode_response(
    body: bytes, header_length: int | None, *, json_limit: int = RESPONSE_JSON_LIMIT_BYTES
) -> InferResponse:
    """An infer response from its body; binary outputs are views of `body`. Raises BadMessage, TooLarge."""
    document, outputs = _responses.decode(body, header_length, json_limit)
    return InferResponse(
        model_name=document.model_name,
        model_version=document.model_version or "",
        id=document.id or "",
        parameters=document.parameters or {},
        outputs=outputs,
    )


def to_binary_request(
    body: bytes | memoryview, header_length: int | None, most_bytes: int = 1 << 62, model: str = ""
) -> tuple[BodyParts, int]:
    """Convert a request of any size to equivalent body parts with binary inputs, and the length of their JSON part.

    Only the inputs change; `decode_request` still checks the rest. Takes time and memory
    in proportion to the JSON part. model: the name of the model, for refusals.
    Raises BadMessage; TooLarge if the shapes announce more than `most_bytes`.
    """
    end = f" for model {quoted(model)}" if model else ""
    document, inputs = _large_requests.decode(body, header_length, len(body), most_bytes, model=end)
    parts: BodyParts = []
    head: dict[str, Any] = {"inputs": [_encode_tensor("input", each, True, parts) for each in inputs]}
    if document.id is not None:
        head["id"] = document.id
    if document.parameters is not None:
        head["parameters"] = document.parameters
    if document.outputs is not None:
        head["outputs"] = msgspec.to_builtins(document.outputs)
    # Not msgspec, which would write NaN among the parameters as null.
    text = padded(json.dumps(head).encode())
    return [text, *parts], len(text)


def to_json_response(body: bytes, header_length: int) -> BodyParts:
    """Convert the body of a response with binary outputs to JSON alone. Raises BadMessage."""
    response = decode_response(body, header_length)
    request = InferRequest(model_name=response.model_name, model_version=response.model_version)
    return encode_response(response, request)[0]


def _encode_tensor(kind: str, each: Tensor, binary: bool, parts: BodyParts) -> dict[str, Any]:
    what = f"{kind} {quoted(each.name)}"
    encoded: dict[str, Any] = {"name": each.name, "datatype": each.datatype, "shape": each.shape}
    if binary:
        part = raw_view(each.array, each.datatype, each.shape, what)
        parts.append(part)
        encoded["parameters"] = {**each.parameters, "binary_data_size": len(part)}
        return encoded
    if each.parameters:
        encoded["parameters"] = each.parameters
    data = encode_data(each.array, lookup(each.datatype, what), each.shape, what)
    if kind == "input" and isinstance(data, msgspec.Raw):
        raise BadMessage(f"{what}: JSON has neither NaN nor infinities, send it as binary data")
    encoded["data"] = data
    return encoded


def _encode_requested(output: RequestedOutput, binary: bool) -> dict[str, Any]:
    parameters: dict[str, ParameterValue] = {**output.parameters, "binary_data": binary}
    if output.classification:
        parameters["classification"] = output.classification
    return {"name": output.name, "parameters": parameters}


def _body(document: dict[str, Any], parts: BodyParts) -> tuple[BodyParts, int | None]:
    head = _encoder.encode(document)
    if not parts:
        return [head], None
    head = padded(head)
    return [head, *parts], len(head)


def padded(text: bytes) -> bytes:
    """A JSON part with spaces behind it, so that the tensor that follows starts aligned."""
    return text + b" " * (-len(text) % _ALIGNMENT)
