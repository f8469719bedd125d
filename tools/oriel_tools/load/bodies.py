"""The one request of a stream as bytes: a file as it is, or a v2 request in the form the stream asks for."""

import time
from dataclasses import dataclass
from pathlib import Path
from re import compile as pattern
from typing import Any

import numpy as np

from oriel_cli.errors import CommandFailed
from oriel_tools.load.scenario import Stream, address
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError, WireError
from oriel_wire.observe.trace import format_traceparent, new_trace
from oriel_wire.v2 import grpc as v2_grpc
from oriel_wire.v2 import http as v2_http
from oriel_wire.v2.datatypes import lookup
from oriel_wire.v2.messages import InferRequest, Tensor
from oriel_wire.v2.metadata import ModelMetadata, TensorMetadata, decode_metadata
from oriel_wire.v2.proto import v2_pb2

MAX_BODY_BYTES = 64 << 20
ANSWER_WITHIN_S = 10.0
_MODEL = pattern(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/infer)?/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One request that is sent over and over. path: HTTP target or gRPC method; fields: headers or metadata."""

    host: str
    port: int
    grpc: bool
    method: str
    path: str
    fields: list[tuple[str, str]]
    body: bytes


async def prepare(stream: Stream) -> Prepared:
    """`stream`'s request. Raises CommandFailed when its body cannot be made."""
    parts, host, port = address(stream.url)
    found = _MODEL.search(parts.path)
    fields = _fields(stream)
    try:
        request = await _request(stream, host, port, found[1], found[2] or "", fields) if found else None
    except WireError as wrong:
        raise CommandFailed(f"stream {stream.name!r}: {wrong}") from wrong
    if request is None and (stream.rows or stream.encoding != "raw"):
        raise CommandFailed(f"stream {stream.name!r}: 'rows' and 'encoding' need a URL of a model: .../v2/models/NAME")
    body = b"" if request is not None else _file(stream)
    if parts.scheme == "grpc":
        path = parts.path
        if request is not None:
            path = f"/{v2_grpc.SERVICE}/ModelInfer"
            body = v2_grpc.encode_infer_request(request).SerializeToString()
        elif path.count("/") != 2:
            raise CommandFailed(
                f"stream {stream.name!r}: {parts.path!r} is neither /v2/models/NAME nor /Service/Method"
            )
        return Prepared(host=host, port=port, grpc=True, method="", path=path, fields=fields, body=body)
    if request is not None:
        if not parts.path.endswith("/infer"):
            raise CommandFailed(f"stream {stream.name!r}: a v2 request over HTTP must go to .../infer")
        pieces, header_length = v2_http.encode_request(request, binary=stream.encoding == "binary")
        body = b"".join(pieces)
        if header_length is not None:
            fields.append(("inference-header-content-length", str(header_length)))
    names = {name for name, _ in fields}
    if body and "content-type" not in names:
        fields.append(("content-type", _content_type(stream, request is not None)))
    if stream.deadline_ms is not None and "x-request-timeout-ms" not in names:
        fields.append(("x-request-timeout-ms", str(max(1, round(stream.deadline_ms)))))
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Prepared(host=host, port=port, grpc=False, method=stream.method, path=path, fields=fields, body=body)


def _fields(stream: Stream) -> list[tuple[str, str]]:
    fields = [(name.lower(), value) for name, value in stream.headers.items()]
    names = {name for name, _ in fields}
    if stream.key and "authorization" not in names:
        fields.append(("authorization", f"Bearer {stream.key}"))
    if "traceparent" not in names:
        # Not sampled: spans of a load would push every other trace out of the buffer and cost what they measure.
        fields.append(("traceparent", format_traceparent(new_trace(sampled=False))))
    return fields


def _content_type(stream: Stream, encoded: bool) -> str:
    if stream.content_type:
        return stream.content_type
    if encoded and stream.encoding == "binary":
        return "application/octet-stream"
    known = {".json": "application/json", ".png": "image/png", ".jpg": "image/jpeg", ".txt": "text/plain"}
    return "application/json" if encoded else known.get(Path(stream.body).suffix, "application/octet-stream")


def _file(stream: Stream) -> bytes:
    if not stream.body:
        return b""
    path = Path(stream.body)
    try:
        if path.stat().st_size > MAX_BODY_BYTES:
            raise CommandFailed(f"{path}: a body may have at most {MAX_BODY_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as refused:
        raise CommandFailed(f"{path}: cannot be read ({refused.strerror})") from refused


async def _request(
    stream: Stream, host: str, port: int, model: str, version: str, fields: list[tuple[str, str]]
) -> InferRequest | None:
    """The v2 request a stream to a model sends; None when its body travels as it is."""
    grpc = stream.url.startswith("grpc:")
    if stream.rows:
        found = await (_described_grpc if grpc else _described)(host, port, model, version, fields)
        inputs = [_random(each, stream.rows) for each in found.inputs]
        return InferRequest(model_name=model, model_version=version, inputs=inputs)
    if stream.body and (grpc or stream.encoding != "raw"):
        return v2_http.decode_request(model, version, _file(stream), None, json_limit=MAX_BODY_BYTES)
    if grpc:
        raise CommandFailed(f"stream {stream.name!r}: a model over gRPC needs 'body' (v2 JSON) or 'rows'")
    return None


def _random(described: TensorMetadata, rows: int) -> Tensor:
    """A tensor of `rows` rows: the first free axis takes them, any other free axis is 1."""
    free = next((axis for axis, size in enumerate(described.shape) if size < 0), None)
    shape = tuple(rows if axis == free else max(1, size) for axis, size in enumerate(described.shape))
    random = np.random.default_rng(1)
    array: Any
    if described.datatype == "BYTES":
        array = np.full(shape, b"oriel", dtype=object)
    else:
        dtype = lookup(described.datatype, f"input {described.name!r}").dtype
        if described.datatype == "BF16":
            array = (random.random(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif dtype.kind == "f":
            array = random.random(shape).astype(dtype)
        else:
            array = random.integers(0, 2, shape).astype(dtype)
    return Tensor(described.name, described.datatype, shape, array)


async def _described(host: str, port: int, model: str, version: str, fields: list[tuple[str, str]]) -> ModelMetadata:
    client = HttpClient(host=host, port=port, max_connections=1)
    target = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
    try:
        answer = await client.request("GET", target, fields, deadline=time.monotonic() + ANSWER_WITHIN_S)
    except UpstreamError as error:
        raise CommandFailed(f"http://{host}:{port} does not describe the inputs of {model!r}: {error}") from error
    finally:
        await client.close()
    if answer.status != 200:
        raise CommandFailed(f"http://{host}:{port}{target} answered {answer.status}, so the model's inputs are unknown")
    return decode_metadata(answer.body)


async def _described_grpc(
    host: str, port: int, model: str, version: str, fields: list[tuple[str, str]]
) -> ModelMetadata:
    import grpc

    metadata_request = v2_pb2.ModelMetadataRequest(name=model, version=version)
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        call = channel.unary_unary(f"/{v2_grpc.SERVICE}/ModelMetadata", None, None)
        try:
            raw = await call(metadata_request.SerializeToString(), timeout=ANSWER_WITHIN_S, metadata=fields)
        except grpc.aio.AioRpcError as error:
            raise CommandFailed(
                f"grpc://{host}:{port} does not describe the inputs of {model!r}: {error.code().name} {error.details()}"
            ) from error
    found = v2_pb2.ModelMetadataResponse.FromString(raw)
    inputs = tuple(
        TensorMetadata(name=each.name, datatype=each.datatype, shape=tuple(each.shape)) for each in found.inputs
    )
    return ModelMetadata(name=found.name, platform=found.platform, inputs=inputs)
