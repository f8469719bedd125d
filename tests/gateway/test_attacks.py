"""Regression tests for the findings of a security review, one each."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from oriel_wire.engine.limits import HttpLimits

from ..waiting import until
from .fake_transport import ASKED, HEAD, core_connections, wired
from .gate import INFER, Gate, idle
from .stack import BRONZE, GOLD, Client, Seen, Upstream, documents, gateway, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def test_stalled_uploads_of_a_lower_tier_hold_no_permit(up: Upstream) -> None:
    """An upload gets no permit while its body is incomplete; otherwise four slow uploads would block the gold
    tenant.
    """
    async with gateway(documents([up.port], max_inflight=2)) as (port, core):
        stalled = [await Client(port).__aenter__() for _ in range(4)]
        for client in stalled:
            client.writer.write(HEAD % BRONZE.encode() + b"content-length: 500000\r\n\r\n" + b"x" * 200_000)
        await until(lambda: core.pools["p"].held_bytes == 4 * 200_000)
        assert core.pools["p"].admission.inflight == 0
        async with Client(port) as gold:
            assert (await gold.ask(INFER)).status == 200
        for client in stalled:
            client.writer.close()
        await until(lambda: idle(core) and core.pools["p"].held_bytes == 0)


async def test_the_byte_budget_of_incoming_bodies_keeps_a_quarter_for_the_most_urgent_tier(up: Upstream) -> None:
    files = documents([up.port])
    files["all.toml"] = files["all.toml"].replace(b"max_queue = 100", b"max_queue = 100\nmax_queue_bytes = 400000")
    async with gateway(files) as (port, core):
        async with Client(port) as bronze, Client(port) as late, Client(port) as gold:
            bronze.writer.write(HEAD % BRONZE.encode() + b"content-length: 500000\r\n\r\n" + b"x" * 290_000)
            await until(lambda: core.pools["p"].held_bytes == 290_000)
            late.writer.write(HEAD % BRONZE.encode() + b"content-length: 500000\r\n\r\n" + b"x" * 90_000)
            refused = await late.reply()
            assert refused.status == 503 and json.loads(refused.body)["reason"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            gold.writer.write(HEAD % GOLD.encode() + b"content-length: 90000\r\n\r\n")
            await until(lambda: core.pools["p"].calls == 2)  # send only the head, so that the gateway collects the body
            gold.writer.write(b"x" * 90_000)
            assert (await gold.reply()).status == 200
        await until(lambda: idle(core) and core.pools["p"].held_bytes == 0)


async def test_a_client_that_does_not_read_its_answers_gets_no_further_request_read(up: Upstream) -> None:
    """If further requests were read, pipelined refusals would gather in memory without bound."""
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        await until(lambda: len(core_connections(core)) == 1)
        (connection,) = core_connections(core)
        for transport, option in (
            (client.writer.transport, socket.SO_RCVBUF),
            (connection.transport, socket.SO_SNDBUF),
        ):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 4096)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(b"GET /nothing-here HTTP/1.1\r\nhost: x\r\nx-api-key: key-gold\r\n\r\n" * 60_000)
        # Either all requests were sent, or, as intended, the gateway has stopped reading them.
        await until(
            lambda: not client.writer.transport.get_write_buffer_size() or not connection.transport.is_reading()
        )
        assert connection.transport.get_write_buffer_size() < 1_000_000
        client.writer.transport.abort()
        await until(lambda: not core_connections(core))


async def test_refused_credentials_in_a_row_close_the_connection(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        closing = []
        for _ in range(8):
            reply = await client.ask(INFER, key="wrong")
            assert reply.status == 401
            closing.append(reply.headers.get("connection"))
        assert closing == [None] * 7 + ["close"]


async def test_the_last_write_to_a_slow_reader_does_not_pause_a_pooled_connection() -> None:
    """A pause that outlives the answer would make the next caller on that connection wait until its deadline."""
    async with wired() as (client, towards_client, upstream, towards_upstream):
        for pieces in ([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"],
                       [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nok", b"ok"]):  # fmt: skip
            client.data_received(ASKED)
            for number, piece in enumerate(pieces):
                towards_client.full = number == len(pieces) - 1
                upstream.data_received(piece)
            assert upstream in upstream.endpoint.idle and "pause_reading" not in towards_upstream.calls
            towards_client.full = False
            client.resume_writing()


async def test_an_answer_nobody_reads_is_cut_after_the_connection_was_closed() -> None:
    """An answer below the high-water mark counts as stalled as well; otherwise closing would wait for the client for
    ever.
    """
    async with wired() as (client, towards_client, upstream, _):
        client.data_received(ASKED.replace(b"host: x", b"host: x\r\nconnection: close"))
        towards_client.unsent = 100
        upstream.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        assert "close" in towards_client.calls
        client.sweep(monotonic() + HttpLimits().write_stall_s - 1)
        assert "abort" not in towards_client.calls
        client.sweep(monotonic() + HttpLimits().write_stall_s + 1)
        assert "abort" in towards_client.calls


async def test_a_refusal_of_head_has_no_body(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        client.writer.write(b"HEAD /v2/models/digits HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401")
        client.send("/v2/models/digits", method="GET")
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_requests_on_their_way_survive_a_drain(up: Upstream) -> None:
    """Connections between two requests stay open for a moment: the next request may already be on its way."""
    async with gateway(documents([up.port])) as (port, core):
        clients = [await Client(port).__aenter__() for _ in range(8)]
        for client in clients:
            assert (await client.ask(INFER)).status == 200
        server = core_connections(core)[0].server
        draining = asyncio.ensure_future(server.drain(5.0))
        await asyncio.sleep(0)
        for client in clients:
            client.send(INFER)
        replies = [await client.reply() for client in clients]
        assert [(r.status, r.headers["connection"]) for r in replies] == [(200, "close")] * 8
        await draining
        for client in clients:
            client.writer.close()


async def test_endless_interim_answers_are_a_502(up: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3000

    up.answer = answer
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        assert (await client.ask(INFER)).status == 502
        assert idle(core)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_framing_error_under_v2_is_a_string(up: Upstream) -> None:
    async with gateway(documents([up.port]), limits=HttpLimits(max_body_bytes=10)) as (port, _):
        for path, kind in ((INFER, str), ("/v1/services/digits", dict)):
            async with Client(port) as client:
                reply = await client.ask(path, b"x" * 11, headers="x-request-id: mine\r\n")
                assert reply.status == 413 and isinstance(json.loads(reply.body)["error"], kind)
                assert reply.headers["x-request-id"] == "mine"


async def test_http_1_0_gets_its_end_of_file(up: Upstream) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"

    up.answer = answer
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        client.writer.write(b"GET /v2 HTTP/1.0\r\nx-api-key: key-gold\r\nconnection: keep-alive\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await client.reader.read(-1)).endswith(b"hello")
        assert idle(core)


async def test_a_kept_connection_the_upstream_closed_is_not_the_readers_problem(up: Upstream) -> None:
    asked = 0

    async def once(_: Seen) -> bytes:
        nonlocal asked
        asked += 1
        return b"" if asked == 2 else b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    up.answer = once
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        assert (await client.ask("/v2/models/digits", method="GET")).status == 200
        assert (await client.ask("/v2/models/digits", method="GET")).status == 200  # repeated on a new connection
        assert asked == 3
        asked = 1
        assert (await client.ask(INFER)).status == 502  # it may have been executed, so it is not repeated
        assert asked == 2 and idle(core)


async def test_a_header_the_upstream_named_for_its_own_hop_stays_there(up: Upstream) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\nx-hop: 1\r\nconnection: x-hop\r\ncontent-length: 0\r\n\r\n"

    up.answer = answer
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        assert "x-hop" not in (await client.ask(INFER)).headers


async def test_the_time_in_the_queue_is_told_in_a_refusal(up: Upstream) -> None:
    release = asyncio.Event()

    async def answer(_: Seen) -> bytes:
        await release.wait()
        return await up.ok(_)

    up.answer = answer
    async with gateway(documents([up.port], max_inflight=1)) as (port, _), Client(port) as a, Client(port) as b:
        a.send(INFER)
        await until(lambda: len(up.seen) == 1)
        reply = await b.ask(INFER, headers="x-request-timeout-ms: 60\r\n")
        assert reply.status == 504
        assert float(reply.headers["server-timing"].partition("dur=")[2]) > 20
        release.set()
        assert (await a.reply()).status == 200


async def test_a_new_connection_takes_the_place_of_an_idle_one(up: Upstream) -> None:
    async with gateway(documents([up.port]), limits=HttpLimits(max_connections=4)) as (port, core):
        strangers = [await Client(port).__aenter__() for _ in range(4)]
        await until(lambda: core.fronts and len(core_connections(core)) == 4)
        async with Client(port) as client:
            assert (await client.ask(INFER)).status == 200
        for stranger in strangers:
            stranger.writer.close()


async def test_an_incomplete_head_makes_room_and_a_request_under_way_does_not(up: Upstream) -> None:
    """Otherwise clients that send slow heads would hold all connections until the time limit of a head."""
    gate = Gate()
    up.answer = gate
    # A long target: on a busy machine no deadline may pass.
    patient = {
        name: text.replace(b"target_ms = 2000", b"target_ms = 30000") for name, text in documents([up.port]).items()
    }
    async with (
        gateway(patient, limits=HttpLimits(max_connections=3)) as (port, core),
        Client(port) as busy,
        Client(port) as first,
        Client(port) as second,
    ):
        busy.send(INFER)
        await until(lambda: len(gate.order) == 1)
        for client in (first, second):
            client.writer.write(b"GET /v2 HT")
            await client.writer.drain()
        await until(lambda: len(core_connections(core)) == 3 and sum(not c.idle for c in core_connections(core)) == 3)
        async with Client(port) as late:
            late.send(INFER)
            await until(lambda: len(gate.order) == 2)
            gate.go.release()
            gate.go.release()
            assert (await busy.reply()).status == (await late.reply()).status == 200
