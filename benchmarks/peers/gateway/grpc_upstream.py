"""A gRPC server that answers every call with a message of 1 KB, on our engine: it is not what is measured.

grpc_upstream.py PORT
"""

import asyncio
import sys
from time import monotonic

import uvloop

from oriel_wire.engine.h2_transport import H2Transport
from oriel_wire.h2.grpc import HEAD, prefix
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field, FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

LIMITS = H2Limits(stream_window_bytes=1 << 20, connection_window_bytes=1 << 26, requests_per_turn=1 << 20)
ANSWER = prefix(1024) + b"y" * 1024
READY = prefix(2) + b"\x08\x01"  # what probes want to read
TRAILERS = literal(b"grpc-status", b"0")


class Call(Stream):
    __slots__ = ("answer",)
    answer: bytes


class Server(H2Transport):
    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop(), client=False, limits=LIMITS, memo=FieldMemo())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.open()

    def data_received(self, data: bytes) -> None:
        self.receive(data, monotonic())
        if self.out:
            self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end_streams()

    def new_stream(self, stream_id: int) -> Stream:
        return Call()

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        assert isinstance(stream, Call)
        stream.answer = READY if any(value.endswith(b"Ready") for _, value in fields) else ANSWER

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, Call)
        self.consumed(stream, len(data))
        if end:
            self.send_headers(stream, HEAD, False)
            self.send_data(stream, stream.answer, False)
            self.send_headers(stream, TRAILERS, True)

    def on_reset(self, stream: Stream, code: int) -> None:
        pass

    def connection_error(self, code: int, message: str) -> None:
        print(message, file=sys.stderr)
        self.transport.abort()


async def main() -> None:
    await asyncio.get_running_loop().create_server(Server, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    await asyncio.Event().wait()


uvloop.run(main())
