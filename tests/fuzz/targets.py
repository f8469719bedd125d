"""What must hold for every byte string given to the three v2 codecs, to an HTTP/1.1 port, to HPACK and to HTTP/2.

`check(codec, data)` raises Broken if it does not:

1. A codec gives a message or a refusal (BadMessage, for configurations ConfigInvalid); nothing else escapes.
2. A refusal is one printable sentence of at most 500 characters without paths and names of classes.
3. Decoded arrays have the shape and datatype they claim, and are no larger than a small multiple of the bytes given.
4. What decodes, encodes again to bytes that decode to an equal message.
5. A body that is recognised by its text is what the full decoder makes of it.

Codecs: "http" (a line with Inference-Header-Content-Length, or an empty one, then the body), "grpc" (a message
ModelInferRequest or -Response), "config" (a model configuration as text or JSON), "http1" (what a client sends on one
connection; its rules are in `http1`), "hpack" (the header blocks of an HTTP/2 connection; see `header_blocks`), "http2"
(the frames that an HTTP/2 connection receives; see `http2`).
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError, EncodeError

from oriel_inference.errors import InferenceError, LoadFailed
from oriel_inference.fitting import RequestFitter
from oriel_inference.model import ModelSpec, TensorInfo, TensorSpec
from oriel_inference.repository import config as judged
from oriel_inference.repository import spec as specs
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.instances import placements
from oriel_inference.servers.generate import decode_generate
from oriel_wire.errors import BadMessage
from oriel_wire.v2 import grpc, http, metadata
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import InferRequest, InferResponse, Tensor
from oriel_wire.v2.proto import v2_pb2
from oriel_wire.v2.recognise import Templates

if __package__:
    from . import header_blocks, http1, http2
else:  # run as a script, from its own folder
    import header_blocks  # type: ignore[no-redef]
    import http1  # type: ignore[no-redef]
    import http2  # type: ignore[no-redef]

__all__ = ["CODECS", "Broken", "check"]

MAX_FACTOR, ALLOWANCE_BYTES = 8, 4096
_INSIDES = re.compile(r"oriel_|Traceback|<class|object at 0x|\.py\b|/usr/|/home/|/tmp/|msgspec|numpy|google\.protobuf")
_RAW = (
    ("FP32", (1, -1)),
    ("FP32", (2, 2)),
    ("INT64", (-1,)),
    ("BOOL", (1, -1, -1)),
    ("BYTES", (1, 1)),
    ("FP16", (0, -1)),
)
_TENSORS = (
    TensorSpec(name="text_input", datatype="BYTES", dims=(1,)),
    TensorSpec(name="x", datatype="FP32", dims=(-1,), optional=True),
    TensorSpec(name="n", datatype="INT64", dims=(2, -1), optional=True),
)
_LISTS = (b"[]", b"[1]", b"[ 1 , 2 ]", b"[1,]", b"[[1]]", b"[NaN]", b'["?"]', b"[null]", b"[1]]", b'[1],"x":[2]')
_ELEMENTS = (
    b"0",
    b"-0",
    b"1.0",
    b"1.5",
    b"1e39",
    b"1e400",
    b"1e-46",
    b"127",
    b"128",
    b"-129",
    b"255",
    b"256",
    b"65536",
)
_ELEMENTS += (b"true", b"2147483648", b"9223372036854775808", b"18446744073709551616", b"0.1", b"16777217", b" 7\n")
_SPEC = ModelSpec(
    name="m",
    version=1,
    platform="",
    backend="",
    max_batch_size=8,
    inputs=_TENSORS,
    outputs=_TENSORS,
    bounds=None,
)
_FITTER = RequestFitter(_SPEC)
_FILE = (
    TensorInfo(name="x", datatype="FP32", shape=(-1, 4)),
    TensorInfo(name="y", datatype="FP32", shape=(-1, 4)),
)


class Broken(AssertionError):
    """A rule does not hold."""


def check(codec: str, data: bytes) -> str:
    """Return the refusal, "" if the bytes were decoded. Raises Broken, or any other exception that the codec lets
    escape.
    """
    return _outcome(lambda: CODECS[codec](data))


def _outcome(part: Callable[[], object]) -> str:
    try:
        part()
    except (BadMessage, InferenceError, LoadFailed) as refusal:
        said = refusal.reason if isinstance(refusal, LoadFailed) else refusal.message
        if not 0 < len(said) <= 500 or not said.isprintable():
            raise Broken(f"a refusal of {len(said)} characters: {said[:600]!r}") from refusal
        # What was sent may be quoted.
        if _INSIDES.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", said)):
            raise Broken(f"a refusal shows insides: {said}") from refusal
        return said
    return ""


# HTTP ---------------------------------------------------------------------------------------------------------------


def _http(data: bytes) -> None:
    line, _, body = data.partition(b"\n")
    length = http.parse_header_length(line.decode("latin-1") or None)
    # The other readers of the same bytes: their refusals are judged, but do not end the case.
    _outcome(lambda: _http_response(body, length))
    _outcome(lambda: _tensors(decode_generate("m", "1", body, _SPEC).inputs, len(body)))
    request = http.decode_request("m", "1", body, length)
    if length == 0:
        for datatype, shape in _RAW:
            copy = http.decode_request("m", "1", body, 0)
            try:
                http.resolve_raw(copy, name="x", datatype=datatype, shape=shape)
            except BadMessage:
                continue
            _tensors(copy.inputs, len(body))
        return
    _tensors(request.inputs, len(body))
    _same(request, _again(request, binary=True), "binary")
    if all(DATATYPES[each.datatype].json for each in request.inputs):
        try:
            again = _again(request, binary=False)
        except BadMessage:
            pass  # BYTES that are no text
        else:
            _same(request, again, "JSON")
    _recognised(body, length, request)
    _FITTER.fit(request)


def _recognised(body: bytes, length: int | None, request: InferRequest) -> None:
    """Check that bodies like `body` that are recognised by their text decode to what the full decoder returns."""
    known = Templates()
    for _ in range(2):  # a text is learned when it comes a second time
        known.learn(body, length, request)
    rng = random.Random(body)
    for variant in _variants(body, length, rng):
        try:
            found = known.find(variant, length)
        except BadMessage:
            found = None
        if found is None:
            continue
        template, inputs = found
        try:
            whole = http.decode_request("m", "1", variant, length)
        except BadMessage as error:
            raise Broken(f"recognised, but refused by the decoder: {error.message}") from error
        for tensor in whole.inputs:
            array = inputs.get(tensor.name)
            if array is None or array.dtype != tensor.array.dtype or array.shape != tensor.shape:
                raise Broken(f"{tensor.name[:80]!r} was recognised as something else")
            if array.tolist() != tensor.array.tolist() and array.tobytes() != tensor.array.tobytes():
                raise Broken(f"{tensor.name[:80]!r} was recognised with other elements")
        if len(inputs) != len(whole.inputs):
            raise Broken("a request was recognised with other inputs")
        said = InferRequest(
            model_name="m", id=template.request.id, parameters=template.request.parameters, inputs=whole.inputs
        )
        said.outputs = template.request.outputs
        _same(whole, said, "recognised")


def _variants(body: bytes, length: int | None, rng: random.Random) -> Iterator[bytes]:
    yield body
    start = body.find(b"[", body.find(b'"data"'))
    stop = body.find(b"]", start) + 1
    if length is None and 0 <= start < stop:
        for numbers in _LISTS:
            yield body[:start] + numbers + body[stop:]
        count = body[start:stop].count(b",") + 1
        for number in _ELEMENTS:
            yield body[:start] + b"[" + b",".join([number] * count) + b"]" + body[stop:]
    for _ in range(6):
        changed = bytearray(body)
        changed[rng.randrange(len(body))] = rng.choice(b'0123456789[]{},:"\\ .-eE\x00\xff')
        yield bytes(changed)
    yield body + b"\0"
    yield body[:-1]


def _again(request: InferRequest, *, binary: bool) -> InferRequest:
    parts, length = http.encode_request(request, binary=binary)
    return http.decode_request("m", "1", b"".join(parts), length, json_limit=1 << 30)


def _http_response(body: bytes, length: int | None) -> None:
    response = http.decode_response(body, length)
    _tensors(response.outputs, len(body))
    asked = InferRequest(model_name="m", binary_default=True)
    parts, again = http.encode_response(response, asked)
    _same_response(response, http.decode_response(b"".join(parts), again))


# gRPC ---------------------------------------------------------------------------------------------------------------


def _grpc(data: bytes) -> None:
    _outcome(lambda: _grpc_response(data))
    try:
        message = v2_pb2.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise BadMessage("the message is not what this method takes") from error
    request = grpc.decode_infer(message)
    _tensors(request.inputs, len(data))
    again = grpc.encode_infer_request(request).SerializeToString()
    _same(request, grpc.decode_infer(v2_pb2.ModelInferRequest.FromString(again)), "raw")
    _FITTER.fit(request)


def _grpc_response(data: bytes) -> None:
    try:
        message = v2_pb2.ModelInferResponse.FromString(data)
    except DecodeError as error:
        raise BadMessage("no response") from error
    response = grpc.decode_infer_response(message)
    _tensors(response.outputs, len(data))
    _same_response(response, grpc.decode_infer_response(grpc.encode_infer(response)))


# Configurations -----------------------------------------------------------------------------------------------------


def _config(data: bytes) -> None:
    if data.lstrip()[:1] == b"{":
        config = metadata.parse_config_json(data)
    else:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise BadMessage("not text") from error
        config = judged.parse(text, "m/config.pbtxt")
    try:
        written = text_format.MessageToString(config)
    except EncodeError as error:
        raise Broken("a configuration that cannot be written") from error
    if metadata.parse_config_text(written).SerializeToString(deterministic=True) != config.SerializeToString(
        deterministic=True
    ):
        raise Broken("a configuration changes when it is written as text")
    if metadata.parse_config_json(metadata.config_json(config)).SerializeToString(
        deterministic=True
    ) != config.SerializeToString(deterministic=True):
        raise Broken("a configuration changes when it is written as JSON")
    metadata.message_json(config)
    judged.validate(config, "m", "m/config.pbtxt", ("model.onnx",))
    judged.select_versions(config, [1, 2, 7], "m/config.pbtxt")
    placements(config, "m/config.pbtxt", threads=1, gpus=())
    specs.complete(config, _FILE[:1], _FILE[1:], "m/config.pbtxt", defaults=LoadDefaults())
    specs.check_against_file(config, _FILE[:1], _FILE[1:], "m/config.pbtxt")
    specs.build_spec(config, 1, "m/config.pbtxt", instances=1, labels=lambda name: ())
    metadata.encode_metadata(metadata.describe(config, ["1"]))


# HTTP/1.1 -----------------------------------------------------------------------------------------------------------


def _http1(data: bytes) -> None:
    refusal, broken = http1.judge(data)
    if broken:
        raise Broken(broken)
    if refusal:
        raise BadMessage(refusal)


# HTTP/2 header compression ------------------------------------------------------------------------------------------


def _hpack(data: bytes) -> None:
    refusal, broken = header_blocks.judge(data)
    if broken:
        raise Broken(broken)
    if refusal:
        raise BadMessage(refusal)


# HTTP/2 -------------------------------------------------------------------------------------------------------------


def _http2(data: bytes) -> None:
    refusal, broken = http2.judge(data)
    if broken:
        raise Broken(broken)
    if refusal:
        raise BadMessage(refusal)


CODECS: dict[str, Callable[[bytes], None]] = {
    "http": _http,
    "grpc": _grpc,
    "config": _config,
    "http1": _http1,
    "hpack": _hpack,
    "http2": _http2,
}


# Rules --------------------------------------------------------------------------------------------------------------


def _tensors(tensors: Sequence[Tensor], size: int) -> None:
    total = 0
    for tensor in tensors:
        array = tensor.array
        if tensor.datatype and (array.shape != tensor.shape or array.dtype != DATATYPES[tensor.datatype].dtype):
            raise Broken(f"{tensor.datatype} {tensor.shape} came as {array.dtype} {array.shape}")
        total += array.nbytes
        if tensor.datatype == "BYTES":
            if not all(type(each) is bytes for each in array.flat):
                raise Broken("BYTES hold something else")
            total += sum(map(len, array.flat))
    if total > MAX_FACTOR * size + ALLOWANCE_BYTES:
        raise Broken(f"{size} bytes became arrays of {total}")


def _same(one: InferRequest, other: InferRequest, how: str) -> None:
    wanted = [
        None if each.outputs is None else [(o.name, o.classification, _typed(o.parameters)) for o in each.outputs]
        for each in (one, other)
    ]
    plain = [(each.id, _typed(each.parameters), wanted[n]) for n, each in enumerate((one, other))]
    if plain[0] != plain[1]:
        raise Broken(f"{how}: {plain[0]} came back as {plain[1]}")
    _same_tensors(one.inputs, other.inputs, how)


def _same_response(one: InferResponse, other: InferResponse) -> None:
    plain = [(each.model_name, each.model_version, each.id, _typed(each.parameters)) for each in (one, other)]
    if plain[0] != plain[1]:
        raise Broken(f"{plain[0]} came back as {plain[1]}")
    _same_tensors(one.outputs, other.outputs, "response")


def _same_tensors(ones: Sequence[Tensor], others: Sequence[Tensor], how: str) -> None:
    if len(ones) != len(others):
        raise Broken(f"{how}: {len(ones)} tensors came back as {len(others)}")
    for one, other in zip(ones, others, strict=True):
        head = [(each.name, each.datatype, each.shape, _typed(each.parameters)) for each in (one, other)]
        if head[0] != head[1]:
            raise Broken(f"{how}: {head[0]} came back as {head[1]}")
        flat = [each.array.reshape(-1) for each in (one, other)]
        equal = (
            np.array_equal(*flat, equal_nan=True) if flat[0].dtype.kind == "f" else flat[0].tolist() == flat[1].tolist()
        )
        if not equal:
            raise Broken(f"{how}: the elements of {one.name[:80]!r} changed")


def _typed(parameters: dict[str, bool | int | float | str]) -> list[tuple[str, type, str]]:
    """Make a value comparable such that 1, 1.0 and True differ and NaN equals itself."""
    return sorted((name, type(value), repr(value)) for name, value in parameters.items())
