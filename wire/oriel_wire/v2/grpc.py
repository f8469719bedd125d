"""v2 infer messages over gRPC: translates between protobuf and tensors, and lists the service's methods by name.

The service is registered through generic handlers under its wire name; the classes live in our own proto package.
Raw contents are views of the bytes protobuf hands out, one copy in all; typed contents are copied.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import (
    Datatype,
    check_bytes_count,
    check_dimensions,
    decode_raw,
    element_count,
    lookup,
    quoted,
    raw_view,
    shown,
)
from oriel_wire.v2.grpc_names import SERVICE as SERVICE
from oriel_wire.v2.messages import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    InferRequest,
    InferResponse,
    ParameterValue,
    ReadShared,
    RequestedOutput,
    Tensor,
    shared_array,
    take_classes,
    take_shared,
    too_many,
)
from oriel_wire.v2.proto import health_pb2, v2_pb2

HEALTH_SERVICE = "grpc.health.v1.Health"


# method name -> (request class, response class); the messages of a stream are those of `ModelInfer`
METHODS: Mapping[str, tuple[type[Message], type[Message]]] = MappingProxyType(
    {
        name: (getattr(v2_pb2, f"{name.replace('Stream', '')}Request"), getattr(v2_pb2, f"{name}Response"))
        for name in (
            *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"),
            *("ModelStreamInfer", "ModelConfig", "ModelStatistics"),
            *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
            *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
            *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
            *("TraceSetting", "LogSettings"),
        )
    }
)

# Check is unary, Watch streams its responses
HEALTH_METHODS: Mapping[str, tuple[type[Message], type[Message]]] = MappingProxyType(
    dict.fromkeys(("Check", "Watch"), (health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse))
)

_TYPED = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
    **{f"INT{bits}": "int_contents" for bits in (8, 16, 32)},
    **{f"UINT{bits}": "uint_contents" for bits in (8, 16, 32)},
}
RawPiece = tuple[bytes | memoryview, int, int]  # bytes, start of the tensor in them, its size
_INT64_MIN, _INT64_END, _UINT64_END = -(2**63), 2**63, 2**64


def decode_infer(
    message: v2_pb2.ModelInferRequest, raw: Sequence[RawPiece] | None = None, read: ReadShared | None = None
) -> InferRequest:
    """Decode an infer request; its answer always has raw contents.

    raw: the raw contents, if they are not in the message. read: reads tensors from shared memory; None refuses requests
    that name a region. Raises BadMessage.
    """
    parameters = _parameters(message.parameters, "request")
    for name in parameters:
        if name.startswith("triton_") and name != "triton_enable_empty_final_response":
            raise BadMessage(f"parameter {quoted(name)}: names that start with triton_ are reserved")
    return InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=parameters,
        inputs=_tensors(
            "input",
            message.inputs,
            _pieces(message.raw_input_contents) if raw is None else raw,
            read,
            f" for model {quoted(message.model_name)}",
        ),
        outputs=_requested(message.outputs, may_share=read is not None) if message.outputs else None,
        binary_default=True,
    )


def encode_infer(response: InferResponse) -> v2_pb2.ModelInferResponse:
    """Encode a response with raw contents. Raises BadMessage if an array is not of its datatype."""
    message = v2_pb2.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    _set_parameters(message.parameters, response.parameters, "response")
    for output in response.outputs:
        if output.name in response.in_shared_memory:
            message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
            message.raw_output_contents.append(b"")  # clients count raw contents by the position of the output
        else:
            message.raw_output_contents.append(bytes(_add_tensor("output", output, message.outputs.add())))
    return message


def encode_infer_request(
    request: InferRequest, raw: list[bytes | memoryview] | None = None
) -> v2_pb2.ModelInferRequest:
    """Encode a request with raw contents. Raises BadMessage if an array is not of its datatype.

    raw: takes views of the raw contents, which are then not in the message.
    """
    message = v2_pb2.ModelInferRequest(
        model_name=request.model_name, model_version=request.model_version, id=request.id
    )
    _set_parameters(message.parameters, request.parameters, "request")
    for each in request.inputs:
        contents = _add_tensor("input", each, message.inputs.add())
        if raw is None:
            message.raw_input_contents.append(bytes(contents))
        else:
            raw.append(contents)
    for output in request.outputs or ():
        parameters = dict(output.parameters)
        if output.classification:
            parameters["classification"] = output.classification
        _set_parameters(message.outputs.add(name=output.name).parameters, parameters, f"output {quoted(output.name)}")
    return message


def decode_infer_response(message: v2_pb2.ModelInferResponse, raw: Sequence[RawPiece] | None = None) -> InferResponse:
    """Decode a response with raw or typed contents. raw: the raw contents, if they are not in the message.

    Raises BadMessage.
    """
    return InferResponse(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=_parameters(message.parameters, "response"),
        outputs=_tensors("output", message.outputs, _pieces(message.raw_output_contents) if raw is None else raw, None),
    )


def _pieces(contents: Sequence[bytes]) -> list[RawPiece]:
    return [(each, 0, len(each)) for each in contents]


def _tensors(
    kind: str, found: Sequence[Any], raw: Sequence[RawPiece], read: ReadShared | None, model: str = ""
) -> list[Tensor]:
    """Decode the tensors of a message. model: the end of their description in errors."""
    if raw:
        sent = [each for each in found if "shared_memory_region" not in each.parameters]  # the others have no contents
        if len(raw) != len(sent):
            for each in sent:
                _refuse_contents(each, model)
            if len(raw) < len(sent):
                name = quoted(sent[len(raw)].name)
                raise BadMessage(f"unable to find data for {kind} tensor {name}{model} in request.")
            raise BadMessage(f"{len(sent)} {kind}s have {len(raw)} raw contents, there must be one for each")
    left = iter(raw)
    tensors: list[Tensor] = []
    names: set[str] = set()
    if len(found) > MAX_TENSORS:
        raise too_many(found, MAX_TENSORS, f"{kind}s")
    for each in found:
        name, datatype = each.name, each.datatype
        what = f"{kind} {quoted(name)}{model}"
        check_dimensions(len(each.shape), what)
        shape = tuple(each.shape)
        if name in names:
            raise BadMessage(f"{what} is given more than once")
        names.add(name)
        entry = lookup(datatype, what)
        parameters = _parameters(each.parameters, what) if each.parameters else {}
        shared = take_shared(parameters, what, allowed=read is not None) if parameters else None
        if shared is not None:
            if each.HasField("contents") and each.contents.ListFields():
                raise BadMessage(f"{what}: has typed contents and a region of shared memory, use one of them")
            array = shared_array(shared, read, entry, shape, what)
        elif not raw:
            array = _typed(each, entry, shape, what)
        else:
            _refuse_contents(each, model)
            data, start, size = next(left)
            array = decode_raw(data, start, size, entry, shape, what)
        tensors.append(Tensor(name, datatype, shape, array, parameters))
    return tensors


def _refuse_contents(each: Any, model: str) -> None:
    if each.HasField("contents") and each.contents.ListFields():
        reason = f"when using raw_input_contents for {quoted(each.name)}{model}"
        raise BadMessage(f"contents field must not be specified {reason}")


def _typed(each: Any, entry: Datatype, shape: tuple[int, ...], what: str) -> NDArray[Any]:
    """Typed contents -> array [shape]; every value is checked against the datatype's range."""
    count = element_count(shape, what)
    field = _TYPED.get(entry.name)
    if field is None:
        raise BadMessage(f"{what}: {entry.name} has no typed contents, send it as raw contents")
    for other, _ in each.contents.ListFields():
        if other.name != field:
            raise BadMessage(f"{what}: {entry.name} values belong in {field}, found {other.name}")
    values = getattr(each.contents, field)
    if len(values) != count:
        raise BadMessage(f"{what}: shape {shown(shape)} has {count} elements, {field} holds {len(values)}")
    if not entry.size:
        check_bytes_count(count, what)
        array = np.empty(count, dtype=object)
        array[:] = list(values)
    elif field in ("int_contents", "uint_contents"):
        wide = np.fromiter(values, np.int64, count)
        array = wide.astype(entry.dtype)
        if not np.array_equal(wide, array):
            info = np.iinfo(entry.dtype)
            raise BadMessage(f"{what}: {field} has a value outside {entry.name} ({info.min} to {info.max})")
    elif entry.name in ("BOOL", "FP32", "FP64") and count:
        array = _packed(each.contents, entry, count)
    else:
        array = np.fromiter(values, entry.dtype, count)
    return array.reshape(shape)


def _packed(contents: Any, entry: Datatype, count: int) -> NDArray[Any]:
    """The `count` numbers of fixed width in `contents`, as an array.

    They are read from the message's encoding (a tag, a length, then the numbers as in an array), because reading them
    one by one would block the loop.
    """
    data: bytes = contents.SerializeToString()
    start = 1
    while data[start] > 127:
        start += 1
    return np.frombuffer(data, entry.dtype, count, start + 1)


def _requested(found: Sequence[Any], *, may_share: bool) -> list[RequestedOutput]:
    outputs: dict[str, RequestedOutput] = {}
    if len(found) > MAX_TENSORS:
        raise too_many(found, MAX_TENSORS, "outputs")
    for each in found:
        what = f"output {quoted(each.name)}"
        parameters = _parameters(each.parameters, what)
        classes = take_classes(parameters, what)
        shared = take_shared(parameters, what, allowed=may_share, classes=classes)
        wanted = RequestedOutput(each.name, True, classes, parameters, shared)
        outputs.setdefault(each.name, wanted)  # requested again, it is still one output
    return list(outputs.values())


def _parameters(found: Mapping[str, v2_pb2.InferParameter], what: str) -> dict[str, ParameterValue]:
    parameters: dict[str, ParameterValue] = {}
    if len(found) > MAX_PARAMETERS:
        raise too_many(found, MAX_PARAMETERS, f"{what}: parameters")
    for name, value in found.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise BadMessage(f"{what}: parameter {quoted(name)} has no value")
        parameters[name] = getattr(value, choice)
    return parameters


def _set_parameters(target: Any, parameters: Mapping[str, ParameterValue], what: str) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, str):
            target[name].string_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        elif _INT64_MIN <= value < _INT64_END:
            target[name].int64_param = value
        elif 0 <= value < _UINT64_END:
            target[name].uint64_param = value
        else:
            raise BadMessage(f"{what}: parameter {quoted(name)} does not fit in 64 bits")


def _add_tensor(kind: str, each: Tensor, target: Any) -> bytes | memoryview:
    """Describe a tensor in `target`, and return its raw contents."""
    what = f"{kind} {quoted(each.name)}"
    target.name = each.name
    target.datatype = each.datatype
    target.shape.extend(each.shape)
    if each.parameters:
        _set_parameters(target.parameters, each.parameters, what)
    return raw_view(each.array, each.datatype, each.shape, what)
