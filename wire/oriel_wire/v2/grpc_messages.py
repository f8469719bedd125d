"""Reads and writes ModelInfer messages as bytes: tensors are views of the input, and repeated heads are parsed once.

A ModelInferRequest is a sequence of length-delimited fields, and their order does not matter to protobuf. So the raw
contents (field 7) are found without copying them. The rest, the head, is small and mostly the same for one client:
equal heads are decoded once. Anything unusual (a group, a length that passes the end or is not in its shortest form,
too many fields) is left to protobuf.

An answer is a head that depends on names and shapes alone, then raw contents, joined in one copy. A client's requests
and the answers that it gets are treated alike.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.datatypes import DATATYPES, MAX_DIMENSIONS, decode_raw, lookup, quoted, raw_view
from oriel_wire.v2.grpc import RawPiece, decode_infer_response, encode_infer_request
from oriel_wire.v2.grpc_names import write_varint
from oriel_wire.v2.messages import MAX_TENSORS, Array, InferRequest, InferResponse, Tensor
from oriel_wire.v2.proto import v2_pb2
from oriel_wire.v2.proto_cost import FREE_BYTES, parse

MAX_FIELDS = 64
# The accepted number of inputs, outputs, parameters and raw contents, and a few more.
MAX_ANY_FIELDS = 4 * MAX_TENSORS + MAX_FIELDS
MAX_CUT_BYTES = 4 << 20
MAX_HEAD_BYTES = 4096
MAX_HEADS = 256
MAX_SHAPES = 64
_NO_DATA: Array = np.empty(0)
_RAW_INPUT, _RAW_OUTPUT = 0x3A, 0x32
_INFER_RESPONSE = 0x12  # tag of this field in a ModelStreamInferResponse
# model_name to raw_input_contents, each length-delimited.
_TAGS = frozenset(range(0x0A, 0x3B, 8))

Pieces = list[tuple[int, int]]
Body = bytes | memoryview


class _Input:
    """An input without its data, or an output. described: the message's description in errors."""

    __slots__ = ("datatype", "described", "entry", "name", "parameters", "shape")

    def __init__(self, tensor: Tensor, described: str) -> None:
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.entry = lookup(tensor.datatype, tensor.name)
        self.shape = tensor.shape
        self.described = described
        self.parameters = tensor.parameters.copy()


AnswerHead = tuple[InferResponse, list[_Input]]  # an answer without its outputs, and these without their data


class RequestHead:
    """A request without its raw contents. The server keeps its own findings about such requests in `note`."""

    __slots__ = ("_inputs", "_outputs", "_parameters", "model_name", "model_version", "note")

    def __init__(self, request: InferRequest) -> None:
        self.note: Any = None
        self.model_name = request.model_name
        self.model_version = request.model_version
        self._parameters = request.parameters.copy()
        self._outputs = None if request.outputs is None else request.outputs.copy()
        model = quoted(request.model_name)
        self._inputs = [_Input(each, f"input {quoted(each.name)} for model {model}") for each in request.inputs]

    def __len__(self) -> int:
        return len(self._inputs)

    def arrays(self, data: Body, pieces: Pieces) -> dict[str, Array]:
        """The inputs by name, views of `data` at `pieces`. Raises BadMessage if these do not fill the shapes."""
        return {
            each.name: decode_raw(data, start, size, each.entry, each.shape, each.described)
            for each, (start, size) in zip(self._inputs, pieces, strict=True)
        }

    def request(self, data: Body, pieces: Pieces) -> InferRequest:
        """The whole request. Raises BadMessage as `arrays` does."""
        arrays = self.arrays(data, pieces)
        return InferRequest(
            model_name=self.model_name,
            model_version=self.model_version,
            parameters=self._parameters.copy(),
            inputs=[
                Tensor(each.name, each.datatype, each.shape, arrays[each.name], each.parameters.copy())
                for each in self._inputs
            ],
            outputs=None if self._outputs is None else self._outputs.copy(),
            binary_default=True,
        )


class InferMessages:
    """A bounded cache of request heads. Single user."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[Body, RequestHead] = {}

    def find(self, data: Body) -> tuple[RequestHead, Pieces] | None:
        """The cached head of a request, and the positions of its raw contents in `data`."""
        found = cut(data)
        if found is None or len(found[0]) > MAX_HEAD_BYTES:
            return None
        head = self._heads.get(found[0])
        return None if head is None or len(head) != len(found[1]) else (head, found[1])

    def remember(self, data: Body, request: InferRequest) -> None:
        """Cache the head of `request`, which was just decoded from `data`.

        A request that names shared memory is not cached: not every sender of the same head may use it.
        """
        found = None if request.id else cut(data)  # heads with an id are rarely repeated
        if any(each.shared is not None for each in request.outputs or ()):
            return
        if found and found[1] and len(found[1]) == len(request.inputs) and len(found[0]) <= MAX_HEAD_BYTES:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            self._heads[found[0]] = RequestHead(request)


class RawAnswers:
    """Encodes answers of one model, which have the same names and datatypes.

    outputs: (name, datatype) in the order of the answer.
    """

    __slots__ = ("_heads", "_model", "_outputs", "_version")

    def __init__(self, model_name: str, model_version: str, outputs: Sequence[tuple[str, str]]) -> None:
        self._model = model_name
        self._version = model_version
        self._outputs = [(name, datatype, f"output {quoted(name)}") for name, datatype in outputs]
        self._heads: dict[tuple[tuple[int, ...], ...], bytes] = {}

    def encode(self, arrays: Sequence[Array]) -> bytes:
        """The message of an answer without an id. Raises BadMessage if an array is not of its datatype."""
        shapes = tuple([array.shape for array in arrays])
        parts: list[bytes | memoryview] = [self._heads.get(shapes) or self._head(shapes)]
        for (_, datatype, what), array in zip(self._outputs, arrays, strict=True):
            view = raw_view(array, datatype, array.shape, what)
            size = len(view)
            parts.append(_OUTPUT_TAG)
            parts.append(_SHORT[size] if size < 128 else write_varint(size))
            parts.append(view)
        return b"".join(parts)

    def _head(self, shapes: tuple[tuple[int, ...], ...]) -> bytes:
        message = v2_pb2.ModelInferResponse(model_name=self._model, model_version=self._version)
        for (name, datatype, _), shape in zip(self._outputs, shapes, strict=True):
            message.outputs.add(name=name, datatype=datatype, shape=shape)
        if len(self._heads) >= MAX_SHAPES:
            self._heads.clear()
        head = self._heads[shapes] = message.SerializeToString()
        return head


def read(data: Body) -> tuple[Any, list[RawPiece] | None]:
    """A ModelInferRequest without its raw contents, which are not copied; None for these if they are in it.

    Raises BadMessage.
    """
    found = cut(data, MAX_ANY_FIELDS)
    if found is None or not found[1]:
        return parse(v2_pb2.ModelInferRequest, data), None
    return parse(v2_pb2.ModelInferRequest, found[0]), [(data, start, size) for start, size in found[1]]


def encode_request(request: InferRequest) -> list[bytes | memoryview]:
    """The pieces of a ModelInferRequest with raw contents, which are views of its arrays.

    Raises BadMessage if an array is not of its datatype.
    """
    raw: list[bytes | memoryview] = []
    parts: list[bytes | memoryview] = [encode_infer_request(request, raw).SerializeToString()]
    for contents in raw:
        parts += (_INPUT_TAG, write_varint(len(contents)), contents)
    return parts


def read_stream_answer(data: bytes, model: str = "") -> tuple[str, InferResponse]:
    """The error text of a ModelStreamInferResponse, "" if it has none, and its answer. Raises BadMessage.

    The answer's numbers are views of `data`, if they are raw and the answer is all that it holds.
    model: name of the model, whose answers of one text are recognised by the bytes before the text.
    """
    kept = _TEXTS.get((model, len(data)))
    if kept is not None and data.startswith(kept[0]):
        array = np.empty(kept[1][1][0].shape, dtype=object)
        array.fill(data[len(kept[0]) :])
        return "", _response(kept[1], [array])
    try:
        if data and data[0] == _INFER_RESPONSE:
            size, at = _read_varint(data, 1)
            found = cut(data, MAX_ANY_FIELDS, at, _RAW_OUTPUT) if at and at + size == len(data) else None
            if found is not None and found[1]:
                head, pieces = bytes(found[0]), found[1]
                known = _answer_head(head) if len(head) <= MAX_HEAD_BYTES else None
                if known is not None and len(known[1]) == len(pieces):
                    arrays = [
                        decode_raw(data, start, size, each.entry, each.shape, each.described)
                        for each, (start, size) in zip(known[1], pieces, strict=True)
                    ]
                    if len(arrays) == 1 == arrays[0].size and sum(pieces[0]) == len(data):
                        _remember(model, data, pieces[0][0], known)
                    return "", _response(known, arrays)
                raw = [(data, start, size) for start, size in pieces]
                return "", decode_infer_response(v2_pb2.ModelInferResponse.FromString(head), raw)
        message = v2_pb2.ModelStreamInferResponse.FromString(data)
    except DecodeError as error:
        raise BadMessage("it is no ModelStreamInferResponse") from error
    return message.error_message, decode_infer_response(message.infer_response)


def read_known_text(data: bytes, model: str) -> bytes | None:
    """The text of an answer of a stream that is one text and nothing else, behind bytes that were read before.

    None if it is anything else: `read_stream_answer` reads it.
    """
    kept = _TEXTS.get((model, len(data)))
    return data[len(kept[0]) :] if kept is not None and data.startswith(kept[0]) else None


@lru_cache(maxsize=MAX_HEADS)
def _answer_head(head: bytes) -> AnswerHead | None:
    """Decode an answer without its raw contents, which many answers of a stream share, and its outputs; None for one
    that needs all checks.
    """
    message = v2_pb2.ModelInferResponse.FromString(head)
    if any(each.parameters or each.HasField("contents") or each.datatype not in DATATYPES for each in message.outputs):
        return None
    outputs = [Tensor(each.name, each.datatype, tuple(each.shape), _NO_DATA) for each in message.outputs]
    if len({each.name for each in outputs}) < len(outputs) or any(len(each.shape) > MAX_DIMENSIONS for each in outputs):
        return None
    del message.outputs[:]
    return decode_infer_response(message), [_Input(each, f"output {quoted(each.name)}") for each in outputs]


def _remember(model: str, data: bytes, raw: int, known: AnswerHead) -> None:
    """Keep the bytes before the text of an answer, if it is one and has no parameters that say more.

    raw: offset in `data` at which the raw contents of its element begin.
    """
    if known[1][0].datatype == "BYTES" and known[0].parameters.keys() <= {"triton_final_response"}:
        if len(_TEXTS) >= MAX_HEADS:
            _TEXTS.clear()
        _TEXTS[model, len(data)] = data[: raw + 4], known  # the text comes after the four bytes of its length


def _response(head: AnswerHead, arrays: list[Array]) -> InferResponse:
    facts, outputs = head
    return InferResponse(
        model_name=facts.model_name,
        model_version=facts.model_version,
        id=facts.id,
        parameters=facts.parameters.copy(),
        outputs=[
            Tensor(each.name, each.datatype, each.shape, array, {}) for each, array in zip(outputs, arrays, strict=True)
        ],
    )


def cut(data: Body, limit: int = MAX_FIELDS, start: int = 0, raw: int = _RAW_INPUT) -> tuple[Body, Pieces] | None:
    """The bytes of a ModelInferRequest without its raw contents, and where those are: (start, size) each.

    None if it has to be read by protobuf as a whole. limit: the bound on fields. start, raw: where the message begins
    in `data`, and the tag of its raw contents. Raises TooLarge for more besides raw contents than may be copied, and
    for a large message with more fields than `limit`, unless that is the default.
    """
    kept: list[Body] = []
    pieces: Pieces = []
    at = since = start
    end = len(data)
    for _ in range(limit):
        if at == end:
            if pieces and end - since > MAX_CUT_BYTES:
                raise _large_head()
            if not pieces:
                return data[start:], pieces
            kept.append(data[since:end])
            return b"".join(kept), pieces
        tag = data[at]
        if tag not in _TAGS:
            at = _past(data, at)
            if not 0 < at <= end:
                return None
            continue
        begin = at
        at += 1
        size = shift = 0
        while at < end and shift < 35:
            byte = data[at]
            at += 1
            size |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
        else:
            return None
        if size > end - at:
            return None
        if tag == raw:
            if begin > since:
                if begin - since > MAX_CUT_BYTES:
                    raise _large_head()
                kept.append(data[since:begin])
            pieces.append((at, size))
            since = at + size
        at += size
    if limit > MAX_FIELDS and end > FREE_BYTES:
        raise TooLarge(f"the message has more than {limit} fields, without those of its inputs and outputs")
    return None


def _large_head() -> TooLarge:
    return TooLarge(f"what the message says besides its raw contents is more than {MAX_CUT_BYTES} bytes in one piece")


def _past(data: Body, at: int) -> int:
    """The end of the field at `at`, whose number this module does not handle; 0 if it cannot be found."""
    tag, at = _read_varint(data, at)
    # A tag encoded in more bytes than it needs may be one of those above.
    if not at or tag in _TAGS:
        return 0
    wire = tag & 7
    if wire == 2:
        size, at = _read_varint(data, at)
        return at + size if at else 0
    if wire == 0:
        return _read_varint(data, at)[1]
    return at + 8 if wire == 1 else at + 4 if wire == 5 else 0


def _read_varint(data: Body, at: int) -> tuple[int, int]:
    """(value, its end); an end of 0 if there is none."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << (7 * shift)
        if byte < 128:
            return value, at + shift + 1
    return 0, 0


_SHORT = [write_varint(size) for size in range(128)]
_INPUT_TAG, _OUTPUT_TAG = bytes((_RAW_INPUT,)), bytes((_RAW_OUTPUT,))
# Answers of streams that end with one text, by model and size: the bytes before the text, and their meaning. An answer
# of the same size with the same bytes before it differs in the text alone, because all lengths are among these bytes.
_TEXTS: dict[tuple[str, int], tuple[bytes, AnswerHead]] = {}
