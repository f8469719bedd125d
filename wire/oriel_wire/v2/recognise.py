"""JSON infer requests and answers whose text is known but for the numbers in it.

A client sends the same JSON again and again with other numbers. A text is cut where the flat list of its one `data`
member begins and ends. `Templates.learn` decodes the text a second time with another list in that place: if the
document changed in the data of its only input and nowhere else, that place is the data. From then on a text with the
same beginning and end is the same request with other numbers: JSON is read from left to right, so equal beginnings
leave any parser in the same state, and there one complete list takes the place of another.

What a template does not like (another number of elements, a number out of range, NaN) it leaves to the full decoder,
which refuses it in its own words. Learning costs a decode, so it happens when a beginning comes a second time.
"""

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Any

import msgspec
import numpy as np

from oriel_wire.v2.datatypes import lookup
from oriel_wire.v2.document import DocumentDecoder, InferDocument
from oriel_wire.v2.messages import Array, InferRequest

__all__ = ["AnswerText", "Template", "Templates"]

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
_documents = DocumentDecoder(InferDocument, "inputs", "input")
_encode = msgspec.json.encode


class Template:
    """One known text. request: what it says, with the numbers it was learned from; do not change it.

    Whoever serves the request keeps its own findings in `note`.
    """

    __slots__ = ("_decode", "_dtype", "_pack", "_shape", "end", "note", "request")

    def __init__(self, request: InferRequest, end: bytes) -> None:
        (tensor,) = request.inputs
        code = _FORMATS[tensor.datatype]
        self.request = request
        self.end = end
        self.note: Any = None
        self._decode = _decoders[_ELEMENTS.get(code, int)].decode
        self._pack = Struct(f"<{tensor.array.size}{code}").pack
        self._dtype = lookup(tensor.datatype, "input").dtype
        self._shape = tensor.shape

    def array(self, text: bytes) -> Array | None:
        """The numbers of a JSON list as the input's array, read-only; None if they are not what the input takes."""
        try:
            return np.frombuffer(self._pack(*self._decode(text)), self._dtype).reshape(self._shape)
        except (msgspec.MsgspecError, StructError, OverflowError, UnicodeDecodeError, RecursionError):
            return None


class Templates:
    """The known texts of one model's requests, at most MAX_TEMPLATES of at most MAX_FIXED_BYTES each."""

    __slots__ = ("_known", "_seen")

    def __init__(self) -> None:
        self._known: dict[bytes, Template] = {}
        self._seen: set[int] = set()

    def find(self, body: bytes) -> tuple[Template, Array] | None:
        """The template of `body` and the array it holds; None for the full decoder."""
        start = body.find(b"[", body.find(b'"data"'))
        template = self._known.get(body[:start])
        if template is None or len(body) > MAX_BYTES:
            return None
        stop = body.find(b"]", start) + 1
        if body[stop:] != template.end:
            return None
        array = template.array(body[start:stop])
        return None if array is None else (template, array)

    def learn(self, body: bytes, request: InferRequest) -> Template | None:
        """Remember the text of `request`, just decoded from `body`, if it came before and is fit to be recognised."""
        start = body.find(b"[", body.find(b'"data"'))
        stop = body.find(b"]", start) + 1
        if start < 0 or not stop or start + len(body) - stop > MAX_FIXED_BYTES:
            return None
        begin, end = body[:start], body[stop:]
        mark = hash(begin)
        if mark not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen.add(mark)
            return None
        if not _is_data(body, begin, end, request):
            return None
        if len(self._known) >= MAX_TEMPLATES:
            self._known.clear()
        template = self._known[begin] = Template(request, end)
        return template


def _is_data(body: bytes, begin: bytes, end: bytes, request: InferRequest) -> bool:
    """Whether what stands between `begin` and `end` is the data of the one input, and nothing else depends on it."""
    if len(request.inputs) != 1:
        return False
    (tensor,) = request.inputs
    count = tensor.array.size
    if tensor.datatype not in _FORMATS or not 0 < count <= MAX_ELEMENTS:
        return False
    try:
        there = _documents.decoder.decode(body)
        # Elements no request of this kind can have: were they read anywhere but as data, more would change.
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


class AnswerText:
    """JSON answers to one kind of request: model, version, id and outputs are the same, the numbers are not.

    outputs: (name, datatype) in the order of the answer; see `fits`. The text is, but for white space, what
    `oriel_wire.v2.http.encode_response` writes.
    """

    __slots__ = ("_begin", "_outputs")

    def __init__(self, model_name: str, model_version: str, id: str, outputs: Sequence[tuple[str, str]]) -> None:
        document = {"model_name": model_name, "model_version": model_version}
        if id:
            document["id"] = id
        self._begin = _encode(document)[:-1]
        self._outputs = [_OutputText(name, datatype, first=not index) for index, (name, datatype) in enumerate(outputs)]

    @staticmethod
    def fits(outputs: Sequence[tuple[str, str]]) -> bool:
        """Whether answers with these outputs can be written here: numbers and truth values."""
        return bool(outputs) and all(datatype in _FORMATS for _, datatype in outputs)

    def encode(self, arrays: Sequence[Array]) -> bytes | None:
        """The answer with these outputs; None if it has to be written the long way (NaN, another dtype)."""
        parts = [self._begin]
        for output, array in zip(self._outputs, arrays, strict=True):
            if array.dtype != output.dtype:
                return None
            data = _encode(array.reshape(-1).tolist())
            if b"null" in data:  # how NaN and infinities come out
                return None
            parts.append(output.prefixes.get(array.shape) or output.prefix(array.shape))
            parts.append(data)
        parts.append(b"}]}")
        return b"".join(parts)


class _OutputText:
    """What stands before one output's numbers, by shape."""

    __slots__ = ("_before", "dtype", "prefixes")

    def __init__(self, name: str, datatype: str, *, first: bool) -> None:
        self._before = (b',"outputs":[' if first else b"},") + _encode({"name": name, "datatype": datatype})[:-1]
        self.dtype = lookup(datatype, "output").dtype
        self.prefixes: dict[tuple[int, ...], bytes] = {}

    def prefix(self, shape: tuple[int, ...]) -> bytes:
        if len(self.prefixes) >= MAX_TEMPLATES:
            self.prefixes.clear()
        made = self.prefixes[shape] = b'%b,"shape":%b,"data":' % (self._before, _encode(shape))
        return made
