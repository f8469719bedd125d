"""The worker pool with real processes. Jobs wait on named pipes, so nothing here depends on timing."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, HandlerTimedOut, MemoryExceeded, Saturated, WorkerDied
from oriel_logic.services.context import Work
from oriel_logic.workers import keeper
from oriel_logic.workers.long_jobs import LONG_S
from oriel_wire.context import CallContext

from ..waiting import until
from .jobs import PATIENT_S, CallMaker, Doubling, PoolMaker, read, ref, released, settled, submit, value


async def test_a_value_goes_there_and_back_and_a_failing_job_fails_alone(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    for job in ("fail", "unpicklable", "no_such_function"):
        with pytest.raises(HandlerFailed, match=job):
            await value(made, call(), job)
        assert await value(made, call(), "echo", {"a": [1, 2.5, b"x"]}) == {"a": [1, 2.5, b"x"]}
    assert await value(made, call(), "pid") in made.pids != [os.getpid()]
    array = np.ones((3, 200, 200), np.float32)
    total, changed = await value(made, call(), "total", array)
    assert total == 240_000 and array.sum() == 120_000, "it belongs to who has it"
    changed *= 2
    assert changed.sum() == 480_000


async def test_arguments_and_results_over_the_bound_are_refused(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool(max_frame_bytes=1000)
    with pytest.raises(HandlerFailed, match="too large"):
        await value(made, call(), "echo", bytes(2000))
    with pytest.raises(HandlerFailed):
        await value(made, call(), "echo", lambda: None)


async def test_a_killed_worker_loses_only_its_own_job_and_is_replaced(
    pool: PoolMaker, call: CallMaker, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = await pool(workers=2)
    doomed = submit(made, call(), "announce_and_hold", gate)
    pid = int(await read(gate))
    assert await value(made, call(), "echo", "other") == "other"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await doomed
    assert pid not in made.pids
    await until(lambda: len(made.pids) >= 2)
    assert await value(made, call(), "echo", "again") == "again"
    await until(lambda: f"worker process {pid} ended (signal 9)" in caplog.text)


@pytest.mark.parametrize("last_byte", [5, -1])
async def test_a_worker_that_ends_in_the_middle_of_a_frame_loses_only_its_own_job(
    pool: PoolMaker, call: CallMaker, gate: Path, last_byte: int
) -> None:
    made = await pool(workers=2)
    other = submit(made, call(), "hold", gate)
    with pytest.raises(WorkerDied):
        await value(made, call(), "ends_in_a_frame", last_byte)
    await released(gate)
    assert await other == "open"
    assert made.tally.died == 1


@pytest.mark.parametrize("head", [b"", bytes([1] + [0] * 7)])
async def test_a_worker_that_sends_what_cannot_be_read_is_killed(pool: PoolMaker, call: CallMaker, head: bytes) -> None:
    made = await pool()
    with pytest.raises(WorkerDied):
        await value(made, call(), "sends_nonsense", head)
    assert made.tally.killed == {"protocol": 1}
    assert await value(made, call(), "echo", 1) == 1


async def test_a_dead_fork_server_is_replaced_with_its_workers(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    before = list(made.pids)
    assert made._keeper.server is not None
    os.kill(made._keeper.server.pid, signal.SIGKILL)
    await until(lambda: not (not made.pids or set(before) <= set(made.pids)))
    assert await value(made, call(), "echo", "still here") == "still here"


async def test_a_job_whose_time_is_over_never_starts(
    pool: PoolMaker, call: CallMaker, gate: Path, tmp_path: Path
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
    pool: PoolMaker, call: CallMaker, gate: Path, tmp_path: Path
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


async def test_the_answer_for_a_caller_that_left_goes_to_nobody(pool: PoolMaker, call: CallMaker, gate: Path) -> None:
    made = await pool()
    left = submit(made, call(), "hold", gate)
    await settled()
    left.cancel()
    await asyncio.wait([left])
    assert made.busy == 1
    following = submit(made, call(), "echo", "mine")
    await released(gate, "not yours")
    assert await following == "mine"


async def test_urgent_bands_and_early_deadlines_go_first(pool: PoolMaker, call: CallMaker, gate: Path) -> None:
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
    pool: PoolMaker, call: CallMaker, gate: Path
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


class Hours:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return monotonic() + self.ahead_s


async def test_a_tenant_whose_jobs_are_long_never_holds_the_last_worker(
    pool: PoolMaker, call: CallMaker, gate: Path
) -> None:
    """The service's jobs are short on average, because another tenant calls it with short ones. A tenant that calls for
    the first time is one of long jobs until a job of it was short.
    """
    clock = Hours()
    made = await pool(workers=2, clock=clock)
    hog, gold = call(band=2, tenant="hog", deadline=monotonic() + 3600), call(deadline=monotonic() + 3600)
    assert await value(made, gold, "echo", "short") == "short"
    held = [submit(made, hog, "hold", gate) for _ in range(4)]
    await settled()
    for waiting in (3, 2, 1):
        assert (made.busy, made.waiting) == (1, waiting)
        for _ in range(20):
            assert await value(made, gold, "echo", "short") == "short"
        assert await value(made, call(band=3, tenant="late", deadline=gold.deadline), "echo", "last") == "last"
        clock.ahead_s += LONG_S
        await released(gate)
        await until(lambda left=waiting: made.waiting == left - 1)  # type: ignore[misc]
    held[-1].cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_an_urgent_tenant_with_a_long_job_passes_long_jobs_of_others(
    pool: PoolMaker, call: CallMaker, gate: Path
) -> None:
    clock = Hours()
    made = await pool(workers=2, clock=clock)
    late = monotonic() + 3600
    assert await value(made, call(tenant="third"), "echo", "short") == "short"
    for band, tenant in ((2, "hog"), (0, "gold")):
        long = submit(made, call(band=band, tenant=tenant, deadline=late), "hold", gate)
        await settled()
        clock.ahead_s += LONG_S
        await released(gate)
        await long
    hog = submit(made, call(band=2, tenant="hog", deadline=late), "hold", gate)
    await settled()
    like = [submit(made, call(band=band, tenant="hog", deadline=late), "echo", "long") for band in (2, 3)]
    await settled()
    assert (made.busy, made.waiting) == (1, 2)
    assert await value(made, call(tenant="gold", deadline=late), "echo", "first") == "first"
    like[0].cancel()
    late_call = submit(made, call(band=2, tenant="hog", deadline=clock() + 60), "echo", "too late")
    await settled()
    clock.ahead_s += 61
    made.expire()
    with pytest.raises(DeadlineExceeded):
        await late_call
    assert made.waiting == 1
    await released(gate)
    assert await asyncio.gather(hog, like[1]) == ["open", "long"]


async def test_a_tenant_with_long_jobs_has_all_workers_if_nobody_else_calls(
    pool: PoolMaker, call: CallMaker, gate: Path, tmp_path: Path
) -> None:
    clock = Hours()
    made = await pool(workers=2, clock=clock)
    gates = [gate, tmp_path / "another"]
    os.mkfifo(gates[1])
    for _ in range(3):
        held = [submit(made, call(tenant="hog", deadline=monotonic() + 3600), "hold", each) for each in gates]
        await settled()
        clock.ahead_s += LONG_S
        assert (made.busy, made.waiting) == (2, 0)
        for each in gates:
            await released(each)
        await asyncio.gather(*held)


async def test_a_job_that_overruns_its_deadline_by_far_is_killed(pool: PoolMaker, call: CallMaker, gate: Path) -> None:
    made = await pool(overrun_s=0.0)
    endless = submit(made, call(deadline=monotonic() + 0.05), "hold", gate)
    with pytest.raises(DeadlineExceeded):
        await endless
    assert await value(made, call(), "echo", "next") == "next"


async def test_a_job_over_its_own_time_is_killed_and_says_so(pool: PoolMaker, call: CallMaker, gate: Path) -> None:
    made = await pool()
    with pytest.raises(HandlerTimedOut, match=r"0\.05 s in its stage 'hold'"):
        await made.call(Work(ref("hold"), (gate,), call(), "hold", run_s=0.05))
    assert await value(made, call(), "echo", "next") == "next"
    assert made.tally.killed == {"time_limit": 1}


async def test_a_job_that_nobody_waits_for_is_killed_after_a_grace(
    pool: PoolMaker, call: CallMaker, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log said only "signal 9", which is also how the kernel ends a process that takes too much memory."""
    made = await pool(overrun_s=0.02, grace_min_s=0.01)
    left = submit(made, call(), "hold", gate)
    await settled()
    left.cancel()
    assert await value(made, call(), "echo", "next") == "next"
    assert made.tally.killed == {"abandoned": 1}
    await until(lambda: "ended (by this server: nobody waited for its job any more)" in caplog.text)


async def test_a_coroutine_that_nobody_waits_for_ends_and_its_worker_lives(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool(grace_min_s=PATIENT_S)
    before = made.pids
    left = submit(made, call(), "waits_for_ever")
    await settled()
    left.cancel()
    assert await value(made, call(), "echo", "next") == "next"
    assert set(before) <= set(made.pids)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
async def test_a_job_over_its_memory_says_so_and_the_next_has_a_new_process(pool: PoolMaker, call: CallMaker) -> None:
    made = await pool()
    before = made.pids
    assert (await made.call(Work(ref("greedy"), (20,), call(), "pre", memory_mb=50))).value == 20 << 20
    with pytest.raises(MemoryExceeded, match="in its stage 'pre'"):
        await made.call(Work(ref("greedy"), (100,), call(), "pre", memory_mb=50))
    assert await value(made, call(), "greedy", 100) == 100 << 20, "without a limit there is none"
    assert before[0] not in made.pids


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
async def test_arrays_that_a_job_is_given_and_outputs_of_models_are_not_part_of_its_memory(
    pool: PoolMaker, call: CallMaker
) -> None:
    made = await pool()
    array = np.ones(40 << 20, np.uint8)

    def work(name: str, number: int) -> Work:
        return Work(ref(name), (array, number), call(), "pre", memory_mb=50, models=Doubling())

    assert (await made.call(work("uses", 30))).value == 70 << 20
    with pytest.raises(MemoryExceeded):
        await made.call(work("uses", 60))
    assert (await made.call(work("uses_outputs", 30))).value == (4 * 40 + 30) << 20
    with pytest.raises(MemoryExceeded):
        await made.call(work("uses_outputs", 60))
    with pytest.raises(MemoryExceeded):
        await made.call(work("uses_outputs_in_turn", 8))


async def test_where_set_up_takes_long_a_spare_worker_steps_in(
    pool: PoolMaker, call: CallMaker, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "SPARE_FROM_S", 0.0)
    made = await pool()
    await until(lambda: len(made.pids) >= 2)
    doomed, waiting = submit(made, call(), "announce_and_hold", gate), submit(made, call(), "pid")
    pid = int(await read(gate))
    assert made.busy == 1 and made.waiting == 1, "a spare one does not work beside the others"
    (spare,) = [each for each in made.pids if each != pid]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await doomed
    assert await waiting == spare


async def test_closing_fails_what_waits(pool: PoolMaker, call: CallMaker, gate: Path) -> None:
    made = await pool()
    running, queued = submit(made, call(), "hold", gate), submit(made, call(), "echo", 1)
    await settled()
    await made.close()
    for each in (running, queued):
        with pytest.raises(WorkerDied):
            await each
