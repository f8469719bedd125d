"""Several gateways that exchange what they count: each plans from the sum of all."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from time import monotonic

import pytest

from oriel_gateway.limits.ledger import LedgerLost
from oriel_policies.scaling.members import MISSING_S

from ..waiting import until
from .gate import INFER
from .scaled import SCALING, gateways, scaled
from .stack import Client, gateway, nobody

WAITING = "x-request-timeout-ms: 200000\r\n"


@pytest.mark.parametrize("count", [1, 2, 8])
async def test_any_number_of_gateways_plans_for_the_demand_of_all(count: int) -> None:
    with nobody() as closed:
        async with gateways(count, scaled(closed)) as members, AsyncExitStack() as stack:
            for port, core in members:
                await until(lambda core=core: core.pools["p"].endpoints.looked_up)  # type: ignore[misc]
                core.pools["p"].endpoints.assign([])
                for _ in range(8 // count):
                    client = await stack.enter_async_context(Client(port))
                    client.send(INFER, b"x", headers=WAITING)
            plans = [core.scaled.plans["p"] for _, core in members]
            await until(lambda: [plan.demand.total.held for plan in plans] == [8] * count)
            await until(lambda: [plan.latest.wanted for plan in plans] == [1] * count)
            assert all(plan.latest.active and plan.value == 1.0 for plan in plans)


async def test_a_call_at_one_gateway_is_pushed_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # No plan is made by itself: what a gateway knows of the other one was sent to it.
    monkeypatch.setattr("oriel_gateway.pools.scaling.PLAN_EVERY_S", 1000.0)
    with nobody() as closed:
        async with gateways(2, scaled(closed)) as ((port, one), (_, two)), Client(port) as client:
            for core in (one, two):
                await until(lambda core=core: core.pools["p"].endpoints.looked_up)  # type: ignore[misc]
                core.pools["p"].endpoints.assign([])
            listener = asyncio.Event()
            two.scaled.plans["p"].listeners.add(listener.set)
            client.send(INFER, b"x", headers=WAITING)
            await listener.wait()
            plan = two.scaled.plans["p"]
            assert plan.latest.active and plan.latest.wanted == 1 and plan.demand.total.held == 1


class Lost:
    async def exchange(self, records: bytes, *, edge: bool) -> dict[str, tuple[bytes, float]]:
        raise LedgerLost("no")


class Quiet:
    """An exchange whose streams end again and again, as they do in Redis after a minute without an edge."""

    def __init__(self) -> None:
        self.begun = 0

    async def exchange(self, records: bytes, *, edge: bool) -> dict[str, tuple[bytes, float]]:
        return {}

    async def edges(self) -> AsyncGenerator[None]:
        self.begun += 1
        yield


async def test_edges_that_end_are_followed_again_at_once() -> None:
    ledger = Quiet()
    with nobody() as closed:
        async with gateway(scaled(closed)) as (_, core):
            core.scaled.listen_again_s = 1000.0
            task = asyncio.ensure_future(core.scaled.run(ledger))  # type: ignore[arg-type]
            await until(lambda: ledger.begun >= 3)
            task.cancel()


class Damaged:
    async def exchange(self, records: bytes, *, edge: bool) -> dict[str, tuple[bytes, float]]:
        return {"other": (b"?", 0.0)}


@pytest.mark.parametrize("ledger", [Lost(), Damaged()])
async def test_without_the_others_records_nothing_is_scaled_after_a_minute(ledger: Lost | Damaged) -> None:
    with nobody() as closed:
        async with gateway(scaled(closed, scaling=SCALING.replace("minimum = 0", "minimum = 3"))) as (_, core):
            plan = core.scaled.plans["p"]
            plan.read({}, monotonic())
            others = await core.scaled._exchange(ledger)  # type: ignore[arg-type]
            assert others is None
            plan.update(monotonic() + MISSING_S)
            assert not plan.latest.available and plan.latest.wanted == 3
