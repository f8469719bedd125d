"""KEDA's connection to the external scaler: what lies between cuts it, or one end is gone without a word."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection

from oriel_gateway.admin.external_scaler import PINGS_S

from ..waiting import until
from .gate import INFER
from .keda import PATH, keda, reference
from .scaler_stack import WAITING, Scaled, stack
from .stack import Client, nobody

DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
ACK = END_STREAM = 1


class Between:
    """A proxy for connections between KEDA and the scaler."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        self._pumps |= {asyncio.create_task(self._pump(reader, back))}
        self._pumps |= {asyncio.create_task(self._pump(there, writer))}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        self.cut()

    def vanish(self) -> None:
        """Pass on nothing more, and leave the connections open: like a machine that has lost its power."""
        for pump in self._pumps:
            pump.cancel()

    def cut(self) -> None:
        """Abort the connections on both sides, as a balancer does with those that are silent for too long."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def behind_a_proxy(closed: int, pings_s: tuple[float, float] = PINGS_S) -> AsyncIterator[tuple[Scaled, Between]]:
    """A scaler, and an operator that asks it through a proxy."""
    async with stack(closed, pings_s=pings_s) as it:
        between = Between(it.scaler_port)
        server = await asyncio.start_server(between.serve, "127.0.0.1", 0)
        try:
            async with keda(server.sockets[0].getsockname()[1]) as operator:
                it.operator = operator
                yield it, between
        finally:
            server.close()
            await between.close()


async def test_a_peer_that_vanished_is_found_out_by_a_ping() -> None:
    """grpcio waited a minute for the answer to a ping, whatever the time-out of its keep-alive was."""
    with nobody() as closed:
        async with behind_a_proxy(closed, pings_s=(0.2, 1.0)) as (it, between), it.operator.listening("p"):
            await until(it.listeners)
            between.vanish()
            await until(lambda: not it.listeners(), timeout_s=40.0)
            assert not it.scaler.calls


async def test_pushes_that_nobody_reads_any_more_keep_no_call_waiting() -> None:
    with nobody() as closed:
        async with behind_a_proxy(closed) as (it, between), Client(it.port) as client:
            async with it.operator.listening("p"):
                await until(it.listeners)
                between.vanish()
                client.send(INFER, b"x", headers=WAITING)
                await until(lambda: it.core.scaled.plans["p"].latest.active)
                async with keda(it.scaler_port) as another, another.listening("p"):  # KEDA's new leader
                    await until(lambda: another.states.get("p") == [True])
                    assert await another.poll() == (1.0, 1.0, True)


async def test_after_a_stream_was_cut_pushes_go_on_with_the_next_one() -> None:
    """The stream ended with an error, and the first `true` for a call fell into the time without one."""
    with nobody() as closed:
        async with behind_a_proxy(closed) as (it, between), Client(it.port) as client:
            planning = asyncio.ensure_future(it.core.scaled.run())
            async with it.operator.listening("p"):
                await until(lambda: it.operator.states.get("p") == [False])
                between.cut()
                await until(lambda: it.operator.ended == [grpc.StatusCode.UNAVAILABLE] and not it.listeners())
            client.send(INFER, b"x", headers=WAITING)
            await until(lambda: it.core.scaled.plans["p"].latest.active)
            async with it.operator.listening("p"):
                await until(lambda: len(it.operator.states["p"]) >= 4)
                assert set(it.operator.states["p"][1:]) == {True} and it.listeners() == 1
            planning.cancel()


class Balancer:
    """A client that speaks HTTP/2 itself, as a balancer does that opens connections of its own.

    states: what the stream reported; ended: whether the server has ended the stream.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.states: list[bool] = []
        self.ended = False

    def open(self) -> None:
        connection = H2Connection(H2Configuration(client_side=True))
        connection.initiate_connection()
        path = PATH + "StreamIsActive"
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "gateway-scaler")]
        connection.send_headers(1, [*fields, ("content-type", "application/grpc"), ("te", "trailers")])
        message = reference().SerializeToString()
        connection.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        self._writer.write(connection.data_to_send())

    def _send(self, kind: int, payload: bytes, flags: int = 0) -> None:
        self._writer.write(len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload)

    def go_away(self) -> None:
        """Say that no further stream will be opened; what is open goes on."""
        self._send(GOAWAY, bytes(8))

    async def read(self) -> None:
        """Read until the stream ends."""
        data = b""
        while not self.ended:
            head = await self._reader.readexactly(9)
            kind, flags = head[3], head[4]
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._send(kind, payload if kind == PING else b"", ACK)
            elif kind in (DATA, HEADERS):
                data += payload if kind == DATA else b""
                self.ended = bool(flags & END_STREAM)
            while len(data) >= 5:  # each message: five bytes of gRPC, and two for `true`, none for `false`
                size = int.from_bytes(data[1:5], "big")
                self.states.append(bool(size))
                data = data[5 + size :]


async def test_a_client_that_announces_its_end_gets_its_pushes_and_leaves_nothing() -> None:
    with nobody() as closed:
        async with stack(closed) as it, Client(it.port) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.scaler_port)
            balancer = Balancer(reader, writer)
            balancer.open()
            reading = asyncio.ensure_future(balancer.read())
            await until(lambda: balancer.states == [False] and it.listeners() == 1)
            balancer.go_away()
            client.send(INFER, b"x", headers=WAITING)
            await until(lambda: balancer.states[1:] or balancer.ended)
            assert balancer.states[:2] == [False, True] and not balancer.ended
            await it.scaler.close()
            await until(lambda: balancer.ended)
            await reading
            assert not it.listeners()
            writer.close()
