"""Spans over the wire, judged by OpenTelemetry's own protobuf messages on a receiver of ours."""

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from oriel_wire.engine import spans
from oriel_wire.engine.spans import ExportingSink, Lane, open_sink
from oriel_wire.trace import NullSink, Span, SpanSink, TraceContext, child, new_trace, wall_ns

from ..waiting import TIMEOUT_S


class Receiver(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        self.arrived = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        return [s for r in self.requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        self.server.arrived.release()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (spans.BUFFER_VARIABLE, *spans.COLLECTOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    # The exporter's own ten seconds are little for a machine that is busy with something else.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(int(TIMEOUT_S)))


def opened(service: str) -> SpanSink:
    """A sink that posts soon and waits for a slow receiver."""
    return open_sink(service, collector_delay_s=0.05, post_timeout_s=TIMEOUT_S, close_s=TIMEOUT_S)


def span(ctx: TraceContext, **changed: Any) -> Span:
    now = time.monotonic()
    return Span(**{"name": "gateway.request", "context": ctx, "parent_id": 0, "start_s": now, "end_s": now, **changed})


@pytest.mark.parametrize("variable", [spans.BUFFER_VARIABLE, spans.COLLECTOR_VARIABLES[0]])
def test_a_span_arrives_whole(receiver: Receiver, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, receiver.url)
    root = TraceContext(0xABC, 0xD, True, "vendor=1")
    sent = span(
        child(root), parent_id=root.span_id, kind="server", error="boom", attributes={"oriel.request_id": "r1", "n": 3}
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


def test_without_a_destination_opentelemetry_is_not_imported() -> None:
    assert isinstance(open_sink("gateway"), NullSink)
    code = (
        "import sys; from oriel_wire.engine.spans import open_sink; open_sink('x');"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    environ = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    entered, release = threading.Event(), threading.Event()

    def stuck(_: Sequence[object]) -> bool:
        entered.set()
        return release.wait(TIMEOUT_S)

    lane = Lane(stuck, max_queued=10, delay_s=0.001)
    sink = ExportingSink([lane], lambda s: s, close_s=TIMEOUT_S)  # type: ignore[arg-type,return-value]
    sink.record(span(new_trace(True)))
    assert entered.wait(TIMEOUT_S)
    for _ in range(25):
        sink.record(span(new_trace(True)))
    assert sink.dropped == 15
    release.set()
    sink.close()
    assert sink.dropped == 15


def test_a_span_that_cannot_be_sent_costs_its_batch_only(receiver: Receiver) -> None:
    posted: list[int] = []
    done = threading.Event()

    def post(batch: Sequence[object]) -> bool:
        posted.append(len(batch))
        done.set()
        if len(posted) == 1:
            raise ValueError("cannot encode")
        return True

    lane = Lane(post, delay_s=0.001)
    sink = ExportingSink([lane], lambda s: s, close_s=TIMEOUT_S)  # type: ignore[arg-type,return-value]
    sink.record(span(new_trace(True)))
    assert done.wait(TIMEOUT_S)
    sink.record(span(new_trace(True)))
    sink.close()
    assert (posted, sink.dropped) == ([1, 1], 1)


DYING = """
import sys, time
from oriel_wire.engine.spans import open_sink
from oriel_wire.trace import Span, new_trace
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
