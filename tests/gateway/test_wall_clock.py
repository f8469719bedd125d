"""The wall clock jumps by a year in both directions (R33): deadlines, queues, limits and endpoints are not affected."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tritonclient.utils import InferenceServerException

from oriel_gateway.core import Gateway

from ..waiting import until
from ..wall_clock import JUMPS, YEAR_S, WallClock
from .gate import INFER
from .grpc_stack import Backend, infer, stack
from .stack import BRONZE, GOLD, LIMITED, Client, Reply, Seen, Upstream, documents, gateway, upstream


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as up:
        yield up


async def waiting(core: Gateway, calls: int) -> None:
    async with asyncio.timeout(60):
        await until(lambda: len(core.pools["p"].admission.queue) == calls)


async def ask(port: int, *more: str, key: str = BRONZE) -> Reply:
    async with Client(port) as client:
        return await client.ask(INFER, b"x", key=key, headers="".join(f"{line}\r\n" for line in more))


@JUMPS
async def test_deadlines_and_queues_over_http(up: Upstream, wall: WallClock, jumps: tuple[float, ...]) -> None:
    go = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        await go.wait()
        return await up.ok(seen)

    up.answer = answer
    async with gateway(documents([up.port], max_inflight=1)) as (port, core):
        patient = [asyncio.create_task(ask(port)) for _ in range(4)]
        await waiting(core, 3)
        for jump in jumps:
            wall.ahead_s = jump
            late = await ask(port, "x-request-timeout-ms: 300")
            assert late.status == 504 and b"waiting for a permit" in late.body
            assert len(core.pools["p"].admission.queue) == 3 and not any(each.done() for each in patient)
            assert len(core.pools["p"].endpoints.usable) == 1
        go.set()
        assert [(await each).status for each in patient] == [200] * 4
        assert (await ask(port, key=GOLD)).status == 200


@JUMPS
async def test_deadlines_and_queues_over_grpc(wall: WallClock, jumps: tuple[float, ...]) -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with stack(backend, max_inflight=1) as (address, core):
        patient = [asyncio.create_task(infer(address, "digits", BRONZE)) for _ in range(4)]
        await waiting(core, 3)
        # The fourth call has its permit, but gRPC may still be connecting and sends its deadline only then (see below).
        async with asyncio.timeout(60):
            await until(lambda: backend.seen)
        for jump in jumps:
            wall.ahead_s = jump
            with pytest.raises(InferenceServerException, match="waiting for a permit"):
                await infer(address, "digits", BRONZE, extra={"x-request-timeout-ms": "1000"})
            assert len(core.pools["p"].admission.queue) == 3 and not any(each.done() for each in patient)
            assert len(core.pools["p"].grpc.usable) == 1
        # gRPC converts a deadline with Python's time of day, while the clock of its core has not jumped.
        wall.ahead_s = 0.0
        backend.hold.set()
        assert len(await asyncio.gather(*patient)) == 4


@pytest.mark.parametrize("jump", [YEAR_S, -YEAR_S], ids=["forward", "back"])
async def test_rates_and_concurrency(up: Upstream, wall: WallClock, jump: float) -> None:
    async with gateway(documents([up.port])) as (port, _):
        assert [(await ask(port, key=LIMITED)).status for _ in range(2)] == [200] * 2
        wall.ahead_s = jump
        refused = await ask(port, key=LIMITED)
        assert refused.status == 429 and refused.headers["retry-after"] == "2"
