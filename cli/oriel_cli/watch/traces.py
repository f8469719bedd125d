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


Span = dict[str, Any]  # as `oriel trace --json` prints it


@dataclass(slots=True)
class _Trace:
    spans: deque[tuple[Span, int]] = field(default_factory=deque)  # with their sizes
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
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, spans: Iterable[tuple[str, Span]]) -> None:
        """Keep spans, each with the id of its trace, whatever order and batches they come in."""
        for trace_id, span in spans:
            trace = self._traces.setdefault(trace_id, _Trace())
            self._traces.move_to_end(trace_id)
            trace.touched_s = self._clock()
            trace.spans.append((span, _size_bytes(span)))
            self.size_bytes += trace.spans[-1][1]
            if len(trace.spans) > self._max_trace_spans:
                self.size_bytes -= trace.spans.popleft()[1]
            while len(self._traces) > self._max_traces or self.size_bytes > self._max_bytes:
                _, oldest = self._traces.popitem(last=False)
                self.size_bytes -= sum(size for _, size in oldest.spans)

    def find(self, request_id: str) -> tuple[str, float, list[Span]] | None:
        """(trace id, seconds since its last span arrived, the request's spans by start), None when unknown.

        A client may send many requests in one trace: the request's spans are those that carry its id and all below.
        """
        for trace_id, trace in reversed(self._traces.items()):
            pending = [span for span, _ in trace.spans if span["attributes"].get(REQUEST_ID) == request_id]
            if not pending:
                continue
            children: dict[str, list[Span]] = {}
            for span, _ in trace.spans:
                children.setdefault(span["parent_id"], []).append(span)
            found: dict[str, Span] = {}
            while pending:
                span = pending.pop()
                if span["span_id"] not in found:
                    found[span["span_id"]] = span
                    pending.extend(children.get(span["span_id"], ()))
            spans = sorted(found.values(), key=lambda span: (span["start_ns"], -span["end_ns"]))
            return trace_id, self._clock() - trace.touched_s, spans
        return None


def _size_bytes(span: Span) -> int:
    """Estimate the memory of a span: a fixed share and its texts."""
    texts = [*span["attributes"], *span["attributes"].values(), span["name"], span["unit"], span["error"]]
    return 512 + 64 * len(span["attributes"]) + sum(len(text) if isinstance(text, str) else 8 for text in texts)


def decode(body: bytes) -> Iterator[tuple[str, Span]]:
    """The spans of an OTLP ExportTraceServiceRequest, each with the id of its trace.

    Ids are lower-case hex, that of no parent is "", times are epoch nanoseconds; texts are cut to bounds. Raises
    DecodeError (google.protobuf).
    """
    request = ExportTraceServiceRequest.FromString(body)
    for resource_spans in request.resource_spans:
        about = _attributes(resource_spans.resource.attributes)
        unit = str(about.get("oriel.unit") or about.get("service.name") or "?")
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                attributes = _attributes(span.attributes)
                yield (
                    span.trace_id[:16].hex(),
                    {
                        "name": span.name[:MAX_TEXT],
                        "unit": unit,
                        "span_id": span.span_id[:8].hex(),
                        "parent_id": span.parent_span_id[:8].hex(),
                        "start_ns": span.start_time_unix_nano,
                        "end_ns": span.end_time_unix_nano,
                        "error": _error(span.status.message, attributes) if span.status.code == 2 else "",
                        "attributes": attributes,
                    },
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
            number = value.double_value
            return number if isfinite(number) else str(number)  # JSON has no NaN and no infinity
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
        return JSONResponse({"trace_id": trace_id, "age_s": round(age_s, 3), "spans": spans})

    return [Route("/v1/traces", receive, methods=["POST"]), Route("/traces/{request_id}", read)]
