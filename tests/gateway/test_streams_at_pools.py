"""Streaming calls at a pool: from their first answer byte they keep no permit from other calls."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc import aio

from ..waiting import until
from .gate import INFER
from .grpc_stack import Backend, idle, stack
from .grpc_stream_calls import infer
from .stack import BRONZE, GOLD, Client, Seen, documents, gateway, upstream
from .stream_clients import Messages, asks, opened

SIZE = 8 << 20


def few_streams(port: int, count: int, permits: int = 4) -> dict[str, bytes]:
    return documents([port], max_inflight=permits, pool=f'probe = ""\nmax_streams = {count}')


async def closes(messages: Messages, call: Any) -> None:
    """The stream goes on, and ends well."""
    messages.send(infer("digits"))
    assert await call.read() is not aio.EOF
    messages.send(None)
    assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK


async def test_grpc_streams_that_were_answered_keep_no_permit_from_other_calls() -> None:
    async with AsyncExitStack() as clients:
        async with stack(Backend(), max_inflight=2) as (address, core):
            gate = core.pools["p"]
            streams = [await opened(clients, address, BRONZE) for _ in range(4)]
            assert gate.admission.inflight == 0 and gate.streams.shares.held == 4
            for key in (GOLD, BRONZE):
                await asks(address, key)
            for messages, call in streams:
                await closes(messages, call)
            await until(lambda: idle(core) and not gate.streams.shares.held and not gate.calls)


async def test_a_grpc_stream_begins_only_with_a_slot() -> None:
    backend = Backend()
    async with AsyncExitStack() as clients:
        async with stack(backend, files=lambda port: few_streams(port, 2)) as (address, core):
            first, second = [await opened(clients, address, BRONZE) for _ in range(2)]
            with pytest.raises(aio.AioRpcError) as refused:
                await opened(clients, address, BRONZE)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ("x-oriel-reason", "queue_full") in tuple(refused.value.trailing_metadata() or ())
            assert len(backend.seen) == 2
            urgent = await opened(clients, address, GOLD)
            assert await second[1].code() is grpc.StatusCode.UNAVAILABLE, "the newest of the less urgent tier"
            assert ("x-oriel-reason", "displaced") in tuple(await second[1].trailing_metadata())
            for messages, call in (first, urgent):
                await closes(messages, call)
            await until(lambda: idle(core) and not core.pools["p"].streams.shares.held)


@asynccontextmanager
async def slow_client(port: int, key: str) -> AsyncIterator[socket.socket]:
    """A client that requests a large answer and does not read."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", port))
    raw.sendall(f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 3\r\n\r\nbig".encode())
    raw.setblocking(False)
    try:
        yield raw
    finally:
        raw.close()


async def big_or_small(seen: Seen) -> bytes:
    data = bytes(SIZE) if seen.body == b"big" else b"ok"
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


async def test_a_client_that_does_not_read_keeps_no_permit_from_others() -> None:
    async with upstream() as up, gateway(documents([up.port], max_inflight=1)) as (port, core):
        up.answer = big_or_small
        gate = core.pools["p"]
        async with slow_client(port, BRONZE) as raw:
            await until(lambda: len(up.seen) == 1 and gate.streams.shares.held == 1)
            assert gate.admission.inflight == gate.streams.working == 0
            async with Client(port) as client:
                for key in (GOLD, BRONZE):
                    assert (await client.ask(INFER, b"x", key=key)).status == 200
            loop, got = asyncio.get_running_loop(), 0
            while got < SIZE:
                got += len(await loop.sock_recv(raw, 1 << 20))
        await until(lambda: idle(core) and not gate.streams.shares.held)


async def test_a_client_that_does_not_read_is_cut_while_no_slot_is_free() -> None:
    async with upstream() as up, gateway(few_streams(up.port, 0, permits=1)) as (port, core):
        up.answer = big_or_small
        core.pools["p"].streams.most_unread_s = 0.01
        async with slow_client(port, BRONZE), Client(port) as client:
            await until(lambda: len(up.seen) == 1)
            assert (await client.ask(INFER, b"x", key=GOLD)).status == 200
        await until(lambda: idle(core) and not core.pools["p"].calls)
        assert {each.outcome.value for each in core.records.decisions.where(tenant="b")} == {"queue_full"}


async def test_clients_that_do_not_read_cut_no_answer_of_a_more_urgent_tier() -> None:
    async with upstream() as up, gateway(few_streams(up.port, 2)) as (port, core):
        up.answer = big_or_small
        gate = core.pools["p"]
        gate.streams.most_unread_s = 0.01
        async with slow_client(port, BRONZE), slow_client(port, BRONZE):
            await until(lambda: gate.streams.shares.held == 2)
            async with slow_client(port, GOLD) as raw:
                await until(lambda: core.records.decisions.where())
                assert [each.outcome.value for each in core.records.decisions.where()] == ["displaced"]
                loop, got = asyncio.get_running_loop(), 0
                while got < SIZE:
                    assert (piece := await loop.sock_recv(raw, 1 << 20)), "it was cut"
                    got += len(piece)
        await until(lambda: idle(core) and not gate.streams.shares.held and not gate.calls)


async def test_answers_without_a_length_wait_for_a_slot_with_their_permits() -> None:
    """One slot and one permit: two answers are under way, and the third call waits in the queue for the first end."""
    go = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(1)
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
                await go.acquire()
                writer.write(b"1\r\nb\r\n0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, AsyncExitStack() as clients:
        at = server.sockets[0].getsockname()[1]
        port, core = await clients.enter_async_context(gateway(few_streams(at, 1, permits=1)))
        gate = core.pools["p"]
        callers = [await clients.enter_async_context(Client(port)) for _ in range(3)]
        for number, caller in enumerate(callers):
            caller.send(INFER, b"x", key=BRONZE)
            await until(lambda number=number: gate.calls == number + 1)
        await until(lambda: gate.streams.shares.held == 1 and len(gate.admission.queue) == 1)
        assert gate.admission.inflight == 1
        go.release()
        assert (await callers[0].reply()).body == b"ab"
        await until(lambda: not len(gate.admission.queue))
        assert gate.admission.inflight == 1, "the second has the slot now, and the third its permit"
        for caller in callers[1:]:
            go.release()
            assert (await caller.reply()).body == b"ab"
        await until(lambda: idle(core) and not gate.streams.shares.held and not gate.calls)
