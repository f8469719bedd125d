"""Exchanges over HTTP/2: our endpoint and our server, both with the `h2` library, our server with other clients."""

import operator
from collections.abc import AsyncIterator
from functools import partial

import pytest

from oriel_wire.engine.h2_upstream import H2Endpoint
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.limits import H2Limits

from ..waiting import until
from .h2.recorders import TRAILERS
from .h2_peers import App, Borrower, LibraryServer, connections_of, endpoint_of, serve
from .judges import run

LARGE = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture
async def ours() -> AsyncIterator[tuple[HttpServer, App]]:
    server, app = await serve()
    yield server, app
    await server.drain(0.0)


@pytest.fixture(params=["our server", "the library's server"])
async def upstream(request: pytest.FixtureRequest, ours: tuple[HttpServer, App]) -> AsyncIterator[H2Endpoint]:
    """Our endpoint of each server."""
    if request.param == "our server":
        endpoint = endpoint_of(ours[0].port)
        yield endpoint
        await endpoint.close()
        return
    async with LibraryServer() as library:
        endpoint = endpoint_of(library.port)
        yield endpoint
        await endpoint.close()


@pytest.mark.parametrize("body", [b"", b"hello", LARGE], ids=["empty", "small", "2 MiB"])
async def test_a_unary_exchange_of_our_client(upstream: H2Endpoint, body: bytes) -> None:
    for _ in range(2):  # on a new connection and on a kept one
        borrower = Borrower(upstream, body=body)
        assert await borrower.answer() == body
        assert borrower.fields[0] == (b":status", b"200") and borrower.trailers == TRAILERS
    assert upstream.outstanding == 0 and len(connections_of(upstream)) == 1


async def test_a_stream_in_both_directions_of_our_client(upstream: H2Endpoint) -> None:
    borrower = Borrower(upstream, b"/chat", b"0", end=False)
    wanted = b"0"
    for number in range(1, 10):
        await until(partial(operator.eq, borrower.body, wanted))
        assert borrower.stream is not None
        wanted += b"%d" % number
        assert borrower.stream.send_more(b"%d" % number, number == 9)
    assert await borrower.answer() == b"0123456789" and borrower.trailers == TRAILERS


async def test_a_client_that_pauses_stops_our_server_at_its_window(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    endpoint = endpoint_of(server.port, limits=H2Limits(stream_window_bytes=64 * 1024))
    borrower = Borrower(endpoint, b"/hold", paused=True)
    await until(lambda: app.calls)
    call = app.calls[0]
    call.answer(LARGE)
    await until(lambda: len(borrower.body) == 64 * 1024)
    assert await Borrower(endpoint, body=b"x").answer() == b"x"  # the connection goes on
    assert call.pending is not None and call.send_window == 0 and len(borrower.body) == 64 * 1024
    assert borrower.stream is not None
    borrower.stream.resume()
    assert await borrower.answer() == LARGE
    await endpoint.close()


async def test_a_server_that_consumes_nothing_stops_our_client_at_its_window(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    endpoint = endpoint_of(server.port)
    borrower = Borrower(endpoint, b"/keep", LARGE)
    window = app.limits.stream_window_bytes
    await until(lambda: app.calls and len(app.calls[0].body) == window)
    call = app.calls[0]
    assert await Borrower(endpoint, body=b"x").answer() == b"x"
    assert borrower.stream is not None and borrower.stream.pending is not None and len(call.body) == window
    call.path = b"/hold"  # consumes from now on
    call.connection.consumed(call, window)
    await until(lambda: call.ended)
    assert call.body == LARGE
    call.answer()
    assert await borrower.answer() == b""
    await endpoint.close()


async def test_a_borrower_is_told_of_room_for_more(ours: tuple[HttpServer, App]) -> None:
    endpoint = endpoint_of(ours[0].port)
    borrower = Borrower(endpoint, b"/echo", LARGE, end=False)
    await until(lambda: borrower.rooms)
    assert borrower.stream is not None
    borrower.stream.send_more(b"end", True)
    assert await borrower.answer() == LARGE + b"end"
    await endpoint.close()


async def test_answers_that_end_while_their_borrower_pauses_keep_no_window(ours: tuple[HttpServer, App]) -> None:
    """They held it for ever, until nothing came on their connection any more."""
    limits = H2Limits(stream_window_bytes=64 * 1024, connection_window_bytes=128 * 1024)
    endpoint = endpoint_of(ours[0].port, limits=limits)
    body = bytes(60_000)
    for _ in range(8):
        assert await Borrower(endpoint, body=body, paused=True).answer() == body
    assert len(connections_of(endpoint)) == 1
    await endpoint.close()


# Judges that were not written here -----------------------------------------------------------------------------------


async def test_curl_speaks_http2_and_http1_on_one_port(ours: tuple[HttpServer, App]) -> None:
    url = f"http://127.0.0.1:{ours[0].port}/echo"
    command = ("curl", "--silent", "--show-error", "--max-time", "240", "--noproxy", "*")
    written = ("--write-out", " %{http_version} %{http_code}", "--data", "hello", url)
    assert await run(*command, "--http2-prior-knowledge", *written) == "hello 2 200"
    assert await run(*command, "--http1.1", "--write-out", " %{http_version}", url) == "h1 1.1"


async def test_h2load_finds_every_answer(ours: tuple[HttpServer, App]) -> None:
    url = f"http://127.0.0.1:{ours[0].port}/echo"
    out = await run("h2load", "-n", "200", "-c", "4", "-m", "10", url)
    assert "200 succeeded, 0 failed, 0 errored, 0 timeout" in out
    assert len(ours[1].connections) == 4
