"""The moments in which a pool goes to zero or comes back: streams that rest, calls that come then, many at once."""

import asyncio
from contextlib import AsyncExitStack
from time import monotonic

from grpc import aio

from oriel_cli.up.units import free_ports

from ..waiting import until
from .gate import INFER, idle
from .grpc_stack import Backend
from .scaled import scaled
from .scaler_stack import WAITING, stack
from .stack import BRONZE, GOLD, Client, Upstream, gateway, grpc_server, nobody
from .stream_clients import asks, opened

KEEP_ALIVE_S = 300


async def test_a_stream_without_a_permit_keeps_its_pool() -> None:
    """It has a slot in place of its permit: counting permits would scale the pool to zero under the stream."""
    async with AsyncExitStack() as stacked:
        at = await stacked.enter_async_context(grpc_server(Backend()))
        files = scaled(stacked.enter_context(nobody()), max_inflight=1)
        files["all.toml"] = files["all.toml"].replace(
            b'probe = ""\n', f'probe = ""\ngrpc_discover = "dns:127.0.0.1:{at}"\n'.encode(), 1
        )
        port, core = await stacked.enter_async_context(gateway(files))
        gate, plan = core.pools["p"], core.scaled.plans["p"]
        await until(lambda: gate.grpc.usable)
        messages, stream = await opened(stacked, f"127.0.0.1:{port}", BRONZE)
        await asks(f"127.0.0.1:{port}", GOLD)
        await until(lambda: not gate.admission.inflight)
        now = monotonic()
        for seconds in range(0, 2 * KEEP_ALIVE_S, 5):
            plan.read({}, now + seconds)
            plan.update(now + seconds)
            assert plan.latest.active and plan.latest.wanted == 1
        messages.send(None)
        assert await stream.read() is aio.EOF
        await until(lambda: not gate.calls)
        for seconds in range(2 * KEEP_ALIVE_S, 4 * KEEP_ALIVE_S, 5):
            plan.read({}, now + seconds)
            plan.update(now + seconds)
        total = plan.demand.total
        assert (total.held, total.in_flight) == (0, 0)
        assert not plan.latest.active and not plan.latest.wanted


async def test_a_call_that_comes_as_the_last_server_goes_wakes_the_pool_and_is_answered() -> None:
    (at,) = free_ports("127.0.0.1", 1)
    up = Upstream()
    async with stack(at) as it, Client(it.port) as client:
        endpoints = it.core.pools["p"].endpoints
        server = await asyncio.start_server(up.serve, "127.0.0.1", at)
        endpoints.assign([("127.0.0.1", at)])
        assert (await client.ask(INFER, b"x")).status == 200
        planning = asyncio.ensure_future(it.core.scaled.run())
        async with it.operator.listening("p"):
            await until(it.listeners)
            server.close()
            await up.close()
            assert endpoints.usable  # the gateway does not know yet that it is gone
            client.send(INFER, b"x", headers=WAITING)
            # the first state says that the pool is kept after a call; the others ask for a server
            await until(lambda: endpoints.parked and it.operator.states["p"].count(True) >= 3)
            assert (await it.operator.poll())[2]
            server = await asyncio.start_server(up.serve, "127.0.0.1", at)
            assert (await client.reply()).status == 200
        planning.cancel()
        assert idle(it.core) and len(up.seen) == 2
        server.close()
        await up.close()
