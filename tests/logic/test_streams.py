"""Streamed answers and their deadline."""

from collections.abc import AsyncIterator
from typing import Any

from oriel_logic import service
from oriel_logic.server.pipeline import STREAM_STEP_S
from oriel_logic.testing import AsyncClient, FakeClock, FakeModels


@service
async def steps(upto: int, models: Any, ctx: Any) -> AsyncIterator[float]:
    for _ in range(upto):
        await models.infer("slow", {"x": [1.0]})
        yield ctx.remaining_s


async def test_a_stream_has_a_new_deadline_with_each_piece() -> None:
    """Five calls of twenty seconds each within a request that allowed thirty."""
    clock = FakeClock()
    models = FakeModels({"slow": {"y": [1.0]}}, takes_s={"slow": 20.0}, clock=clock)
    client = AsyncClient(steps, models=models, clock=clock)
    answer = await client.post(json={"upto": 5}, timeout_s=30.0)
    left = [float(line) for line in answer.text.splitlines()]
    assert left == [10.0] + [STREAM_STEP_S - 20.0] * 4
    assert [each.remaining_s for each in models.calls] == [30.0] + [STREAM_STEP_S] * 4


async def test_the_first_piece_has_the_requests_deadline() -> None:
    clock = FakeClock()
    models = FakeModels({"slow": {"y": [1.0]}}, takes_s={"slow": 31.0}, clock=clock)
    answer = await AsyncClient(steps, models=models, clock=clock).post(json={"upto": 1}, timeout_s=30.0)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (504, "deadline_exceeded")
