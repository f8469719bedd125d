"""Spans over the wire, judged by OpenTelemetry's own protobuf messages on a receiver of ours."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)

from oriel_wire.observe import spans
from oriel_wire.observe.otel_settings import Collector, Queue
from oriel_wire.observe.otlp import ProtobufEncoder
from oriel_wire.observe.spans import LONGEST_RETRY_S, ExportingSink, Lane, Poster, open_sink
from oriel_wire.observe.trace import NullSink, Span, SpanSink, TraceContext, child, new_trace, wall_ns

from ..otlp_receiver import Receiver, receiving
from ..waiting import TIMEOUT_S


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture(autouse=True)
def no_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (spans.BUFFER_VARIABLE, *spans.COLLECTOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    # The ten seconds of the default are little for a machine that is busy with something else.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(int(TIMEOUT_S * 1000)))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def opened(service: str, **options: float) -> SpanSink:
    """A sink that posts soon and waits for a slow receiver."""
    return open_sink(service, post_timeout_s=TIMEOUT_S, close_s=TIMEOUT_S, **options)


def span(ctx: TraceContext, **changed: Any) -> Span:
    now = time.monotonic()
    return Span(**{"name": "gateway.request", "context": ctx, "parent_id": 0, "start_s": now, "end_s": now, **changed})


@pytest.mark.parametrize("variable", [spans.BUFFER_VARIABLE, spans.COLLECTOR_VARIABLES[0]])
def test_a_span_arrives_whole(receiver: Receiver, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, receiver.url)
    root = TraceContext(0xABC, 0xD, True, "vendor=1")
    sent = span(
        child(root),
        parent_id=root.span_id,
        kind="server",
        failed=True,
        error="boom",
        attributes={"oriel.request_id": "r1", "n": 3},
    )
    sink = opened("gateway")
    assert sink.enabled
    sink.record(sent)
    assert receiver.arrived.acquire(timeout=TIMEOUT_S), "the span waits for its delay, not for close()"
    sink.close()

    (got,) = receiver.spans()
    resource = receiver.requests[0].resource_spans[0].resource
    assert {a.key: a.value.string_value for a in resource.attributes}["service.name"] == "oriel-gateway"
    assert (got.trace_id, got.span_id) == (root.trace_id.to_bytes(16, "big"), sent.context.span_id.to_bytes(8, "big"))
    assert got.parent_span_id == root.span_id.to_bytes(8, "big")
    assert (got.trace_state, got.name, got.kind, got.status.message) == ("vendor=1", "gateway.request", 2, "boom")
    assert (got.start_time_unix_nano, got.end_time_unix_nano) == (wall_ns(sent.start_s), wall_ns(sent.end_s))
    assert {a.key for a in got.attributes} == {"oriel.request_id", "n"}


def test_close_flushes_what_is_queued_to_both_destinations(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(spans.BUFFER_VARIABLE, receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.url + "/v1/traces")
    sink = opened("logic")
    for _ in range(600):
        sink.record(span(new_trace(True)))
    sink.close()
    assert len(receiver.spans()) == 1200


def test_without_a_destination_nothing_large_is_imported() -> None:
    assert isinstance(open_sink("gateway"), NullSink)
    code = (
        "import sys; from oriel_wire.observe.spans import open_sink; open_sink('x');"
        "sys.exit(any(name.startswith(('opentelemetry', 'httpx')) for name in sys.modules))"
    )
    environ = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0


def test_a_collector_gets_the_headers_of_its_settings(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-scope=one")
    sink = opened("gateway")
    sink.record(span(new_trace(True)))
    sink.close()
    (headers,) = receiver.headers
    assert (headers["authorization"], headers["x-scope"]) == ("Bearer abc", "one")
    assert (headers["content-type"], headers["content-encoding"]) == ("application/x-protobuf", "gzip")


def test_json_and_no_compression(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    sink = opened("gateway")
    sink.record(span(new_trace(True)))
    sink.close()
    (headers,) = receiver.headers
    assert headers["content-type"] == "application/json" and "content-encoding" not in headers


@pytest.mark.parametrize("status", [429, 503])
def test_a_collector_that_is_busy_is_asked_again(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    receiver.answers = [(status, b""), (status, b"")]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    sink = opened("gateway", first_retry_s=0.001)
    sink.record(span(new_trace(True)))
    for _ in range(3):
        assert receiver.arrived.acquire(timeout=TIMEOUT_S)
    sink.close()
    assert isinstance(sink, ExportingSink) and (len(receiver.spans()), sink.dropped) == (1, 0)


@pytest.mark.parametrize("status", [401, 500])
def test_a_collector_that_refuses_is_not_asked_again(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    receiver.answers = [(status, b"")]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    sink = opened("gateway")
    sink.record(span(new_trace(True)))
    sink.close()
    assert isinstance(sink, ExportingSink) and len(receiver.headers) == 1
    assert sink.lanes[0].dropped == {"queue": 0, "export": 1, "rejected": 0}


class Pauses(threading.Event):
    """Pauses between tries that take no time. then: called after so many."""

    def __init__(self, tries: int, then: Callable[[], object]) -> None:
        super().__init__()
        self.taken_s: list[float] = []
        self._tries, self._then = tries, then

    def wait(self, timeout: float | None = None) -> bool:
        self.taken_s.append(timeout or 0.0)
        if len(self.taken_s) == self._tries:
            self._then()
        return False


def poster(url: str, pauses: Pauses, *, timeout_s: float = TIMEOUT_S, **options: float) -> Poster:
    collector = Collector(url=f"{url}/v1/traces", json=False, gzip=False, headers={}, timeout_s=timeout_s)
    made = Poster(collector, ProtobufEncoder({"oriel.unit": "gateway"}, "1"), trust_env=False, **options)
    made._interrupted = pauses
    return made


def test_spans_are_kept_for_a_collector_that_refuses_the_connection() -> None:
    """They were lost as soon as the pause before the next try was longer than what one request may take."""
    with socket.socket() as held, ExitStack() as stack:
        held.bind(("127.0.0.1", 0))  # nobody listens: connections are refused
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        started: list[Receiver] = []
        pauses = Pauses(3, lambda: started.append(stack.enter_context(receiving(held))))
        made = poster(url, pauses, first_retry_s=2 * TIMEOUT_S, unreachable_s=100 * TIMEOUT_S)
        assert made.deliver([span(new_trace(True))]) == 0
        (receiver,) = started
        assert len(receiver.spans()) == 1 and len(pauses.taken_s) == 3


LOST = [httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError]


@pytest.mark.parametrize("error", LOST)
def test_the_pauses_before_an_unreachable_collector_double_within_bounds(error: type[httpx.TransportError]) -> None:
    left = [error("gone")] * 8

    def answer(_: httpx.Request) -> httpx.Response:
        if left:
            raise left.pop()
        return httpx.Response(200)

    pauses = Pauses(0, list)
    made = poster("http://collector.example", pauses, first_retry_s=1.0, unreachable_s=100 * TIMEOUT_S)
    made._client = httpx.Client(transport=httpx.MockTransport(answer))
    assert made.deliver([span(new_trace(True))]) == 0
    longest = [min(2.0**number, LONGEST_RETRY_S) for number in range(8)]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses.taken_s, longest, strict=True))


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (httpx.ReadTimeout, {"unreachable_s": 100 * TIMEOUT_S}),  # it has the request, and does not answer
        (httpx.ConnectError, {"unreachable_s": 0.0, "timeout_s": 1e-9}),  # for long enough
    ],
    ids=["silent", "unreachable"],
)
def test_spans_that_a_collector_does_not_take_count_as_lost_to_the_export(
    error: type[httpx.TransportError], options: dict[str, float]
) -> None:
    asked = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        raise error("gone")

    made = poster("http://collector.example", Pauses(0, list), **options)
    made._client = httpx.Client(transport=httpx.MockTransport(answer))
    lane = Lane(made.deliver, interrupt=made.interrupt, delay_s=0.001)
    sink = ExportingSink([lane], close_s=TIMEOUT_S)
    sink.record(span(new_trace(True)))
    sink.close()
    assert lane.dropped == {"queue": 0, "export": 1, "rejected": 0} and asked == 1


def test_spans_that_a_collector_rejects_count_as_lost(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 2
    receiver.answers = [(200, answer.SerializeToString())]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    sink = opened("gateway")
    for _ in range(5):
        sink.record(span(new_trace(True)))
    sink.close()
    assert isinstance(sink, ExportingSink)
    assert sink.lanes[0].dropped == {"queue": 0, "export": 0, "rejected": 2}
    assert sink.lanes[0].export_s.count == 1


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    entered, release = threading.Event(), threading.Event()

    def stuck(_: Sequence[Span]) -> int:
        entered.set()
        assert release.wait(TIMEOUT_S)
        return 0

    lane = Lane(stuck, queue=Queue(max_spans=10, delay_s=0.001))
    sink = ExportingSink([lane], close_s=TIMEOUT_S)
    sink.record(span(new_trace(True)))
    assert entered.wait(TIMEOUT_S)
    for _ in range(25):
        sink.record(span(new_trace(True)))
    assert (sink.dropped, lane.pending) == (16, 10)  # the one under way counts until it is delivered
    release.set()
    sink.close()
    assert (sink.dropped, lane.pending) == (16, 0)


def test_a_span_that_cannot_be_sent_costs_its_batch_only() -> None:
    posted: list[int] = []
    done = threading.Event()

    def deliver(batch: Sequence[Span]) -> int:
        posted.append(len(batch))
        done.set()
        if len(posted) == 1:
            raise ValueError("cannot encode")
        return 0

    lane = Lane(deliver, delay_s=0.001)
    sink = ExportingSink([lane], close_s=TIMEOUT_S)
    sink.record(span(new_trace(True)))
    assert done.wait(TIMEOUT_S)
    sink.record(span(new_trace(True)))
    sink.close()
    assert (posted, sink.dropped) == ([1, 1], 1)


def test_a_record_becomes_spans_in_the_thread_of_the_receiver() -> None:
    built: list[str] = []
    delivered: list[int] = []

    def build(context: TraceContext, count: int) -> list[Span]:
        built.append(threading.current_thread().name)
        return [span(child(context)) for _ in range(count)]

    def deliver(batch: Sequence[Span]) -> int:
        delivered.append(len(batch))
        return 0

    sink = ExportingSink([Lane(deliver, delay_s=0.001)], close_s=TIMEOUT_S)
    sink.keep(build, (new_trace(True), 3), 3)
    sink.close()
    assert (built, delivered) == (["oriel-spans"], [3])


DYING = """
import sys, time
from oriel_wire.observe.spans import open_sink
from oriel_wire.observe.trace import Span, new_trace
sink = open_sink("x")
for _ in range(300):
    sink.record(Span(name="n", context=new_trace(True), parent_id=0, start_s=1, end_s=2))
sink.close()
"""


@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_a_dead_collector_does_not_hold_the_exit(kind: str) -> None:
    """OpenTelemetry's own processor waits for up to 30 s at exit; the promise is 2 s, the timeout leaves head room."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if kind == "refused":
            silent.close()
        environ = {"PYTHONPATH": ":".join(sys.path), spans.BUFFER_VARIABLE: url, spans.COLLECTOR_VARIABLES[0]: url}
        command = [sys.executable, "-c", DYING]
        done = subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
        assert b"Traceback" not in done.stderr
