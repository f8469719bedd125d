"""HTTP/2 ingress: each stream of a connection is a gRPC call (`ingress.grpc`) or an HTTP request (`ingress.http2`)."""

from typing import Final

from oriel_gateway.ingress.grpc import GrpcClient
from oriel_gateway.ingress.grpc_web import GrpcWebOverH2
from oriel_gateway.ingress.h2_connection import PublicConnection
from oriel_gateway.ingress.http2 import Http2Client
from oriel_wire.errors import BadMessage
from oriel_wire.h2.block_shapes import BlockShape
from oriel_wire.h2.frames import REFUSED_STREAM
from oriel_wire.h2.grpc import RpcShape
from oriel_wire.h2.grpc_web import BINARY, is_grpc_web
from oriel_wire.h2.known_fields import Field as HeaderField
from oriel_wire.h2.streams import Stream

__all__ = ["Http2Connection"]

MAX_REQUESTS = 16_384  # requests under way on one port; further ones are refused and may be sent again
_GRPC: Final = b"application/grpc"


class Http2Connection(PublicConnection):
    """One public connection of HTTP/2. It passes what comes on a stream to the object that handles this stream's
    call.
    """

    __slots__ = ()

    def new_stream(self, stream_id: int) -> GrpcClient:
        return GrpcClient(self)

    def on_headers(self, stream: Stream, fields: list[HeaderField], end: bool) -> None:
        assert isinstance(stream, GrpcClient)
        if self.server.requests_open >= MAX_REQUESTS:
            self.send_reset(stream, REFUSED_STREAM)
            return
        for name, value in fields:
            if name == b"content-type":
                if value.startswith(_GRPC) and not value.startswith(BINARY):
                    stream.began(fields, end)
                    return
                if is_grpc_web(value) and (b":method", b"POST") in fields:
                    stream.other = stream.connection = web = GrpcWebOverH2(self, stream, fields)
                    web.call = stream
                    stream.began(web.metadata, end)
                    return
                break
        stream.other = plain = Http2Client(self, stream)
        plain.began(fields, end)

    def on_recognised(self, stream: Stream, shape: BlockShape, values: list[bytes], end: bool) -> None:
        assert isinstance(stream, GrpcClient)
        known: RpcShape | None = shape.decision
        if known is not None and self.server.requests_open < MAX_REQUESTS:
            try:
                rpc = known.read(values, self.server.memo)
            except BadMessage:
                pass  # it is refused as the whole list says
            else:
                stream.judge(rpc, end)
                return
        self.on_headers(stream, shape.fields_of(values), end)

    def on_too_large(self, stream: Stream, end: bool) -> None:
        assert isinstance(stream, GrpcClient)
        stream.too_large()

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, GrpcClient)
        if stream.other is None:
            stream.came(data, end)
        else:
            stream.other.came(data, end)

    def on_trailers(self, stream: Stream, fields: list[HeaderField]) -> None:
        self.on_data(stream, b"", True)

    def on_reset(self, stream: Stream, code: int) -> None:
        assert isinstance(stream, GrpcClient)
        if stream.other is None:
            stream.client_left()
        else:
            stream.other.client_left()

    def on_room(self, stream: Stream) -> None:
        assert isinstance(stream, GrpcClient)
        if stream.other is None:
            stream.on_writable(True)
        else:
            stream.other.on_writable(True)
