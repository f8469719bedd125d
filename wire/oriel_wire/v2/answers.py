"""Encoders for repeated answers that differ in their numbers only: model, version, id and outputs are the same.

The text before the numbers depends on the outputs' shapes alone and is cached by shape. The bytes are what
`oriel_wire.v2.http.encode_response` writes.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from oriel_wire.v2.datatypes import DATATYPES, raw_view
from oriel_wire.v2.http import BodyParts, padded
from oriel_wire.v2.messages import Array

MAX_SHAPES = 64
MAX_NUMBERS = 1 << 17  # written in some 15 ms

_encode = msgspec.json.encode
Outputs = Sequence[tuple[str, str]]
Body = tuple[bytes | BodyParts, int | None]


def _opening(model_name: str, model_version: str, id: str) -> dict[str, Any]:
    document: dict[str, Any] = {"model_name": model_name, "model_version": model_version}
    if id:
        document["id"] = id
    return document


class JsonAnswers:
    """Encodes answers in JSON alone. outputs: (name, datatype) in the order of the answer; see `fits`."""

    __slots__ = ("_begin", "_outputs")

    def __init__(self, model_name: str, model_version: str, id: str, outputs: Outputs) -> None:
        self._begin = _encode(_opening(model_name, model_version, id))[:-1]
        self._outputs = [_OutputText(name, datatype, first=not index) for index, (name, datatype) in enumerate(outputs)]

    @staticmethod
    def fits(outputs: Outputs) -> bool:
        """Return whether answers with these outputs can be written here: numbers and truth values."""
        return bool(outputs) and all(DATATYPES[kind].size and DATATYPES[kind].json for _, kind in outputs)

    def encode(self, arrays: Sequence[Array]) -> Body | None:
        """The body with these outputs, and None.

        None if the general encoder has to write it: NaN, another dtype, more than MAX_NUMBERS in one output.
        """
        parts = [self._begin]
        for output, array in zip(self._outputs, arrays, strict=True):
            if array.dtype != output.dtype or array.size > MAX_NUMBERS:
                return None
            data = _encode(array.reshape(-1).tolist())
            if b"null" in data:  # NaN and infinities are encoded so
                return None
            parts.append(output.prefixes.get(array.shape) or output.prefix(array.shape))
            parts.append(data)
        parts.append(b"}]}")
        return b"".join(parts), None


class _OutputText:
    """The text before one output's numbers, cached by shape."""

    __slots__ = ("_before", "dtype", "prefixes")

    def __init__(self, name: str, datatype: str, *, first: bool) -> None:
        self._before = (b',"outputs":[' if first else b"},") + _encode({"name": name, "datatype": datatype})[:-1]
        self.dtype = DATATYPES[datatype].dtype
        self.prefixes: dict[tuple[int, ...], bytes] = {}

    def prefix(self, shape: tuple[int, ...]) -> bytes:
        if len(self.prefixes) >= MAX_SHAPES:
            self.prefixes.clear()
        made = self.prefixes[shape] = b'%b,"shape":%b,"data":' % (self._before, _encode(shape))
        return made


class BinaryAnswers:
    """Encodes answers whose outputs follow the JSON part as bytes. outputs: as for `JsonAnswers`."""

    __slots__ = ("_heads", "_opening", "_outputs")

    def __init__(self, model_name: str, model_version: str, id: str, outputs: Outputs) -> None:
        self._opening = _opening(model_name, model_version, id)
        self._outputs = outputs
        self._heads: dict[tuple[tuple[int, ...], ...], bytes] = {}

    @staticmethod
    def fits(outputs: Outputs) -> bool:
        """Return whether answers with these outputs can be written here: elements of a fixed size."""
        return bool(outputs) and all(DATATYPES[kind].size for _, kind in outputs)

    def encode(self, arrays: Sequence[Array]) -> Body | None:
        """The body's parts with these outputs, views of them where possible, and the length of the JSON part.

        None if an array is not of its datatype.
        """
        parts: BodyParts = [b""]
        for (name, kind), array in zip(self._outputs, arrays, strict=True):
            if array.dtype != DATATYPES[kind].dtype:
                return None
            parts.append(raw_view(array, kind, array.shape, name))
        shapes = tuple([array.shape for array in arrays])
        head = self._heads.get(shapes) or self._head(shapes, parts)
        parts[0] = head
        return parts, len(head)

    def _head(self, shapes: tuple[tuple[int, ...], ...], parts: BodyParts) -> bytes:
        if len(self._heads) >= MAX_SHAPES:
            self._heads.clear()
        outputs = [
            {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(part)}}
            for (name, kind), shape, part in zip(self._outputs, shapes, parts[1:], strict=True)
        ]
        head = self._heads[shapes] = padded(_encode({**self._opening, "outputs": outputs}))
        return head
