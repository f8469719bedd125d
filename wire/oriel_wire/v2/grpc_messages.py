"""ModelInfer's messages as bytes: tensors are views of what arrived, and what repeats is parsed once.

A ModelInferRequest is a row of length-delimited fields, and protobuf reads the same message whatever the order of
different fields. So the raw contents (field 7) are found without copying them, and what is left, the head, is small
and from one client mostly the same bytes again: equal heads say the same, and are decoded once. Anything unusual
(another kind of field, a length beyond the end or not written as usual, too many fields) is left to protobuf whole.

An answer is a head that depends on names and shapes alone, then id and raw contents, joined in one copy.
"""

from google.protobuf.message import DecodeError

from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import decode_raw, lookup, quoted, raw_view
from oriel_wire.v2.grpc import decode_infer, encode_infer
from oriel_wire.v2.messages import InferRequest, InferResponse, Tensor
from oriel_wire.v2.proto import v2_pb2

__all__ = ["InferMessages", "cut"]

MAX_FIELDS = 64
MAX_HEAD_BYTES = 4096
MAX_HEADS = 256
_ID, _RAW_INPUT, _RAW_OUTPUT = 0x1A, 0x3A, b"\x32"
# model_name to raw_input_contents, each length-delimited.
_TAGS = frozenset(range(0x0A, 0x3B, 8))

_Pieces = list[tuple[int, int]]


class _Head:
    """What a request says besides its raw contents."""

    __slots__ = ("_inputs", "_model", "_outputs", "_parameters", "_version")

    def __init__(self, request: InferRequest) -> None:
        self._model = request.model_name
        self._version = request.model_version
        self._parameters = request.parameters.copy()
        self._outputs = None if request.outputs is None else request.outputs.copy()
        self._inputs = [
            (each.name, each.datatype, lookup(each.datatype, each.name), each.shape, f"input {quoted(each.name)}",
             each.parameters.copy())
            for each in request.inputs
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self._inputs)

    def request(self, data: bytes, pieces: _Pieces) -> InferRequest:
        """The request with these raw contents, one for each input. Raises BadMessage if they do not fill the shapes."""
        inputs = [
            Tensor(name, datatype, shape, decode_raw(data, start, size, entry, shape, what), parameters.copy())
            for (name, datatype, entry, shape, what, parameters), (start, size) in zip(
                self._inputs, pieces, strict=True
            )
        ]
        return InferRequest(
            model_name=self._model,
            model_version=self._version,
            parameters=self._parameters.copy(),
            inputs=inputs,
            outputs=None if self._outputs is None else self._outputs.copy(),
            binary_default=True,
        )


class InferMessages:
    """Reads requests and writes answers. Single user; what it remembers is bounded."""

    __slots__ = ("_answers", "_heads")

    def __init__(self) -> None:
        self._heads: dict[bytes, _Head] = {}
        self._answers: dict[tuple[object, ...], bytes] = {}

    def decode(self, data: bytes) -> InferRequest:
        """An infer request from its message. Raw contents are views of `data`. Raises BadMessage."""
        found = cut(data)
        if found is None or not found[1]:
            return decode_infer(_parsed(data))
        text, pieces = found
        head = self._heads.get(text)
        if head is not None and len(head) == len(pieces):
            return head.request(data, pieces)
        request = decode_infer(_parsed(text), [(data, start, size) for start, size in pieces])
        # An id makes most heads the only one of their kind.
        if len(text) <= MAX_HEAD_BYTES and not request.id:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            self._heads[text] = _Head(request)
        return request

    def encode(self, response: InferResponse) -> bytes:
        """A response's message with raw contents. Raises BadMessage if an array is not of its datatype."""
        outputs = response.outputs
        if response.parameters or any(output.parameters for output in outputs):
            return encode_infer(response).SerializeToString()
        key = (
            response.model_name,
            response.model_version,
            *[(output.name, output.datatype, output.shape) for output in outputs],
        )
        head = self._answers.get(key)
        if head is None:
            head = self._answer_head(response)
            if len(self._answers) >= MAX_HEADS:
                self._answers.clear()
            self._answers[key] = head
        parts: list[bytes | memoryview] = [head]
        if response.id:
            text = response.id.encode()
            parts += (bytes((_ID,)), _varint(len(text)), text)
        for output in outputs:
            view = raw_view(output.array, output.datatype, output.shape, f"output {quoted(output.name)}")
            parts += (_RAW_OUTPUT, _varint(len(view)), view)
        return b"".join(parts)

    @staticmethod
    def _answer_head(response: InferResponse) -> bytes:
        message = v2_pb2.ModelInferResponse(model_name=response.model_name, model_version=response.model_version)
        for output in response.outputs:
            message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        return message.SerializeToString()


def cut(data: bytes) -> tuple[bytes, _Pieces] | None:
    """The bytes of a ModelInferRequest without its raw contents, and where those are: (start, size) each.

    None if it has to be read by protobuf as a whole.
    """
    kept: list[bytes] = []
    pieces: _Pieces = []
    at = since = 0
    end = len(data)
    for _ in range(MAX_FIELDS):
        if at == end:
            kept.append(data[since:end])
            return (b"".join(kept) if len(kept) > 1 else kept[0]), pieces
        tag = data[at]
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
        if tag not in _TAGS or size > end - at:
            return None
        if tag == _RAW_INPUT:
            if begin > since:
                kept.append(data[since:begin])
            pieces.append((at, size))
            since = at + size
        at += size
    return None


def _parsed(data: bytes) -> v2_pb2.ModelInferRequest:
    try:
        return v2_pb2.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise BadMessage("the message is not what this method takes") from error


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
