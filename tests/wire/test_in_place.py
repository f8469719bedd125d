"""Large bodies that are read into memory of their length, among all else that a connection brings."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from oriel_wire.engine.buffered import Exchange, serve
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h1.request import RequestHead

from ..waiting import until
from .engine_client import bound, count, talk

LARGE = 200_000


class Keep:
    """Answers with the method and the body's length; keeps all bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes | memoryview] = []
        self.aborted = 0

    def __call__(self, exchange: Exchange) -> None:
        self.bodies.append(exchange.body)
        if exchange.head.path == "/hold":
            exchange.on_abort = self._left
            return
        exchange.respond(200, [], f"{exchange.head.path} {len(exchange.body)};".encode())

    def _left(self) -> None:
        self.aborted += 1


def views(head: RequestHead) -> bool:
    return head.path != "/bytes"


@pytest.fixture
async def kept() -> AsyncIterator[tuple[Keep, HttpServer]]:
    handler = Keep()
    server = await serve(handler, bound(), limits=HttpLimits(max_body_bytes=32 << 20), views=views)
    yield handler, server
    await server.drain(0.0)


def post(body: bytes, path: str = "/views", extra: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), extra, len(body), body)


def chunked(body: bytes) -> bytes:
    head = b"POST /chunked HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"


async def test_requests_without_a_length_cost_no_more_than_others(kept: tuple[Keep, HttpServer]) -> None:
    _, server = kept
    sent = (b"GET /bare HTTP/1.1\r\nHost: x\r\n\r\n" + chunked(b"")) * 200
    async with asyncio.timeout(30):  # a third of a second each, once, while every length of a large body was looked at
        assert (await talk(server.port, sent, until=count(b"200 OK", 400))).count(b"200 OK") == 400


@pytest.mark.parametrize("seed", range(4))
async def test_requests_of_all_sizes_in_any_pieces_are_read_as_they_were_sent(
    kept: tuple[Keep, HttpServer], seed: int
) -> None:
    handler, server = kept
    rng = random.Random(seed)
    sent = [rng.randbytes(700_000)]
    data = post(sent[0])
    for _ in range(30):
        body = rng.randbytes(rng.choice([0, 10, 65_535, 65_536, 65_537, 100_000, 700_000]))
        sent.append(body)
        data += rng.choice([post, post, lambda each: post(each, "/bytes"), chunked])(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def send() -> None:
        at = 0
        while at < len(data):
            size = rng.choice([1, 100, 8192, 65_536, 300_000, 2_000_000])
            writer.write(data[at : at + size])
            at += size
            await writer.drain()
            if rng.random() < 0.3:
                await asyncio.sleep(0.001)

    sending = asyncio.create_task(send())
    got = b""
    async with asyncio.timeout(60):
        while got.count(b";") < len(sent) and (piece := await reader.read(65_536)):
            got += piece
    await sending
    writer.close()
    assert got.count(b"HTTP/1.1 200 OK") == len(sent)
    assert [bytes(body) for body in handler.bodies] == sent
    placed = [body for body in handler.bodies if isinstance(body, memoryview)]
    assert placed and all(body.readonly and len(body) >= 65_536 for body in placed)


async def test_what_may_not_be_a_view_and_what_is_too_large_to_be_believed_is_bytes(
    kept: tuple[Keep, HttpServer],
) -> None:
    handler, server = kept
    for body, path, kind in (
        (LARGE, "/bytes", bytes),
        (8 << 20, "/views", memoryview),
        ((8 << 20) + 1, "/views", bytes),
        (50_000, "/views", bytes),
    ):
        await talk(server.port, post(bytes(body), path), until=count(b";", 1))
        assert type(handler.bodies[-1]) is kind and len(handler.bodies[-1]) == body


async def test_a_client_that_leaves_within_a_large_body_or_behind_it_is_noticed(kept: tuple[Keep, HttpServer]) -> None:
    handler, server = kept
    for data, bodies in ((post(bytes(LARGE))[:-5], 0), (post(bytes(LARGE), "/hold"), 1)):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(60):
            await until(lambda bodies=bodies: len(handler.bodies) >= bodies and server.connections)
            writer.close()
            await until(lambda: not server.connections)
    assert handler.aborted == 1 and len(handler.bodies) == 1


async def test_a_large_body_that_stops_is_cut_with_408() -> None:
    server = await serve(Keep(), bound(), limits=HttpLimits(body_timeout_s=0.05), views=views)
    got = await talk(server.port, post(bytes(LARGE))[:-5])
    assert got.startswith(b"HTTP/1.1 408 ")
    await server.drain(0.0)


async def test_continue_is_said_before_a_large_body_and_the_next_request_waits_for_its_turn(
    kept: tuple[Keep, HttpServer],
) -> None:
    handler, server = kept
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    whole = post(bytes(LARGE), extra=b"Expect: 100-continue\r\n")
    writer.write(whole[:-LARGE])
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(whole[-LARGE:] + post(b"abc", "/bytes") + post(bytes(LARGE)))
    async with asyncio.timeout(60):
        for said in (b"/views 200000;", b"/bytes 3;", b"/views 200000;"):
            assert (await reader.readuntil(b";")).endswith(said)
    writer.close()
    assert [type(body) for body in handler.bodies] == [memoryview, bytes, memoryview]
