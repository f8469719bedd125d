"""Our endpoint of HTTP/2: how many connections it opens, what it says of requests that failed, when it closes."""

import socket
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from oriel_wire.engine.buffered import serve as serve_buffered
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.errors import UpstreamBroken, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h2.frames import CANCEL, MAX_ID, NO_ERROR, REFUSED_STREAM, goaway

from ..waiting import until
from .engine_client import bound
from .h2.recorders import TRAILERS
from .h2_peers import App, Borrower, Library, LibraryServer, connections_of, endpoint_of, serve


@pytest.fixture
async def library() -> AsyncIterator[LibraryServer]:
    async with LibraryServer() as server:
        yield server


@pytest.fixture
async def ours() -> AsyncIterator[tuple[HttpServer, App]]:
    server, app = await serve(max_streams=2)
    yield server, app
    await server.drain(0.0)


@pytest.fixture
def silent() -> socket.socket:
    """Accepts connections and sends nothing."""
    sock = bound()
    sock.listen()
    return sock


async def begun(library: LibraryServer, count: int) -> Library:
    """The one connection of a server, once so many streams have come."""
    await until(lambda: library.connections and len(library.connections[0].fields) == count)
    return library.connections[0]


# Connections and streams ---------------------------------------------------------------------------------------------


async def test_requests_beyond_the_streams_of_all_connections_wait(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    endpoint = endpoint_of(server.port, max_connections=2)
    borrowers = [Borrower(endpoint, b"/hold") for _ in range(6)]
    await until(lambda: len(app.calls) == 4)
    assert len(app.connections) == 2 and endpoint.outstanding == 6
    assert [each.stream is not None for each in borrowers] == [True] * 4 + [False] * 2
    for number in range(6):  # each end lets the oldest that waits begin
        app.calls[number].answer(b"%d" % number)
        assert await borrowers[number].answer() == b"%d" % number
        await until(lambda: len(app.calls) == min(6, 5 + number))  # noqa: B023
    assert len(app.connections) == 2 and endpoint.outstanding == 0
    assert [call.reset for call in app.calls] == [None] * 6
    await endpoint.close()


async def test_a_burst_waits_for_the_settings_of_the_first_connection() -> None:
    """The first hundred began before them, and more connections were opened for the others."""
    server, app = await serve(max_streams=300)
    endpoint = endpoint_of(server.port)
    borrowers = [Borrower(endpoint, body=b"x") for _ in range(300)]
    assert [await each.answer() for each in borrowers] == [b"x"] * 300
    assert len(app.connections) == 1 and [call.reset for call in app.calls] == [None] * 300
    await endpoint.close()
    await server.drain(0.0)


async def test_without_a_second_connection_requests_wait_for_the_first() -> None:
    """They failed as if the upstream could not be reached."""
    server, app = await serve(HttpLimits(max_connections=1), max_streams=1)
    endpoint = endpoint_of(server.port)
    first, second = Borrower(endpoint, b"/hold"), Borrower(endpoint)
    await until(lambda: endpoint._retry_at)
    assert second.stream is None and second.error is None
    app.calls[0].answer(b"first")
    assert [await first.answer(), await second.answer()] == [b"first", b""]
    assert len(app.connections) == 1
    await endpoint.close()
    await server.drain(0.0)


# Requests that fail --------------------------------------------------------------------------------------------------


async def test_a_refused_stream_was_not_executed(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    refused, broken = Borrower(endpoint, b"/hold"), Borrower(endpoint, b"/hold")
    server = await begun(library, 2)
    server.codec.reset_stream(1, REFUSED_STREAM)
    server.codec.reset_stream(3, CANCEL)
    server.flush()
    with pytest.raises(UpstreamUnread):
        await refused.answer()
    with pytest.raises(UpstreamBroken, match="CANCEL"):
        await broken.answer()
    assert await Borrower(endpoint, body=b"x").answer() == b"x"
    assert len(library.connections) == 1 and endpoint.outstanding == 0
    await endpoint.close()


async def test_goaway_says_which_requests_were_not_executed(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    kept, lost, refused = [Borrower(endpoint, b"/hold") for _ in range(3)]
    server = await begun(library, 3)
    server.raw(goaway(MAX_ID, NO_ERROR) + goaway(3, NO_ERROR))
    with pytest.raises(UpstreamUnread):
        await refused.answer()
    assert await Borrower(endpoint, body=b"x").answer() == b"x" and len(library.connections) == 2
    server.send(1, b"whole", TRAILERS)
    assert await kept.answer() == b"whole" and lost.error is None
    server.transport.abort()
    with pytest.raises(UpstreamBroken, match="before its answer was complete"):
        await lost.answer()
    assert endpoint.outstanding == 0 and len(connections_of(endpoint)) == 1
    await endpoint.close()


async def test_a_connection_that_leaves_is_closed_with_its_last_stream(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    borrower = Borrower(endpoint, b"/hold")
    server = await begun(library, 1)
    server.raw(goaway(MAX_ID, NO_ERROR))
    await until(lambda: not endpoint.connected)
    assert not server.lost
    server.send(1, b"whole", TRAILERS)
    assert await borrower.answer() == b"whole"
    await until(lambda: server.lost and not connections_of(endpoint))


async def test_a_request_that_was_never_written_was_not_executed(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    written = Borrower(endpoint, b"/hold")
    await begun(library, 1)
    unwritten = Borrower(endpoint, b"/hold")
    connections_of(endpoint)[0].transport.abort()
    with pytest.raises(UpstreamBroken):
        await written.answer()
    with pytest.raises(UpstreamUnread):
        await unwritten.answer()


async def test_an_answer_that_breaks_a_rule_is_broken(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    borrower = Borrower(endpoint, b"/hold")
    server = await begun(library, 1)
    server.raw(b"no frame of HTTP/2 " * 1000)
    with pytest.raises(UpstreamBroken, match="breaks HTTP/2"):
        await borrower.answer()
    await until(lambda: server.lost and not connections_of(endpoint))


async def test_nobody_listens() -> None:
    with bound() as sock:
        endpoint = endpoint_of(sock.getsockname()[1])
        for borrower in [Borrower(endpoint) for _ in range(3)]:
            with pytest.raises(UpstreamUnreachable, match="does not accept"):
                await borrower.answer()
        assert endpoint.outstanding == 0
        await endpoint.close()


async def test_an_upstream_of_http1_takes_no_streams() -> None:
    server = await serve_buffered(lambda exchange: exchange.respond(200, [], b""), bound(), limits=HttpLimits())
    endpoint = endpoint_of(server.port)
    with pytest.raises(UpstreamUnreachable, match="no streams"):
        await Borrower(endpoint).answer()
    await endpoint.close()
    await server.drain(0.0)


async def test_an_upstream_that_leaves_at_once_is_not_tried_without_end(library: LibraryServer) -> None:
    library._options["max_streams"] = 0
    endpoint = endpoint_of(library.port)
    with pytest.raises(UpstreamUnreachable, match="no streams"):
        await Borrower(endpoint).answer()
    assert len(library.connections) == 1
    await endpoint.close()


async def test_connecting_that_takes_too_long_fails(silent: socket.socket) -> None:
    with silent:
        endpoint = endpoint_of(silent.getsockname()[1], connect_timeout_s=0.01)
        with pytest.raises(UpstreamUnreachable):
            await Borrower(endpoint).answer()
        await endpoint.close()


async def test_giving_up_to_connect_fails_those_that_wait(silent: socket.socket) -> None:
    with silent:
        endpoint = endpoint_of(silent.getsockname()[1])
        borrowers = [Borrower(endpoint) for _ in range(3)]
        await until(lambda: endpoint.connecting_for_s(monotonic()) > 0.0)
        endpoint.give_up_connecting()
        for borrower in borrowers:
            with pytest.raises(UpstreamUnreachable):
                await borrower.answer()
        assert endpoint.outstanding == 0 and endpoint.connecting_for_s(monotonic()) == 0.0
        await endpoint.close()


async def test_one_failure_that_ends_another_request_ends_it_quietly(silent: socket.socket) -> None:
    """The other one was called although it had been forgotten."""

    class Chain(Borrower):
        def failed(self, error: object) -> None:
            endpoint.borrower_left(other)
            self.done.set()

    with silent:
        endpoint = endpoint_of(silent.getsockname()[1])
        chain, other = Chain(endpoint), Borrower(endpoint)
        endpoint.give_up_connecting()
        assert chain.done.is_set() and other.error is None and endpoint.outstanding == 0
        await endpoint.close()


# Borrowers that leave ------------------------------------------------------------------------------------------------


async def test_a_forgotten_request_gets_no_callback_and_connecting_goes_on(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    borrower = Borrower(endpoint)
    endpoint.borrower_left(borrower)
    await until(lambda: endpoint.connected)
    assert borrower.stream is None and borrower.error is None and endpoint.outstanding == 0
    assert await Borrower(endpoint, body=b"x").answer() == b"x" and len(library.connections) == 1
    await endpoint.close()


async def test_an_abandoned_request_resets_its_stream(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    endpoint = endpoint_of(server.port)
    borrower = Borrower(endpoint, b"/chat", b"x", end=False)
    await until(lambda: borrower.body == b"x")
    assert borrower.stream is not None
    borrower.stream.abandon()
    borrower.stream.abandon()
    await until(lambda: app.calls[0].reset == CANCEL)
    assert not borrower.done.is_set() and endpoint.outstanding == 0
    assert await Borrower(endpoint, body=b"y").answer() == b"y" and len(app.connections) == 1
    await endpoint.close()


async def test_closing_fails_those_that_wait_and_spares_open_streams(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    endpoint = endpoint_of(server.port, max_connections=1)
    running = [Borrower(endpoint, b"/hold") for _ in range(2)]
    waiting = Borrower(endpoint)
    await until(lambda: len(app.calls) == 2)
    await endpoint.close()
    for late in (waiting, Borrower(endpoint)):
        with pytest.raises(UpstreamUnreachable):
            await late.answer()
    for number in range(2):
        assert not app.connections[0].transport.is_closing()
        app.calls[number].answer(b"whole")
        assert await running[number].answer() == b"whole"
    await until(lambda: not server.connections and not connections_of(endpoint))


async def test_closing_while_it_connects_fails_those_that_wait(silent: socket.socket) -> None:
    with silent:
        endpoint = endpoint_of(silent.getsockname()[1])
        borrower = Borrower(endpoint)
        await endpoint.close()
        with pytest.raises(UpstreamUnreachable):
            await borrower.answer()


# Time ----------------------------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    await Borrower(endpoint).answer()
    now = monotonic()
    endpoint.close_stale(now)
    endpoint.close_stale(now + endpoint.max_idle_s - 1.0)
    assert endpoint.connected
    endpoint.close_stale(now + endpoint.max_idle_s + 1.0)
    assert not endpoint.connected
    await until(lambda: library.connections[0].lost and not connections_of(endpoint))
    assert library.connections[0].goaways == [(0, NO_ERROR)]


async def test_the_kernel_probes_an_upstream_that_may_have_vanished(library: LibraryServer) -> None:
    endpoint = endpoint_of(library.port)
    await Borrower(endpoint).answer()
    sock = connections_of(endpoint)[0].transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
    await endpoint.close()
