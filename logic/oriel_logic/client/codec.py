"""Encodes and decodes one model's calls, and keeps what it has computed once.

The JSON part of a call (names, datatypes, shapes) is the same for every call with arrays of the same shapes, and so is
the JSON part of an answer. Both are computed in full the first time and kept: afterwards an input costs a comparison of
its dtype, and an output one view. A JSON part with any other content is computed every time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from oriel_logic.client.models import Array, ArrayLike, ModelSpec, Outputs
from oriel_logic.client.tensors import check_inputs, over_time
from oriel_logic.errors import ModelFailed, ModelInputWrong
from oriel_wire.engine.client import HttpResponse
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import DATATYPES, raw_view
from oriel_wire.v2.http import decode_response, encode_request
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, Tensor, tensor

HEADER_LENGTH = "inference-header-content-length"
COPIED_BYTES = 64 * 1024  # up to here a copy costs less than a view
MAX_KEPT = 64
MAX_KEPT_BYTES = 4096
Body = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded request body. headers: the lines of its header fields, with their CRLF."""

    headers: str
    body: Body


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The layout of an answer with a given JSON part: (name, dtype, shape, offset) of its outputs, in a body of
    `size` bytes.
    """

    model: str
    version: str
    outputs: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...]
    size: int


class ModelCodec:
    """The codec of one model and version, built from its metadata. Single writer: the loop."""

    def __init__(self, spec: ModelSpec, version: str = "", *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self.spec = spec
        self.infer_path = path_of(spec.name, version) + "/infer"
        self._version = version
        self._max_kept_bytes = max_kept_bytes
        # BYTES are objects of any length, so their form on the wire has to be computed every time.
        self._dtypes = {
            name: DATATYPES[each.datatype].dtype
            for name, each in spec.inputs.items()
            if each.datatype in DATATYPES and DATATYPES[each.datatype].size
        }
        self._requests: dict[tuple[Any, ...], tuple[str, bytes]] = {}
        self._answers: dict[bytes, AnswerPlan] = {}

    def encode(self, inputs: Mapping[str, ArrayLike], wanted: Sequence[str] | None) -> Encoded:
        """Encode a call's body. Arrays are never cast; see `check_inputs`. Raises ModelInputWrong."""
        shapes: list[Any] = [None if wanted is None else tuple(wanted)]
        body: Body = []
        for name, value in inputs.items():
            dtype = self._dtypes.get(name)
            if (
                dtype is None
                or type(value) is not np.ndarray
                or value.dtype != dtype  # an array of a worker has a dtype of its own
                or not value.flags.c_contiguous
            ):
                return self._encode_anew(inputs, wanted)
            shapes.append(name)
            shapes.append(value.shape)
            if value.nbytes <= COPIED_BYTES:
                body.append(value.tobytes())
            else:
                body.append(raw_view(value, self.spec.inputs[name].datatype, value.shape, name))
        key = tuple(shapes)
        known = self._requests.get(key)
        if known is None:
            made = self._encode_anew(inputs, wanted)
            head = bytes(made.body[0])
            if len(head) <= self._max_kept_bytes:
                if len(self._requests) >= MAX_KEPT:
                    self._requests.clear()
                self._requests[key] = made.headers, head
            return made
        body.insert(0, known[1])
        return Encoded(known[0], body)

    def _encode_anew(self, inputs: Mapping[str, ArrayLike], wanted: Sequence[str] | None) -> Encoded:
        return encoded(infer_request(self.spec, inputs, wanted, self._version))

    def decode(self, response: HttpResponse) -> Outputs:
        """Decode the outputs of a 200 answer; numbers are read-only views of its body. Raises ModelFailed."""
        body, header = response.body, response.get(HEADER_LENGTH)
        length = None
        if header is not None:
            if not (header.isascii() and header.isdigit() and len(header) < 12):
                raise self._unreadable("its header length is not a number")
            length = int(header)
            plan = self._answers.get(body[:length]) if length <= self._max_kept_bytes else None
            if plan is not None and plan.size == len(body):
                arrays = {name: np.ndarray(shape, dtype, body, at) for name, dtype, shape, at in plan.outputs}
                return Outputs(arrays, model=plan.model, model_version=plan.version)
        try:
            answer = decode_response(body, length)
        except BadMessage as error:
            raise self._unreadable(error.message) from error
        if length is not None and length <= self._max_kept_bytes:
            self._keep(answer, body, length)
        return outputs_of(answer)

    def _unreadable(self, why: str) -> ModelFailed:
        return ModelFailed(f"the answer of model '{self.spec.name}' cannot be read: {why}")

    def _keep(self, answer: InferResponse, body: bytes, length: int) -> None:
        """Keep the layout if all outputs are in `body`, one after another; outputs decoded from JSON values are not."""
        outputs, at = [], length
        for each in answer.outputs:
            if each.array.dtype.hasobject:
                return
            outputs.append((each.name, each.array.dtype, each.shape, at))
            at += each.array.nbytes
        if at == len(body):
            if len(self._answers) >= MAX_KEPT:
                self._answers.clear()
            self._answers[body[:length]] = AnswerPlan(answer.model_name, answer.model_version, tuple(outputs), at)


def infer_request(
    spec: ModelSpec, inputs: Mapping[str, ArrayLike], wanted: Sequence[str] | None, version: str
) -> InferRequest:
    """Build a v2 infer request. Raises ModelInputWrong."""
    tensors: list[Tensor] = check_inputs(spec, inputs)
    return InferRequest(
        model_name=spec.name,
        model_version=version,
        inputs=tensors,
        outputs=None if wanted is None else [RequestedOutput(name, True) for name in wanted],
    )


def scan_body(
    spec: ModelSpec,
    inputs: Mapping[str, ArrayLike],
    state: Mapping[str, Array] | None,
    wanted: Sequence[str] | None,
    version: str,
) -> Encoded:
    """Encode a scan: `inputs` with a leading time axis, and its first state. Raises ModelInputWrong."""
    request = infer_request(over_time(spec, inputs), inputs, wanted, version)
    try:
        # The states of a model are not in its metadata: the server checks them.
        request.inputs += [tensor(name, array) for name, array in (state or {}).items()]
    except BadMessage as error:
        raise ModelInputWrong(f"state of model '{spec.name}': {error.message}") from error
    request.parameters["scan"] = True
    return encoded(request)


def encoded(request: InferRequest) -> Encoded:
    """Encode a request. Raises ModelInputWrong."""
    try:
        body, length = encode_request(request)
    except BadMessage as error:
        raise ModelInputWrong(f"model '{request.model_name}': {error.message}") from error
    return Encoded(f"content-type: application/octet-stream\r\n{HEADER_LENGTH}: {length}\r\n", body)


def outputs_of(answer: InferResponse) -> Outputs:
    arrays: dict[str, Array] = {each.name: each.array for each in answer.outputs}
    return Outputs(arrays, model=answer.model_name, model_version=answer.model_version, parameters=answer.parameters)


def path_of(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path
