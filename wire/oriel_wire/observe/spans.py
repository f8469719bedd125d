"""Sends finished spans to OTLP/HTTP receivers without ever holding up a request.

`keep` appends a record to a bounded queue for each receiver and returns. A daemon thread per receiver builds the spans
of the records, encodes and posts them (docs/decisions/0001-span-export-queue.md). A receiver that is slow or gone costs
the spans that do not fit the queue, which are counted, and no request any time.

A receiver that cannot be reached, as one that is being replaced, gets the same spans again for up to UNREACHABLE_S; one
that answers that it is busy, for as long as one request may take.
"""

import gzip
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from oriel_wire.observe.otel_settings import (
    BUFFER_VARIABLE,
    COLLECTOR_VARIABLES,
    Collector,
    Queue,
    buffer_of,
    collector_of,
    queue_of,
    resource_of,
    sampling_of,
)
from oriel_wire.observe.sampling import ALWAYS, Sampling
from oriel_wire.observe.telemetry import Histogram
from oriel_wire.observe.trace import NullSink, Span, SpanSink
from oriel_wire.observe.unsampled import SEGMENTS, Unsampled

if TYPE_CHECKING:
    import httpx

    from oriel_wire.observe.otlp import JsonEncoder, ProtobufEncoder

__all__ = ["BUFFER_VARIABLE", "COLLECTOR_VARIABLES", "DROPPED", "ExportingSink", "Lane", "open_sink"]

MAX_BATCH_SPANS = 512
BUFFER_DELAY_S = 0.2
POST_TIMEOUT_S = 2.0
CLOSE_S = 1.5
REPORT_EVERY_S = 60.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 8.0
UNREACHABLE_S = 60.0
CONNECT_S = 2.0
DROPPED = ("queue", "export", "rejected")
_RETRIED = frozenset({429, 502, 503, 504})
_GZIP_LEVEL = 1

_log = logging.getLogger(__name__)

Build = Callable[..., Iterable[Span]]
# Sends spans and returns how many of them the receiver rejected. Raises `NotDelivered` if it took none.
Deliver = Callable[[Sequence[Span]], int]


class NotDelivered(Exception):
    """A batch of spans that the receiver did not take."""


def open_sink(
    unit: str,
    *,
    post_timeout_s: float = POST_TIMEOUT_S,
    close_s: float = CLOSE_S,
    first_retry_s: float = FIRST_RETRY_S,
    unreachable_s: float = UNREACHABLE_S,
) -> SpanSink:
    """A sink for `unit` ("gateway"), fed by the environment. Raises StartFailed if that cannot be used.

    OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT): a collector, with OpenTelemetry's other variables, see
    `otel_settings`. ORIEL_TRACE_BUFFER: the supervisor's trace buffer. Both may be set. Neither: a NullSink.

    post_timeout_s: seconds of one post to the trace buffer; a collector has its own in OTEL_EXPORTER_OTLP_TIMEOUT.
    close_s: the longest time that `close` of the sink takes.
    first_retry_s: the pause before a request is sent again, of which a random part is left out; it doubles each time.
    unreachable_s: seconds for which spans are kept for a receiver that cannot be reached.
    """
    collector, buffer = collector_of(), buffer_of()
    queue, resource = queue_of(), resource_of(unit)
    if collector is None and not buffer:
        return NullSink()
    from oriel_wire.observe.otlp import JsonEncoder, ProtobufEncoder  # only if spans are sent: it takes time to load

    version = resource["service.version"]
    lanes: list[Lane] = []
    if buffer:
        local = Collector(url=f"{buffer}/v1/traces", json=False, gzip=False, headers={}, timeout_s=post_timeout_s)
        # A collector's proxies are not for the buffer, which is on this machine.
        poster = Poster(local, ProtobufEncoder(resource, version), trust_env=False, unreachable_s=unreachable_s)
        lanes.append(Lane(poster.deliver, interrupt=poster.interrupt, delay_s=BUFFER_DELAY_S))
    if collector is not None:
        encoder = (JsonEncoder if collector.json else ProtobufEncoder)(resource, version)
        poster = Poster(collector, encoder, first_retry_s=first_retry_s, unreachable_s=unreachable_s)
        lanes.append(Lane(poster.deliver, interrupt=poster.interrupt, queue=queue))
    # Requests of services have stages, and so take twice the memory.
    segments = SEGMENTS // 2 if unit == "logic" else SEGMENTS
    return ExportingSink(lanes, sampling=sampling_of(), close_s=close_s, segments=segments)


class ExportingSink:
    """Gives every record to each lane. `keep` is for one thread; `close` blocks at most `close_s`."""

    enabled = True

    def __init__(
        self,
        lanes: Sequence["Lane"],
        *,
        sampling: Sampling = ALWAYS,
        close_s: float = CLOSE_S,
        segments: int = SEGMENTS,
    ) -> None:
        self.lanes = tuple(lanes)
        self.sampling = sampling
        self.ring = Unsampled(segments)
        self._close_s = close_s
        for lane in self.lanes:
            lane.start()

    @property
    def dropped(self) -> int:
        """Spans lost so far, over all lanes."""
        return sum(sum(lane.dropped.values()) for lane in self.lanes)

    def keep(self, build: Build, record: tuple[Any, ...], spans: int) -> None:
        for lane in self.lanes:
            lane.offer(build, record, spans)

    def record(self, span: Span) -> None:
        self.keep(_alone, (span,), 1)

    def close(self) -> None:
        """Flush and stop. Call it after the unit has drained; spans recorded later are dropped."""
        deadline = time.monotonic() + self._close_s
        for lane in self.lanes:
            lane.stop()
        for lane in self.lanes:
            lane.join(deadline, abandon_s=deadline - self._close_s / 3)


class Lane:
    """A bounded queue and the daemon thread that delivers what is in it, oldest first.

    The loop's thread appends, the lane's thread pops: both are atomic on a deque, so neither waits for the other. Each
    counts in numbers of its own: `_offered` and `_refused` are the loop's, all others the thread's.

    export_s: seconds that requests to the receiver took, with their retries.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        interrupt: Callable[[], None] | None = None,
        queue: Queue | None = None,
        delay_s: float = BUFFER_DELAY_S,
    ) -> None:
        self._deliver = deliver
        self._interrupt = interrupt
        self._delay_s = queue.delay_s if queue is not None else delay_s
        self.capacity = (queue or Queue()).max_spans
        self._records: deque[tuple[Build, tuple[Any, ...], int]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._offered = self._taken = 0
        self._refused = self._failed = self._rejected = 0
        self.export_s = Histogram()
        self._reported_s = 0.0

    @property
    def pending(self) -> int:
        """Spans that wait."""
        return max(0, self._offered - self._taken)

    @property
    def dropped(self) -> dict[str, int]:
        """Spans lost so far: to a full queue, to a receiver that does not answer, and those that it rejected."""
        return dict(zip(DROPPED, (self._refused, self._failed, self._rejected), strict=True))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="oriel-spans", daemon=True)
        self._thread.start()

    def offer(self, build: Build, record: tuple[Any, ...], spans: int) -> None:
        """Put a record into the queue, or count its spans as lost."""
        queued = self._offered - self._taken + spans
        if self._stopping or queued > self.capacity:
            self._refused += spans
            return
        self._offered += spans
        self._records.append((build, record, spans))
        if queued >= MAX_BATCH_SPANS and not self._wake.is_set():
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

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._flush()
        self._flush()

    def _flush(self) -> None:
        records = self._records
        while records:
            batch: list[tuple[Build, tuple[Any, ...], int]] = []
            spans = 0
            while records and spans < MAX_BATCH_SPANS:
                record = records.popleft()
                batch.append(record)
                spans += record[2]
            self._export(batch, spans)
            self._taken += spans

    def _export(self, batch: Sequence[tuple[Build, tuple[Any, ...], int]], expected: int) -> None:
        if self._abandoned:
            self._failed += expected
            return
        began_s = time.monotonic()
        try:
            self._rejected += self._deliver([span for build, record, _ in batch for span in build(*record)])
        except NotDelivered:
            self._failed += expected
            self._report()
        except Exception:
            # The thread must live: a span that cannot be encoded costs its batch, not every later trace.
            _log.debug("a batch of spans was lost", exc_info=True)
            self._failed += expected
            self._report()
        self.export_s.observe(time.monotonic() - began_s)

    def _report(self) -> None:
        now = time.monotonic()
        if not self._stopping and now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            lost = sum(self.dropped.values())
            _log.warning("the trace collector does not take spans: %d dropped so far", lost)


class Poster:
    """Posts spans to one receiver, and again after a while if it asks for that; for one thread."""

    def __init__(
        self,
        collector: Collector,
        encoder: "ProtobufEncoder | JsonEncoder",
        *,
        trust_env: bool = True,
        first_retry_s: float = FIRST_RETRY_S,
        unreachable_s: float = UNREACHABLE_S,
    ) -> None:
        import httpx  # only if spans are sent: it is large

        self._collector = collector
        self._encoder = encoder
        self._first_retry_s = first_retry_s
        self._unreachable_s = unreachable_s
        self._timeout = httpx.Timeout
        self._error = httpx.HTTPError
        # No connection, or one that was closed: another one may do.
        self._unreachable = (httpx.NetworkError, httpx.ConnectTimeout, httpx.ProxyError, httpx.RemoteProtocolError)
        self._interrupted = threading.Event()
        self._headers = {**collector.headers, "content-type": encoder.content_type, "user-agent": "oriel"}
        if collector.gzip:
            self._headers["content-encoding"] = "gzip"
        self._client = httpx.Client(
            verify=collector.tls if collector.tls is not None else False,
            timeout=collector.timeout_s,
            trust_env=trust_env,
            limits=httpx.Limits(max_connections=1),
        )
        # httpx logs each request, and our own report says once a minute what is lost.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    def interrupt(self) -> None:
        """Wait for no further retry."""
        self._interrupted.set()

    def deliver(self, spans: Sequence[Span]) -> int:
        """See `Deliver`. A request that is answered is repeated for at most the collector's timeout in all."""
        body = self._encoder.encode(spans)
        if self._collector.gzip:
            body = gzip.compress(body, _GZIP_LEVEL)
        now = time.monotonic()
        reached_by_s = now + max(self._unreachable_s, self._collector.timeout_s)
        answered_by_s = now + self._collector.timeout_s
        wait_s = self._first_retry_s
        while True:
            answer = self._post(body, max(answered_by_s - now, 0.001))
            if answer is not None and answer.is_success:
                return min(self._encoder.rejected(answer.content), len(spans))
            if answer is not None and answer.status_code not in _RETRIED:
                raise NotDelivered
            retry_s = _retry_after_s(answer)
            pause_s = wait_s * (0.5 + 0.5 * random.random()) if retry_s is None else retry_s
            again_s = time.monotonic() + pause_s
            if again_s >= (reached_by_s if answer is None else answered_by_s) or self._interrupted.wait(pause_s):
                raise NotDelivered
            now = time.monotonic()
            if answer is None:
                answered_by_s = now + self._collector.timeout_s
            wait_s = min(2.0 * wait_s, LONGEST_RETRY_S)

    def _post(self, body: bytes, left_s: float) -> "httpx.Response | None":
        """Return the receiver's answer, or None if it cannot be reached. Raises NotDelivered if it does not answer."""
        timeout = self._timeout(left_s, connect=min(left_s, CONNECT_S))
        try:
            return self._client.post(self._collector.url, content=body, headers=self._headers, timeout=timeout)
        except self._unreachable:
            return None
        except self._error as error:
            raise NotDelivered from error


def _retry_after_s(answer: "httpx.Response | None") -> float | None:
    given = answer.headers.get("retry-after", "") if answer is not None else ""
    return float(given) if given.isascii() and given.isdigit() and len(given) < 6 else None


def _alone(span: Span) -> tuple[Span]:
    return (span,)
