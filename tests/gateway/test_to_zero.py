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
from .stack import BRONZE, GOLD, Client, Seen, Upstream, gateway, grpc_server, nobody, upstream
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


async def test_many_calls_that_are_released_together_come_to_the_first_server_a_few_at_a_time() -> None:
    calls, most = 100, 4
    async with AsyncExitStack() as stacked:
        up = await stacked.enter_async_context(upstream())
        running, peak = 0, 0

        async def counted(seen: Seen) -> bytes:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0)
            running -= 1
            return await up.ok(seen)

        up.answer = counted
        port, core = await stacked.enter_async_context(gateway(scaled(up.port, max_inflight=most)))
        endpoints = core.pools["p"].endpoints
        await until(lambda: endpoints.looked_up)
        endpoints.assign([])
        clients = [await stacked.enter_async_context(Client(port)) for _ in range(calls)]
        for client in clients:
            client.send(INFER, b"x", headers=WAITING)
        await until(lambda: endpoints.parked == calls)
        endpoints.assign([("127.0.0.1", up.port)])
        assert [(await client.reply()).status for client in clients] == [200] * calls
        assert 1 <= peak <= most and len(up.seen) == calls
        await until(lambda: idle(core))
