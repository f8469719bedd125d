"""The worker pool with real processes. Jobs wait on named pipes, so nothing here depends on timing."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, Refused, Saturated, WorkerDied
from oriel_logic.workers.pool import WorkerPool
from oriel_wire.context import CallContext

PoolMaker = Callable[..., Awaitable[WorkerPool]]
CallMaker = Callable[..., CallContext]


def ref(name: str) -> str:
    return f"function:oriel_services.jobs:{name}"


@pytest.fixture
def gate(tmp_path: Path) -> str:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    return path


async def released(gate: str, text: str = "open") -> None:
    await asyncio.to_thread(Path(gate).write_text, text)


async def read(gate: str) -> str:
    return await asyncio.to_thread(Path(gate).read_text)


def submit(pool: WorkerPool, call: CallContext, name: str, *arguments: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(value(pool, call, name, *arguments))


async def value(pool: WorkerPool, call: CallContext, name: str, *arguments: Any) -> Any:
    return (await pool.call(ref(name), arguments, call=call, stage=name)).value


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_value_goes_there_and_back_in_another_process(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    assert await value(made, call(), "echo", {"a": [1, 2.5, b"x"]}) == {"a": [1, 2.5, b"x"]}
    assert await value(made, call(), "pid") in made.pids != [os.getpid()]


async def test_large_arguments_travel_whole(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    assert await value(made, call(), "size", bytes(5_000_000)) == 5_000_000


async def test_a_refusal_keeps_its_meaning(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    with pytest.raises(Refused, match="not this one"):
        await value(made, call(), "refuse")


@pytest.mark.parametrize("job", ["fail", "unpicklable", "no_such_function"])
async def test_a_failing_job_fails_alone(pool: PoolMaker, call: CallMaker, job: str) -> None:
    made = await pool()
    with pytest.raises(HandlerFailed, match=job):
        await value(made, call(), job)
    assert await value(made, call(), "echo", 1) == 1


async def test_arguments_and_results_over_the_bound_are_refused(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool(max_frame_bytes=1000)
    with pytest.raises(HandlerFailed, match="too large"):
        await value(made, call(), "echo", bytes(2000))
    with pytest.raises(HandlerFailed):
        await value(made, call(), "echo", lambda: None)


async def test_a_killed_worker_loses_only_its_own_job_and_is_replaced(
    pool: PoolMaker, call: CallMaker, gate: str
) -> None:
    made = await pool(workers=2)
    doomed = submit(made, call(), "announce_and_hold", gate)
    pid = int(await read(gate))
    assert await value(made, call(), "echo", "other") == "other"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await doomed
    assert pid not in made.pids
    while len(made.pids) < 2:
        await asyncio.sleep(0.01)
    assert await value(made, call(), "echo", "again") == "again"


async def test_a_dead_fork_server_is_replaced_with_its_workers(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    before = list(made.pids)
    assert made._server is not None
    os.kill(made._server.pid, signal.SIGKILL)
    while not made.pids or made.pids == before:
        await asyncio.sleep(0.01)
    assert await value(made, call(), "echo", "still here") == "still here"


async def test_a_job_whose_time_is_over_never_starts(
    pool: PoolMaker, call: CallMaker, gate: str, tmp_path: Path
) -> None:
    made = await pool()
    busy = submit(made, call(), "hold", gate)
    await settled()
    with pytest.raises(DeadlineExceeded) as caught:
        await value(made, call(deadline=monotonic() + 0.05), "mark", str(tmp_path / "started"))
    assert caught.value.stage == "mark"
    with pytest.raises(DeadlineExceeded):
        await value(made, call(deadline=monotonic() - 1), "mark", str(tmp_path / "started"))
    assert made.waiting == 0
    await released(gate)
    assert await busy == "open"
    await value(made, call(), "echo", 1)
    assert not (tmp_path / "started").exists()


async def test_a_caller_that_leaves_frees_its_place(
    pool: PoolMaker, call: CallMaker, gate: str, tmp_path: Path
) -> None:
    made = await pool(max_waiting=1)
    busy = submit(made, call(), "hold", gate)
    await settled()
    queued = submit(made, call(), "mark", str(tmp_path / "started"))
    await settled()
    with pytest.raises(Saturated):
        await value(made, call(), "echo", 1)
    queued.cancel()
    await asyncio.wait([queued])
    assert made.waiting == 0
    after = submit(made, call(), "echo", 2)
    await released(gate)
    assert await asyncio.gather(busy, after) == ["open", 2]
    assert not (tmp_path / "started").exists()


async def test_the_answer_for_a_caller_that_left_goes_to_nobody(pool: PoolMaker, call: CallMaker, gate: str) -> None:
    made = await pool()
    left = submit(made, call(), "hold", gate)
    await settled()
    left.cancel()
    await asyncio.wait([left])
    assert made.busy == 1
    following = submit(made, call(), "echo", "mine")
    await released(gate, "not yours")
    assert await following == "mine"


async def test_urgent_bands_and_early_deadlines_go_first(pool: PoolMaker, call: CallMaker, gate: str) -> None:
    made = await pool()
    order: list[str] = []

    async def noted(name: str, context: CallContext) -> None:
        order.append(await value(made, context, "echo", name))

    busy = submit(made, call(), "hold", gate)
    await settled()
    now = monotonic()
    waiting = [
        asyncio.create_task(noted("bronze", call(band=2))),
        asyncio.create_task(noted("late", call(deadline=now + 50))),
        asyncio.create_task(noted("early", call(deadline=now + 40))),
    ]
    await settled()
    assert made.waiting == 3
    await released(gate)
    await asyncio.gather(busy, *waiting)
    assert order == ["early", "late", "bronze"]


async def test_a_more_urgent_job_displaces_the_newest_of_the_lowest_band(
    pool: PoolMaker, call: CallMaker, gate: str
) -> None:
    made = await pool(max_waiting=1)
    busy = submit(made, call(), "hold", gate)
    await settled()
    bronze = submit(made, call(band=2), "echo", "bronze")
    await settled()
    gold = submit(made, call(), "echo", "gold")
    with pytest.raises(Saturated, match="displaced"):
        await bronze
    await released(gate)
    assert await asyncio.gather(busy, gold) == ["open", "gold"]


async def test_a_job_that_overruns_its_deadline_by_far_is_killed(pool: PoolMaker, call: CallMaker, gate: str) -> None:
    made = await pool(overrun_s=0.0)
    endless = submit(made, call(deadline=monotonic() + 0.05), "hold", gate)
    with pytest.raises(WorkerDied):
        await endless
    assert await value(made, call(), "echo", "next") == "next"


async def test_closing_fails_what_waits(pool: PoolMaker, call: CallMaker, gate: str) -> None:
    made = await pool()
    running, queued = submit(made, call(), "hold", gate), submit(made, call(), "echo", 1)
    await settled()
    await made.close()
    for each in (running, queued):
        with pytest.raises(WorkerDied):
            await each
