"""A client that waits for a stream of events gets comments until the first event comes, so no balancer cuts it off."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from oriel_gateway.call import kept_open

from ..waiting import until
from .documents import changed
from .stack import GOLD, Client, Seen, Upstream, documents, gateway, upstream

CHAT, STREAM = "/v1/chat/completions", "/v2/models/digits/generate_stream"
ASKS = b'{"model": "m", "stream": true}'
EVENTS = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
COMMENT = b": waiting\n\n"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_open, "KEEP_ALIVE_S", 0.05)


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


class Late:
    """Answers when it is let go."""

    def __init__(self, answer: bytes) -> None:
        self.go = asyncio.Event()
        self.answer = answer

    async def __call__(self, seen: Seen) -> bytes:
        await self.go.wait()
        return self.answer


async def commented(client: Client) -> bytes:
    """Return the head of an answer, once two comments have followed it."""
    async with asyncio.timeout(60):
        head = await client.reader.readuntil(b"\r\n\r\n")
        for _ in range(2):
            assert await client.reader.readuntil(COMMENT + b"\r\n")
    return head


async def rest(client: Client) -> bytes:
    """Return what follows of the answer, without the framing of its chunks and without comments."""
    found = b""
    async with asyncio.timeout(60):
        while size := int((await client.reader.readuntil(b"\r\n"))[:-2], 16):
            found += await client.reader.readexactly(size)
            await client.reader.readexactly(2)
        await client.reader.readexactly(2)
    return found.replace(COMMENT, b"")


@pytest.mark.parametrize(
    ("target", "body", "headers"),
    [(CHAT, ASKS, ""), (STREAM, b"{}", ""), ("/v1/services/digits", b"{}", "accept: text/event-stream\r\n")],
)
async def test_comments_come_before_the_first_event(up: Upstream, target: str, body: bytes, headers: str) -> None:
    late = up.answer = Late(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"9\r\ndata: 1\n\n\r\n0\r\n\r\n")
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        client.send(target, body, headers=headers)
        head = await commented(client)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"x-accel-buffering: no" in head and b"x-request-id" in head
        late.go.set()
        assert await rest(client) == b"data: 1\n\n"
        up.answer = up.ok
        assert (await client.ask("/v2/models/digits/infer")).body == b"ok", "the connection goes on"
        assert core.pools["p"].admission.inflight == 0


@pytest.mark.parametrize("body", [b'{"model": "m"}', b'{"messages": "\\"stream\\": true"}', b'{"stream": 1}'])
async def test_who_asks_for_no_stream_gets_a_status(up: Upstream, body: bytes) -> None:
    late = up.answer = Late(b"HTTP/1.1 503 Full\r\ncontent-length: 0\r\n\r\n")
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        client.send(CHAT, body)
        await until(lambda: bool(up.seen))
        looked = core.keep_alive.rounds
        await until(lambda: core.keep_alive.rounds > looked + 2)
        late.go.set()
        assert (await client.reply()).status == 503


async def test_an_error_after_comments_is_the_last_event(up: Upstream) -> None:
    error = b'{"error":{"message":"late"}}'
    answer = b"HTTP/1.1 500 No\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(error), error)
    late = up.answer = Late(answer)
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        client.send(CHAT, ASKS)
        await commented(client)
        late.go.set()
        assert await rest(client) == b"data: " + error + b"\n\n"


async def test_so_is_a_refusal_of_the_gateway(up: Upstream) -> None:
    up.answer = Late(b"")
    files = changed(documents([up.port]), "band = 0\ntarget_ms = 2000", "band = 0\ntarget_ms = 500\ngive_up_ms = 500")
    async with gateway(files) as (port, core), Client(port) as client:
        client.send(CHAT, ASKS, key=GOLD)
        await commented(client)
        event = json.loads((await rest(client)).removeprefix(b"data: "))
        assert event["error"]["reason"] == "deadline_exceeded"
        (decided,) = core.records.decisions.where()
        assert (decided.outcome, decided.status) == ("deadline_exceeded", 200)


async def test_an_answer_that_is_no_stream_is_cut_if_it_is_not_whole(up: Upstream) -> None:
    late = up.answer = Late(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab")
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        client.send(CHAT, ASKS)
        await commented(client)
        late.go.set()
        async with asyncio.timeout(60):
            assert b"0\r\n\r\n" not in await client.reader.read(), "nobody takes it for a whole answer"
        await until(lambda: core.pools["p"].calls == 0)


async def test_over_http2_it_is_the_same(up: Upstream) -> None:
    late = up.answer = Late(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"9\r\ndata: 1\n\n\r\n0\r\n\r\n")
    async with gateway(documents([up.port])) as (port, _), asyncio.timeout(60):
        headers = {"authorization": f"Bearer {GOLD}"}
        async with (
            httpx.AsyncClient(http1=False, http2=True) as client,
            client.stream("POST", f"http://127.0.0.1:{port}{CHAT}", content=ASKS, headers=headers) as answer,
        ):
            assert (answer.status_code, answer.headers["x-accel-buffering"]) == (200, "no")
            found = b""
            async for piece in answer.aiter_bytes():
                found += piece
                if found.count(COMMENT) >= 2:
                    late.go.set()
            assert found.replace(COMMENT, b"") == b"data: 1\n\n"


async def test_a_request_for_the_head_gets_no_comments(up: Upstream) -> None:
    """They would be a body, which the next answer of the connection would be taken for."""
    up.answer = late = Late(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n")
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        client.send("/v2/models/digits", b"", method="HEAD", headers="accept: text/event-stream\r\n")
        await until(lambda: up.seen)
        rounds = core.keep_alive.rounds
        await until(lambda: core.keep_alive.rounds > rounds + 2)
        late.go.set()
        assert b"content-length: 40" in await client.reader.readuntil(b"\r\n\r\n")
