"""Replicas that start before the calls come: an operator asks for them on the admin port, or a schedule does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import httpx
import pytest

from oriel_gateway.admin.app import admin_app
from oriel_gateway.admin.queues import live_queues
from oriel_gateway.admin.wake import MOST_BYTES
from oriel_gateway.core import Gateway
from oriel_gateway.pools.scaling import ScaledPools
from oriel_policies.documents import compile_documents

from ..waiting import until
from .scaled import SCALING, scaled
from .stack import gateway, nobody

TOKEN = "an-operators-token"
SCHEDULE = '[[pools.p.scaling.schedule]]\nfrom = "Mon-Fri 08:00"\nto = "18:00"\nzone = "Europe/Berlin"\nminimum = 2\n'
MONDAY_S = 1_772_434_800.0  # 2026-03-02 08:00 in Berlin; a replica takes 20 s to start


def operator(core: Gateway, token: str | None = TOKEN) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(admin_app(core, token=TOKEN))  # type: ignore[arg-type]  # ASGI
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8082", headers=headers)


@asynccontextmanager
async def empty(port: int, scaling: str = SCALING) -> AsyncIterator[Gateway]:
    async with gateway(scaled(port, scaling=scaling)) as (_, core):
        await until(lambda: core.pools["p"].endpoints.looked_up)
        core.pools["p"].endpoints.assign([])
        yield core


async def test_an_operator_wakes_a_pool_for_a_while() -> None:
    with nobody() as closed:
        async with empty(closed) as core, operator(core) as client:
            plan = core.scaled.plans["p"]
            plan.update(monotonic())
            assert not plan.latest.active
            for _ in range(2):  # repeating the request changes nothing
                answer = await client.post("/pools/p/wake", json={"replicas": 2, "for_ms": 600_000})
                assert answer.status_code == 200
                assert answer.json() == {
                    "pool": "p",
                    "message": "at least 2 replica(s) for 600 s; 0 ready, a new one takes up to 20 s",
                    "for_ms": 600_000,
                    "floor": 2,
                    "wanted": 2,
                    "replicas": 0,
                    "ready": 0,
                    "start_ms": 20_000,
                }
            shown = live_queues(core)["p"]["scaling"]
            assert shown["active"] and (shown["floor"], shown["wanted"], shown["woken"]) == (2, 2, 2)
            assert 0 < shown["woken_ms"] <= 600_000
            now = monotonic()
            for seconds in range(0, 605, 5):
                assert plan.latest.active
                plan.read({}, now + seconds)
                plan.update(now + seconds)
            assert not plan.latest.active and not plan.latest.wanted


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/pools/q/wake", b"", 404, "no pool 'q' with a `scaling` table"),
        ("/pools/p/wake", b'{"replicas": 10}', 400, "at most 9 replicas"),
        ("/pools/p/wake", b'{"replicas": 0}', 400, "`int` >= 1"),
        ("/pools/p/wake", b'{"for_ms": 86400001}', 400, "<= 86400000"),
        ("/pools/p/wake", b'{"for": 1}', 400, "unknown field `for`"),
        ("/pools/p/wake", b"no", 400, "the body is not"),
        ("/pools/p/wake", b'{"\xff": 1}', 400, "the body is not"),
        ("/pools/p/wake", b" " * (MOST_BYTES + 1), 413, f"more than {MOST_BYTES} bytes"),
    ],
)
async def test_a_wake_call_that_cannot_be_followed_says_why(path: str, body: bytes, status: int, reason: str) -> None:
    with nobody() as closed:
        async with empty(closed) as core, operator(core) as client:
            answer = await client.post(path, content=body)
            assert answer.status_code == status and reason in answer.json()["error"]["message"]
            core.scaled.plans["p"].update(monotonic())
            assert not core.scaled.plans["p"].latest.active


async def test_only_an_operators_program_wakes_a_pool() -> None:
    with nobody() as closed:
        async with empty(closed) as core:
            async with operator(core, None) as client:
                assert (await client.post("/pools/p/wake")).status_code == 401
            async with operator(core) as client:
                page = await client.post("/pools/p/wake", headers={"origin": "https://example.com"})
                assert page.status_code == 403
                assert (await client.get("/pools/p/wake")).status_code == 405
            assert not core.scaled.plans["p"].demand.total.woken


async def test_a_schedule_orders_its_replicas_in_time_for_the_beginning() -> None:
    with nobody() as closed:
        async with empty(closed, SCALING + SCHEDULE) as core:
            now = monotonic()
            wall = [MONDAY_S - 21.0]
            pools = ScaledPools(lambda: wall[0])
            pools.adopt(core.pools, compile_documents(scaled(closed, scaling=SCALING + SCHEDULE)))
            plan = pools.plans["p"]
            assert not plan.latest.active
            listener = asyncio.Event()
            plan.listeners.add(listener.set)

            def pass_time(seconds: float) -> None:
                wall[0] = MONDAY_S - 21.0 + seconds
                plan.read({}, now + seconds)
                plan.update(now + seconds)

            for seconds in (1.0, 2.0, 3.0):
                pass_time(seconds)
                assert plan.latest.wanted == 2 and listener.is_set(), "it is repeated while no server comes"
                listener.clear()
            for seconds in range(5, 36_021, 5):
                pass_time(seconds)
                assert plan.latest.active and plan.latest.wanted == 2
            pass_time(36_022.0)
            assert not plan.latest.active and not plan.latest.wanted
