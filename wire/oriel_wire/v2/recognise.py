"""Recognises infer requests whose JSON differs from an earlier one in its numbers only.

A client sends the same JSON again and again with other numbers. With the binary extension the JSON part holds no tensor
data at all, and equal bytes are the same request. A request in JSON alone is cut where the flat list of its one `data`
member begins and ends. `Templates.learn` checks the cut by decoding the text once more with another list in that place:
the data of the only input has to change, and nothing else. From then on, any text with the same beginning and end is
the same request with other numbers. This holds for every parser, because JSON is read from left to right: equal
beginnings leave a parser in the same state, and one complete list takes the place of another.

All other texts (another number of elements, a number out of range, NaN) are left to the full decoder, which reports
errors. Learning costs a decode, so it happens only when a beginning arrives for the second time.
"""

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Any, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from oriel_wire.v2.datatypes import Datatype, decode_raw, lookup
from oriel_wire.v2.document import DocumentDecoder, InferDocument
from oriel_wire.v2.messages import Array, InferRequest

MAX_BYTES = 64 << 10
MAX_FIXED_BYTES = 4096
MAX_ELEMENTS = 1024
MAX_TEMPLATES = 64
_MAX_SEEN = 256

_FORMATS = {"BOOL": "?", "FP32": "f", "FP64": "d"}
_FORMATS |= {"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I"}
_FORMATS |= {"UINT64": "Q"}
_ELEMENTS: dict[str, type] = {"?": bool, "f": float, "d": float}
_decoders: dict[type, Any] = {each: msgspec.json.Decoder(list[each]) for each in (bool, int, float)}  # type: ignore[valid-type]
_documents = DocumentDecoder(InferDocument, "inputs", "input", bounded=True)


class Template:
    """One known text. request: the decoded request without its inputs, which would keep a whole body; do not change it.

    The server keeps its own findings about such requests in `note`.
    """

    __slots__ = ("note", "request")

    def __init__(self, request: InferRequest) -> None:
        self.request = replace(request, inputs=[])
        self.note: Any = None


class _ListTemplate(Template):
    """A request in JSON alone with one input, whose data is a flat list followed by `end`."""

    __slots__ = ("_decode", "_dtype", "_name", "_pack", "_shape", "end")

    def __init__(self, request: InferRequest, end: bytes) -> None:
        super().__init__(request)
        (tensor,) = request.inputs
        code = _FORMATS[tensor.datatype]
        self.end = end
        self._name = tensor.name
        self._decode = _decoders[_ELEMENTS.get(code, int)].decode
        self._pack = Struct(f"<{tensor.array.size}{code}").pack
        self._dtype = lookup(tensor.datatype, "input").dtype
        self._shape = tensor.shape

    def inputs(self, text: bytes) -> dict[str, Array] | None:
        """The numbers of a JSON list as the input's array; None if they do not fit the input."""
        try:
            return {self._name: np.ndarray(self._shape, self._dtype, self._pack(*self._decode(text)))}
        except (msgspec.MsgspecError, StructError, OverflowError, UnicodeDecodeError, RecursionError):
            return None


class _BinaryTemplate(Template):
    """A JSON part all of whose tensors follow it as bytes."""

    __slots__ = ("_inputs", "_size")

    def __init__(self, request: InferRequest, length: int, sizes: Sequence[int]) -> None:
        super().__init__(request)
        self._inputs: list[tuple[str, Datatype, int, int, tuple[int, ...]]] = []
        offset = length
        for tensor, size in zip(request.inputs, sizes, strict=True):
            self._inputs.append((tensor.name, lookup(tensor.datatype, "input"), offset, size, tensor.shape))
            offset += size
        self._size = offset

    def inputs(self, body: bytes | memoryview) -> dict[str, Array] | None:
        """The tensors behind the JSON part, as views; None if there are more or fewer bytes than declared."""
        if len(body) != self._size:
            return None
        return {
            name: decode_raw(body, offset, size, entry, shape, name)
            for name, entry, offset, size, shape in self._inputs
        }


class Templates:
    """The known texts of one model's requests, at most MAX_TEMPLATES of at most MAX_FIXED_BYTES each."""

    __slots__ = ("_binary", "_lists", "_seen")

    def __init__(self) -> None:
        self._lists: dict[bytes, _ListTemplate] = {}
        self._binary: dict[bytes, _BinaryTemplate] = {}
        self._seen: set[int] = set()

    def find(self, body: bytes | memoryview, header_length: int | None) -> tuple[Template, dict[str, Array]] | None:
        """The template of `body` and the inputs it holds, read-only; None for the full decoder.

        Raises BadMessage for BYTES that are not what the JSON part says.
        """
        if header_length is not None:
            known = self._binary.get(bytes(body[:header_length])) if header_length <= MAX_FIXED_BYTES else None
            inputs = known.inputs(body) if known is not None else None
            return None if known is None or inputs is None else (known, inputs)
        if len(body) > MAX_BYTES or not isinstance(body, bytes):
            return None
        start = body.find(b"[", body.find(b'"data"'))
        template = self._lists.get(body[:start])
        if template is None:
            return None
        stop = body.find(b"]", start) + 1
        if body[stop:] != template.end:
            return None
        inputs = template.inputs(body[start:stop])
        return None if inputs is None else (template, inputs)

    def learn(self, body: bytes | memoryview, header_length: int | None, request: InferRequest) -> Template | None:
        """Keep the text of `request`, just decoded from `body`, if it has occurred before and can be recognised."""
        if header_length is not None:
            known = 0 < header_length <= MAX_FIXED_BYTES
            return self._learn_binary(bytes(body[:header_length]), request) if known else None
        if not isinstance(body, bytes):
            return None
        start = body.find(b"[", body.find(b'"data"'))
        stop = body.find(b"]", start) + 1
        if start < 0 or not stop or start + len(body) - stop > MAX_FIXED_BYTES:
            return None
        begin, end = body[:start], body[stop:]
        if not self._came_before(begin) or not _is_data(body, begin, end, request):
            return None
        if len(self._lists) >= MAX_TEMPLATES:
            self._lists.clear()
        template = self._lists[begin] = _ListTemplate(request, end)
        return template

    def _learn_binary(self, text: bytes, request: InferRequest) -> Template | None:
        if not self._came_before(text):
            return None
        try:
            document = _documents.decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # NaN among the parameters, which another decoder has read
        sizes = [(each.parameters or {}).get("binary_data_size") for each in document.inputs]
        if not all(type(size) is int for size in sizes):
            return None  # some of the tensors are in the JSON part
        if len(self._binary) >= MAX_TEMPLATES:
            self._binary.clear()
        template = self._binary[text] = _BinaryTemplate(request, len(text), cast(list[int], sizes))
        return template

    def _came_before(self, text: bytes) -> bool:
        mark = hash(text)
        if mark in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(mark)
        return False


def _is_data(body: bytes, begin: bytes, end: bytes, request: InferRequest) -> bool:
    """Return whether the text between `begin` and `end` is the data of the one input and nothing else depends on it."""
    if len(request.inputs) != 1:
        return False
    (tensor,) = request.inputs
    count = tensor.array.size
    if tensor.datatype not in _FORMATS or not 0 < count <= MAX_ELEMENTS:
        return False
    try:
        there = _documents.decoder.decode(body)
        # No request has such elements as data: if they were read as anything else, more than the data would change.
        other = _documents.decoder.decode(b'%b["?"]%b' % (begin, end))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    if (
        bytes(other.inputs[0].data) != b'["?"]'
        or bytes(there.inputs[0].data) != body[len(begin) : len(body) - len(end)]
    ):
        return False
    other.inputs[0].data = there.inputs[0].data
    return bool(other == there)
