"""The connections of the gRPC port: one `GrpcCall` per stream."""

from oriel_inference.servers.grpc_call import GrpcCall, GrpcPort
from oriel_inference.servers.statuses import head_refusal
from oriel_wire.engine.grpc_port import PortConnection
from oriel_wire.engine.limits import reason_phrase
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h1.request import RequestHead
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream


class GrpcConnection(PortConnection):
    """One connection."""

    __slots__ = ("_plans", "_port")

    def __init__(self, server: HttpServer, port: GrpcPort, limits: H2Limits, *, trusted: bool) -> None:
        super().__init__(server, limits)
        self._port = port
        self._plans = port.plans[trusted]

    def new_stream(self, stream_id: int) -> GrpcCall:
        return GrpcCall(self, self._port, self._plans)

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        if self._judged is not None:
            self.trust_fields()
        super().on_headers(stream, fields, end)


def refuse_http1(head: RequestHead | None, status: int, message: str) -> bytes:
    """Return a whole answer to a client that speaks HTTP/1.1."""
    refusal = head_refusal(head, status, message)
    fields = "".join([f"{name}: {value}\r\n" for name, value in refusal.headers])
    start = f"HTTP/1.1 {status} {reason_phrase(status)}\r\nconnection: close\r\n{fields}"
    return f"{start}content-length: {len(refusal.body)}\r\n\r\n".encode("latin-1") + refusal.body
