"""Clients that do not read their answers keep no permit from others."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ..waiting import until
from .gate import INFER
from .grpc_stack import idle
from .lending_streams import (
    NEVER_S,
    SOON_S,
)
from .stack import BRONZE, GOLD, Client, Seen, documents, gateway, upstream

SIZE = 8 << 20


@asynccontextmanager
async def reader(port: int, key: str) -> AsyncIterator[socket.socket]:
    """A client that requests 8 MiB and does not read."""
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
        core.pools["p"].suspend_after_s = SOON_S
        admission = core.pools["p"].admission
        async with reader(port, BRONZE) as raw:
            await until(lambda: len(up.seen) == 1 and admission.inflight == 0)
            async with Client(port) as client:
                assert (await client.ask(INFER, b"x", key=GOLD)).status == 200
            loop, got = asyncio.get_running_loop(), 0
            while got < SIZE:
                got += len(await loop.sock_recv(raw, 1 << 20))
        await until(lambda: idle(core) and admission.inflight == 0)


@pytest.mark.parametrize("asks_before", [False, True])
@pytest.mark.parametrize("tier", ["bronze", "gold"])
async def test_another_tenant_has_the_permit_of_a_client_that_does_not_read_at_once(
    tier: str, asks_before: bool
) -> None:
    """It need not wait as long as a stream may pause. The reader's own tenant does wait."""
    async with upstream() as up:
        text = documents([up.port], max_inflight=1)["all.toml"]
        text = text.replace(b'tier = "bronze"', f'tier = "{tier}"'.encode())
        async with gateway({"all.toml": text}) as (port, core):
            gate = core.pools["p"]
            gate.suspend_after_s = NEVER_S
            go = asyncio.Event()

            async def answer(seen: Seen) -> bytes:
                if seen.body == b"big":
                    await go.wait()
                return await big_or_small(seen)

            up.answer = answer
            async with reader(port, BRONZE), Client(port) as same, Client(port) as other:
                await until(lambda: len(up.seen) == 1)
                same.send(INFER, b"own", key=BRONZE)
                await until(lambda: len(gate.admission.queue) == 1)
                if asks_before:
                    other.send(INFER, b"x", key=GOLD)
                    await until(lambda: len(gate.admission.queue) == 2)
                go.set()
                if not asks_before:
                    await until(lambda: len(gate.lendable) == 1)
                    assert len(up.seen) == 1 and len(gate.admission.queue) == 1
                    other.send(INFER, b"x", key=GOLD)
                replies = asyncio.gather(other.reply(), same.reply())
                assert [reply.status for reply in await replies] == [200, 200]
                assert not gate.lendable
            await until(lambda: idle(core) and gate.admission.inflight == 0)
