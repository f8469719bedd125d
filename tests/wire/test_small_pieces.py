"""Heads, chunks and header blocks that never end, or that come byte by byte, take steps by their bytes."""

import asyncio
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.server import ServerConnection
from oriel_wire.engine.upstream import UpstreamConnection
from oriel_wire.errors import BadMessage
from oriel_wire.h1.chunked import ChunkedDecoder
from oriel_wire.h1.request import LineMemo, RequestHead
from oriel_wire.h1.response import ResponseHead, ResponseMemo
from oriel_wire.h1.similar import SimilarHeads
from oriel_wire.h2.frames import CONTINUATION, HEADERS, frame

from ..steps import linear
from .h2.blocks import literal
from .h2.recorders import REQUEST, block, server

SIZES = 1000, 2000, 4000  # bytes that come one by one
START = b"POST /a HTTP/1.1\r\nHost: x\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\n"


class Transport(asyncio.Transport):
    """Takes what is written."""

    def write(self, data: Any) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    can_write_eof = is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass

    pause_reading = resume_reading = close = abort


class Server(ServerConnection):
    """Notes what it is asked."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self.heads: list[RequestHead] = []
        self.refused: list[int] = []
        self.body = b""

    def on_head(self, head: RequestHead) -> None:
        self.heads.append(head)

    def on_data(self, data: bytes | memoryview) -> None:
        self.body += data

    def on_end(self) -> None:
        pass

    def on_request(self, head: RequestHead, data: bytes) -> None:
        self.heads.append(head)
        self.body += data

    def on_refused(self, status: int, message: str) -> None:
        self.refused.append(status)

    def on_lost(self) -> None:
        pass


def feed(connection: Any, data: bytes, size: int = 1) -> None:
    for at in range(0, len(data), size):
        connection.data_received(data[at : at + size])


def accepted() -> Server:
    connection = Server(HttpServer(HttpLimits()))
    connection.connection_made(Transport())
    connection._pulse.fresh_until = inf  # or a busy machine takes more steps, to know how late it reads
    return connection


LINES: dict[str, Callable[[int], bytes]] = {
    "one line": lambda size: b"x-long: " + b"a" * size,
    "many lines": lambda size: b"a: b\r\n" * (size // 6),
    "cookies": lambda size: b"cookie: a=1; b=2\r\n" * (size // 18),
    "no lines": lambda size: b"a" * size,
    "line ends": lambda size: b"\r\n" * (size // 2),
}


@pytest.mark.parametrize("kind", LINES)
async def test_a_request_head_in_single_bytes(kind: str) -> None:
    """All that had come was copied and searched again with each byte."""

    def work(size: int) -> None:
        connection = accepted()
        feed(connection, (b"" if kind == "line ends" else START) + LINES[kind](size))
        assert not connection.heads and not connection.refused or kind == "line ends"

    assert linear(work, SIZES, copies=True)[2] < 40 * SIZES[2]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_a_head_in_pieces_is_the_head(size: int) -> None:
    connection = accepted()
    whole = START + b"x-a: 1\r\ncontent-length: 3\r\n\r\nabc"
    feed(connection, whole + whole[:20], size)
    assert [head.get("x-a") for head in connection.heads] == ["1"] and connection.body == b"abc"
    connection.answered(close=False)
    await asyncio.sleep(0)
    feed(connection, whole[20:], size)
    assert len(connection.heads) == 2 and connection.body == b"abcabc" and not connection.refused


@pytest.mark.parametrize("wrong", [b"a: b\n", b"a: b\r\n\n", b"a\n\r\n", b"x: " + b"y" * 40_000])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_wrong_head_in_pieces_is_refused(wrong: bytes, size: int) -> None:
    connection = accepted()
    feed(connection, START + b"c: d\r\n" + wrong, size)
    assert connection.refused == [431 if len(wrong) > 100 else 400]


async def test_what_a_client_sends_ahead_in_single_bytes() -> None:
    def work(size: int) -> None:
        connection = accepted()
        connection.data_received(START + b"\r\n")
        feed(connection, START + b"x: " + b"a" * size)

    linear(work, SIZES, copies=True)


class Sink:
    def __init__(self) -> None:
        self.heads: list[ResponseHead] = []

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        self.heads.append(head)
        assert bytes(data) == b"no"

    def broken(self, *_: Any) -> None:
        raise AssertionError


def asked() -> tuple[UpstreamConnection, Sink]:
    memo = ResponseMemo()
    endpoint: Any = SimpleNamespace(heard=False, memo=memo, max_response_bytes=10**6, outstanding=1, release=print)
    connection = UpstreamConnection(endpoint)
    connection.connection_made(Transport())
    connection.sink = sink = Sink()  # type: ignore[assignment]
    return connection, sink


@pytest.mark.parametrize("kind", ["one line", "many lines"])
async def test_a_head_of_an_answer_in_single_bytes(kind: str) -> None:
    def work(size: int) -> None:
        connection, sink = asked()
        feed(connection, ANSWER + LINES[kind](size))
        assert not sink.heads and connection.sink is not None

    linear(work, SIZES, copies=True)


async def test_a_short_error_in_single_bytes() -> None:
    def work(size: int) -> None:
        connection, sink = asked()
        feed(connection, b"HTTP/1.1 500 No\r\ncontent-length: 4096\r\n\r\n" + b"a" * size)
        assert not sink.heads

    linear(work, SIZES, copies=True)


@pytest.mark.parametrize("kind", ["size", "extension", "trailers", "small chunks"])
def test_chunks_in_single_bytes(kind: str) -> None:
    whole: dict[str, Callable[[int], bytes]] = {
        "size": lambda size: b"0" * size,
        "extension": lambda size: b"1;" + b"x" * size,
        "trailers": lambda size: b"0\r\n" + b"a: b\r\n" * (size // 6),
        "small chunks": lambda size: b"1\r\na\r\n" * (size // 6),
    }

    def work(size: int) -> None:
        decoder, data = ChunkedDecoder(), whole[kind](size)
        try:
            for at in range(len(data)):
                decoder.feed(data[at : at + 1])
        except BadMessage:
            assert kind in ("size", "extension"), kind

    linear(work, SIZES, copies=True)


def test_many_small_chunks_at_once() -> None:
    linear(lambda size: ChunkedDecoder().feed(b"1\r\na\r\n" * size), SIZES, copies=True)


@pytest.mark.parametrize("kind", ["continuations", "cookies", "many fields", "one frame in bytes"])
def test_header_blocks_of_http2(kind: str) -> None:
    head = block(REQUEST)

    def work(size: int) -> None:
        connection = server()
        if kind == "one frame in bytes":
            data = frame(HEADERS, 0, 1, head + literal(b"x-a", b"v" * size))
            for at in range(len(data)):
                connection.receive(data[at : at + 1], 0.0)
            return
        if kind == "continuations":
            data = frame(HEADERS, 0, 1, head) + b"".join([frame(CONTINUATION, 0, 1, b"")] * size)
        else:
            one = literal(b"cookie", b"a=1") if kind == "cookies" else literal(b"x-a", b"1")
            data = frame(HEADERS, 4, 1, head + one * (size // 2))
        connection.receive(data, 0.0)

    linear(work, SIZES, copies=True)


def test_heads_of_many_lines() -> None:
    def work(size: int) -> None:
        lines = [b"x-%d: a" % number for number in range(size)]
        SimilarHeads(LineMemo()).read(b"\r\n".join((START[:-2], *lines)), size + 10)

    linear(work, SIZES, copies=True)
