"""Sends finished spans to OTLP/HTTP collectors without ever holding up a request.

`record` appends to a bounded queue and returns; a daemon thread per destination turns `Span`s into OpenTelemetry's
ReadableSpans, encodes and posts them. The SDK's own batch processor would build each ReadableSpan on the loop
(35 us), counts no drops outside its private metrics and waits up to 30 s at exit. OpenTelemetry is imported only when
a destination is set, by `open_sink`, so that no request pays for the import.
"""

import http.client
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from oriel_wire.trace import NullSink, Span, SpanSink, wall_ns

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

BUFFER_VARIABLE = "ORIEL_TRACE_BUFFER"
COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
MAX_QUEUED_SPANS = 2048
MAX_BATCH_SPANS = 256
BUFFER_DELAY_S = 0.2
COLLECTOR_DELAY_S = 1.0
POST_TIMEOUT_S = 2.0
CLOSE_S = 1.5
REPORT_EVERY_S = 60.0

_log = logging.getLogger(__name__)

Post = Callable[[Sequence["ReadableSpan"]], bool]


def open_sink(
    service: str,
    *,
    collector_delay_s: float = COLLECTOR_DELAY_S,
    post_timeout_s: float = POST_TIMEOUT_S,
    close_s: float = CLOSE_S,
) -> SpanSink:
    """A sink for `service` ("gateway"), fed by the environment.

    OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT): a collector, with OpenTelemetry's other OTEL_EXPORTER_*
    settings; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are honoured. ORIEL_TRACE_BUFFER: the supervisor's trace
    buffer. Both may be set. Neither: a NullSink, and OpenTelemetry is not imported.

    collector_delay_s: time for which spans for a collector are gathered into one post.
    post_timeout_s: of one post to the trace buffer; a collector has its own in OTEL_EXPORTER_OTLP_TIMEOUT.
    close_s: the longest time that `close` of the sink takes.
    """
    collector = any(os.environ.get(name) for name in COLLECTOR_VARIABLES)
    buffer = os.environ.get(BUFFER_VARIABLE, "")
    lanes: list[Lane] = []
    if buffer:
        lanes.append(Lane(_buffer_post(buffer, post_timeout_s), delay_s=BUFFER_DELAY_S))
    if collector:
        post, interrupt = _collector_post()
        lanes.append(Lane(post, interrupt=interrupt, delay_s=collector_delay_s))
    if not lanes:
        return NullSink()
    return ExportingSink(lanes, _converter(service), close_s=close_s)


class ExportingSink:
    """Gives every recorded span to each lane. `record` is for one thread; `close` blocks at most `close_s`."""

    enabled = True

    def __init__(
        self, lanes: Sequence["Lane"], convert: Callable[[Span], "ReadableSpan"], *, close_s: float = CLOSE_S
    ) -> None:
        self._lanes = tuple(lanes)
        self._close_s = close_s
        for lane in self._lanes:
            lane.start(convert)

    @property
    def dropped(self) -> int:
        """Spans lost so far to a full queue or a failed post, over all lanes."""
        return sum(lane.dropped for lane in self._lanes)

    def record(self, span: Span) -> None:
        for lane in self._lanes:
            lane.offer(span)

    def close(self) -> None:
        """Flush and stop. Call it after the unit has drained; spans recorded later are dropped."""
        deadline = time.monotonic() + self._close_s
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join(deadline, abandon_s=deadline - self._close_s / 3)


class Lane:
    """A bounded queue and the daemon thread that posts what is in it, oldest first.

    The loop's thread appends, the lane's thread pops: both are atomic on a deque, so neither waits for the other.
    """

    def __init__(
        self,
        post: Post,
        *,
        interrupt: Callable[[], None] | None = None,
        delay_s: float = BUFFER_DELAY_S,
        max_queued: int = MAX_QUEUED_SPANS,
    ) -> None:
        self._post = post
        self._interrupt = interrupt
        self._delay_s = delay_s
        self._max_queued = max_queued
        self._spans: deque[Span] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._refused = 0
        self._failed = 0
        self._reported_s = 0.0

    @property
    def dropped(self) -> int:
        """Spans lost to a full queue (counted by the recording thread) or a failed post (by the lane's thread)."""
        return self._refused + self._failed

    def start(self, convert: Callable[[Span], "ReadableSpan"]) -> None:
        self._thread = threading.Thread(target=self._run, args=(convert,), name="oriel-spans", daemon=True)
        self._thread.start()

    def offer(self, span: Span) -> None:
        if self._stopping or len(self._spans) >= self._max_queued:
            self._refused += 1
            return
        self._spans.append(span)
        if len(self._spans) >= MAX_BATCH_SPANS and not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def join(self, deadline: float, *, abandon_s: float) -> None:
        """Wait for the thread until `deadline`; at `abandon_s`, break off a retry that is being waited for."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, abandon_s - time.monotonic()))
        if not self._thread.is_alive():
            return
        self._abandoned = True
        if self._interrupt is not None:
            self._interrupt()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, convert: Callable[[Span], "ReadableSpan"]) -> None:
        while not self._stopping:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._flush(convert)
        self._flush(convert)

    def _flush(self, convert: Callable[[Span], "ReadableSpan"]) -> None:
        while self._spans:
            batch = [self._spans.popleft() for _ in range(min(len(self._spans), MAX_BATCH_SPANS))]
            if self._abandoned or not self._deliver(batch, convert):
                self._failed += len(batch)
                self._report()

    def _deliver(self, batch: Sequence[Span], convert: Callable[[Span], "ReadableSpan"]) -> bool:
        try:
            return self._post([convert(span) for span in batch])
        except Exception:
            # The thread must live: a span that cannot be encoded costs its batch, not every later trace.
            _log.debug("a batch of spans was lost", exc_info=True)
            return False

    def _report(self) -> None:
        now = time.monotonic()
        if not self._stopping and now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            _log.warning("the trace collector does not take spans: %d dropped so far", self.dropped)


def _converter(service: str) -> Callable[[Span], "ReadableSpan"]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

    service = service.removeprefix("oriel-")
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"oriel-{service}"}
    resource = Resource.create({**named, "oriel.unit": service})
    scope = InstrumentationScope("oriel")
    kinds = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def convert(span: Span) -> ReadableSpan:
        ctx = span.context
        state = TraceState.from_header([ctx.state]) if ctx.state else None
        parent = SpanContext(ctx.trace_id, span.parent_id, True, sampled) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=SpanContext(ctx.trace_id, ctx.span_id, False, sampled, state),
            parent=parent,
            resource=resource,
            attributes=dict(span.attributes),
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=wall_ns(span.start_s),
            end_time=wall_ns(span.end_s),
            instrumentation_scope=scope,
        )

    return convert


def _collector_post() -> tuple[Post, Callable[[], None]]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    # Our own report says it once a minute; the exporter would say it per attempt.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter()

    def post(spans: Sequence["ReadableSpan"]) -> bool:
        return exporter.export(spans) is SpanExportResult.SUCCESS

    return post, exporter.shutdown


def _buffer_post(base: str, timeout_s: float) -> Post:
    # Not OTLPSpanExporter: a collector's credentials, certificates and proxies in OTEL_* are not for the buffer.
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    address = urlsplit(base)
    host, port = address.hostname or "127.0.0.1", address.port or 4318

    def post(spans: Sequence["ReadableSpan"]) -> bool:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            body = encode_spans(spans).SerializeToString()
            connection.request("POST", "/v1/traces", body, {"content-type": "application/x-protobuf"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return post
