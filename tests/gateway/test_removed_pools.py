"""Pools, endpoints and names that leave the documents or the discovery while calls are on their way."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic

import pytest
from scripted_discovery import ScriptedDiscovery

from oriel_gateway.core import Gateway
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.health import Watch
from oriel_policies.documents import Pool
from oriel_wire.discovery.discovery import Address

from ..waiting import until
from .endpoint_pools import PROBED, served, with_probe
from .gate import INFER
from .special_routes import FLOWN, Held, house
from .stack import GOLD, Client, Seen, Upstream, documents, gateway, nobody, upstream

HALF = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {GOLD}\r\ncontent-length: 4\r\n\r\nbo".encode()


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as served:
        yield served


def without(core: Gateway, *gone: str, **changed: Pool) -> None:
    """Adopt documents without these pools and without any route."""
    pools = {name: pool for name, pool in core.snapshot.pools.items() if name not in gone}
    core.adopt(replace(core.snapshot, pools=pools | changed, routes=()))


async def test_a_call_whose_body_comes_in_outlives_its_pool_and_leaves_no_connection(up: Upstream) -> None:
    """A pool with such a call is still used: it is not closed, and keeps no connection after the call."""
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        old = core.pools["p"]
        client.writer.write(HALF)
        await until(lambda: old.calls == 1)
        without(core, "p")
        await core.close_left_pools()
        assert core.left_pools == [old]
        client.writer.write(b"dy")
        assert (await client.reply()).status == 200 and up.seen[0].body == b"body"
        await core.close_left_pools()
        assert core.left_pools == [] and not old.endpoints[0].idle and not old.calls


async def test_equal_calls_whose_pool_leaves_while_their_bodies_come_in_are_made(up: Upstream) -> None:
    """Equal calls keep the pool that they began with, and do not look it up by its name, which is gone."""
    async with house(FLOWN) as it, Client(it.port) as one, Client(it.port) as other:
        old, pool = it.core.pools["p0"], it.core.snapshot.pools["p0"]
        held = it.ups[0].answer = Held()
        for client in (one, other):
            client.writer.write(HALF)
        await until(lambda: old.calls == 2)
        without(it.core, "p0")
        one.writer.write(b"dy")
        await until(lambda: it.members() == 1)
        without(it.core, p0=pool)  # the name comes back as another pool, which has permits of its own
        other.writer.write(b"dy")
        await until(lambda: it.members() == 2 and len(it.ups[0].seen) == 1)
        held.go.release()
        assert [(await client.reply()).body for client in (one, other)] == [b"ok", b"ok"]
        await it.core.close_left_pools()
        assert it.idle() and not it.core.left_pools and not old.calls and not old.admission.inflight


async def test_a_call_that_waits_for_a_server_of_a_removed_pool_is_sent_when_it_comes() -> None:
    """A pool that was removed is watched as long as calls wait for its servers."""
    late, gone = Upstream(), socket.socket()
    gone.bind(("127.0.0.1", 0))  # connections are refused until it listens
    async with gateway(documents([gone.getsockname()[1]])) as (port, core), Client(port) as client:
        client.send(INFER, b"x")
        old = core.pools["p"]
        await until(lambda: old.endpoints.parked == 1)
        without(core, "p")
        async with served(late.serve, sock=gone):
            assert (await client.reply()).status == 200
            await core.close_left_pools()
            assert core.left_pools == []


async def test_the_probe_of_an_endpoint_that_leaves_keeps_no_connection(up: Upstream) -> None:
    """A probe that ends after its endpoint has left closes its connection, instead of adding one for each pod that
    goes.
    """
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(seen: Seen) -> bytes:
        asked.set()
        await go.wait()
        return await up.ok(seen)

    async with upstream() as other, gateway(with_probe([other.port, up.port])) as (_, core):
        these = core.pools["p"].endpoints
        await until(lambda: these[1].reach is Reach.READY)
        up.answer = slow
        await asked.wait()
        gone = these[1]
        pool = replace(core.snapshot.pools["p"], endpoints=(these[0].address,))
        without(core, p=pool)
        await until(lambda: not these.leaving)
        assert gone.prober.outstanding == 1
        go.set()
        await until(lambda: not gone.prober.outstanding)
        assert not gone.prober.idle and not gone.idle


async def test_connections_that_are_too_old_to_be_used_are_closed(up: Upstream) -> None:
    """They need not wait until a call happens to find them in the list of idle connections."""
    files = documents([up.port], pool=PROBED)
    async with gateway(files) as (port, core), Client(port) as one, Client(port) as other:
        core.endpoint_watch.tick_s = 0.01
        up.answer = Held()
        for client in (one, other):
            client.send(INFER)
        await until(lambda: sum("POST" in seen.head for seen in up.seen) == 2)
        for _ in range(10):
            up.answer.go.release()
        for client in (one, other):
            assert (await client.reply()).status == 200
        endpoint = core.pools["p"].endpoints[0]
        assert len(endpoint.idle) == 2
        endpoint.idle[0].idle_since = monotonic() - 46.0
        await until(lambda: len(endpoint.idle) == 1)


async def test_a_lookup_that_ends_after_the_documents_changed_says_nothing(
    up: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the late addresses of a name would replace those that the documents list now, for good."""
    began, go = asyncio.Event(), asyncio.Event()

    class Late(ScriptedDiscovery):
        async def lookup(self) -> tuple[Address, ...]:
            began.set()
            await go.wait()
            return await super().lookup()

    late = Late([("127.0.0.1", 1)])
    monkeypatch.setattr(Watch, "discover", staticmethod(lambda _: late))
    files = documents([up.port])
    lines = [line for line in files["all.toml"].split(b"\n") if not line.startswith((b"endpoints", b"grpc_endp"))]
    files["all.toml"] = b"\n".join(lines).replace(b"[pools.p]", b'[pools.p]\ndiscover = "dns:pods.example:8000"')
    async with gateway(files) as (_, core):
        await began.wait()
        these = core.pools["p"].endpoints
        without(core, p=replace(core.snapshot.pools["p"], discover=None, endpoints=(("127.0.0.1", up.port),)))
        go.set()
        await until(lambda: late.lookups == 1)
        assert [endpoint.port for endpoint in these] == [up.port]


async def test_a_large_pool_that_is_down_does_not_keep_others_from_being_probed(up: Upstream) -> None:
    """The large pool comes first in the order, and could use all probes that are allowed at a time."""
    files = with_probe([up.port])
    down = ", ".join(f'"127.0.0.1:{port}"' for port in range(1, 41))
    pool = f"[pools.a]\nendpoints = [{down}]\n{PROBED}\n[pools.p]"
    files["all.toml"] = files["all.toml"].replace(b"[pools.p]", pool.encode())
    async with gateway(files) as (_, core):
        watch = core.endpoint_watch
        watch.tick_s, watch.again_s, watch.probes_per_s = 0.01, 0.0, 100_000
        assert list(core.pools) == ["a", "p"]
        await until(lambda: core.pools["p"].endpoints[0].reach is Reach.READY)
        before = len(up.seen)
        await until(lambda: len(up.seen) > before + 2)


async def test_calls_that_queued_when_the_last_server_went_hear_that_there_is_none() -> None:
    """They get the same answer as a call that comes a moment later, not 504, as if the pool were only slow."""
    async with AsyncExitStack() as stack:
        files = documents([stack.enter_context(nobody())], max_inflight=1)
        port, core = await stack.enter_async_context(gateway(files))
        clients = [await stack.enter_async_context(Client(port)) for _ in range(6)]
        for client in clients:
            client.send(INFER, b"x", headers="x-request-timeout-ms: 2000\r\n")
        gate = core.pools["p"]
        await until(lambda: gate.calls == 6 and not gate.endpoints.usable)
        replies = [await client.reply() for client in clients]
        assert {(reply.status, reply.headers.get("retry-after")) for reply in replies} == {(502, "1")}
        assert not gate.calls and not gate.held_bytes
