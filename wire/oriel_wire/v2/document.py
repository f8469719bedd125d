"""The JSON part of v2 REST bodies: what it may contain, and its tensors."""

import json
from typing import Any, Generic, TypeVar

import msgspec

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2.datatypes import decode_raw, lookup, quoted
from oriel_wire.v2.depth import MAX_DEPTH, check_depth
from oriel_wire.v2.jsondata import decode_data
from oriel_wire.v2.messages import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    ParameterValue,
    RequestedOutput,
    Tensor,
    take_classes,
    too_many,
)

__all__ = [
    "DocumentDecoder",
    "InferDocument",
    "OutputEntry",
    "ResponseDocument",
    "TensorEntry",
    "requested_outputs",
    "take_flag",
]

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


# A decoder gets through so many in some 30 ms; the loop has other requests to serve.
MAX_VALUES = 1 << 19
MAX_LISTS = 1 << 16


def _check_values(body: bytes, length: int, brackets: int) -> None:
    """By their separators: a text of commas counts as well."""
    if brackets > MAX_LISTS:
        raise BadMessage(f"the JSON part has {brackets} lists and objects, at most {MAX_LISTS} are accepted")
    if (commas := body.count(b",", 0, length)) >= MAX_VALUES:
        raise BadMessage(
            f"the JSON part has {commas + 1} values, at most {MAX_VALUES} are accepted: send tensors as binary data"
        )


_Document = TypeVar("_Document", InferDocument, ResponseDocument)


class DocumentDecoder(Generic[_Document]):
    """Bodies -> (document, its tensors). `tensors` is the member that holds them, `kind` their name in errors.

    bounded: refuse texts that would take a decoder long for their size, see MAX_VALUES and MAX_LISTS.
    """

    def __init__(self, document: type[_Document], tensors: str, kind: str, *, bounded: bool) -> None:
        self._bounded = bounded
        self._document: type[_Document] = document
        self._member = tensors
        self._kind = kind
        self.decoder: msgspec.json.Decoder[_Document] = msgspec.json.Decoder(document)

    def decode(self, body: bytes, header_length: int | None, limit: int) -> tuple[_Document, list[Tensor]]:
        """Raises BadMessage; TooLarge if the JSON part is longer than `limit` bytes."""
        length = len(body) if header_length is None else header_length
        if not 0 <= length <= len(body):
            raise BadMessage(f"Inference-Header-Content-Length is {length}, the body has {len(body)} bytes")
        if length > limit:
            raise TooLarge(f"the JSON part has {length} bytes, at most {limit} are accepted: send tensors as binary")
        # Hardly any body has more brackets than levels are allowed: counting here saves the call.
        if (brackets := body.count(b"[", 0, length) + body.count(b"{", 0, length)) > MAX_DEPTH:
            check_depth(body, length)
        if self._bounded and length > MAX_VALUES:
            _check_values(body, length, brackets)
        head = body if header_length is None else memoryview(body)[:length]
        try:
            document = self.decoder.decode(head)
            lists = None
        except RecursionError as error:
            raise BadMessage("the JSON part is nested too deeply") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            text = bytes(head)
            if b"NaN" not in text and b"Infinity" not in text:
                raise BadMessage(f"the JSON part is not an infer message: {str(error)[:200]}") from error
            document, lists = self._decode_loosely(text)
        found: list[TensorEntry] = getattr(document, self._member)
        return document, self._tensors(found, lists, body, length)

    def _decode_loosely(self, text: bytes) -> tuple[_Document, list[Any]]:
        """NaN and infinities are no JSON, yet the protocol's own clients and servers write them."""
        try:
            loose = json.loads(text)
            found = loose.get(self._member) if isinstance(loose, dict) else None
            entries = [each if isinstance(each, dict) else {} for each in found] if isinstance(found, list) else []
            lists = [each.pop("data", _NO_DATA) for each in entries]
            if b"\\u" in text:
                # Half a character could be read, but never written into an answer.
                json.dumps(loose, ensure_ascii=False).encode()
            return msgspec.convert(loose, self._document), lists
        except RecursionError as error:
            raise BadMessage("the JSON part is nested too deeply") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadMessage(f"the JSON part is not an infer message: {str(error)[:200]}") from error

    def _tensors(self, found: list[TensorEntry], lists: list[Any] | None, body: bytes, offset: int) -> list[Tensor]:
        tensors: list[Tensor] = []
        names: set[str] = set()
        if len(found) > MAX_TENSORS:
            raise too_many(found, MAX_TENSORS, f"{self._kind}s")
        for index, each in enumerate(found):
            what = f"{self._kind} {quoted(each.name)}"
            if each.name in names:
                raise BadMessage(f"{what} is given more than once")
            names.add(each.name)
            entry = lookup(each.datatype, what)
            shape = tuple(each.shape)
            parameters = each.parameters or {}
            if parameters:
                if len(parameters) > MAX_PARAMETERS:
                    raise too_many(parameters, MAX_PARAMETERS, f"{what}: parameters")
                if "shared_memory_region" in parameters:
                    raise BadMessage(f"{what}: shared memory is not supported, send the data in the body")
            data = each.data if lists is None else lists[index]
            absent = isinstance(data, msgspec.Raw) and not len(data)
            size = parameters.pop("binary_data_size", None)
            if size is None:
                if absent:
                    raise BadMessage(f"{what}: has neither data nor binary_data_size")
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
            # An emptied dict keeps its table, which is larger than all of the tensor.
            tensors.append(Tensor(each.name, each.datatype, shape, array, parameters or {}))
        if offset != len(body):
            raise BadMessage(f"the body has {len(body) - offset} bytes that belong to no {self._kind}")
        return tensors


def requested_outputs(found: list[OutputEntry] | None, binary_default: bool) -> list[RequestedOutput] | None:
    """The outputs a request names; None (all of them) if it names none."""
    if not found:
        return None
    outputs: dict[str, RequestedOutput] = {}
    if len(found) > MAX_TENSORS:
        raise too_many(found, MAX_TENSORS, "outputs")
    for each in found:
        what = f"output {quoted(each.name)}"
        if each.name in outputs:
            raise BadMessage(f"{what} is requested more than once")
        parameters = each.parameters or {}
        if len(parameters) > MAX_PARAMETERS:
            raise too_many(parameters, MAX_PARAMETERS, f"{what}: parameters")
        if "shared_memory_region" in parameters:
            raise BadMessage(f"{what}: shared memory is not supported, leave it out")
        binary = take_flag(parameters, "binary_data", binary_default, what)
        outputs[each.name] = RequestedOutput(each.name, binary, take_classes(parameters, what), parameters)
    return list(outputs.values())


def take_flag(parameters: dict[str, ParameterValue], name: str, default: bool, what: str) -> bool:
    """Remove a true-or-false parameter and return it."""
    value = parameters.pop(name, default)
    if type(value) is not bool:
        raise BadMessage(f"{what}: parameter {name} must be true or false")
    return value
