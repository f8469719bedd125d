"""Writes spans as an OTLP trace request, in protobuf's binary form or as JSON. Pure.

Import it only where spans are sent: OpenTelemetry's protobuf classes take time to load. Attributes with short texts or
numbers repeat, so they are remembered as bytes: an attribute that is made anew costs as much as the rest of a span
(docs/decisions/0098-own-otlp-encoder.md).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf, isfinite
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1 import trace_pb2

from oriel_wire.observe.trace import Scalar, Span, wall_ns

__all__ = ["JsonEncoder", "ProtobufEncoder"]

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SCOPE = "oriel"
_KINDS = {"internal": 1, "server": 2, "client": 3}
_ERROR = 2
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_SHORT = 64
_UNIQUE = frozenset({"oriel.request_id"})  # no two spans of a process have the same
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


class ProtobufEncoder:
    """Writes `ExportTraceServiceRequest`s of one process.

    resource: the attributes of the process. version: the version of the instrumentation scope `oriel`.
    """

    content_type = "application/x-protobuf"

    def __init__(self, resource: Mapping[str, Scalar], version: str) -> None:
        self._around = trace_pb2.ResourceSpans(schema_url=SCHEMA_URL)
        for key, value in resource.items():
            _add(self._around.resource.attributes, key, value)
        scope = InstrumentationScope(name=SCOPE, version=version)
        self._around.scope_spans.add(scope=scope, schema_url=SCHEMA_URL)

    def encode(self, spans: Iterable[Span]) -> bytes:
        """Return one request with all these spans."""
        request = ExportTraceServiceRequest(resource_spans=[self._around])
        add = request.resource_spans[0].scope_spans[0].spans.add
        for span in spans:
            context = span.context
            written: Any = add()  # fields are set one by one, which is faster than by keywords
            written.trace_id = context.trace_id.to_bytes(16, "big")
            written.span_id = context.span_id.to_bytes(8, "big")
            written.trace_state = context.state
            if span.parent_id:
                written.parent_span_id = span.parent_id.to_bytes(8, "big")
            written.flags = flags_of(span)
            written.name = _clean(span.name)
            written.kind = _KINDS[span.kind]
            written.start_time_unix_nano = wall_ns(span.start_s)
            written.end_time_unix_nano = wall_ns(span.end_s)
            written.MergeFromString(b"".join([_attribute(key, value) for key, value in span.attributes.items()]))
            if span.failed:
                written.status.code, written.status.message = _ERROR, _clean(span.error)
        return request.SerializeToString()

    @staticmethod
    def rejected(body: bytes) -> int:
        """Return the spans that a collector rejected, from its answer; 0 if it is not readable."""
        try:
            return max(0, ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans)
        except DecodeError:
            return 0


def _attribute(key: str, value: Scalar) -> bytes:
    """Return the bytes of a span that has this attribute only."""
    kind = type(value)
    # 0.0 and -0.0 are the same key
    apart = key in _UNIQUE or (kind is float and not value) or (kind is str and len(value) > _SHORT)  # type: ignore[arg-type]
    return _written(key, value) if apart else _remembered(key, value)


def _written(key: str, value: Scalar) -> bytes:
    span = trace_pb2.Span()
    _add(span.attributes, key, value)
    return span.SerializeToString()


_remembered = lru_cache(4096, typed=True)(_written)


def _add(attributes: Any, key: str, value: Scalar) -> None:
    written = attributes.add(key=_clean(key)).value
    if isinstance(value, bool):
        written.bool_value = value
    elif isinstance(value, int) and _INT64_MIN <= value <= _INT64_MAX:
        written.int_value = value
    elif isinstance(value, float):
        written.double_value = value
    else:
        written.string_value = _clean(str(value))


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

    @staticmethod
    def rejected(body: bytes) -> int:
        """Return the spans that a collector rejected, from its answer; 0 if it is not readable."""
        try:
            answer = msgspec.json.decode(body, type=_Response)
            return max(0, int(answer.partial_success.rejected_spans)) if answer.partial_success else 0
        except (msgspec.DecodeError, ValueError):
            return 0


class _Partial(msgspec.Struct, rename="camel"):
    rejected_spans: int | str = 0


class _Response(msgspec.Struct, rename="camel"):
    partial_success: _Partial | None = None


def flags_of(span: Span) -> int:
    """Return `Span.flags`: the flags of the trace, and whether the parent is in another process."""
    context = span.context
    flags = _HAS_IS_REMOTE | context.sampled | context.random << 1
    return flags | _IS_REMOTE if span.parent_id and span.kind == "server" else flags


def _clean(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


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


_NOT_FINITE = {inf: "Infinity", -inf: "-Infinity"}
