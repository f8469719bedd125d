"""The server of HTTP/2: taking over from HTTP/1.1, its time limits, eviction, departures, draining."""

import asyncio
import socket
from collections.abc import AsyncIterator
from math import inf
from time import monotonic
from typing import Any, cast

import pytest

from oriel_wire.engine import h2_server
from oriel_wire.engine.buffered import serve as serve_buffered
from oriel_wire.engine.limits import SETTINGS_S, HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.errors import UpstreamUnreachable, UpstreamUnread
from oriel_wire.h2.frames import (
    CANCEL,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    NO_ERROR,
    PREFACE,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    frame,
    settings,
    window_update,
)
from oriel_wire.h2.limits import H2Limits

from ..waiting import until
from .engine_client import bound, count, talk
from .h2.recorders import block, frames_of
from .h2_peers import HTTP1_ANSWER, App, Borrower, Connection, OurCodec, endpoint_of, library_client, request, serve

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def head(stream_id: int, path: bytes) -> bytes:
    """A request without a body."""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block(request(path)))


ECHO = PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK + head(1, b"/echo")


@pytest.fixture
async def ours() -> AsyncIterator[tuple[HttpServer, App]]:
    server, app = await serve()
    yield server, app
    await server.drain(0.0)


async def only(app: App) -> Connection:
    """The one connection, once its client has acknowledged its settings."""
    await until(lambda: app.connections and app.connections[0].settings_acknowledged)
    (connection,) = app.connections
    return connection


# Hand-over -----------------------------------------------------------------------------------------------------------


async def test_http1_and_http2_are_served_on_one_port(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    assert await talk(server.port, GET + GET, until=count(b"h1", 2)) == HTTP1_ANSWER * 2
    client = await library_client(server.port)
    stream_id = client.begin(b"/echo", end=True)
    await until(lambda: stream_id in client.ended)
    assert await talk(server.port, GET, until=count(b"h1", 1)) == HTTP1_ANSWER
    assert len(app.connections) == 1 and app.connections[0].peer == "127.0.0.1"
    client.transport.close()


@pytest.mark.parametrize("size", [1, 10, 17, 18, 19, 23, 24, 30])
async def test_the_preface_may_come_in_pieces(ours: tuple[HttpServer, App], size: int) -> None:
    server, app = ours
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await until(lambda: server.connections)
    for start in range(0, len(ECHO), size):
        (protocol,) = server.connections  # the one that has the transport now
        cast(Any, protocol).data_received(ECHO[start : start + size])
    assert app.calls[0].ended and len(app.connections) == 1
    assert (await reader.readexactly(9))[3] == SETTINGS
    writer.close()


async def test_the_preface_is_refused_behind_a_request(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    got = await talk(server.port, GET + ECHO)
    assert got.startswith(HTTP1_ANSWER + b"HTTP/1.1 400 ")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET)
    assert await reader.readexactly(len(HTTP1_ANSWER)) == HTTP1_ANSWER
    writer.write(ECHO)
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    assert app.connections == []


async def test_a_server_that_does_not_take_http2_answers_400() -> None:
    server = await serve_buffered(lambda exchange: exchange.respond(200, [], b"here"), bound(), limits=HttpLimits())
    assert (await talk(server.port, ECHO)).startswith(b"HTTP/1.1 400 ")
    assert (await talk(server.port, GET, until=count(b"here", 1))).startswith(b"HTTP/1.1 200 ")
    await server.drain(0.0)


async def test_what_is_no_http2_behind_the_preface_gets_goaway(ours: tuple[HttpServer, App]) -> None:
    got = await talk(ours[0].port, PREFACE[:18] + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert frames_of(got)[-1].payload[4:8] == PROTOCOL_ERROR.to_bytes(4, "big")


# Time limits ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_acknowledge_settings_is_cut(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + head(1, b"/hold"))
    await until(lambda: app.calls)
    app.connections[0].sweep(monotonic() + SETTINGS_S - 1.0)
    assert not app.connections[0].transport.is_closing()
    app.connections[0].sweep(monotonic() + SETTINGS_S + 1.0)
    await until(lambda: app.calls[0].reset is not None)
    assert server.connections == set()
    await reader.read()
    writer.close()


async def test_an_idle_connection_ends_with_goaway(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    client = await library_client(server.port)
    connection = await only(app)
    connection.sweep(connection.due - 1.0)
    assert not connection.closed
    connection.sweep(connection.due)
    await until(lambda: client.lost)
    assert client.goaways == [(0, NO_ERROR)]


async def test_calls_between_two_sweeps_keep_a_connection(ours: tuple[HttpServer, App]) -> None:
    """It was idle by the clock although it had just been used."""
    server, app = ours
    client = await library_client(server.port)
    connection = await only(app)
    connection.due = 0.0  # long ago
    stream_id = client.begin(b"/echo", end=True)
    connection.sweep = lambda now: None  # type: ignore[method-assign]
    await until(lambda: stream_id in client.ended)
    del connection.sweep
    connection.sweep(monotonic())
    assert not connection.closed and connection.due > monotonic()
    client.transport.close()


async def test_a_stream_whose_window_stays_closed_is_reset(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    client = await library_client(server.port, window=10)
    client.acknowledges = False
    stuck, other = client.begin(b"/hold", end=True), client.begin(b"/other", end=True)
    await until(lambda: len(app.calls) == 2)
    await only(app)
    app[b"/hold"].answer(bytes(11))
    now = monotonic()
    app.connections[0].sweep(now)
    app.connections[0].sweep(now + server.limits.write_stall_s - 1.0)
    assert app[b"/hold"].reset is None
    app.connections[0].sweep(now + server.limits.write_stall_s + 1.0)
    assert app[b"/hold"].reset == CANCEL and app[b"/other"].reset is None
    await until(lambda: client.resets == {stuck: CANCEL})
    app[b"/other"].answer(b"x")
    await until(lambda: other in client.ended)
    client.transport.close()


async def deaf(server: HttpServer, data: bytes) -> asyncio.StreamWriter:
    """A client that sends and never reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    cast(asyncio.ReadTransport, writer.transport).pause_reading()
    writer.write(data)
    return writer


WIDE = PREFACE + settings({4: 2**31 - 1}) + SETTINGS_ACK + window_update(0, 2**30)


async def test_a_client_that_never_reads_its_connection_is_cut(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    writer = await deaf(server, WIDE + head(1, b"/hold"))
    await until(lambda: app.calls)
    connection = await only(app)
    app.calls[0].answer(bytes(16 * 1024 * 1024))
    await until(lambda: connection.paused)
    connection.sweep(monotonic() + server.limits.write_stall_s - 5.0)
    assert not connection.transport.is_closing()
    connection.sweep(monotonic() + server.limits.write_stall_s + 5.0)
    await until(lambda: not server.connections)
    writer.close()


async def test_answers_without_data_cannot_gather_before_a_client_that_never_reads(
    ours: tuple[HttpServer, App],
) -> None:
    """Only data waits for a client: heads that it never read took memory without bound."""
    server, app = ours
    writer = await deaf(server, WIDE)
    most = 0
    for number in range(2000):
        writer.write(head(2 * number + 1, b"/refuse"))
        await until(lambda: len(app.calls) > number or (app.connections and not server.connections))  # noqa: B023
        if app.connections and not server.connections:
            break
        most = max(most, app.connections[0].transport.get_write_buffer_size())
    assert server.connections == set() and most < 2 * h2_server.UNREAD_BYTES
    writer.close()


async def test_a_silent_client_is_pinged_and_cut_if_it_does_not_answer(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    client = await library_client(server.port)
    client.begin(b"/hold")
    connection = await only(app)
    await until(lambda: app.calls)
    for pings in (1, 2):  # which it answers
        connection.sweep(monotonic() + H2Limits().keepalive_s + 1.0)
        heard_s = connection._heard_s
        await until(lambda: client.pings == pings and connection._heard_s > heard_s)  # noqa: B023
        connection._pinged_s = heard_s  # the time of the test is ahead of the clock
    client.mute = True
    now = monotonic() + H2Limits().keepalive_s + 1.0
    connection.sweep(now)
    connection.sweep(now + H2Limits().pong_s - 1.0)
    assert not connection.transport.is_closing()
    connection.sweep(now + H2Limits().pong_s + 1.0)
    await until(lambda: client.lost)
    assert app.calls[0].reset == CANCEL


async def test_a_request_that_goes_on_behind_its_answer_is_stopped(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    client = await library_client(server.port)
    stream_id = client.begin(b"/early")
    await until(lambda: stream_id in client.ended)
    assert client.resets == {}
    (await only(app)).sweep(monotonic() + h2_server.LINGER_S + 1.0)
    await until(lambda: client.resets == {stream_id: NO_ERROR})
    assert app.calls[0].reset is None
    client.transport.close()


# Departures, and room for others -------------------------------------------------------------------------------------


async def test_a_client_that_vanishes_resets_its_streams(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    client = await library_client(server.port)
    for _ in range(3):
        client.begin(b"/hold")
    await until(lambda: server.requests_open == 3)
    client.transport.abort()
    await until(lambda: [call.reset for call in app.calls] == [CANCEL] * 3)
    await until(lambda: not server.requests_open)
    app.calls[0].answer(b"too late")
    assert server.connections == set()


async def test_nothing_is_left_to_do_for_a_connection_that_was_lost_between_two_turns(
    ours: tuple[HttpServer, App],
) -> None:
    """The loop went on with its requests for ever, at the cost of a whole core."""
    server, app = ours
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(ECHO)
    connection = await only(app)
    connection.data_received(b"".join([head(stream_id, b"/hold") for stream_id in range(3, 2003, 2)]))
    assert connection.unhandled
    connection.transport.abort()
    writer.close()
    await until(lambda: connection.closed)
    await until(lambda: not connection.unhandled)
    assert not server.requests_open


async def test_an_idle_connection_makes_room_for_another_client() -> None:
    server, app = await serve(HttpLimits(max_connections=1))
    idle = await library_client(server.port)
    await only(app)
    busy = await library_client(server.port)
    busy.begin(b"/hold")
    await until(lambda: app.calls and idle.lost)
    assert idle.goaways == [(0, NO_ERROR)]
    late = await library_client(server.port)
    await until(lambda: late.lost)  # the other one has a request, and stays
    assert not busy.lost and app.calls[0].reset is None
    busy.transport.close()
    await server.drain(0.0)


class Paused:
    """The pulse of a loop that has just resumed."""

    fresh_until = -inf
    pauses = 1
    paused_s = 10.0

    def age_s(self, arrival: object, now: float) -> float:
        return 0.75

    def shared_age_s(self, arrival: object, now: float, before_s: float) -> float:
        return 0.75

    def close(self) -> None: ...


async def test_a_request_read_after_a_pause_of_the_loop_is_as_old_as_it_is(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    server.pulse.close()
    server.pulse = cast(Any, Paused())
    before_s = monotonic()
    client = await library_client(server.port)
    client.begin(b"/hold")
    await until(lambda: app.calls)
    call = app.calls[0]
    assert call.late_s == 0.75 and before_s - 0.75 <= call.arrived_s <= monotonic() - 0.75
    client.transport.close()


async def test_a_request_whose_client_left_during_a_pause_is_not_begun(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK)
        connection = await only(app)
        connection._pulse = cast(Any, Paused())
        sock.sendall(head(1, b"/hold"))
    await until(lambda: not server.connections)
    assert app.calls == []


async def resumed(server: HttpServer, app: App, data: bytes) -> None:
    """A client has sent this on a connection from before, while the loop was paused."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK)
        connection = await only(app)
        connection._pulse = cast(Any, Paused())
        sock.sendall(data + head(2**20 + 1, b"/last"))
        await until(lambda: app.calls and app.calls[-1].path == b"/last" or connection.closed)
        assert not connection.closed


def cancel(stream_id: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, CANCEL.to_bytes(4, "big"))


async def test_a_request_that_was_reset_during_a_pause_is_not_begun(ours: tuple[HttpServer, App]) -> None:
    await resumed(*ours, head(1, b"/gone") + head(3, b"/hold") + cancel(1))
    assert [call.path for call in ours[1].calls] == [b"/hold", b"/last"]


async def test_calls_that_ended_at_their_deadline_during_a_pause_are_no_flood(ours: tuple[HttpServer, App]) -> None:
    """A client whose calls were reset while nothing was read lost the connection, and the other calls on it."""
    server, app = ours
    await resumed(server, app, head(1, b"/hold") + b"".join([head(n, b"/x") + cancel(n) for n in range(3, 6003, 2)]))
    others = [(call.path, call.reset) for call in app.calls if call.path != b"/x"]
    assert others == [(b"/hold", None), (b"/last", None)]
    assert len(app.calls) < 20, "a call is begun only where a read ends between its head and its reset"


# Draining ------------------------------------------------------------------------------------------------------------


async def test_a_drain_waits_for_streams_and_refuses_new_ones(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    _, client = await server.loop.create_connection(OurCodec, "127.0.0.1", server.port)
    held = client.codec.start(request(b"/hold"), end=True)
    client.flush()
    await until(lambda: app.calls)
    drain = asyncio.create_task(server.drain(240.0))
    await until(lambda: len(client.codec.goaways) == 2)  # any stream, then the last one
    assert [goaway[:2] for goaway in client.codec.goaways] == [(2**31 - 1, NO_ERROR), (held.id, NO_ERROR)]
    client.transport.write(head(held.id + 2, b"/late"))
    app.calls[0].answer(b"whole")
    await drain
    assert held.body == b"whole" and held.ended
    assert len(app.calls) == 1 and app.calls[0].reset is None


async def test_a_client_that_does_not_acknowledge_the_drain_is_cut_at_the_end(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    client = await library_client(server.port)
    client.begin(b"/hold", end=True)
    await until(lambda: app.calls)
    client.mute = True
    await server.drain(0.5)
    assert app.calls[0].reset == CANCEL and server.connections == set()


class Caller:
    """Keeps calling a server until it is gone. answers: calls that were answered; refused: surely not executed."""

    def __init__(self, server: HttpServer) -> None:
        self._endpoint = endpoint_of(server.port)
        self.answers = self.refused = 0

    async def run(self, body: bytes) -> None:
        while True:
            try:
                assert await Borrower(self._endpoint, body=body).answer() == body
                self.answers += 1
            except UpstreamUnread:
                self.refused += 1
            except UpstreamUnreachable:
                return

    async def close(self) -> None:
        await self._endpoint.close()


async def test_twenty_drains_lose_no_call() -> None:
    """A call may be refused, and is then surely not executed; each other one is answered."""

    async def drained(body: bytes) -> None:
        server, app = await serve()
        caller = Caller(server)
        calls = [asyncio.create_task(caller.run(body)) for _ in range(2)]
        await until(lambda: caller.answers > 10)
        answers = caller.answers
        await server.drain(240.0)
        await asyncio.gather(*calls)
        await caller.close()
        assert caller.answers > answers and len(app.calls) == caller.answers
        assert [call for call in app.calls if call.reset is not None] == []

    await asyncio.gather(*[drained(bytes(size)) for size in (0, 10, 1000, 100_000) * 5])
