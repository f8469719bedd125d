"""Answers written piece by piece: framing, slow readers, departures."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from oriel_wire.engine.buffered import Exchange, serve
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer

from ..waiting import until


class Held:
    """Starts an answer to every request and keeps it."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.aborted = 0
        self.caught_up = 0

    def __call__(self, exchange: Exchange) -> None:
        def left() -> None:
            self.aborted += 1

        def caught_up() -> None:
            self.caught_up += 1

        exchange.on_abort, exchange.on_writable = left, caught_up
        exchange.start(200, [("content-type", "text/plain")])
        self.exchanges.append(exchange)


@pytest.fixture
async def held() -> AsyncIterator[tuple[Held, HttpServer]]:
    handler = Held()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = await serve(handler, sock, limits=HttpLimits(write_stall_s=0.6))
    yield handler, server
    await server.drain(0.0)


GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_pieces_are_chunks_and_the_connection_goes_on(held: tuple[Held, HttpServer]) -> None:
    handler, server = held
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(2):
        writer.write(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head and b"content-length" not in head
        exchange = handler.exchanges.pop()
        exchange.write(b"one")
        assert await reader.readexactly(8) == b"3\r\none\r\n"
        exchange.write(b"two")
        exchange.end()
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"
        exchange.end()
        exchange.write(b"after the end")
    writer.close()
    assert handler.aborted == 0


async def test_an_old_client_gets_plain_bytes_until_the_end(held: tuple[Held, HttpServer]) -> None:
    handler, server = held
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /a HTTP/1.0\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"chunked" not in head and b"connection: close" in head
    handler.exchanges[0].write(b"all")
    handler.exchanges[0].end()
    assert await reader.read() == b"all"
    writer.close()


async def test_a_client_that_leaves_is_told_of_once(held: tuple[Held, HttpServer]) -> None:
    handler, server = held
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET)
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await until(lambda: handler.aborted)
    (exchange,) = handler.exchanges
    assert exchange.aborted and not exchange.writable
    exchange.write(b"nobody reads")
    exchange.end()
    assert handler.aborted == 1


async def test_a_slow_reader_is_known_and_may_catch_up(held: tuple[Held, HttpServer]) -> None:
    handler, server = held
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET)
    await until(lambda: handler.exchanges)
    exchange = handler.exchanges[0]
    sent = 0
    while exchange.writable:
        exchange.write(b"x" * 65536)
        sent += 65536
        await asyncio.sleep(0)
    got = b""
    async with asyncio.timeout(60):
        while not handler.caught_up:
            got += await reader.read(1 << 20)
    assert exchange.writable
    exchange.end()
    while not got.endswith(b"0\r\n\r\n"):
        got += await reader.read(1 << 20)
    assert got.partition(b"\r\n\r\n")[2].count(b"x") == sent
    writer.close()


async def test_one_that_never_reads_is_cut(held: tuple[Held, HttpServer]) -> None:
    handler, server = held
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET)
    await until(lambda: handler.exchanges)
    while handler.exchanges[0].writable:
        handler.exchanges[0].write(b"x" * 65536)
        await asyncio.sleep(0)
    await until(lambda: handler.aborted == 1)
    writer.close()


async def test_a_started_answer_cannot_be_given_whole(held: tuple[Held, HttpServer]) -> None:
    handler, server = held
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET)
    await until(lambda: handler.exchanges)
    with pytest.raises(RuntimeError, match="begun"):
        handler.exchanges[0].respond(200, [])
    writer.close()
