"""A closed loop of gRPC calls whose ids differ, as clients send them: each call that ends begins the next one.

grpc_load.py PORT CONNECTIONS STREAMS SECONDS MESSAGE_BYTES KEY [repeated]: prints the number of calls, their seconds
and the median and 99th percentile of their milliseconds as JSON. `repeated`: the same ids in every call.

Fields that a client sends in every call are kept in the server's table of header fields, if the server has one, as
gRPC's own clients do; ids are sent as they are.
"""

import asyncio
import json
import random
import struct
import sys
from time import monotonic

import uvloop

from oriel_wire.engine.h2_transport import H2Transport
from oriel_wire.h2.grpc import prefix, status_of
from oriel_wire.h2.hpack import literal
from oriel_wire.h2.known_fields import Field, FieldMemo
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream
from oriel_wire.v2.proto import v2_pb2

LIMITS = H2Limits(stream_window_bytes=1 << 20, connection_window_bytes=1 << 26)
METHOD = b"\x83\x86"  # POST, http
TABLE_OF_4096 = b"\x3f\xe1\x1f"
ANSWER_BYTES = 5 + 1024


def message(size: int) -> bytes:
    """A framed ModelInfer request of `size` bytes, give or take a few."""
    request = v2_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    request.raw_input_contents.append(bytes(size - request.ByteSize() - 4))
    data = request.SerializeToString()
    return prefix(len(data)) + data


def ids(chance: random.Random) -> bytes:
    """Fields of one call: an id of 8 to 36 characters, a trace context, and for one call in four its vendor's state."""
    request_id = b"%036x" % chance.getrandbits(144)
    block = literal(b"x-request-id", request_id[: chance.randint(8, 36)])
    block += literal(b"traceparent", b"00-%032x-%016x-00" % (chance.getrandbits(128), chance.getrandbits(64)))
    if chance.random() < 0.25:
        block += literal(b"tracestate", b"vendor=%x" % chance.getrandbits(chance.randint(16, 96)))
    return block


def indexed(fields: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """The block that enters these fields into an empty table, and the one that refers to them from then on."""
    first = b"".join(b"\x40%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields)
    return TABLE_OF_4096 + METHOD + first, METHOD + bytes(0x80 | 62 + age for age in reversed(range(len(fields))))


def table_bytes(data: bytes) -> int:
    """The size of the table of header fields that a server's first frame allows."""
    settings = data[9 : 9 + int.from_bytes(data[:3], "big")]
    return dict(struct.iter_unpack(">HI", settings)).get(1, 4096)


class Call(Stream):
    __slots__ = ("began_s", "size")
    began_s: float
    size: int


class Load:
    """Shared by all connections. took_s: of every call that has ended. open: calls that are still to be followed."""

    def __init__(self, port: int, key: str, data: bytes, calls: int, seconds: float, repeated: bool) -> None:
        self.data = data
        self.fixed = [
            (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
            (b":authority", b"127.0.0.1:%d" % port),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"grpc-python/1.80.0 grpc-c/53.0.0 (linux; chttp2)"),
            (b"grpc-accept-encoding", b"identity, deflate, gzip"),
            (b"grpc-timeout", b"5S"),
            (b"authorization", b"Bearer " + key.encode()),
        ]
        self.took_s: list[float] = []
        self.open = calls
        self.end_s = monotonic() + seconds
        self.ended = asyncio.get_running_loop().create_future()
        self._chance = random.Random(1)
        self._same = ids(self._chance) if repeated else b""

    def ids(self) -> bytes:
        return self._same or ids(self._chance)

    def fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(reason))


class Client(H2Transport):
    """One connection with `streams` calls at a time."""

    def __init__(self, load: Load, streams: int) -> None:
        super().__init__(asyncio.get_running_loop(), client=True, limits=LIMITS, memo=FieldMemo())
        self.load = load
        self.idle = streams
        self.first, self.block = b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.open()

    def data_received(self, data: bytes) -> None:
        if not self.block:
            if table_bytes(data):
                self.first, self.block = indexed(self.load.fixed)
            else:
                self.block = METHOD + b"".join(literal(*field) for field in self.load.fixed)
        self.receive(data, monotonic())
        if self.out:
            self._write()

    def on_settings(self) -> None:
        while self.idle:
            self.idle -= 1
            self.begin()

    def begin(self) -> None:
        call, load = Call(), self.load
        call.began_s, call.size = monotonic(), 0
        block, self.first = self.first or self.block, b""
        self.send_headers(call, block + load.ids(), False)
        self.send_data(call, load.data, True)

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        if end:
            self.load.fail(f"a call was refused: {fields}")

    def on_data(self, stream: Stream, data: bytes | memoryview, end: bool) -> None:
        assert isinstance(stream, Call)
        stream.size += len(data)
        self.consumed(stream, len(data))

    def on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        assert isinstance(stream, Call)
        load, now = self.load, monotonic()
        if status_of([], fields)[0] or stream.size != ANSWER_BYTES:
            load.fail(f"a call failed: {stream.size} bytes, {fields}")
            return
        load.took_s.append(now - stream.began_s)
        if now < load.end_s:
            self.begin()
            return
        load.open -= 1
        if not load.open and not load.ended.done():
            load.ended.set_result(None)

    def on_reset(self, stream: Stream, code: int) -> None:
        self.load.fail(f"a call was reset: {code}")

    def on_stream_error(self, stream: Stream, code: int, message: str) -> None:
        self.load.fail(message)

    def connection_error(self, code: int, message: str) -> None:
        self.load.fail(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.fail("the server closed a connection")


async def main() -> None:
    port, connections, streams, seconds, size = map(int, sys.argv[1:6])
    began = monotonic()
    load = Load(port, sys.argv[6], message(size), connections * streams, seconds, "repeated" in sys.argv)
    for _ in range(connections):
        await asyncio.get_running_loop().create_connection(lambda: Client(load, streams), "127.0.0.1", port)
    await load.ended
    took = sorted(load.took_s)
    p50, p99 = took[len(took) // 2] * 1e3, took[len(took) * 99 // 100] * 1e3
    print(json.dumps({"calls": len(took), "seconds": monotonic() - began, "p50_ms": p50, "p99_ms": p99}))


if __name__ == "__main__":
    uvloop.run(main())
