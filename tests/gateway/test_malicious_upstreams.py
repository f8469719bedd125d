"""Answers of servers that are malformed, endless, slow, duplicated or unrequested."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic

import pytest

from ..waiting import until
from .endpoint_pools import served
from .gate import INFER, idle
from .stack import Client, Seen, Upstream, documents, gateway, upstream


@pytest.fixture
async def two() -> AsyncIterator[tuple[Upstream, Upstream]]:
    async with upstream() as a, upstream() as b:
        yield a, b


async def test_a_redirect_is_the_clients_to_judge_and_never_followed(two: tuple[Upstream, Upstream]) -> None:
    a, sink = two

    async def redirect(_: Seen) -> bytes:
        return b"HTTP/1.1 307 T\r\nlocation: http://127.0.0.1:%d/x\r\ncontent-length: 0\r\n\r\n" % sink.port

    a.answer = redirect
    async with gateway(documents([a.port])) as (port, _), Client(port) as client:
        assert (await client.ask(INFER, headers=f"host-override: 127.0.0.1:{sink.port}\r\n")).status == 307
        # Whatever the target or the headers of a request name, the call goes to the configured upstream.
        reply = await client.ask(f"http://127.0.0.1:{sink.port}{INFER}", headers=f"x-oriel-pool: {sink.port}\r\n")
        assert reply.status == 307 and len(a.seen) == 2 and not sink.seen


BIG = 'probe = ""\nmax_response_bytes = 100000'


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100001\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n" + b"x" * 100_001,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nxxx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nxxx",
        b"HTTP/1.1 200 OK\r\nx: a\nb: c\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"SSH-2.0-nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_a_malicious_answer_is_a_502_with_retry_after(two: tuple[Upstream, Upstream], answer: bytes) -> None:
    async def malicious(_: Seen) -> bytes:
        return answer

    two[0].answer = malicious
    async with gateway(documents([two[0].port], pool=BIG)) as (port, core), Client(port) as client:
        reply = await client.ask(INFER, b"x")
        assert reply.status == 502 and 1 <= int(reply.headers["retry-after"]) <= 60
        assert json.loads(reply.body)["reason"] == "upstream_broken" and len(reply.body) < 500
        assert idle(core)


@pytest.mark.parametrize("head", [b"transfer-encoding: chunked", b"x-until: close"])
async def test_an_answer_without_a_length_is_cut_at_its_bound(two: tuple[Upstream, Upstream], head: bytes) -> None:
    began = asyncio.Event()
    cut = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n2\r\nxx\r\n")
        await began.wait()
        writer.write(b"20000\r\n" + b"x" * 0x20000)  # the answer is incomplete, and already larger than allowed
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        cut.set()

    async with (
        served(endless) as upstream_port,
        gateway(documents([upstream_port], pool=BIG)) as (port, core),
        Client(port) as client,
    ):
        client.send(INFER)
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        began.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            async with asyncio.timeout(60):
                # the connection is cut before the end of the answer, so that no client takes it for complete
                await client.reader.readexactly(1_000_000)
        await until(lambda: idle(core) and cut.is_set())


@pytest.mark.parametrize("drip", [b"HTTP/1.1 200 OK\r\nx-a: ", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"])
async def test_an_answer_that_drips_ends_with_the_deadline(two: tuple[Upstream, Upstream], drip: bytes) -> None:
    async def loris(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(drip)
        try:
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    async with (
        served(loris) as upstream_port,
        gateway(documents([upstream_port])) as (port, core),
        Client(port) as client,
    ):
        before = monotonic()
        client.send(INFER, headers="x-request-timeout-ms: 100\r\n")
        async with asyncio.timeout(60):
            if b"content-length" in drip:
                await client.reader.read()  # its head has been passed on, so the connection can only be cut
            else:
                assert (await client.reply()).status == 504
        assert monotonic() - before >= 0.1
        await until(lambda: idle(core))


async def test_the_second_half_of_a_split_answer_reaches_nobody(two: tuple[Upstream, Upstream]) -> None:
    stolen = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nstolen"
    honest = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhonest"

    async def split(_: Seen) -> bytes:
        return honest + stolen

    two[0].answer = split
    async with gateway(documents([two[0].port])) as (port, core), Client(port) as victim, Client(port) as other:
        for client in (victim, other, victim, other):
            assert (await client.ask(INFER)).body == b"honest"
        assert idle(core)


async def test_an_answer_nobody_asked_for_closes_its_connection(two: tuple[Upstream, Upstream]) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhonest")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async with (
        served(late) as upstream_port,
        gateway(documents([upstream_port])) as (port, core),
        Client(port) as client,
    ):
        assert (await client.ask(INFER)).body == b"honest"
        endpoint = core.pools["p"].endpoints[0]
        assert len(endpoint.idle) == 1
        writers[0].write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nstolen")
        await until(lambda: not endpoint.idle)
        assert (await client.ask(INFER)).body == b"honest"
    for writer in writers:
        writer.close()
