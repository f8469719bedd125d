"""Streamed answers: their deadline, their end, and environments that cannot encode."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from oriel_logic import service
from oriel_logic.bodies.messages import Request
from oriel_logic.errors import CallerLeft, HandlerFailed, LogicError, Outcome, Refused
from oriel_logic.server.pipeline import STREAM_STEP_S
from oriel_logic.server.streaming import Streamed, ended_well
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


class Pieces:
    """Some pieces, then an error."""

    def __init__(self, *found: bytes, error: LogicError | None = None) -> None:
        self.found = list(found)
        self.error = error
        self.is_closed = False

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> bytes:
        if self.found:
            return self.found.pop(0)
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.is_closed = True


async def taken(pieces: Pieces, media: str) -> tuple[list[bytes], list[Outcome]]:
    noted: list[Outcome] = []
    streamed = Streamed(content_type=media, pieces=pieces)
    found = ended_well(streamed, lambda error: error.message.encode(), noted.append, "r1")
    return [piece async for piece in found], noted


async def test_an_error_after_the_first_piece_is_the_last() -> None:
    pieces = Pieces(b"1\n", error=Refused("no more"))
    assert await taken(pieces, "application/x-ndjson") == ([b"1\n", b"no more\n"], [Outcome.INPUT_REFUSED])
    assert pieces.is_closed
    pieces = Pieces(b"data: 1\n\n", error=HandlerFailed("it failed"))
    found, noted = await taken(pieces, "text/event-stream")
    assert found[-1] == b"event: error\ndata: it failed\n\n" and noted == [Outcome.HANDLER_FAILED]


@pytest.mark.parametrize(
    ("pieces", "media"),
    [
        (Pieces(error=Refused("no")), "application/x-ndjson"),  # nothing has begun: it can have a status
        (Pieces(b"1", error=Refused("no")), "text/plain"),  # no words for it
        (Pieces(b"1", error=CallerLeft()), "application/x-ndjson"),
    ],
)
async def test_other_errors_are_raised(pieces: Pieces, media: str) -> None:
    with pytest.raises(LogicError):
        await taken(pieces, media)
    assert pieces.is_closed


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
