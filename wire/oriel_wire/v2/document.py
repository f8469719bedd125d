"""Decodes the JSON part of v2 REST bodies within limits, and finds its tensors."""

import json
from contextlib import suppress
from math import isfinite, isnan
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from oriel_wire.errors import BadMessage, TooLarge, json_fault
from oriel_wire.v2.datatypes import decode_raw, element_count, lookup, quoted
from oriel_wire.v2.depth import MAX_DEPTH, check_depth
from oriel_wire.v2.jsondata import decode_data
from oriel_wire.v2.messages import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    ParameterValue,
    ReadShared,
    RequestedOutput,
    Tensor,
    shared_array,
    take_classes,
    take_shared,
    too_many,
)

_NO_DATA = msgspec.Raw()
_Parameters = dict[str, ParameterValue] | None


class TensorEntry(msgspec.Struct, gc=False):
    name: str
    shape: list[int]
    datatype: str
    parameters: _Parameters = None
    data: msgspec.Raw = _NO_DATA


class OutputEntry(msgspec.Struct, gc=False):
    name: str
    parameters: _Parameters = None


class InferDocument(msgspec.Struct, gc=False):
    inputs: list[TensorEntry]
    id: str | None = None
    parameters: _Parameters = None
    outputs: list[OutputEntry] | None = None


class ResponseDocument(msgspec.Struct, gc=False):
    model_name: str
    outputs: list[TensorEntry]
    model_version: str | None = None
    id: str | None = None
    parameters: _Parameters = None


# A decoder takes up to 20 ms for this many, while the loop has other requests to serve.
MAX_VALUES = 1 << 17
MAX_LISTS = 1 << 16
CUT_BYTES = 1 << 13  # a shorter text is decoded as it is
_MARK = b'["\\u0000%d"]'  # stands for a list that was cut out
_MARK_BEGIN = _MARK[:8]


def _check_values(text: bytes) -> None:
    """Raise TooLarge for too many values. They are counted by their separators, so even invalid text is bounded."""
    codes = np.frombuffer(text, np.uint8)
    # [ and { differ in one bit
    if (brackets := int(np.count_nonzero(codes & 0xDF == 0x5B))) > MAX_LISTS:
        check_depth(text)
        raise TooLarge(f"the JSON part has {brackets} lists and objects, at most {MAX_LISTS} are accepted")
    if (commas := int(np.count_nonzero(codes == 0x2C))) >= MAX_VALUES:
        raise TooLarge(
            f"the JSON part has {commas + 1} values, at most {MAX_VALUES} are accepted: send tensors as binary data"
        )


def cut(text: bytes) -> tuple[bytes, list[msgspec.Raw]]:
    """Cut the long lists of numbers out of a text, so that nothing else than their own decoder reads them.

    A list is taken for that if it follows `"data":` and has no text and no object in it. Returns the text with a mark
    in place of each, and the lists. No byte is searched more than a few times, whatever the text, and no more `"data"`
    are looked at than a text may have tensors.
    """
    parts: list[bytes | memoryview] = []
    lists: list[msgspec.Raw] = []
    view = memoryview(text)
    begin = found = end = 0
    for _ in range(MAX_TENSORS):
        if (found := text.find(b'"data"', found)) < 0:
            break
        found += 6
        if end < found and (end := text.find(b"}", found)) < 0:
            break
        start = text.find(b"[", found, found + 64)
        quote = text.find(b'"', found, end)
        stop = text.rfind(b"]", found, end if quote < 0 else quote) + 1
        if start >= 0 and stop - start > CUT_BYTES and text[found:start].strip() == b":":
            parts += (view[begin:start], _MARK % len(lists))
            lists.append(msgspec.Raw(view[start:stop]))
            begin = found = stop
    parts.append(view[begin:])
    rest = b"".join(parts)
    return (rest, lists) if rest.count(_MARK_BEGIN) == len(lists) else (text, [])


_Document = TypeVar("_Document", InferDocument, ResponseDocument)


class DocumentDecoder(Generic[_Document]):
    """Decodes bodies to (document, its tensors).

    tensors: the member that holds the tensors. kind: their name in errors.
    bounded: refuse texts that take long to decode for their size, see MAX_VALUES and MAX_LISTS. Only a process that may
    take its time decodes without this bound.
    """

    def __init__(self, document: type[_Document], tensors: str, kind: str, *, bounded: bool) -> None:
        self._bounded = bounded
        self._document: type[_Document] = document
        self._member = tensors
        self._kind = kind
        self.decoder: msgspec.json.Decoder[_Document] = msgspec.json.Decoder(document)

    def decode(
        self,
        body: bytes | memoryview,
        header_length: int | None,
        limit: int,
        most_bytes: int = 1 << 62,
        read: ReadShared | None = None,
        model: str = "",
    ) -> tuple[_Document, list[Tensor]]:
        """Decode a body. read: reads tensors from shared memory; None refuses them. model: the end of a tensor's
        description in errors.

        Raises BadMessage; TooLarge if the JSON part is longer than `limit` bytes or has too many values, or if the
        shapes of tensors in it announce more than `most_bytes` as binary data.
        """
        length = len(body) if header_length is None else header_length
        if not 0 <= length <= len(body):
            raise BadMessage(f"Inference-Header-Content-Length is {length}, the body has {len(body)} bytes")
        if length > limit:
            raise TooLarge(f"the JSON part has {length} bytes, at most {limit} are accepted: send tensors as binary")
        head = body if isinstance(body, bytes) and header_length is None else bytes(memoryview(body)[:length])
        if self._bounded and length > MAX_VALUES:
            _check_values(head)
        if length > CUT_BYTES and (parts := self._decode_in_parts(head)) is not None:
            with suppress(BadMessage):  # the whole text says more about it
                return parts[0], self._tensors(parts[1], body, length, most_bytes, read, model)
        # Hardly any body has more brackets than the allowed levels: counting here saves the call.
        if head.count(b"[") + head.count(b"{") > MAX_DEPTH:
            check_depth(head)
        if not head:
            raise BadMessage("the body is empty, which is not an infer message")
        try:
            document = self.decoder.decode(head)
            lists = None
        except RecursionError as error:
            raise BadMessage("the JSON part is nested too deeply") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if b"NaN" not in head and b"Infinity" not in head:
                raise BadMessage(f"the JSON part is not an infer message: {json_fault(head, error)[:200]}") from error
            document, lists = self._decode_loosely(head)
        found: list[TensorEntry] = getattr(document, self._member)
        data = [(each, each.data) for each in found] if lists is None else list(zip(found, lists, strict=True))
        return document, self._tensors(data, body, length, most_bytes, read, model)

    def _decode_in_parts(self, text: bytes) -> tuple[_Document, list[tuple[TensorEntry, Any]]] | None:
        """Decode a text without its long lists of numbers, and give these to their tensors; None if that fails."""
        rest, lists = cut(text)
        if not lists or rest.count(b"[") + rest.count(b"{") > MAX_DEPTH:
            return None
        try:
            document = self.decoder.decode(rest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        marked = {_MARK % number: data for number, data in enumerate(lists)}
        entries: list[TensorEntry] = getattr(document, self._member)
        found = [(each, marked.pop(bytes(each.data), each.data)) for each in entries]
        return None if marked else (document, found)

    def _decode_loosely(self, text: bytes) -> tuple[_Document, list[Any]]:
        """Decode with NaN and infinities, which are not JSON but are written by v2 servers; for answers only."""
        words: list[str] = []

        def constant(word: str) -> float:
            words.append(word)
            return float(word)

        try:
            loose = json.loads(text, parse_constant=constant)
            found = loose.get(self._member) if isinstance(loose, dict) else None
            entries = [each if isinstance(each, dict) else {} for each in found] if isinstance(found, list) else []
            lists = [each.pop("data", _NO_DATA) for each in entries]
            if words and self._kind == "input":
                raise BadMessage(_no_number(entries, lists, words[0]))
            if b"\\u" in text:
                # A lone surrogate could be read, but not written into an answer.
                json.dumps(loose, ensure_ascii=False).encode()
            return msgspec.convert(loose, self._document), lists
        except RecursionError as error:
            raise BadMessage("the JSON part is nested too deeply") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadMessage(f"the JSON part is not an infer message: {str(error)[:200]}") from error

    def _tensors(
        self,
        found: list[tuple[TensorEntry, Any]],
        body: bytes | memoryview,
        offset: int,
        most_bytes: int,
        read: ReadShared | None,
        model: str,
    ) -> list[Tensor]:
        tensors: list[Tensor] = []
        announced = 0
        names: set[str] = set()
        if len(found) > MAX_TENSORS:
            raise too_many(found, MAX_TENSORS, f"{self._kind}s")
        for each, data in found:
            what = f"{self._kind} {quoted(each.name)}{model}"
            if each.name in names:
                raise BadMessage(f"{what} is given more than once")
            names.add(each.name)
            entry = lookup(each.datatype, what)
            shape = tuple(each.shape)
            parameters = each.parameters or {}
            shared = None
            if parameters:
                if len(parameters) > MAX_PARAMETERS:
                    raise too_many(parameters, MAX_PARAMETERS, f"{what}: parameters")
                shared = take_shared(parameters, what, allowed=read is not None)
            absent = isinstance(data, msgspec.Raw) and not len(data)
            size = parameters.pop("binary_data_size", None)
            if shared is not None:
                if not absent or size is not None:
                    raise BadMessage(f"{what}: has data in the body and in shared memory, use one of them")
                array = shared_array(shared, read, entry, shape, what)
            elif size is None:
                if absent:
                    raise BadMessage(f"{what}: has neither data nor binary_data_size")
                announced += element_count(shape, what) * entry.size
                if announced > most_bytes:
                    raise TooLarge(
                        f"the {self._kind}s have {announced} bytes as binary data, at most {most_bytes} are accepted"
                    )
                array = decode_data(data, entry, shape, what)
            elif not absent:
                raise BadMessage(f"{what}: has both data and binary_data_size")
            elif type(size) is not int or size < 0:
                raise BadMessage(f"{what}: binary_data_size must be a whole number of bytes")
            elif size > len(body) - offset:
                raise BadMessage(
                    f"{what}: binary_data_size is {str(size)[:24]}, the body has {len(body) - offset} bytes left"
                )
            else:
                array = decode_raw(body, offset, size, entry, shape, what)
                offset += size
            # An emptied dict keeps its table, which is larger than the tensor itself.
            tensors.append(Tensor(each.name, each.datatype, shape, array, parameters or {}))
        if offset != len(body):
            raise BadMessage(f"the body has {len(body) - offset} bytes that belong to no {self._kind}")
        return tensors


def _no_number(entries: list[dict[str, Any]], lists: list[Any], word: str) -> str:
    """The error for `word`, the first token of the text that is not JSON."""
    why = "which is no JSON number"
    for entry, data in zip(entries, lists, strict=True):
        position = 0
        left = [data]
        while left:
            value = left.pop()
            if isinstance(value, list):
                left.extend(reversed(value))
            elif isinstance(value, float) and not isfinite(value):
                what = f"input {quoted(str(entry.get('name', '')))}"
                return (
                    f"{what}: data holds {_word(value)} at position {position}, {why}: send the tensor as binary data"
                )
            else:
                position += 1
    return f"the JSON part is not an infer message: it holds {word}, {why}"


def _word(value: float) -> str:
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def requested_outputs(
    found: list[OutputEntry] | None, binary_default: bool, *, may_share: bool
) -> list[RequestedOutput] | None:
    """The outputs that a request names; None, meaning all, if it names none. may_share: accept shared memory."""
    if not found:
        return None
    outputs: dict[str, RequestedOutput] = {}
    if len(found) > MAX_TENSORS:
        raise too_many(found, MAX_TENSORS, "outputs")
    for each in found:
        what = f"output {quoted(each.name)}"
        parameters = each.parameters or {}
        if len(parameters) > MAX_PARAMETERS:
            raise too_many(parameters, MAX_PARAMETERS, f"{what}: parameters")
        binary = take_flag(parameters, "binary_data", binary_default, what)
        classes = take_classes(parameters, what)
        shared = take_shared(parameters, what, allowed=may_share, classes=classes)
        wanted = RequestedOutput(each.name, binary, classes, parameters, shared)
        outputs.setdefault(each.name, wanted)  # requested again, it is still one output
    return list(outputs.values())


def take_flag(parameters: dict[str, ParameterValue], name: str, default: bool, what: str) -> bool:
    """Remove a true-or-false parameter and return it."""
    value = parameters.pop(name, default)
    if type(value) is not bool:
        raise BadMessage(f"{what}: parameter {name} must be true or false")
    return value
