"""Writes spans as an OTLP trace request, in protobuf's binary form or as JSON. Pure.

The bytes are written straight from our `Span`: the general way over OpenTelemetry's objects costs twenty times as much
CPU. Tests let OpenTelemetry's own protobuf classes decode both forms. What repeats (names, attributes with short texts
or small numbers) is remembered in its encoded form.

Source: opentelemetry-proto 1.x, `trace/v1/trace.proto` and `common/v1/common.proto`; field numbers are comments below.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from struct import Struct
from typing import Any

import msgspec

from oriel_wire.trace import Span, wall_ns

__all__ = ["JsonEncoder", "ProtobufEncoder", "Scalar", "rejected_json", "rejected_protobuf"]

Scalar = str | int | float | bool

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SCOPE = "oriel"
_KINDS = {"internal": 1, "server": 2, "client": 3}
_ERROR = 2
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_MAX_REMEMBERED = 4096
_SHORT = 64
_UNIQUE = frozenset({"oriel.request_id"})  # no two spans of a process have the same
_SMALL = 1024
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1

# kind, start_time_unix_nano and end_time_unix_nano: fields 6 (varint), 7 and 8 (fixed64)
_KIND_AND_TIMES = Struct("<BBBQBQ").pack
# flags: field 16 (fixed32)
_FLAGS = Struct("<BBI").pack
# double_value of AnyValue: field 4 (fixed64)
_DOUBLE = Struct("<Bd").pack


class ProtobufEncoder:
    """Writes `ExportTraceServiceRequest`s of one process. For one thread at a time.

    resource: the attributes of the process. version: the version of the instrumentation scope `oriel`.
    """

    content_type = "application/x-protobuf"

    def __init__(self, resource: Mapping[str, Scalar], version: str) -> None:
        self._remembered: dict[tuple[str, str | int], bytes] = {}
        self._floats: dict[tuple[str, float], bytes] = {}
        self._names: dict[str, bytes] = {}
        self._keys: dict[str, bytes] = {}
        described = b"".join([_field(0x0A, _key_value(_key(key), value)) for key, value in resource.items()])
        self._resource = _field(0x0A, described)  # ResourceSpans.resource: 1
        scope = _text(0x0A, SCOPE) + _text(0x12, version)  # InstrumentationScope: name 1, version 2
        self._scope = _field(0x0A, scope)  # ScopeSpans.scope: 1
        self._schema = _text(0x1A, SCHEMA_URL)  # schema_url: 3, of ResourceSpans and of ScopeSpans

    def encode(self, spans: Iterable[Span]) -> bytes:
        """Return one request with all these spans."""
        written = b"".join([_field(0x12, self.span(span)) for span in spans])  # ScopeSpans.spans: 2
        scope_spans = _field(0x12, self._scope + written + self._schema)  # ResourceSpans.scope_spans: 2
        return _field(0x0A, self._resource + scope_spans + self._schema)  # ExportTraceServiceRequest.resource_spans: 1

    def span(self, span: Span) -> bytes:
        """Return one `Span` message, without its tag and length."""
        context = span.context
        name = self._names.get(span.name)
        if name is None:
            name = self._name(span.name)
        parts = [
            b"\x0a\x10",  # trace_id: 1
            context.trace_id.to_bytes(16, "big"),
            b"\x12\x08",  # span_id: 2
            context.span_id.to_bytes(8, "big"),
            name,
            _KIND_AND_TIMES(0x30, _KINDS[span.kind], 0x39, wall_ns(span.start_s), 0x41, wall_ns(span.end_s)),
            _FLAGS(0x85, 0x01, flags_of(span)),
        ]
        if context.state:
            parts.append(_text(0x1A, context.state))  # trace_state: 3
        if span.parent_id:
            parts.append(b"\x22\x08")  # parent_span_id: 4
            parts.append(span.parent_id.to_bytes(8, "big"))
        remembered, floats = self._remembered, self._floats
        for pair in span.attributes.items():
            # True, 1 and 1.0 are the same key of a dict: numbers of the type float have one of their own.
            kind = type(pair[1])
            if kind is str or kind is int:
                found = remembered.get(pair)  # type: ignore[arg-type]
            else:
                found = floats.get(pair) if kind is float else None  # type: ignore[arg-type]
            parts.append(self._attribute(*pair) if found is None else found)
        if span.failed:
            # status: 15, with message 2 and code 3
            described = _text(0x12, span.error) if span.error else b""
            parts.append(_field(0x7A, described + b"\x18\x02"))
        return b"".join(parts)

    def _name(self, name: str) -> bytes:
        if len(self._names) >= _MAX_REMEMBERED:
            self._names.clear()
        written = self._names[name] = _text(0x2A, name)  # name: 5
        return written

    def _attribute(self, key: str, value: Scalar) -> bytes:
        written_key = self._keys.get(key)
        if written_key is None:
            if len(self._keys) >= _MAX_REMEMBERED:
                self._keys.clear()
            written_key = self._keys[key] = _key(key)
        written = _field(0x4A, _key_value(written_key, value))  # attributes: 9
        kind = type(value)
        if key in _UNIQUE:
            return written
        if (kind is str and len(value) <= _SHORT) or (kind is int and 0 <= value < _SMALL):  # type: ignore[arg-type,operator]
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key, value] = written  # type: ignore[index]
        elif kind is float and value and value == value:  # 0.0 equals -0.0, and NaN nothing
            if len(self._floats) >= _MAX_REMEMBERED:
                self._floats.clear()
            self._floats[key, value] = written  # type: ignore[index]
        return written


class JsonEncoder:
    """Writes the same request as JSON; see `ProtobufEncoder`."""

    content_type = "application/json"

    def __init__(self, resource: Mapping[str, Scalar], version: str) -> None:
        self._resource = {"attributes": _json_attributes(resource)}
        self._scope = {"name": SCOPE, "version": version}

    def encode(self, spans: Iterable[Span]) -> bytes:
        """Return one request with all these spans."""
        scope_spans = {"scope": self._scope, "spans": [self.span(span) for span in spans], "schemaUrl": SCHEMA_URL}
        resource_spans = {"resource": self._resource, "scopeSpans": [scope_spans], "schemaUrl": SCHEMA_URL}
        return msgspec.json.encode({"resourceSpans": [resource_spans]})

    def span(self, span: Span) -> dict[str, Any]:
        """Return one span; ids are hexadecimal and 64-bit numbers are texts, as OTLP wants them in JSON."""
        context = span.context
        written: dict[str, Any] = {
            "traceId": f"{context.trace_id:032x}",
            "spanId": f"{context.span_id:016x}",
            "traceState": context.state,
            "parentSpanId": f"{span.parent_id:016x}" if span.parent_id else "",
            "flags": flags_of(span),
            "name": _clean(span.name),
            "kind": _KINDS[span.kind],
            "startTimeUnixNano": str(wall_ns(span.start_s)),
            "endTimeUnixNano": str(wall_ns(span.end_s)),
            "attributes": _json_attributes(span.attributes),
        }
        if span.failed:
            written["status"] = {"code": _ERROR, **({"message": _clean(span.error)} if span.error else {})}
        return written


def flags_of(span: Span) -> int:
    """Return `Span.flags`: the flags of the trace, and whether the parent is in another process."""
    context = span.context
    flags = _HAS_IS_REMOTE | context.sampled | context.random << 1
    return flags | _IS_REMOTE if span.parent_id and span.kind == "server" else flags


def rejected_protobuf(body: bytes) -> int:
    """Return the spans that a collector rejected, from its `ExportTraceServiceResponse`; 0 if it is not readable."""
    for number, value in _fields(body):
        if number == 1 and isinstance(value, bytes):  # partial_success: 1
            for inner, count in _fields(value):
                if inner == 1 and isinstance(count, int):  # rejected_spans: 1
                    return count if count <= _INT64_MAX else 0
    return 0


class _Partial(msgspec.Struct, rename="camel"):
    rejected_spans: int | str = 0


class _Response(msgspec.Struct, rename="camel"):
    partial_success: _Partial | None = None


def rejected_json(body: bytes) -> int:
    """Return the spans that a collector rejected, from its answer in JSON; 0 if it is not readable."""
    try:
        answer = msgspec.json.decode(body, type=_Response)
        return max(0, int(answer.partial_success.rejected_spans)) if answer.partial_success else 0
    except (msgspec.DecodeError, ValueError):
        return 0


def _fields(data: bytes) -> Sequence[tuple[int, int | bytes]]:
    """Return the fields of a message: numbers, and bytes of what has a length. Reading ends at what is malformed."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag & 7 == 0:
            value, at = _read_varint(data, at)
            found.append((tag >> 3, value))
        elif tag & 7 == 2:
            size, at = _read_varint(data, at)
            found.append((tag >> 3, data[at : at + size]))
            at += size
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            break
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, len(data)


def _clean(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(tag: int, data: bytes) -> bytes:
    size = len(data)
    return bytes((tag, size)) + data if size < 0x80 else bytes((tag,)) + _varint(size) + data


def _text(tag: int, text: str) -> bytes:
    return _field(tag, text.encode("utf-8", "replace"))


def _key(key: str) -> bytes:
    return _text(0x0A, key)  # KeyValue.key: 1


def _key_value(key: bytes, value: Scalar) -> bytes:
    return key + _field(0x12, _any_value(value))  # KeyValue.value: 2


def _any_value(value: Scalar) -> bytes:
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"  # bool_value: 2
    if isinstance(value, int):
        if not _INT64_MIN <= value <= _INT64_MAX:
            return _text(0x0A, str(value))
        return b"\x18" + _varint(value & 0xFFFFFFFFFFFFFFFF)  # int_value: 3
    if isinstance(value, float):
        return _DOUBLE(0x21, value)
    return _text(0x0A, value)  # string_value: 1


def _json_attributes(attributes: Mapping[str, Scalar]) -> list[dict[str, Any]]:
    return [{"key": _clean(key), "value": _json_value(value)} for key, value in attributes.items()]


def _json_value(value: Scalar) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        fits = _INT64_MIN <= value <= _INT64_MAX
        return {"intValue" if fits else "stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if isfinite(value) else _NOT_FINITE.get(value, "NaN")}
    return {"stringValue": _clean(value)}


_NOT_FINITE = {inf: "Infinity", -inf: "-Infinity", nan: "NaN"}
