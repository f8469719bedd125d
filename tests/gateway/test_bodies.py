"""Request and answer bodies in transit: their share of the byte budget, backpressure, and slow clients."""

import asyncio
import json
import socket
import sys
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from oriel_gateway.core import Gateway
from oriel_wire.engine.large_messages import GIVE_BACK_BYTES, LargeMessages
from oriel_wire.engine.limits import HttpLimits

from ..waiting import until
from .fake_transport import HEAD, FakeTransport, core_connections, wired
from .gate import INFER, Gate, idle
from .stack import BRONZE, GOLD, Client, Seen, documents, gateway, upstream


async def test_a_body_in_tiny_pieces_weighs_what_it_is() -> None:
    """A list of pieces of two bytes each would take 25 times the size of the body."""
    async with wired() as (client, _, _, _):
        client.data_received(HEAD % GOLD.encode() + b"content-length: 100000\r\n\r\n")
        assert client.call is not None
        tracemalloc.start()
        for _ in range(49_999):
            client.data_received(b"ab")
        weight = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert client.call.holding.units == 99_998 and weight < 2 * 100_000
        client.connection_lost(None)


class Lines(FakeTransport):
    """Keeps the objects that were written, without copying them."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []

    def writelines(self, lines: Any) -> None:
        self.written += lines

    def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_a_large_body_and_a_large_answer_are_passed_on_uncopied() -> None:
    async with wired() as (client, _, up, _):
        lines, answered = Lines(), Lines()
        up.transport, client.transport = lines, answered  # type: ignore[assignment]
        pieces = [bytes(100_000) for _ in range(3)]
        client.data_received(HEAD % GOLD.encode() + b"content-length: 300000\r\n\r\n")
        for piece in pieces:
            client.data_received(piece)
        assert all(any(piece is written for written in lines.written) for piece in pieces)
        up.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n")
        for piece in pieces:
            up.data_received(piece)
        assert all(any(piece is written for written in answered.written) for piece in pieces[:2])
        assert client.call is None


async def test_bodies_that_came_with_their_heads_count_while_they_wait() -> None:
    """A body that arrives together with its head is on the byte budget as well, like one that is collected."""
    async with upstream() as up:
        up.answer = hold = Gate()
        files = documents([up.port], max_inflight=1)
        files["all.toml"] = files["all.toml"].replace(b"max_queue = 100", b"max_queue = 100\nmax_queue_bytes = 40000")
        async with gateway(files) as (port, core):
            clients = [await Client(port).__aenter__() for _ in range(4)]
            for number, client in enumerate(clients):
                client.send(INFER, b"x" * 12_000, key=BRONZE)
                if number == 0:
                    await until(lambda: len(hold.order) == 1)
            refused = await clients[3].reply()
            assert refused.status == 503 and core.pools["p"].held_bytes == 24_000
            for _ in range(3):
                hold.go.release()
            assert [(await client.reply()).status for client in clients[:3]] == [200] * 3
            await until(lambda: idle(core) and core.pools["p"].held_bytes == 0)
            for client in clients:
                client.writer.close()


async def test_a_streamed_answer_waits_for_its_reader_and_then_arrives_whole() -> None:
    """The gateway stops reading from the upstream while the client does not read, so nothing gathers in between."""
    sent = 0
    total = 400

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(total):
            event = b"data: %06d %s\n\n" % (number, b"x" * 65_000)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    ports = [server.sockets[0].getsockname()[1]]
    async with gateway(documents(ports)) as (port, core):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.write(b"POST /v2/models/digits/generate_stream HTTP/1.1\r\nhost: x\r\nx-api-key: key-gold\r\n\r\n")
        await reader.readuntil(b"data: 000000 ")
        (connection,) = core_connections(core)
        await until(lambda: not connection.call.connection.transport.is_reading())
        assert sent < total
        (gate,) = core.pools.values()
        assert gate.admission.inflight == 0 and gate.streams.shares.held == 1
        events = 1
        while piece := await reader.read(1 << 20):
            events += piece.count(b"data: ")
            if piece.endswith(b"0\r\n\r\n"):
                break
        assert sent == total and events >= total - 20  # a piece may end in the middle of a name
        writer.close()
        await writer.wait_closed()
        await until(lambda: idle(core))
    server.close()
    await server.wait_closed()


class Slow:
    """A client that sends and receives only when the test calls `move`."""

    def __init__(self, port: int, first: bytes = b"") -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.sendall(first)
        self.sock.setblocking(False)
        self.got = b""
        self.cut = False

    def move(self, data: bytes) -> None:
        """Send some bytes, and note what was received."""
        with suppress(OSError):
            self.sock.send(data)
        try:
            piece = self.sock.recv(4096)
            self.got += piece
            self.cut = self.cut or not piece
        except BlockingIOError:
            pass
        except ConnectionError:
            self.cut = True


async def test_slow_heads_bodies_readers_and_idlers_are_cut_while_others_are_served() -> None:
    """R20 with limits of a quarter of a second."""
    size = 20_000_000

    async def large(seen: Seen) -> bytes:
        if seen.get("x-large") is None:
            return await up.ok(seen)
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)

    short = HttpLimits(
        head_timeout_s=0.25, body_timeout_s=0.25, body_min_bytes=1000, idle_timeout_s=0.5, write_stall_s=0.25
    )
    async with upstream() as up, gateway(documents([up.port]), limits=short) as (port, core):
        up.answer = large
        heads = [Slow(port) for _ in range(5)]
        # These send or read all the time, but fewer than body_min_bytes per window.
        bodies = [Slow(port, HEAD % BRONZE.encode() + b"content-length: 100000\r\n\r\n") for _ in range(5)]
        silent = [Slow(port) for _ in range(5)]
        readers = [Slow(port, HEAD % GOLD.encode() + b"x-large: 1\r\ncontent-length: 0\r\n\r\n") for _ in range(3)]
        sent = iter(b"GET /v2 HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 100_000)
        async with asyncio.timeout(60):
            while not all(slow.cut for slow in (*heads, *bodies, *silent)):
                byte = bytes([next(sent)])
                for slow in (*heads, *bodies):
                    slow.move(byte)
                for slow in silent:
                    slow.move(b"")
                async with Client(port) as canary:
                    assert (await canary.ask(INFER)).status == 200
                await asyncio.sleep(0.01)
            await until(lambda: idle(core) and core.pools["p"].held_bytes == 0)
        assert all(slow.got.startswith(b"HTTP/1.1 408 ") for slow in (*heads, *bodies))
        assert not any(slow.got for slow in silent)
        for slow in (*heads, *bodies, *silent, *readers):
            slow.sock.close()


async def test_keep_alive_without_a_request_ends_whatever_else_is_sent() -> None:
    """Empty lines before a request are ignored: they begin no request, so they do not prolong the wait for one."""
    async with upstream() as up, gateway(documents([up.port]), limits=HttpLimits(idle_timeout_s=0.5)) as (port, core):
        fresh = Slow(port)
        used = Slow(port, b"GET /v2 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n" % GOLD.encode())
        async with asyncio.timeout(60):
            while not (fresh.cut and used.cut):
                fresh.move(b"\r\n")
                used.move(b"\r\n")
                await asyncio.sleep(0.01)
        assert not fresh.got and used.got.count(b"HTTP/1.1 ") == 1 and used.got.startswith(b"HTTP/1.1 200 ")
        assert len(up.seen) == 1 and idle(core)
        for slow in (fresh, used):
            slow.sock.close()


async def test_a_stranger_is_read_no_more_than_a_mebibyte() -> None:
    """R22: this holds for whatever a client without a key sends, however it is framed."""
    async with upstream() as up, gateway(documents([up.port])) as (port, core):
        head = b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\n"
        for data in (
            head + b"content-length: 60000000\r\n\r\n" + bytes(8_000_000),
            head + b"transfer-encoding: chunked\r\n\r\n" + (b"fa00\r\n" + bytes(64_000) + b"\r\n") * 125,
            (head + b"content-length: 50000\r\n\r\n" + bytes(50_000)) * 160,
            b"x" * 8_000_000,
            (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: %b\r\n" % (b"b" * 30_000) + b"\r\n") * 260,
        ):
            read = await _read_of(port, core, data)
            assert read <= 1 << 20, data[:60]


async def _read_of(port: int, core: Gateway, data: bytes) -> int:
    """Return how many bytes of `data` the gateway reads before it closes the connection."""
    from oriel_gateway.ingress.http import ClientConnection

    read = 0
    receive = ClientConnection.data_received

    def counted(self: ClientConnection, piece: bytes) -> None:
        nonlocal read
        if not getattr(self, "_inner", False):
            read += len(piece)
        receive(self, piece)

    ClientConnection.data_received = counted  # type: ignore[method-assign]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        try:
            async with asyncio.timeout(60):
                while await reader.read(65536):
                    pass
        except ConnectionError:
            pass
        writer.transport.abort()
        await until(lambda: not core.fronts or not core_connections(core))
    finally:
        ClientConnection.data_received = receive  # type: ignore[method-assign]
    return read


async def test_an_encoded_body_is_passed_on_as_it_is() -> None:
    """The gateway decompresses nothing; the server behind it bounds the decompressed size."""
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        assert (await client.ask(INFER, b"\x1f\x8b...", headers="content-encoding: gzip\r\n")).status == 200
        assert (up.seen[0].get("content-encoding"), up.seen[0].body) == ("gzip", b"\x1f\x8b...")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v2?%b HTTP/1.1\r\nhost: x\r\n" % (b"a" * 300), 414),
        (b"GET /v2 HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20, 431),
        (b"GET /v2 HTTP/1.1\r\nhost: x\r\na: %b\r\n" % (b"b" * 2000), 431),
        (b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 5001\r\n", 413),
    ],
)
async def test_what_is_too_large_is_refused_at_its_head(head: bytes, status: int) -> None:
    """R22: the head is enough to refuse the request; its body is not waited for."""
    limits = HttpLimits(max_head_bytes=1024, max_fields=16, max_target_bytes=200, max_body_bytes=5000)
    async with upstream() as up, gateway(documents([up.port]), limits=limits) as (port, core):
        async with Client(port) as client:
            client.writer.write(head + b"x-api-key: key-gold\r\n\r\n")
            reply = await client.reply()
            assert (reply.status, reply.headers["connection"]) == (status, "close")
            assert json.loads(reply.body)["reason"] == "too_large" and not up.seen
        assert core.pools["p"].held_bytes == 0


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"?%b HTTP/1.1\r\nhost: x\r\n" % (b"a" * 300), 414),
        (b"?%b" % (b"a" * 2000), 414),
        (b" HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20, 431),
        (b" HTTP/1.1\r\nhost: x\r\na: %b\r\n" % (b"b" * 2000), 431),
        (b" HTTP/1.1\r\nhost: x\r\nexpect: 200-ok\r\n", 400),
        (b" HTTP/1.1\r\nhost: x\r\na: b\n", 400),
    ],
)
async def test_a_head_that_cannot_be_read_is_answered_in_the_form_of_its_path(rest: bytes, status: int) -> None:
    limits = HttpLimits(max_head_bytes=1024, max_fields=16, max_target_bytes=200)
    async with upstream() as up, gateway(documents([up.port]), limits=limits) as (port, _):
        for path, form in ((b"/v1/services/digits", dict), (b"/v2/models/digits/infer", str)):
            async with Client(port) as client:
                client.writer.write(b"POST " + path + rest + b"x-api-key: key-gold\r\n\r\n")
                reply = await client.reply()
                assert reply.status == status and isinstance(json.loads(reply.body)["error"], form)


async def test_a_client_that_waits_for_its_head_hears_before_it_sends_its_body() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _):
        asked = b"expect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        async with Client(port) as client:
            client.writer.write(HEAD % GOLD.encode() + asked)
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(b"body")
            assert (await client.reply()).status == 200
            assert up.seen[0].body == b"body" and up.seen[0].get("expect") is None
        async with Client(port) as stranger:
            stranger.writer.write(HEAD % b"wrong" + asked)
            reply = await stranger.reply()
            assert (reply.status, reply.headers["connection"]) == (401, "close")


async def test_a_gateway_that_leaves_says_so_to_new_connections_and_still_answers() -> None:
    """A load balancer that checks the gateway's readiness gets an answer instead of a refused connection."""
    async with upstream() as up, gateway(documents([up.port])) as (port, core):
        async with Client(port) as kept:
            assert (await kept.ask(INFER)).status == 200
            server = core_connections(core)[0].server
            server.lame_duck_s = 30.0
            core.draining = True
            draining = asyncio.ensure_future(server.drain(60.0))
            await asyncio.sleep(0)
            async with Client(port) as late:
                ready = await late.ask("/v2/health/ready", key=None, method="GET")
                assert (ready.status, ready.headers["connection"]) == (503, "close")
            async with Client(port) as late:
                reply = await late.ask(INFER)
                assert (reply.status, reply.headers["connection"]) == (200, "close")
            assert (await kept.ask(INFER)).headers["connection"] == "close"
            draining.cancel()
            await asyncio.wait((draining,))
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_what_large_bodies_took_is_given_back() -> None:
    """Whether freed memory returns to the system by itself is chance; `test_exhaustion` measures a process."""
    given_back: list[float] = []
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        core.bodies = LargeMessages(lambda: given_back.append(0.0), least_bytes=64 * 1024, delay_s=0.0)
        body = bytes(900_000)
        for _ in range(GIVE_BACK_BYTES // len(body)):
            assert (await client.ask(INFER, body)).status == 200
        assert (await client.ask(INFER, b"small")).status == 200 and not given_back
        assert (await client.ask(INFER, body)).status == 200
        await until(lambda: len(given_back) == 1)


@pytest.mark.parametrize("ends", ["answered", "left", "cut"])
async def test_a_call_that_has_ended_keeps_nothing_that_was_sent(ends: str) -> None:
    async with wired() as (client, _, up, _):
        client.data_received(HEAD % GOLD.encode() + b"content-length: 5\r\n\r\nhello")
        call = client.call
        assert call is not None and call.body() == b"hello"
        if ends == "answered":
            up.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        elif ends == "left":
            client.connection_lost(None)
        else:
            up.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
            up.connection_lost(None)
        assert call.record is not None and [*client.gateway.records.decisions.latest(1)] == [call.record]
        holders = sys.getrefcount(call) - 2  # beside this test and the call of this function
        assert holders == 0, "the record keeps names, sizes and times; all else goes with the call"
        view = client.view
        assert (view.head, view.known, view.tenant, view.target) == (None, None, None, None), "it stays open"
