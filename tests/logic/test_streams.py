"""Streamed answers: their deadline, their end, and environments that cannot encode."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from oriel_logic import service
from oriel_logic.bodies.messages import Request
from oriel_logic.server.pipeline import STREAM_STEP_S
from oriel_logic.services.definition import define
from oriel_logic.services.serving import Serving
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


async def test_an_environment_that_cannot_encode_gives_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without msgspec or numpy: the logic process encodes what comes from there."""

    def plain(request: Any) -> Any:
        return {"size": len(request.body)}

    def pieces(request: Any) -> Any:
        yield from request.body

    monkeypatch.setitem(sys.modules, "oriel_logic.bodies.encoding", None)  # an import fails
    request = Request(body=b"ab")
    assert Serving(define(plain), None).job("")(request, "") == {"size": 2}
    assert list(Serving(define(pieces), None).job("")(request, "application/x-ndjson")) == [97, 98]
