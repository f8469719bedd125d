"""Keeps the last traces in memory, so that `oriel trace` can show one without a collector.

`TraceStore` is the bounded memory; `routes` is its OTLP/HTTP receiver and reader, served on loopback.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oriel_wire.observe.trace import Scalar

REQUEST_ID = "oriel.request_id"
MAX_BODY_BYTES = 4 << 20
MAX_TRACES = 500
MAX_TRACE_SPANS = 256
MAX_STORE_BYTES = 16 << 20
MAX_TEXT = 256
MAX_ATTRIBUTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpan:
    """One span; ids are lower-case hex, `parent_id` is "" for a root, times are epoch nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    unit: str
    start_ns: int
    end_ns: int
    error: str
    attributes: dict[str, Scalar]

    @property
    def size_bytes(self) -> int:
        """Estimate its memory: a fixed share and its texts."""
        texts = sum(len(key) + (len(value) if isinstance(value, str) else 8) for key, value in self.attributes.items())
        return 512 + len(self.name) + len(self.unit) + len(self.error) + 64 * len(self.attributes) + texts

    def as_document(self) -> dict[str, Any]:
        """The JSON form that `oriel trace --json` prints."""
        return {
            "name": self.name,
            "unit": self.unit,
            "span_id": self.span_id,
            "parent_id": self.parent_id,
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "error": self.error,
            # JSON has no NaN and no infinity.
            "attributes": {
                name: value if not isinstance(value, float) or isfinite(value) else str(value)
                for name, value in self.attributes.items()
            },
        }


@dataclass(slots=True)
class _Trace:
    spans: deque[StoredSpan] = field(default_factory=deque)
    request_ids: set[str] = field(default_factory=set)
    size_bytes: int = 0
    touched_s: float = 0.0


class TraceStore:
    """The newest traces, bounded in traces, spans per trace and bytes; the least recently touched goes first.

    Single writer: the loop that serves `routes`.
    """

    def __init__(
        self,
        *,
        max_traces: int = MAX_TRACES,
        max_trace_spans: int = MAX_TRACE_SPANS,
        max_bytes: int = MAX_STORE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_traces = max_traces
        self._max_trace_spans = max_trace_spans
        self._max_bytes = max_bytes
        self._clock = clock
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, spans: Iterable[StoredSpan]) -> None:
        """Keep `spans`, whatever order and batches they come in."""
        for span in spans:
            trace = self._traces.get(span.trace_id)
            if trace is None:
                trace = self._traces[span.trace_id] = _Trace()
            self._traces.move_to_end(span.trace_id)
            trace.touched_s = self._clock()
            trace.spans.append(span)
            self._grow(trace, span.size_bytes)
            self._index(trace, span)
            if len(trace.spans) > self._max_trace_spans:
                self._forget_span(trace)
            while len(self._traces) > self._max_traces or self.size_bytes > self._max_bytes:
                self._evict()

    def find(self, request_id: str) -> tuple[str, float, list[StoredSpan]] | None:
        """(trace id, seconds since its last span arrived, the request's spans by start), None when unknown.

        A client may send many requests in one trace: the request's spans are those that carry its id and all below.
        """
        trace_id = self._by_request.get(request_id)
        if trace_id is None:
            return None
        trace = self._traces[trace_id]
        children: dict[str, list[StoredSpan]] = {}
        for span in trace.spans:
            children.setdefault(span.parent_id, []).append(span)
        found: dict[str, StoredSpan] = {}
        pending = [span for span in trace.spans if span.attributes.get(REQUEST_ID) == request_id]
        while pending:
            span = pending.pop()
            if span.span_id not in found:
                found[span.span_id] = span
                pending.extend(children.get(span.span_id, ()))
        spans = sorted(found.values(), key=lambda span: (span.start_ns, -span.end_ns))
        return trace_id, self._clock() - trace.touched_s, spans

    def _grow(self, trace: _Trace, size_bytes: int) -> None:
        trace.size_bytes += size_bytes
        self.size_bytes += size_bytes

    def _index(self, trace: _Trace, span: StoredSpan) -> None:
        request_id = span.attributes.get(REQUEST_ID)
        if isinstance(request_id, str) and request_id:
            trace.request_ids.add(request_id)
            self._by_request[request_id] = span.trace_id

    def _forget_span(self, trace: _Trace) -> None:
        oldest = trace.spans.popleft()
        self._grow(trace, -oldest.size_bytes)
        request_id = oldest.attributes.get(REQUEST_ID)
        if all(span.attributes.get(REQUEST_ID) != request_id for span in trace.spans):
            self._forget_request(trace, oldest.trace_id, request_id)

    def _forget_request(self, trace: _Trace, trace_id: str, request_id: object) -> None:
        if not isinstance(request_id, str):
            return
        trace.request_ids.discard(request_id)
        if self._by_request.get(request_id) == trace_id:
            del self._by_request[request_id]

    def _evict(self) -> None:
        trace_id, trace = self._traces.popitem(last=False)
        self.size_bytes -= trace.size_bytes
        for request_id in tuple(trace.request_ids):
            self._forget_request(trace, trace_id, request_id)


def decode(body: bytes) -> Iterator[StoredSpan]:
    """The spans of an OTLP ExportTraceServiceRequest, texts cut to bounds. Raises DecodeError (google.protobuf)."""
    request = ExportTraceServiceRequest.FromString(body)
    for resource_spans in request.resource_spans:
        about = _attributes(resource_spans.resource.attributes)
        unit = str(about.get("oriel.unit") or about.get("service.name") or "?")
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                attributes = _attributes(span.attributes)
                yield StoredSpan(
                    trace_id=span.trace_id[:16].hex(),
                    span_id=span.span_id[:8].hex(),
                    parent_id=span.parent_span_id[:8].hex(),
                    name=span.name[:MAX_TEXT],
                    unit=unit,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    error=_error(span.status.message, attributes) if span.status.code == 2 else "",
                    attributes=attributes,
                )


def _error(message: str, attributes: dict[str, Scalar]) -> str:
    """Return why a span failed: its description, or the attribute that makes one unnecessary."""
    return message[:MAX_TEXT] or str(attributes.get("error.type", "error"))


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for pair in pairs:
        value = _scalar(pair.value)
        if value is not None:
            found[pair.key[:MAX_TEXT]] = value
        if len(found) == MAX_ATTRIBUTES:
            break
    return found


def _scalar(value: AnyValue) -> Scalar | None:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value[:MAX_TEXT]
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bool_value":
            return value.bool_value
    return None


def routes(store: TraceStore) -> list[Route]:
    """`POST /v1/traces` (OTLP/HTTP protobuf, at most 4 MiB) and `GET /traces/<request id>`."""

    async def receive(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": "the body is larger than 4 MiB"}, status_code=413)
        try:
            store.add(decode(bytes(body)))
        except DecodeError:
            return JSONResponse({"error": "the body is not an OTLP trace request in protobuf"}, status_code=400)
        return Response(ExportTraceServiceResponse().SerializeToString(), media_type="application/x-protobuf")

    async def read(request: Request) -> Response:
        found = store.find(request.path_params["request_id"])
        if found is None:
            return JSONResponse({"error": "no trace with this request id is kept"}, status_code=404)
        trace_id, age_s, spans = found
        return JSONResponse(
            {"trace_id": trace_id, "age_s": round(age_s, 3), "spans": [span.as_document() for span in spans]}
        )

    return [Route("/v1/traces", receive, methods=["POST"]), Route("/traces/{request_id}", read)]
