"""HTTP/2 at the public port: a request means the same as over HTTP/1.1, and one connection carries many of them."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http2 import Http2Client
from oriel_wire.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    NO_ERROR,
    PREFACE,
    SETTINGS,
    SETTINGS_ACK,
    frame,
)

from ..waiting import until
from ..wire.h2.recorders import block, frames_of
from .gate import INFER, idle
from .stack import BRONZE, GOLD, Client, Seen, Upstream, documents, gateway, upstream

OF_HTTP_1 = {"connection", "transfer-encoding"}
PER_CALL = {"x-request-id", "traceresponse", "server-timing", "date"}
CORS = '[http]\ncors_origins = ["https://a"]'

Asked = tuple[str, str, dict[str, str], bytes]
GOLDEN = {"x-api-key": GOLD}
REQUESTS: dict[str, Asked] = {
    "infer": ("POST", INFER, GOLDEN, b"{}"),
    "a large body": ("POST", INFER, GOLDEN, bytes(range(256)) * 3900),
    "a service": ("POST", "/v1/services/digits?a=b", GOLDEN, b"text"),
    "metadata": ("GET", "/v2/models/digits", GOLDEN, b""),
    "HEAD": ("HEAD", "/v2/models/digits", GOLDEN, b""),
    "health": ("GET", "/v2/health/live", {}, b""),
    "a page": ("GET", "/openapi.json", {}, b""),
    "no key": ("POST", INFER, {}, b"{}"),
    "two keys": ("POST", INFER, {**GOLDEN, "authorization": f"Bearer {GOLD}"}, b"{}"),
    "an unknown key": ("POST", INFER, {"x-api-key": "nobody's"}, b"{}"),
    "another tenant's model": ("POST", "/v2/models/secret/infer", {"x-api-key": BRONZE}, b"{}"),
    "no such path": ("GET", "/nothing", GOLDEN, b""),
    "a method that is not offered": ("DELETE", INFER, GOLDEN, b""),
    "too large": ("POST", INFER, GOLDEN, bytes(1_000_001)),
    "a timeout that is none": ("POST", INFER, {**GOLDEN, "x-request-timeout-ms": "soon"}, b"{}"),
    "a long path": ("GET", "/v2/models/" + "a" * 9000, GOLDEN, b""),
    "preflight": ("OPTIONS", INFER, {"origin": "https://a", "access-control-request-method": "POST"}, b""),
    "of a browser": ("POST", INFER, {**GOLDEN, "origin": "https://a"}, b"{}"),
    "cookies": ("POST", INFER, {**GOLDEN, "cookie": "a=b; c=d"}, b"{}"),
}


@asynccontextmanager
async def both(up: Upstream, **more: Any) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, Gateway]]:
    """A client of HTTP/2 with prior knowledge, one of HTTP/1.1, and the gateway."""
    async with gateway(documents([up.port], **more)) as (port, core):
        url = f"http://127.0.0.1:{port}"
        async with (
            httpx.AsyncClient(base_url=url, http1=False, http2=True, trust_env=False, timeout=60) as second,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as first,
        ):
            yield second, first, core


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_is_answered_as_over_http_1_1(name: str) -> None:
    method, path, headers, body = REQUESTS[name]
    async with upstream() as up, both(up, extra=CORS) as (second, first, core):
        told = []
        for client, version in ((second, "HTTP/2"), (first, "HTTP/1.1")):
            answer = await client.request(method, path, headers=headers, content=body)
            assert answer.http_version == version and set(answer.headers) >= PER_CALL - {"server-timing"}
            names = set(answer.headers) - OF_HTTP_1
            values = {name: answer.headers[name] for name in names - PER_CALL}
            text = answer.text.replace(answer.headers["x-request-id"], "ID")
            told.append((answer.status_code, names, values, text))
        assert told[0] == told[1]
        if up.seen:
            (over2, over1) = up.seen
            assert over2.body == over1.body == body
            fields = [{line.partition(":")[0].lower() for line in seen.head.split("\r\n")[1:]} for seen in up.seen]
            assert fields[0] == fields[1] and over2.get("cookie") == over1.get("cookie")
        await until(lambda: idle(core))


async def test_a_body_without_a_length_is_passed_on_with_one_and_bounded() -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield bytes(10_000)

    async with upstream() as up, both(up) as (client, _, core):
        assert (await client.post(INFER, content=pieces(50), headers=GOLDEN)).status_code == 200
        assert up.seen[0].get("content-length") == "500000" and len(up.seen[0].body) == 500_000
        refused = await client.post(INFER, content=pieces(101), headers=GOLDEN)
        assert (refused.status_code, refused.json()["reason"]) == (413, "too_large") and len(up.seen) == 1
        await until(lambda: idle(core) and not core.pools["p"].held_bytes)


async def test_a_header_list_that_is_too_large_concerns_its_request_only() -> None:
    async with upstream() as up, both(up) as (client, _, _):
        many = {f"x-{number}": "a" * 1000 for number in range(40)}
        answers = await asyncio.gather(
            *(client.post(INFER, content=b"{}", headers={**GOLDEN, **more}) for more in (many, {}))
        )
        assert [answer.status_code for answer in answers] == [431, 200]


async def test_an_answer_without_an_end_comes_piece_by_piece() -> None:
    go = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        await go.wait()
        writer.write(b"data: 2\n\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    up = Upstream()
    up.port = server.sockets[0].getsockname()[1]
    async with both(up) as (client, _, core):
        async with client.stream("POST", "/v2/models/digits/generate_stream", headers=GOLDEN) as answering:
            pieces = answering.aiter_bytes()
            assert await anext(pieces) == b"data: 1\n\n"
            go.set()
            assert b"".join([piece async for piece in pieces]) == b"data: 2\n\n"
        await until(lambda: idle(core))
    server.close()


@pytest.mark.parametrize("events", [True, False])
async def test_an_answer_that_breaks_off_ends_its_stream_and_no_other(events: bool) -> None:
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        kind = b"content-type: text/event-stream\r\n" if events else b""
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + kind + b"\r\n9\r\ndata: 1\n\n\r\n")
        await go.wait()
        writer.write(b"not a chunk\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    up = Upstream()
    up.port = server.sockets[0].getsockname()[1]
    async with both(up) as (client, _, core):
        async with client.stream("POST", INFER, headers=GOLDEN) as answering:
            pieces = answering.aiter_bytes()
            assert await anext(pieces) == b"data: 1\n\n"
            go.set()
            if events:
                last = b"".join([piece async for piece in pieces])
                assert json.loads(last.removeprefix(b"data: "))["reason"] == "upstream_broken"
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(pieces)
        assert (await client.get("/v2/health/live")).status_code == 200 and idle(core)
        (front,) = core.fronts
        assert len(front.connections) == 1, "the same connection"
    server.close()


async def test_a_client_that_resets_its_request_frees_the_place_and_keeps_its_connection() -> None:
    async with upstream() as up, AsyncExitStack() as stack:

        async def answer(seen: Seen) -> bytes:
            if len(up.seen) == 1:
                await asyncio.Event().wait()
            return await up.ok(seen)

        up.answer = answer
        files = {"all.toml": documents([up.port])["all.toml"].replace(b"target_ms = 2000", b"target_ms = 600000")}
        port, core = await stack.enter_async_context(gateway(files))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = h2.connection.H2Connection()
        client.initiate_connection()
        client.send_headers(1, POST, end_stream=True)
        writer.write(client.data_to_send())
        await until(lambda: up.seen)
        client.reset_stream(1)
        writer.write(client.data_to_send())
        await until(lambda: up.departures == 1 and idle(core))
        client.send_headers(3, POST, end_stream=True)
        writer.write(client.data_to_send())
        answered = False
        while not answered:
            events = client.receive_data(await reader.read(65536))
            answered = any(isinstance(event, h2.events.StreamEnded) and event.stream_id == 3 for event in events)
        (server,) = core.fronts
        assert len(server.connections) == 1
        writer.close()


async def test_requests_of_one_connection_wait_in_the_order_of_their_tiers() -> None:
    """A queue behind the socket would serve them as they were sent."""
    go = asyncio.Event()
    async with upstream() as up, both(up, max_inflight=1) as (client, _, core):

        async def answer(seen: Seen) -> bytes:
            await go.wait()
            return await up.ok(seen)

        up.answer = answer
        post = client.post
        asked = [asyncio.ensure_future(post(INFER, content=b"first", headers=GOLDEN))]
        await until(lambda: up.seen)
        for key, count in ((BRONZE, 20), (GOLD, 5)):
            asked += [
                asyncio.ensure_future(post(INFER, content=key.encode(), headers={"x-api-key": key}))
                for _ in range(count)
            ]
        await until(lambda: len(core.pools["p"].admission.queue) == 25)
        go.set()
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 26
        bodies = [seen.body.decode() for seen in up.seen]
        assert bodies.index(BRONZE) >= 4 and bodies[1] == GOLD, bodies
        await until(lambda: idle(core))


async def test_a_gateway_that_ends_answers_what_was_sent_and_says_goodbye() -> None:
    go = asyncio.Event()
    async with upstream() as up, both(up) as (client, _, core):

        async def answer(seen: Seen) -> bytes:
            await go.wait()
            return await up.ok(seen)

        up.answer = answer
        asked = [asyncio.ensure_future(client.post(INFER, content=b"{}", headers=GOLDEN)) for _ in range(10)]
        await until(lambda: len(up.seen) == 8)  # the other requests wait for a permit
        (server,) = core.fronts
        core.draining = True
        draining = asyncio.ensure_future(server.drain(60.0))
        go.set()
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 10
        await draining
        assert not server.connections


async def test_upgrades_are_ignored() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        headers = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
        assert (await client.ask(INFER, b"{}", headers=headers)).status == 200
        assert up.seen[0].get("upgrade") is None


POST: list[tuple[bytes, bytes]] = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", INFER.encode()),
    (b":authority", b"x"),
    (b"x-api-key", GOLD.encode()),
]


def but(name: bytes, value: bytes) -> list[tuple[bytes, bytes]]:
    """Return the request with another value of one of its fields, or with one more field."""
    changed = [(key, value if key == name else old) for key, old in POST]
    return changed if changed != POST else [*POST, (name, value)]


@pytest.mark.parametrize(
    "fields",
    [
        but(b"transfer-encoding", b"chunked"),
        but(b"content-length", b"9"),
        but(b"content-length", b"1"),
        but(b"connection", b"close"),
        but(b"upgrade", b"websocket"),
        but(b"te", b"gzip"),
        but(b"x-a", b"b\r\nx-b: c"),
        but(b"x-a", b"b\nx-b: c"),
        but(b"x-a", b"b\0"),
        but(b"x a", b"b"),
        but(b"x-a:", b"b"),
        but(b"X-A", b"b"),
        but(b"", b"b"),
        but(b"host", b"other"),
        but(b":path", b"/v2 HTTP/1.1\r\nx: y"),
        but(b":path", b"http://other/v2"),
        but(b":authority", b"x\r\ny: z"),
        but(b":authority", b"a@b"),
        but(b":method", b"GET / HTTP/1.1\r\nx:"),
        but(b":protocol", b"websocket"),
        [*POST, POST[2]],
        [*POST[:2], *POST[3:], POST[2]],
        POST[1:],
        [*POST[:3], POST[4]],
    ],
)
async def test_what_could_mean_something_else_over_http_1_1_reaches_no_server(
    fields: list[tuple[bytes, bytes]],
) -> None:
    config = h2.config.H2Configuration(
        header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
    )
    async with upstream() as up, gateway(documents([up.port])) as (port, core), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = h2.connection.H2Connection(config)
        client.initiate_connection()
        client.send_headers(1, fields)
        client.send_data(1, b"abc", end_stream=True)
        client.send_headers(3, POST)
        client.send_data(3, b"abc", end_stream=True)
        writer.write(client.data_to_send())
        reset, answered = False, False
        while not answered:
            for event in client.receive_data(await reader.read(65536)):
                reset |= isinstance(event, h2.events.StreamReset) and event.stream_id == 1
                answered |= isinstance(event, h2.events.StreamEnded) and event.stream_id == 3
        assert reset and len(up.seen) == 1, "the other request is answered"
        await until(lambda: idle(core))
        writer.close()


# Unknown senders -----------------------------------------------------------------------------------------------------

PIECE = 16_000  # bytes of each body whose sender is unknown
KINDS = {"plain": b"application/json", "grpc": b"application/grpc", "grpc-web": b"application/grpc-web+proto"}


class RawClient:
    """Sends requests as frames without waiting for answers, and goes on after GOAWAY.

    errors: the codes of all GOAWAYs so far.
    ended: the streams whose answers are complete.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.errors: list[int] = []
        self.ended: set[int] = set()
        self.next_id = 1
        self._left = b""
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK)

    def ask(self, kind: bytes, body: bytes, *fields: tuple[bytes, bytes]) -> None:
        path = INFER.encode() if kind == KINDS["plain"] else b"/inference.GRPCInferenceService/ModelInfer"
        head = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"), (b":path", path), *fields]
        self.writer.write(frame(HEADERS, END_HEADERS, self.next_id, block([*head, (b"content-type", kind)])))
        self.writer.write(frame(DATA, END_STREAM, self.next_id, body))
        self.next_id += 2

    async def read(self) -> bool:
        """Read more. Returns False if the connection has ended."""
        async with asyncio.timeout(60):
            piece = await self.reader.read(65536)
        data = self._left + piece
        while len(data) >= 9 and len(data) >= (end := 9 + int.from_bytes(data[:3], "big")):
            found, data = frames_of(data[:end])[0], data[end:]
            if found.kind == GOAWAY:
                self.errors.append(int.from_bytes(found.payload[4:8], "big"))
            elif found.kind in (HEADERS, DATA) and found.flags & END_STREAM:
                self.ended.add(found.stream_id)
        self._left = data
        return bool(piece)


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield RawClient(reader, writer)
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_without_a_key_is_asked_to_leave_and_then_cut(kind: str) -> None:
    """R22: what is read of a connection without a valid key is bounded over HTTP/2 as well."""
    async with upstream() as up, gateway(documents([up.port])) as (port, _), raw_client(port) as client:
        for _ in range(60):
            client.ask(KINDS[kind], bytes(PIECE))
        while await client.read():
            pass
        assert client.errors == [NO_ERROR, ENHANCE_YOUR_CALM] and not up.seen
        assert 256 * 1024 < len(client.ended) * PIECE < 512 * 1024 + PIECE


@pytest.mark.parametrize("asked", [(b"OPTIONS", INFER.encode()), (b"GET", b"/v2/health/live")])
async def test_heads_of_requests_that_need_no_key_count_as_well(asked: tuple[bytes, bytes]) -> None:
    head = [(b":method", asked[0]), (b":scheme", b"http"), (b":authority", b"x"), (b":path", asked[1])]
    head += [(b"origin", b"https://a"), (b"access-control-request-method", b"POST"), (b"x-much", b"y" * PIECE)]
    async with gateway(documents([1], extra=CORS)) as (port, _), raw_client(port) as client:
        for stream in range(1, 120, 2):
            client.writer.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, block(head)))
        while await client.read():
            pass
        assert client.errors == [NO_ERROR, ENHANCE_YOUR_CALM]


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_that_share_a_connection_with_unknown_senders_are_answered(kind: str) -> None:
    """Behind a proxy one bad client must not cost the others their connection."""
    go = asyncio.Event()
    async with upstream() as up, gateway(documents([up.port])) as (port, _), raw_client(port) as client:

        async def answer(seen: Seen) -> bytes:
            await go.wait()
            return await up.ok(seen)

        up.answer = answer
        client.ask(KINDS["plain"], b"{}", (b"x-api-key", GOLD.encode()))
        await until(lambda: up.seen)
        for _ in range(60):
            client.ask(KINDS[kind], bytes(PIECE))
        while client.next_id - 2 not in client.ended:
            assert await client.read()
        assert client.errors == [NO_ERROR] and 1 not in client.ended
        go.set()
        while 1 not in client.ended:
            assert await client.read()
        for _ in range(60):
            client.ask(KINDS[kind], bytes(PIECE))  # the requests with keys have ended
        while await client.read():
            pass
        assert client.errors == [NO_ERROR, ENHANCE_YOUR_CALM] and len(up.seen) == 1


OWN = {
    "a page": (b"GET", b"/v2/health/ready"),
    "a preflight": (b"OPTIONS", INFER.encode()),
    "a refusal": (b"GET", b"/nothing"),
}


@pytest.mark.parametrize("name", OWN)
async def test_an_answered_request_that_never_ends_is_reset(name: str) -> None:
    """Nobody needs a key for these: requests without an end must not fill the gateway's places."""
    method, path = OWN[name]
    head = [(b":method", method), (b":scheme", b"http"), (b":authority", b"x"), (b":path", path)]
    if name == "a preflight":
        head += [(b"origin", b"https://a"), (b"access-control-request-method", b"POST")]
    async with upstream() as up, gateway(documents([up.port], extra=CORS)) as (port, core), raw_client(port) as client:
        client.writer.write(frame(HEADERS, END_HEADERS, 1, block(head)))
        while 1 not in client.ended:
            assert await client.read()
        (front,) = core.fronts
        await until(lambda: not front.requests_open)


# Turns ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True])
async def test_more_requests_than_fit_into_a_turn_are_all_answered(behind: bool) -> None:
    """One read may hold more requests than a turn begins; the rest goes on by itself, not when the client sends
    more.
    """
    async with upstream() as up, gateway(documents([up.port])) as (port, core), raw_client(port) as client:
        if behind:
            core.records.stats._counted += 100_000
            core.overload.beat(0.5)
        for _ in range(100):
            client.ask(KINDS["plain"], b"", (b"x-api-key", BRONZE.encode()))
        while len(client.ended) < 100:
            assert await client.read()
        await until(lambda: idle(core))


async def test_a_request_that_is_over_does_not_wait_for_the_garbage_collector() -> None:
    """If a stream and its request referred to each other, a flood would have the collector stop the loop for 0.1 s and
    more.
    """
    async with upstream() as up, both(up) as (client, _, core):
        gc.collect()
        gc.disable()
        try:
            for headers in (GOLDEN, {}):  # one request is served, one refused
                for body in (b"", b"{}"):
                    await client.post(INFER, content=body, headers=headers)
            await until(lambda: idle(core))
            # A refused request is kept for a second more, because its client may still send.
            await until(lambda: not any(isinstance(each, Http2Client) for each in gc.get_objects()))
        finally:
            gc.enable()
