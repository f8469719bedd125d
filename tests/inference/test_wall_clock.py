"""The wall clock jumps by a year in both directions: deadlines, queue timeouts and queues are not affected."""

import asyncio
from pathlib import Path

import httpx
import pytest
from fake_backend import FakeBackend

from ..waiting import until
from ..wall_clock import JUMPS, YEAR_S, WallClock
from . import models
from .gated import INFER, ROW, admitted, gated

QUEUE_TIMEOUT = "default_queue_policy { default_timeout_microseconds: 500000 timeout_action: REJECT }"


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


def ask(client: httpx.AsyncClient, timeout_ms: int) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(client.post(INFER, json=ROW, headers={"x-oriel-timeout-ms": str(timeout_ms)}))


@JUMPS
async def test_deadlines_and_queues(
    tmp_path: Path, fake: FakeBackend, wall: WallClock, jumps: tuple[float, ...]
) -> None:
    async with gated(tmp_path, fake) as (unit, client):
        batcher = unit.catalog.get("double").batcher
        running = ask(client, 60_000)
        await until(lambda: batcher.running == 1)
        patient = [ask(client, 60_000) for _ in range(3)]
        await until(lambda: batcher.pending == 3)
        for jump in jumps:
            wall.ahead_s = jump
            short = await ask(client, 30)  # behind what runs: it cannot be answered before it expires
            assert (short.status_code, short.json()["reason"]) == (504, "deadline_exceeded")
            assert batcher.pending == 3 and not any(each.done() for each in patient)
        fake.gate.open()
        assert [(await each).status_code for each in (running, *patient)] == [200] * 4


@pytest.mark.parametrize("jump", [YEAR_S, -YEAR_S], ids=["forward", "back"])
async def test_timeouts_of_a_queue_policy(tmp_path: Path, fake: FakeBackend, wall: WallClock, jump: float) -> None:
    config = models.DOUBLE + f"dynamic_batching {{ {QUEUE_TIMEOUT} }}"
    async with gated(tmp_path, fake, config) as (unit, client):
        batcher = unit.catalog.get("double").batcher
        running = asyncio.create_task(admitted(client))
        await until(lambda: batcher.running == 1)
        waiting = ask(client, 60_000)
        # On a busy machine its time in the queue may be over before this looks again.
        await until(lambda: batcher.pending == 1 or waiting.done())
        wall.ahead_s = jump
        answer = await waiting
        assert (answer.status_code, answer.json()["reason"]) == (503, "queue_timeout")
        fake.gate.open()
        assert (await running).status_code == 200
