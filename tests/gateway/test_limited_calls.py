"""Limits on the whole path: what calls are told, what they hold while they run, and what is released."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from time import monotonic, time

import pytest
from memory_ledger import MemoryLedger

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_gateway.limits.ledger import Presence, Question
from oriel_policies.bounds.ledger import Answer

from ..waiting import until
from .fake_transport import core_connections
from .limit_desk import INFER, on, tenant_t
from .stack import LIMITED, Client, Seen, Upstream, documents, gateway, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def test_http_tells_what_is_left_and_what_was_refused(up: Upstream) -> None:
    files = on(up.port, tenant_t("limit = { requests_per_day = 2, concurrency = 5 }"))
    async with gateway(files) as (port, core), Client(port) as client:
        left = []
        for _ in range(2):
            reply = await client.ask(INFER, b"x", key="key-t")
            assert reply.status == 200
            left.append(reply.headers["ratelimit"])
            assert '"requests-day";q=2;w=86400' in reply.headers["ratelimit-policy"]
        assert '"requests-day";r=1;t=' in left[0] and '"requests-day";r=0;t=' in left[1]
        reply = await client.ask(INFER, b"x", key="key-t")
        until_midnight = 86400 - time() % 86400
        assert reply.status == 429 and b"quota_exceeded" in reply.body
        assert abs(int(reply.headers["retry-after"]) - until_midnight) <= 2
        assert core.records.stats.refusals == {Outcome.QUOTA_EXCEEDED: 1}
        assert (await client.ask("/v2/models/none!", key="key-t")).status == 404, (
            "a request that is not authorised is neither counted nor limited"
        )


async def test_a_slot_is_held_to_the_last_byte_and_by_nobody_who_left(up: Upstream) -> None:
    gate = asyncio.Event()

    async def answer(_: Seen) -> bytes:
        await gate.wait()
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    up.answer = answer
    files = on(up.port, tenant_t("limit = { concurrency = 1 }"))
    async with gateway(files) as (port, _), Client(port) as one, Client(port) as two:
        one.send(INFER, b"x", key="key-t")
        async with asyncio.timeout(60):
            await until(lambda: up.seen)
        assert (reply := await two.ask(INFER, b"x", key="key-t")).status == 429
        assert b"concurrency_limited" in reply.body and reply.headers["retry-after"] == "1"
        one.writer.close()
        gate.set()

        async def let_through() -> bool:
            return (await two.ask(INFER, b"x", key="key-t")).status == 200

        await until(let_through)


async def test_bytes_both_ways_are_counted(up: Upstream) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1388\r\n" + bytes(5000) + b"\r\n0\r\n\r\n"

    up.answer = answer
    files = on(up.port, tenant_t("limit = { bytes_per_s = 1000, bytes_burst = 10000 }"))
    async with gateway(files) as (port, _), Client(port) as client:
        body = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: key-t\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(body.encode() + b"1388\r\n" + bytes(5000) + b"\r\n0\r\n\r\n")
        assert (await client.reply()).status == 200
        assert (await client.ask(INFER, bytes(1000), key="key-t")).status == 429


async def test_a_streamed_answer_is_counted_as_it_passes(up: Upstream) -> None:
    more = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await more.wait()
        writer.write(b"1388\r\n" + bytes(5000) + b"\r\n")
        await reader.read()  # blocks until the gateway closes: the stream goes on
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    files = on(server.sockets[0].getsockname()[1], tenant_t("limit = { bytes_per_s = 10, bytes_burst = 1000 }"))
    async with gateway(files) as (port, core), Client(port) as client:
        client.send(INFER, b"x", key="key-t")
        await client.reader.readuntil(b"\r\n\r\n1\r\nx\r\n")
        target = core.targets.of_line(core.snapshot.tenants["t"], b"l", "POST", INFER, "")
        assert core.limiter.acquire(core.snapshot.tenants["t"], target, 10, monotonic())
        more.set()
        await client.reader.readexactly(5000)
        with pytest.raises(Refused):  # while the stream goes on
            core.limiter.acquire(core.snapshot.tenants["t"], target, 10, monotonic())
    server.close()
    await server.wait_closed()


async def test_the_charge_a_server_reports_is_what_the_quota_pays(up: Upstream) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-oriel-cost-us: 400000\r\n\r\nok"

    up.answer = answer
    files = on(up.port, tenant_t("limit = { compute_ms_per_day = 1000 }"))
    async with gateway(files) as (port, _), Client(port) as client:
        left = []
        for _ in range(2):
            reply = await client.ask(INFER, b"x", key="key-t")
            left.append(int(reply.headers["ratelimit"].split(";r=")[1].split(";")[0]))
        assert left == [990, 200], (
            "10 ms are reserved for the first call; then 400 ms are charged, and 400 ms reserved for the next call"
        )
        assert (await client.ask(INFER, b"x", key="key-t")).status == 429


async def test_an_unlimited_tenant_meets_no_limiter(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        assert isinstance(core, Gateway)
        reply = await client.ask(INFER, b"x")
        assert reply.status == 200 and "ratelimit" not in reply.headers
        assert (await client.ask(INFER, b"x", key=LIMITED)).headers["ratelimit"] == '"requests";r=1;t=2'


class Thinking:
    """A ledger that answers once `go` is set."""

    def __init__(self) -> None:
        self.behind = MemoryLedger(lambda: time() * 1e6).seat("one")
        self.go = asyncio.Event()
        self.asked = 0

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer]]:
        self.asked += len(questions)
        await self.go.wait()
        return await self.behind.ask(questions)

    async def hello(self, share: float) -> Presence:
        return Presence(1)

    async def close(self) -> None:
        pass


async def test_the_body_is_collected_while_the_limiter_thinks(up: Upstream) -> None:
    ledger = Thinking()
    files = on(up.port, tenant_t("limit = { requests_per_s = 0.001, burst = 2 }"))
    limiter = SharedLimiter(ledger, budget_s=30.0)
    async with gateway(files, limiter=limiter) as (port, core), Client(port) as one, Client(port) as two:
        one.send(INFER, b"whole", key="key-t")
        two.writer.write(f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: key-t\r\n".encode())
        two.writer.write(b"content-length: 200000\r\n\r\n" + bytes(199_000))
        await until(lambda: ledger.asked >= 2)
        await until(lambda: {connection.call.bytes_in for connection in core_connections(core)} == {5, 199_000})
        assert not up.seen
        ledger.go.set()
        assert (await one.reply()).status == 200
        two.writer.write(bytes(1000))
        assert (await two.reply()).status == 200
        assert [len(seen.body) for seen in up.seen] == [5, 200_000]
        ledger.go.clear()
        two.send(INFER, b"x", key="key-t")  # over the limit, which is known only when the ledger has answered
        async with asyncio.timeout(60):
            await until(lambda: ledger.asked >= 3)
        ledger.go.set()
        reply = await two.reply()
        assert reply.status == 429 and int(reply.headers["retry-after"]) > 900 and "x-request-id" in reply.headers
        assert (await two.ask(INFER, b"x", key="key-t")).status == 429, "the connection goes on"


async def test_who_leaves_or_expires_while_the_limiter_thinks_holds_nothing(up: Upstream) -> None:
    ledger = Thinking()
    files = on(up.port, tenant_t("limit = { concurrency = 1 }"))
    async with gateway(files, limiter=SharedLimiter(ledger, budget_s=30.0)) as (port, core):
        async with Client(port) as gone, Client(port) as late:
            gone.send(INFER, b"x", key="key-t")
            late.send(INFER, b"x", key="key-t", headers="x-request-timeout-ms: 20\r\n")
            reply = await late.reply()
            assert reply.status == 504, reply.body
        await until(lambda: not core_connections(core))  # the gateway has seen that both have left
        ledger.go.set()
        async with Client(port) as client:

            async def let_through() -> bool:
                return (await client.ask(INFER, b"x", key="key-t")).status == 200

            await until(let_through)
        assert len(up.seen) == 1 and core.pools["p"].admission.inflight == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_a_limited_call_leaves_nothing_for_the_garbage_collector(up: Upstream, shared: bool) -> None:
    files = on(up.port, tenant_t("limit = { concurrency = 5, requests_per_s = 1000 }"))
    ledger = MemoryLedger(lambda: time() * 1e6).seat("one")
    limiter = SharedLimiter(ledger, budget_s=5.0) if shared else EmbeddedLimiter()
    async with gateway(files, limiter=limiter) as (port, _), Client(port) as client:
        for collected in (False, True):
            if collected:
                gc.collect()
                gc.disable()
            try:
                for _ in range(30):
                    await client.ask(INFER, b"x", key="key-t")
                assert not collected or gc.collect() < 30
            finally:
                gc.enable()
