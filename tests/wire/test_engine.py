"""The HTTP/1.1 engine over real loopback sockets: framing, limits, keep-alive, departures, the client pool."""

import asyncio
import socket
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from oriel_wire.engine import listener
from oriel_wire.engine.buffered import Exchange, explain, serve
from oriel_wire.engine.client import HttpClient
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.server import ServerConnection
from oriel_wire.errors import UpstreamBroken, UpstreamTimedOut, UpstreamUnreachable

from ..waiting import until
from .engine_client import bound, count, talk

SMALL = HttpLimits(max_head_bytes=1024, max_fields=10, max_target_bytes=200, max_body_bytes=1000)


class Echo:
    """Answers with method, path and body; keeps exchanges for /hold."""

    def __init__(self) -> None:
        self.held: list[Exchange] = []
        self.aborted: list[str] = []

    def __call__(self, exchange: Exchange) -> None:
        if exchange.head.path == "/hold":
            exchange.on_abort = lambda: self.aborted.append(exchange.head.path)
            self.held.append(exchange)
            return
        text = f"{exchange.head.method} {exchange.head.path} ".encode()
        exchange.respond(200, [("x-echo", "yes")], [text, exchange.body])


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, HttpServer]]:
    handler = Echo()
    server = await serve(handler, bound(), limits=SMALL)
    yield handler, server
    await server.drain(0.0)


GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_pipelined_requests_are_answered_in_order(echo: tuple[Echo, HttpServer]) -> None:
    post = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nxyz"
    got = await talk(echo[1].port, GET + post + GET, until=count(b"GET /a ", 2))
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert got.index(b"GET /a ") < got.index(b"POST /b xyz") < got.rindex(b"GET /a ")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\nHost: x\n\n", 400),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET http://" + b"a" * 300 + b"/a HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"".join(b"a%d: b\r\n" % n for n in range(11)) + b"\r\n", 431),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 2000 + b"\r\n\r\n", 431),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 2000, 431),
    ],
)
async def test_bad_framing_is_refused_and_the_connection_closed(
    echo: tuple[Echo, HttpServer], data: bytes, status: int
) -> None:
    got = await talk(echo[1].port, data)
    assert got.startswith(b"HTTP/1.1 %d " % status), got
    assert got.count(b"HTTP/1.1 4") == 1 and b'{"error":' in got and b"connection: close" in got


async def test_a_chunked_body_over_the_bound_is_refused(echo: tuple[Echo, HttpServer]) -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    got = await talk(echo[1].port, head + b"3e9\r\n" + b"x" * 1001)
    assert got.startswith(b"HTTP/1.1 413 ")


async def test_expect_continue_is_answered_before_the_body(echo: tuple[Echo, HttpServer]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo[1].port)
    writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"hi")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_http_1_0_is_answered_and_closed(echo: tuple[Echo, HttpServer]) -> None:
    got = await talk(echo[1].port, b"GET /a HTTP/1.0\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in got


async def test_a_client_that_leaves_is_reported_once(echo: tuple[Echo, HttpServer]) -> None:
    handler, server = echo
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
    while not handler.held:
        await asyncio.sleep(0)
    writer.close()
    await writer.wait_closed()
    while not handler.aborted:
        await asyncio.sleep(0)
    exchange = handler.held[0]
    assert exchange.aborted
    exchange.respond(200, [], b"too late")
    assert handler.aborted == ["/hold"]


async def test_slow_head_is_cut_with_408() -> None:
    server = await serve(Echo(), bound(), limits=HttpLimits(head_timeout_s=0.05))
    got = await talk(server.port, b"GET /a HT")
    assert got.startswith(b"HTTP/1.1 408 ")
    await server.drain(0.0)


async def test_slow_body_is_cut_with_408() -> None:
    server = await serve(Echo(), bound(), limits=HttpLimits(body_timeout_s=0.05))
    got = await talk(server.port, b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
    assert got.startswith(b"HTTP/1.1 408 ")
    await server.drain(0.0)


async def test_a_head_can_be_refused_before_its_body() -> None:
    server = await serve(Echo(), bound(), refuse=lambda head: explain(head, 401, "no") if head.path == "/x" else None)
    unread = await talk(server.port, b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\nab")
    assert unread.startswith(b"HTTP/1.1 401 ") and b"connection: close" in unread
    whole = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
    got = await talk(server.port, whole + GET, until=count(b"GET /a ", 1))  # keep-alive survives: the body was all here
    assert got.startswith(b"HTTP/1.1 401 ") and b"HTTP/1.1 200 OK" in got
    await server.drain(0.0)


async def test_who_is_in_the_listen_queue_when_it_closes_is_answered() -> None:
    """Closing it would reset them, and they may have sent a request already."""
    server = await serve(Echo(), bound())
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]  # without a turn of the loop
    for client in clients:
        client.sendall(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
    server.draining = True
    for accepted in server._close_listener():
        await server.loop.connect_accepted_socket(server._factory, accepted)
    for client in clients:
        assert b"HTTP/1.1 200 OK" in await asyncio.to_thread(client.recv, 1000)
        client.close()
    await server.drain(0.0)


async def test_drain_finishes_what_is_in_flight(echo: tuple[Echo, HttpServer]) -> None:
    handler, server = echo
    talking = asyncio.ensure_future(talk(server.port, b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n"))
    while not handler.held:
        await asyncio.sleep(0)
    draining = asyncio.ensure_future(server.drain(5.0))
    await asyncio.sleep(0)
    late = await talk(server.port, GET)  # who was connecting already is answered, and told to go
    assert b"HTTP/1.1 200 OK" in late and b"connection: close" in late
    await stays_open(server)
    assert server.under_way == 1
    handler.held[0].respond(200, [], b"done")
    got = await talking
    assert got.endswith(b"done") and b"connection: close" in got
    await draining
    assert not server.accepting
    with pytest.raises(OSError):
        await talk(server.port, GET)


async def test_a_request_that_waits_to_be_read_is_answered_before_its_connection_ends(
    echo: tuple[Echo, HttpServer],
) -> None:
    """Closed instead, its client could not tell whether it was executed."""
    server = echo[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(2):
        writer.write(GET)
        if server.draining:
            (connection,) = server.connections
            assert connection.idle
            connection.close_if_idle()
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(7) == b"GET /a "
        server.draining = True
    assert b"connection: close" in head
    writer.close()


async def stays_open(server: HttpServer) -> None:
    """Past the time in which it would let in anybody, a listener answers as long as something runs."""
    for _ in range(20):
        await asyncio.sleep(2 * listener.LAME_DUCK_S)
        assert b"HTTP/1.1 200 OK" in await talk(server.port, GET)


async def test_a_request_that_comes_during_a_drain_holds_it_open_for_nobody(echo: tuple[Echo, HttpServer]) -> None:
    """Else a client that calls all the time would keep a server from ending."""
    handler, server = echo
    draining = asyncio.ensure_future(server.drain(3600.0, asyncio.ensure_future(asyncio.Event().wait())))
    hold = b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n"
    await until(lambda: not (server.finishing or not server.draining))
    late = asyncio.ensure_future(talk(server.port, hold))
    while not handler.held:
        await asyncio.sleep(0)
    assert server.under_way == 1 and not server.finishing
    handler.held[0].respond(200, [], b"done")
    assert (await late).endswith(b"done")
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining


async def test_a_listener_stays_open_until_what_drains_beside_it_has_ended(echo: tuple[Echo, HttpServer]) -> None:
    server, beside = echo[1], asyncio.get_running_loop().create_future()
    draining = asyncio.ensure_future(server.drain(3600.0, beside))
    await stays_open(server)
    beside.set_result(None)
    async with asyncio.timeout(60):
        await draining
    with pytest.raises(OSError):
        await talk(server.port, GET)


async def test_a_draining_server_still_answers_new_connections_for_a_while(echo: tuple[Echo, HttpServer]) -> None:
    """Whoever asks whether it is ready hears an answer instead of a refused connection, also when nothing runs."""
    echo[1].lame_duck_s = 30.0
    draining = asyncio.ensure_future(echo[1].drain(60.0))
    for _ in range(2):
        await asyncio.sleep(0)
        got = await talk(echo[1].port, GET)
        assert got.startswith(b"HTTP/1.1 200 ") and b"connection: close" in got
    assert not draining.done()
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    with pytest.raises(OSError):
        await talk(echo[1].port, GET)


async def test_after_a_pause_of_the_loop_what_clients_sent_meanwhile_is_read_before_anybody_is_cut() -> None:
    """A machine that was busy with something else for longer than a head may take cut clients that had sent theirs."""
    server = await serve(Echo(), bound(), limits=HttpLimits(head_timeout_s=3600.0))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET[:5])
    await until(lambda: [each for each in server.connections if not each.idle])
    (connection,) = server.connections
    for cut in (False, True):
        connection.due = monotonic() - 1.0
        server._ticked_s = monotonic() - (0.0 if cut else 10.0)
        server._tick()
        assert connection.waits_for_head is not cut
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    await server.drain(0.0)


async def test_client_reuses_its_connection(echo: tuple[Echo, HttpServer]) -> None:
    client = HttpClient(host="127.0.0.1", port=echo[1].port)
    for n in range(3):
        answer = await client.request("POST", f"/r{n}", [("a", "b")], [b"x", b"y"], deadline=monotonic() + 60)
        assert (answer.status, answer.body, answer.get("x-echo")) == (200, f"POST /r{n} xy".encode(), "yes")
    assert len(echo[1].connections) == 1 and client.outstanding == 0
    await client.close()


async def test_client_gives_up_at_its_deadline_and_the_server_notices(
    echo: tuple[Echo, HttpServer],
) -> None:
    client = HttpClient(host="127.0.0.1", port=echo[1].port)
    with pytest.raises(UpstreamTimedOut):
        await client.request("GET", "/hold", [], deadline=monotonic() + 0.05)
    while not echo[0].aborted:
        await asyncio.sleep(0)
    assert client.outstanding == 0


async def test_a_deadline_holds_also_for_a_place_and_for_connecting(echo: tuple[Echo, HttpServer]) -> None:
    client = HttpClient(host="127.0.0.1", port=echo[1].port, max_connections=1)
    held = asyncio.ensure_future(client.request("GET", "/hold", [], deadline=monotonic() + 60))
    while not echo[0].held:
        await asyncio.sleep(0)
    with pytest.raises(UpstreamTimedOut):
        await client.request("GET", "/a", [], deadline=monotonic() + 0.02)
    with pytest.raises(UpstreamTimedOut):
        await client.request("GET", "/a", [], deadline=monotonic() - 1.0)
    assert client.outstanding == 1
    echo[0].held[0].respond(200, [])
    assert (await held).status == 200
    assert (await client.request("GET", "/a", [], deadline=monotonic() + 60)).status == 200
    await client.close()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:  # its queue takes one or two and no more
        stuck = HttpClient(host="127.0.0.1", port=full.getsockname()[1])
        waiting = [stuck.request("GET", "/", [], deadline=monotonic() + 0.1) for _ in range(8)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, UpstreamTimedOut) for each in results) and stuck.outstanding == 0
        await stuck.close()


async def test_a_large_body_and_lines_that_are_written_already() -> None:
    server = await serve(Echo(), bound())
    client = HttpClient(host="127.0.0.1", port=server.port)
    parts = [b"x" * 70_000, memoryview(b"y" * 10).cast("H")]
    answer = await client.request("POST", "/p", "a: b\r\nc: d\r\n", parts, deadline=monotonic() + 60)
    assert answer.body == b"POST /p " + b"x" * 70_000 + b"y" * 10
    assert (answer.server_timing, answer.cost_us) == ("", -1)
    await client.close()
    await server.drain(0.0)


async def test_cancelling_a_request_closes_its_connection(echo: tuple[Echo, HttpServer]) -> None:
    client = HttpClient(host="127.0.0.1", port=echo[1].port)
    task = asyncio.ensure_future(client.request("GET", "/hold", [], deadline=monotonic() + 60))
    while not echo[0].held:
        await asyncio.sleep(0)
    task.cancel()
    while not echo[0].aborted:
        await asyncio.sleep(0)
    assert client.outstanding == 0


async def test_a_connection_that_was_made_while_the_loop_paused_counts(echo: tuple[Echo, HttpServer]) -> None:
    """As after a pause, the time is over before the loop hears of the connection."""
    client = HttpClient(host="127.0.0.1", port=echo[1].port)
    client.endpoint.connect_timeout_s = 0.0
    assert (await client.request("GET", "/", [], deadline=monotonic() + 60)).status == 200
    await client.close()


async def test_nobody_listening_is_unreachable() -> None:
    sock = bound()
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(UpstreamUnreachable):
        await HttpClient(host="127.0.0.1", port=port).request("GET", "/", [], deadline=monotonic() + 60)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil close", b"until close"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\nsplit", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None),
        (b"nonsense\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70000, None),
        (b"", None),
    ],
)
async def test_upstream_answers_of_every_shape(answer: bytes, expected: bytes | None) -> None:
    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(upstream, "127.0.0.1", 0)
    client = HttpClient(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    request = client.request("GET", "/", [], deadline=monotonic() + 60)
    if expected is None:
        with pytest.raises(UpstreamBroken):
            await request
    else:
        assert (await request).body == expected
    assert client.outstanding == 0
    if b"split" in answer:
        assert not client.endpoint.idle  # bytes nobody asked for never reach the next caller
    await client.close()
    server.close()
    await server.wait_closed()


async def test_answers_that_only_the_kernel_holds_stall_a_connection_too() -> None:
    """R20: a client pipelines, never reads and sends no more; its answers fit into the sockets' own buffers."""
    answer = bytes(1000)
    limits = HttpLimits(write_stall_s=1.0, idle_timeout_s=3600.0)
    answered = 0

    def respond(exchange: Exchange) -> None:
        nonlocal answered
        answered += 1
        exchange.respond(200, [], answer)

    server = await serve(respond, bound(), limits=limits)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 200)
        async with asyncio.timeout(60):
            await until(lambda: answered >= 200)
            (connection,) = server.connections
            assert isinstance(connection, ServerConnection)
            assert connection.transport.get_write_buffer_size() == 0 and connection.keeps_up
            await until(lambda: not server.connections)
    await server.drain(0.0)


async def test_a_connection_that_waits_for_its_answer_is_not_silent_for_a_balancer() -> None:
    """Balancers in front of TCP forget a connection without packets after four minutes; a call may wait longer for a
    first server. The kernel sends the packets.
    """
    begun = asyncio.Event()
    server = await serve(lambda exchange: begun.set(), bound())
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await begun.wait()
    (connection,) = server.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
    writer.close()
    await server.drain(0.0)
