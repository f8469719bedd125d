"""An OTLP/HTTP receiver, as a collector is one. What it gets is decoded by OpenTelemetry's own protobuf messages."""

import gzip
import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(http.server.ThreadingHTTPServer):
    """answers: status and body of the next answers; then 200 without a body. sock: bound, to listen at."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=sock is None)
        if sock is not None:
            self.socket.close()
            self.socket, self.server_address = sock, sock.getsockname()
            self.server_activate()
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[tuple[int, bytes]] = []
        self.arrived = threading.Semaphore(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        return [s for r in self.requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]

    def by_unit(self, trace_id: str) -> dict[str, list[Any]]:
        """Return unit -> its spans of a trace. trace_id: in hexadecimal."""
        wanted, found = bytes.fromhex(trace_id), dict[str, list[Any]]()
        for request in tuple(self.requests):
            for resource in request.resource_spans:
                (unit,) = [each.value.string_value for each in resource.resource.attributes if each.key == "oriel.unit"]
                spans = [s for scope in resource.scope_spans for s in scope.spans if s.trace_id == wanted]
                if spans:
                    found.setdefault(unit, []).extend(spans)
        return found


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        assert self.path == "/v1/traces"
        status, answer = self.server.answers.pop(0) if self.server.answers else (200, b"")
        if status == 200 and self.headers["content-type"] == "application/x-protobuf":
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        self.server.arrived.release()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving(sock: socket.socket | None = None) -> Iterator[Receiver]:
    """Run a receiver on a free port of loopback, or on a socket that is bound."""
    with Receiver(sock) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span: texts and numbers."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
