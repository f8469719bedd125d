"""Descriptions of servers and models, and model configurations, as JSON and as protobuf messages."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from oriel_wire.errors import BadMessage
from oriel_wire.near_names import did_you_mean
from oriel_wire.v2.datatypes import from_config_name
from oriel_wire.v2.proto import model_config_pb2, v2_pb2

_ENUM = re.compile(r"[Ee]num type \"?([A-Za-z.]+)\"?")
_FIELD = re.compile(r'"([A-Za-z.]+)" has no field named "([A-Za-z0-9_]{1,64})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """The description of one tensor. shape: includes the batch dimension, and has -1 where a dimension varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    name: str
    versions: tuple[str, ...] = ()
    platform: str = ""
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()


def describe(config: model_config_pb2.ModelConfig, versions: Sequence[str]) -> ModelMetadata:
    """The metadata of a model for clients. Raises BadMessage if a tensor has no datatype."""
    batch = (-1,) if config.max_batch_size > 0 else ()

    def tensors(found: Any) -> tuple[TensorMetadata, ...]:
        return tuple(
            TensorMetadata(
                name=each.name,
                datatype=from_config_name(model_config_pb2.DataType.Name(each.data_type)),
                shape=(*batch, *each.dims),
            )
            for each in found
        )

    return ModelMetadata(
        name=config.name,
        versions=tuple(versions),
        platform=config.platform or config.backend,
        inputs=tensors(config.input),
        outputs=tensors(config.output),
    )


def encode_metadata(metadata: ModelMetadata) -> bytes:
    """The JSON answer to GET /v2/models/<model>."""
    return msgspec.json.encode(metadata)


def decode_metadata(body: bytes) -> ModelMetadata:
    """The inverse of `encode_metadata`, for clients. Raises BadMessage."""
    try:
        return msgspec.json.decode(body, type=ModelMetadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not the metadata of a model: {str(error)[:200]}") from error


def metadata_message(metadata: ModelMetadata) -> v2_pb2.ModelMetadataResponse:
    """The answer to ModelMetadata over gRPC."""
    message = v2_pb2.ModelMetadataResponse(name=metadata.name, versions=metadata.versions, platform=metadata.platform)
    for target, found in ((message.inputs, metadata.inputs), (message.outputs, metadata.outputs)):
        for each in found:
            target.add(name=each.name, datatype=each.datatype, shape=each.shape)
    return message


def parse_config_text(text: str) -> model_config_pb2.ModelConfig:
    """Parse a `config.pbtxt`. Raises BadMessage with line and column, also for unknown fields."""
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except (text_format.ParseError, ValueError, RecursionError) as error:
        # ValueError: a number that fits 64 bits, but not the field.
        raise BadMessage(f"model configuration: {_plain(error)}") from error


def parse_config_json(text: str | bytes) -> model_config_pb2.ModelConfig:
    """Parse a model configuration in JSON. Raises BadMessage."""
    try:
        if text.lstrip()[:1] not in ("{", b"{"):
            raise json_format.ParseError("it is not a JSON object")
        return json_format.Parse(text, model_config_pb2.ModelConfig())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"model configuration: {_plain(error)}") from error


def config_json(config: model_config_pb2.ModelConfig) -> str:
    """A model configuration as the JSON that a load request carries; unset fields are left out."""
    return str(json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None))


def message_json(message: Message) -> bytes:
    """The JSON that v2 servers write for a message over REST: field names as declared, defaults written, 64-bit
    numbers as numbers.

    For the config and stats answers and the repository index; unset messages and oneofs are left out.
    """
    return msgspec.json.encode(_to_plain(message))


def _to_plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            item = field.message_type.fields_by_name["value"]
            plain[field.name] = {str(key): _value(item, value[key]) for key in value}
        elif field.is_repeated:
            plain[field.name] = [_value(field, each) for each in value]
        elif not field.has_presence or message.HasField(field.name):
            plain[field.name] = _value(field, value)
    return plain


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _to_plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return value


def _plain(error: Exception) -> str:
    """The parser's error text with the allowed values or fields; quoted input is cleaned, as it may contain
    anything.
    """
    words = str(error).replace("oriel.v2.", "")[:300]
    text = "".join(each if each.isprintable() else "?" for each in words)
    if found := _ENUM.search(words):
        values = [value.name for value in _named(found[1], "enum_types_by_name", "values")]
        return f"{text.rstrip('.')}, it is one of {', '.join(values)}" if values else text
    if found := _FIELD.search(words):
        fields = [field.name for field in _named(found[1], "", "fields")]
        return f"{text.rstrip('.')}{did_you_mean(found[2], fields)}"
    return text


def _named(path: str, table: str, attribute: str) -> Sequence[Any]:
    """The names in the message `A.B`, or with a table in the enumeration `A.B`; () if there is none."""
    place: Any = model_config_pb2.DESCRIPTOR
    *outer, last = path.split(".")
    names = [(name, "message_types_by_name", "nested_types_by_name") for name in outer]
    names.append((last, table or "message_types_by_name", table or "nested_types_by_name"))
    for name, outside, inside in names:
        found = getattr(place, outside, None) or getattr(place, inside, None) or {}
        if name not in found:
            return ()
        place = found[name]
    return tuple(getattr(place, attribute))
