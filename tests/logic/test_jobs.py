"""Jobs that call models, and jobs that stream, in real worker processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oriel_logic.errors import HandlerFailed, HandlerTimedOut, ModelBusy, Refused
from oriel_logic.services.context import Work
from oriel_logic.workers.pool import WorkerPool
from oriel_wire.context import CallContext

from .jobs import PATIENT_S, CallMaker, Doubling, PoolMaker, ref, value


async def test_a_function_calls_models_of_its_request(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    array = np.arange(100_000)
    done = await made.call(Work(ref("asks"), (array,), call(), "work", models=Doubling()))
    assert (done.value[0] == array * 2).all() and done.value[1:] == ("gold", True)
    # The worker may still be starting, which is reported as a wait.
    assert [name for name, _, _ in done.stages if name != "wait"] == ["asking"]
    # In a row they would wait for one another for ever.
    done = await made.call(Work(ref("asks_at_once"), (), call(), "work", models=Doubling(at_once=5)))
    assert done.value == [0, 2, 4, 6, 8]
    with pytest.raises(ModelBusy, match="full") as caught:
        await made.call(Work(ref("asks"), ("refuse",), call(), "work", models=Doubling()))
    assert caught.value.retry_after_s == 2.0 and caught.value.too_many
    for wrong in (
        Work(ref("asks_wrongly"), (), call(), "work", models=Doubling()),
        Work(ref("asks"), (1,), call(), ""),
    ):
        with pytest.raises(HandlerFailed):
            await made.call(wrong)


async def test_a_caller_that_leaves_ends_the_call_of_a_model(pool: PoolMaker, call: CallMaker) -> None:
    made, models = await pool(grace_min_s=PATIENT_S), Doubling()
    before = made.pids
    task = asyncio.create_task(made.call(Work(ref("asks"), ("stuck",), call(), "work", models=models)))
    await models.stuck.wait()
    task.cancel()
    assert await value(made, call(), "echo", "next") == "next"
    assert set(before) <= set(made.pids), "its worker lives: what blocked there was told"


# -- streams ---------------------------------------------------------------------------------------------------------


def stream(pool: WorkerPool, call: CallContext, name: str, *arguments: Any) -> AsyncIterator[Any]:
    return pool.stream(Work(ref(name), arguments, call, name))


async def test_a_generator_streams_its_pieces_in_order_and_says_why_it_breaks_off(
    pool: PoolMaker, call: CallMaker
) -> None:
    made, seen = await pool(), []
    for name in ("count", "acount"):
        assert [piece async for piece in stream(made, call(), name, 100)] == list(range(100))
    with pytest.raises(Refused, match="broken off"):
        async for piece in stream(made, call(), "breaks"):
            seen.append(piece)  # noqa: PERF401
    assert seen == [1]
    with pytest.raises(HandlerFailed):
        await value(made, call(), "count", 3)
    assert await value(made, call(), "echo", "next") == "next"


async def test_a_generator_runs_only_a_few_pieces_ahead_and_is_closed_when_its_reader_leaves(
    pool: PoolMaker, call: CallMaker, tmp_path: Path
) -> None:
    made = await pool(grace_min_s=PATIENT_S)
    before = made.pids
    pieces = stream(made, call(), "count", 10**9, str(tmp_path / "closed"))
    assert await anext(pieces) == 0
    await pieces.aclose()  # type: ignore[attr-defined]
    assert await value(made, call(), "echo", "next") == "next"
    assert (tmp_path / "closed").exists() and set(before) <= set(made.pids)
    assert made.tally.jobs == 2


async def test_a_stream_that_falls_silent_is_cut(pool: PoolMaker, call: CallMaker, gate: Path) -> None:
    made, seen = await pool(stream_idle_s=0.05), []
    with pytest.raises(HandlerTimedOut, match="between two pieces"):
        async for piece in stream(made, call(), "silent", gate):
            seen.append(piece)  # noqa: PERF401
    assert await value(made, call(), "echo", "next") == "next"
    assert seen == [1] and made.tally.killed == {"stalled": 1}
