"""How the gateway ends a stream to its client: with one more event where an event may begin, otherwise by a cut."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oriel_gateway.call.stream import Events, events_of
from oriel_gateway.errors import Outcome
from oriel_wire.h1.chunked import ChunkedDecoder, chunk
from oriel_wire.h1.response import ResponseMemo, parse_response_head

from ..waiting import until
from .documents import TIER, written
from .gate import idle
from .stack import Client, documents, gateway

STREAM = "/v2/models/digits/generate_stream"
PLAIN = "content-type: text/event-stream; charset=utf-8\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"
DIES = "the upstream closed the connection before its answer was complete"
LATE = "the deadline passed while receiving the answer"


@given(st.text(alphabet="a:\r\n", max_size=12), st.lists(st.integers(0, 12), max_size=4))
@example("a\r\n", [])
@example("a\r\n\r\n", [2, 3])
@example("a\r\r\n", [2])
@example("a\n\r\n", [1])
def test_an_event_may_begin_after_a_blank_line_however_it_came(text: str, cuts: list[int]) -> None:
    events = Events()
    places = sorted({0, *cuts, len(text)})
    for start, stop in zip(places, places[1:], strict=False):
        events.sent(text[start:stop].encode())
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # the last piece is an event that has not ended
    assert events.between == (not lines[-1] and (len(lines) == 1 or not lines[-2]))


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("200 OK\r\ncontent-type: text/event-stream", True),
        ("200 OK\r\nContent-Type: Text/Event-Stream ;charset=utf-8\r\ncontent-encoding: identity", True),
        ("200 OK\r\ncontent-type: text/event-streams", False),
        ("200 OK\r\ncontent-type: text/plain", False),
        ("200 OK\r\nx-none: of it", False),
        ("200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip", False),
        ("500 No\r\ncontent-type: text/event-stream", False),
    ],
)
def test_which_answers_are_of_plain_events(head: str, found: bool) -> None:
    parsed = parse_response_head(f"HTTP/1.1 {head}".encode(), ResponseMemo())
    assert (events_of(parsed, b"") is not None) is found


@asynccontextmanager
async def streaming(fields: str, *pieces: bytes, dies: bool, again: bytes = b"") -> AsyncIterator[int]:
    """Yield the port of an upstream that sends these pieces and then closes, or else keeps sending `again`."""

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\nx")
            writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n".encode())
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while not dies and not reader.at_eof():
                writer.write(again)
                await writer.drain()  # after a reset the reader reports no end, but drain() raises
                await asyncio.sleep(0.01)
        except (ConnectionError, RuntimeError):
            pass  # uvloop raises RuntimeError for a transport that was reset meanwhile
        finally:
            writer.close()
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        async with asyncio.timeout(60):
            await ended.wait()
        server.close()


async def heard(port: int, target: str = STREAM, version: str = "1.1") -> tuple[str, bytes, bool]:
    """Return the head of the answer, its body, and whether it ended properly, not by a closed connection."""
    async with Client(port) as client, asyncio.timeout(60):
        client.writer.write(f"POST {target} HTTP/{version}\r\n".encode())
        client.writer.write(b"host: x\r\nx-api-key: key-gold\r\ncontent-length: 1\r\n\r\nx")
        head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
        raw = bytearray()
        try:
            while piece := await client.reader.read(1 << 16):
                raw += piece
        except ConnectionError:
            pass
        if CHUNKED not in head:
            return head, bytes(raw), False
        decoder = ChunkedDecoder()
        body = b"".join(decoder.feed(bytes(raw)))
        assert not decoder.rest
        return head, body, decoder.done


@pytest.mark.parametrize(
    ("rule", "pieces", "again", "outcome", "sentence"),
    [
        ("", [b"data: 1\n", b"\n"], b"", Outcome.UPSTREAM_BROKEN, DIES),
        ("", [b"data: 1\r\n\r", b"\n"], b"", Outcome.UPSTREAM_BROKEN, DIES),
        ("", [], b"", Outcome.UPSTREAM_BROKEN, DIES),
        ("stream_idle_ms = 40", [b"data: 1\n\n"], b"", Outcome.DEADLINE_EXCEEDED, LATE),
        ("stream_idle_ms = 60\nstream_max_ms = 60", [], b"data: 1\n\n", Outcome.DEADLINE_EXCEEDED, LATE),
    ],
    ids=["broken", "broken within a line end", "broken before the first", "silent", "too long"],
)
async def test_a_stream_of_events_ends_with_the_reason(
    rule: str, pieces: list[bytes], again: bytes, outcome: Outcome, sentence: str
) -> None:
    chunks = [chunk(piece) for piece in pieces]
    more = chunk(again) if again else b""
    async with (
        streaming(PLAIN + CHUNKED, *chunks, dies=not rule, again=more) as up,
        gateway(written(documents([up]), TIER, f"{TIER}\n{rule}")) as (port, core),
    ):
        head, body, whole = await heard(port)
        assert head.startswith("HTTP/1.1 200 ") and whole
        *events, last, rest = body.replace(b"\r\n", b"\n").split(b"\n\n")
        assert rest == b"" and all(event == b"data: 1" for event in events) and bool(events) == bool(pieces or again)
        (decided,) = core.records.decisions.where()
        assert json.loads(last.removeprefix(b"data: ")) == {
            "error": sentence, "reason": outcome.value, "request_id": decided.mark.request_id,
        }  # fmt: skip
        assert (decided.outcome, decided.status, decided.error) == (outcome, 200, sentence)
        assert [series[3] for series in core.records.stats.series] == [outcome]
        await until(lambda: idle(core))


async def test_a_services_stream_says_it_as_services_do() -> None:
    async with (
        streaming(PLAIN + CHUNKED, chunk(b"data: 1\n\n"), dies=True) as up,
        gateway(documents([up])) as (port, core),
    ):
        _, body, whole = await heard(port, "/v1/services/digits")
        (decided,) = core.records.decisions.where()
        said = {"message": DIES, "type": "server_error", "param": None, "code": "upstream_broken"}
        said |= {"reason": "upstream_broken", "request_id": decided.mark.request_id}
        assert whole and json.loads(body.removeprefix(b"data: 1\n\ndata: ")) == {"error": said}


@pytest.mark.parametrize(
    ("fields", "piece", "version"),
    [
        (PLAIN + CHUNKED, chunk(b"data: 1\n\ndata: 2\n"), "1.1"),
        (PLAIN + CHUNKED, b"20\r\ndata: 1", "1.1"),
        (PLAIN + CHUNKED + "content-encoding: gzip\r\n", chunk(b"data: 1\n\n"), "1.1"),
        (PLAIN + "content-length: 100\r\n", b"data: 1\n\n", "1.1"),
        ("content-type: text/plain\r\n" + CHUNKED, chunk(b"data: 1\n\n"), "1.1"),
        # a client of HTTP/1.0 gets no chunks: its answer ends with the connection
        (PLAIN + CHUNKED, chunk(b"data: 1\n\n"), "1.0"),
    ],
)
async def test_every_other_answer_is_cut(fields: str, piece: bytes, version: str) -> None:
    """No error event can be added within another event, to an answer with a length or a coding, or in HTTP/1.0."""
    async with streaming(fields, piece, dies=True) as up, gateway(documents([up])) as (port, core):
        _, body, whole = await heard(port, version=version)
        assert not whole and b"error" not in body
        (decided,) = core.records.decisions.where()
        assert decided.outcome is Outcome.UPSTREAM_BROKEN
        await until(lambda: idle(core))
