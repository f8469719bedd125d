"""The address, headers and body of a request to one contender, and a check of its answer."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from inference_bench.models import Model
from oriel_wire.v2.grpc import SERVICE, decode_infer_response, encode_infer_request
from oriel_wire.v2.http import decode_response, encode_request
from oriel_wire.v2.messages import InferRequest, Tensor
from oriel_wire.v2.proto import v2_pb2

__all__ = ["Target", "Wrong", "ask", "grpc_target", "http_target", "is_listening"]

Array = NDArray[Any]
HEADER_LENGTH = "inference-header-content-length"
ASK_S = 30.0
ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Wrong(Exception):
    """A contender answers, but not what the model says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """protocol: http or grpc. body: of one request; over gRPC the message, unframed. pid: of its CPU time, or None.

    encoding: how tensors travel, for the report.
    """

    name: str
    protocol: str
    host: str
    port: int
    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    encoding: str
    pid: int | None = None


def http_target(name: str, port: int, path: str, model: Model, *, binary: bool, pid: int | None = None) -> Target:
    """One row of `model`."""
    parts, length = encode_request(_request(model), binary=binary)
    headers = [("content-type", "application/octet-stream" if binary else "application/json")]
    if length is not None:
        headers.append((HEADER_LENGTH, str(length)))
    return Target(
        name=name,
        protocol="http",
        host="127.0.0.1",
        port=port,
        path=path,
        headers=headers,
        body=b"".join(parts),
        encoding="binary" if binary else "JSON",
        pid=pid,
    )


def grpc_target(name: str, port: int, model: Model, *, pid: int | None = None) -> Target:
    """One row of `model`, raw contents."""
    return Target(
        name=name,
        protocol="grpc",
        host="127.0.0.1",
        port=port,
        path=f"/{SERVICE}/ModelInfer",
        headers=[],
        body=encode_infer_request(_request(model)).SerializeToString(),
        encoding="raw",
        pid=pid,
    )


def _request(model: Model) -> InferRequest:
    row = model.row()
    return InferRequest(model_name=model.name, inputs=[Tensor("x", model.datatype, row.shape, row)])


def is_listening(target: Target) -> bool:
    """Return whether it answers this request well; not whether the answer is right."""
    try:
        ask(target)
    except (OSError, grpc.RpcError, Wrong):
        return False
    return True


def ask(target: Target, expected: Array | None = None) -> int:
    """Send one request; bytes of the answer's body or message.

    expected: of output y; the values must be close. Raises Wrong, OSError or grpc.RpcError.
    """
    if target.protocol == "grpc":
        with grpc.insecure_channel(f"{target.host}:{target.port}", options=ANY_SIZE) as channel:
            data: bytes = channel.unary_unary(target.path, None, None)(target.body, timeout=ASK_S)
        outputs = decode_infer_response(v2_pb2.ModelInferResponse.FromString(data)).outputs
        found = [np.asarray(each.array) for each in outputs if each.name == "y"]
    else:
        url = f"http://{target.host}:{target.port}{target.path}"
        request = urllib.request.Request(url, target.body, dict(target.headers))
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as answer:
                data, length = answer.read(), answer.headers.get(HEADER_LENGTH)
        except urllib.error.HTTPError as refused:
            raise Wrong(f"{target.name} answers {refused.code}: {refused.read()[:300]!r}") from refused
        found = [] if expected is None else _outputs(data, length)
    if expected is not None and not (found and np.allclose(found[0].reshape(expected.shape), expected, atol=1e-3)):
        raise Wrong(f"{target.name} gives other values than the model: {found} instead of {expected}")
    return len(data)


def _outputs(data: bytes, length: str | None) -> list[Array]:
    if length is not None:
        return [np.asarray(each.array) for each in decode_response(data, int(length)).outputs if each.name == "y"]
    return [np.asarray(each["data"], np.float32) for each in json.loads(data)["outputs"] if each["name"] == "y"]
