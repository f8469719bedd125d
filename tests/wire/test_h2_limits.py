"""What an HTTP/2 server keeps for its clients: a byte budget for all of them, and limits in time."""

import asyncio
import socket
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    MAX_ID,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    SETTINGS,
    SETTINGS_ACK,
    frame,
    settings,
    window_update,
)

from ..waiting import until
from .h2.recorders import block, frames_of
from .h2_peers import App, Connection, OurCodec, library_client, request, serve

HEAD_BYTES = 1000  # that each connection may keep uncounted
BUDGET = 20_000
LIMITS = HttpLimits(max_head_bytes=HEAD_BYTES, max_kept_bytes=BUDGET)
OPEN = PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK


def head(stream_id: int, path: bytes, *, end: bool = True) -> bytes:
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, block(request(path)))


class Client:
    """A client made of bytes, which reads nothing by itself."""

    def __init__(self, server: HttpServer, data: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", server.port))
        self.sock.setblocking(False)
        self.sock.sendall(OPEN + data)

    async def last(self) -> tuple[int, int]:
        """The last frame before the connection ends, and the error code if it is GOAWAY."""
        got = b""
        while piece := await asyncio.get_running_loop().sock_recv(self.sock, 65536):
            got += piece
        frame = frames_of(got)[-1]
        return frame.kind, int.from_bytes(frame.payload[4:8], "big")

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
async def ours() -> AsyncIterator[tuple[HttpServer, App]]:
    server, app = await serve(LIMITS, stream_window_bytes=BUDGET)
    yield server, app
    await server.drain(0.0)
    assert server.kept_bytes == 0


async def begun(app: App, count: int) -> Connection:
    """The latest of so many connections, once it has read something."""
    await until(lambda: len(app.connections) == count and app.connections[-1].settings_acknowledged)
    return app.connections[-1]


# The byte budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        head(1, b"/keep", end=False) + frame(DATA, 0, 1, bytes(15_000)),
        head(1, b"/keep", end=False) + frame(DATA, 0, 1, bytes(15_000))[:-1],
        head(1, b"/hold", end=False) + frame(DATA, PADDED, 1, bytes(15_000))[:-1],
        frame(HEADERS, 0, 1, bytes(10_000)) + frame(CONTINUATION, 0, 1, bytes(5000)),
        frame(HEADERS, 0, 1, bytes(15_000))[:-1],
    ],
    ids=[
        *("data that is not consumed", "of an incomplete frame", "an incomplete frame with padding"),
        *("an incomplete block", "an incomplete head"),
    ],
)
async def test_connections_are_read_no_further_while_the_budget_is_used_up(
    ours: tuple[HttpServer, App], data: bytes
) -> None:
    server, app = ours
    clients = []
    for count in (1, 2):
        clients.append(Client(server, data))
        await begun(app, count)
        await until(lambda: server.kept_bytes > 14_000 * count)  # noqa: B023
    first, second = app.connections
    assert second.transport.is_reading() is False and first.transport.is_reading()
    await until(lambda: second.server.kept_bytes == first._kept + second._kept)
    other = await library_client(server.port)  # whoever keeps little is served
    stream_id = other.begin(b"/echo", end=True)
    await until(lambda: stream_id in other.ended)
    other.transport.close()
    first.transport.abort()
    await until(second.transport.is_reading)
    for client in clients:
        client.close()


async def test_a_connection_that_keeps_its_bytes_for_too_long_ends_with_a_reason(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    clients = []
    for count in (1, 2):
        clients.append(Client(server, head(1, b"/keep", end=False) + frame(DATA, 0, 1, bytes(15_000))))
        await begun(app, count)
        await until(lambda: server.kept_bytes > 14_000 * count)  # noqa: B023
    second = app.connections[1]
    second.sweep(monotonic() + server.limits.write_stall_s - 5.0)
    assert not second.closed
    second.sweep(monotonic() + server.limits.write_stall_s + 5.0)
    assert await clients[1].last() == (GOAWAY, ENHANCE_YOUR_CALM)
    assert app.calls[1].reset == ENHANCE_YOUR_CALM and app.calls[0].reset is None
    for client in clients:
        client.close()


async def test_answers_that_nobody_reads_are_on_the_same_budget(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", server.port))
    wide = PREFACE + settings({4: MAX_ID}) + SETTINGS_ACK + window_update(0, 2**30)
    await loop.sock_sendall(sock, wide + head(1, b"/hold"))
    connection = await begun(app, 1)
    await until(lambda: app.calls)
    app.calls[0].answer(bytes(16 * 1024 * 1024))
    await until(lambda: connection.paused)
    assert server.kept_bytes >= connection.transport.get_write_buffer_size() > BUDGET
    assert not connection.transport.is_reading()
    left = 16 * 1024 * 1024
    while left > 0:
        left -= len(await loop.sock_recv(sock, 2**20))
    await until(connection.transport.is_reading)
    await until(lambda: not server.kept_bytes)
    sock.close()


# Turns ---------------------------------------------------------------------------------------------------------------


async def test_a_client_with_many_requests_in_one_read_lets_others_have_their_turn() -> None:
    server, app = await serve(requests_per_turn=3)
    many = Client(server, b"")
    connection = await begun(app, 1)
    connection.data_received(b"".join([head(2 * number + 1, b"/hold") for number in range(30)]))
    for turn in range(1, 11):
        assert len(app.calls) == 3 * turn
        assert connection.transport.is_reading() is (turn == 10)
        await asyncio.sleep(0)
    many.close()
    await server.drain(0.0)


async def test_a_sender_that_is_never_known_is_asked_to_leave_and_then_cut() -> None:
    """R22: bytes read from a client without a key are bounded on a connection, as over HTTP/1.1."""
    server, app = await serve(HttpLimits(drain_bytes=1000))
    _, client = await server.loop.create_connection(OurCodec, "127.0.0.1", server.port)
    held = client.codec.start(request(b"/hold"), end=True)
    client.flush()
    await until(lambda: app.calls)
    (connection,) = app.connections
    connection.unwanted(500)
    assert not connection.draining
    connection.unwanted(1)
    await until(lambda: len(client.codec.goaways) == 2)
    assert [goaway[:2] for goaway in client.codec.goaways] == [(MAX_ID, NO_ERROR), (held.id, NO_ERROR)]
    connection.unwanted(500)
    await until(lambda: len(client.codec.goaways) == 3)
    assert client.codec.goaways[2][1] == ENHANCE_YOUR_CALM
    await until(lambda: not server.connections)
    await server.drain(0.0)


# Time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        OPEN + b"\0",
        OPEN + frame(HEADERS, 0, 1, b"a"),
        OPEN + head(1, b"/hold")[:-1],
        OPEN + frame(HEADERS, 0, 1, b"a") + frame(CONTINUATION, 0, 1, b"b")[:-1],
        OPEN + frame(PING, 0, 0, bytes(8))[:-1],
    ],
    ids=["one byte", "block", "head", "continuation", "ping"],
)
async def test_what_is_incomplete_has_to_come_in_time(ours: tuple[HttpServer, App], data: bytes) -> None:
    """R20: whoever had another stream open could send a head as slowly as it liked."""
    server, app = ours
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    await until(lambda: app.connections and app.connections[0].unfinished_since)
    (connection,) = app.connections
    connection.sweep(connection.unfinished_since + server.limits.head_timeout_s - 1.0)
    assert not connection.closed
    connection.sweep(connection.unfinished_since + server.limits.head_timeout_s + 1.0)
    last = frames_of(await reader.read())[-1]
    assert last.kind == GOAWAY and b"in time" in last.payload
    writer.close()


async def test_data_may_take_as_long_as_its_handler_allows(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    client = Client(server, head(1, b"/hold", end=False) + frame(DATA, 0, 1, bytes(100))[:-1])
    connection = await begun(app, 1)
    await until(lambda: connection._data_left == 1)
    connection.sweep(monotonic() + server.limits.head_timeout_s + 1.0)
    assert not connection.closed and app.calls[0].reset is None
    client.close()


async def test_a_client_is_asked_to_leave_an_old_connection_and_loses_nothing() -> None:
    server, app = await serve(max_age_s=40.0)
    _, client = await server.loop.create_connection(OurCodec, "127.0.0.1", server.port)
    held = client.codec.start(request(b"/hold"), end=True)
    client.flush()
    await until(lambda: app.calls and app.connections[0].settings_acknowledged)
    (connection,) = app.connections
    connection.sweep(connection._opened_s + 35.9)
    assert not connection.draining
    connection.sweep(connection._opened_s + 44.1)
    await until(lambda: len(client.codec.goaways) == 2)  # any stream, then the last one
    assert [goaway[:2] for goaway in client.codec.goaways] == [(MAX_ID, NO_ERROR), (held.id, NO_ERROR)]
    app.calls[0].answer(b"whole")
    await until(lambda: not server.connections)
    assert held.body == b"whole" and held.ended
    await server.drain(0.0)


async def test_the_age_of_connections_varies_so_that_not_all_leave_at_once() -> None:
    server, app = await serve(max_age_s=100.0)
    clients = [await library_client(server.port) for _ in range(8)]
    await until(lambda: len(app.connections) == 8)
    ages = {each._retires_s - each._opened_s for each in app.connections}
    assert len(ages) == 8 and all(90.0 <= age <= 110.0 for age in ages)
    for client in clients:
        client.transport.close()
    await server.drain(0.0)
