"""Services that print, start processes, break the process that they run in, or take its worker for long."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oriel_logic.workers.pool import WorkerPool
from oriel_wire.process.output import MAX_LINE_BYTES, MAX_LINES

from ..waiting import until
from .processes import is_gone

Services = Callable[..., Path]
PRINTS = """
    import os, sys
    from oriel_logic import Request, service

    @service
    def prints(request: Request) -> int:
        for number in range(int(request.body)):
            print("x" * 9999)
        sys.stdout.flush()
        return os.getpid()

    @service
    def one_line(request: Request) -> str:
        print("a line of another service")
        return "printed"
"""
FORKS = """
    import os, signal, time
    from oriel_logic import service

    @service
    def forks(request) -> list[int]:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(60)
        return [child, os.getpid()]
"""
BREAKS = """
    import sys
    from oriel_logic import service

    @service
    def breaks(request) -> str:
        sys.modules.clear()
        return "broken"
"""
WELL = """
    import json
    from dataclasses import dataclass
    from oriel_logic import Request, service

    @dataclass
    class Sum:
        total: float

    @service
    def well(request: Request) -> Sum:
        import statistics
        return Sum(statistics.fmean(json.loads(request.body)))
"""
FAILS = """
    import os
    from oriel_logic import service

    @service
    def one(request) -> int:
        raise ValueError("one")

    @service
    def other(request) -> int:
        raise ValueError("other")

    @service
    def pid(request) -> int:
        return os.getpid()
"""
GREEDY = """
    from oriel_logic import Request, service

    def taken(megabytes: int) -> int: return len(bytearray(megabytes << 20))

    @service(name="greedy", memory_mb=50)
    def greedy(request: Request) -> int: return taken(int(request.body))

    @service(name="greedy-run", memory_mb=50)
    async def greedy_run(request: Request, ctx) -> int: return await ctx.run(taken, int(request.body))
"""
SLOW = """
    from oriel_logic import Request, service

    @service
    def slow(request: Request) -> str:
        with open(request.body) as gate:
            return gate.read()

    @service
    def quick(request: Request) -> str:
        return "quick"
"""


async def test_what_a_service_prints_is_bounded_in_the_log(
    stack: Any, services: Services, capfd: pytest.CaptureFixture[str]
) -> None:
    logic = await stack(services(printing=PRINTS))
    text = ""

    def printed() -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return "lines left out" in text

    assert (await logic.post("prints", b"1000")).status_code == 200
    await until(printed)
    lines = text.splitlines()
    assert max(map(len, lines)) == MAX_LINE_BYTES and sum("xxx" in line for line in lines) < 500 < 1000 - MAX_LINES


async def test_processes_that_a_service_starts_end_with_its_worker(stack: Any, services: Services) -> None:
    logic = await stack(services(forks=FORKS))
    child, worker = (await logic.post("forks")).json()
    assert not is_gone(child)
    os.kill(worker, 9)
    await until(lambda: is_gone(child))
    await logic.unit.pool.wait_ready()
    child, worker = (await logic.post("forks")).json()
    await logic.unit.pool.close()
    await until(lambda: is_gone(child) and is_gone(worker))


async def test_a_worker_that_one_service_breaks_is_replaced_before_others_fail(stack: Any, services: Services) -> None:
    logic = await stack(services(breaks=BREAKS, well=WELL))
    for _ in range(10):
        assert "handler_failed" in (await logic.post("breaks")).text  # its own answer cannot be sent any more
        answer = await logic.post("well", b"[1, 3]")
        assert (answer.status_code, answer.text) == (200, '{"total":2.0}')
    assert logic.unit.pool.tally.killed["broken"] == 10


async def test_a_worker_whose_jobs_of_several_services_fail_is_replaced(stack: Any, services: Services) -> None:
    logic = await stack(services(fails=FAILS))
    worker = int((await logic.post("pid")).text)
    for name in ("one", "one", "one", "one", "one"):
        assert (await logic.post(name)).status_code == 500
    assert int((await logic.post("pid")).text) == worker  # one service that fails proves nothing
    for name in ("one", "other", "one", "other"):
        assert (await logic.post(name)).status_code == 500
    await until(lambda: logic.unit.pool.tally.killed["broken"] == 1)
    assert int((await logic.post("pid")).text) != worker


async def test_callers_of_failing_services_take_no_worker_away(
    stack: Any, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four failures of two services ended a worker at once, whoever called them, and the next one, and so on."""
    gone, ready = WorkerPool.gone, []

    def count(pool: WorkerPool, *gone_worker: Any) -> None:
        gone(pool, *gone_worker)
        ready.append(len(pool.pids))

    monkeypatch.setattr(WorkerPool, "gone", count)
    logic = await stack(services(fails=FAILS), workers=2)
    pool = logic.unit.pool
    for _ in range(2):
        for _ in range(8):
            answers = await asyncio.gather(*(logic.post(name) for name in ("one", "other", "one", "other")))
            assert {answer.status_code for answer in answers} == {500}
        await until(lambda: ready == [2])  # it has ended after its successor was ready, and no other one has
    assert pool.tally.killed == {"broken": 1} and pool.tally.died == 0


async def test_slow_services_leave_a_worker_to_quick_ones(stack: Any, services: Services, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    logic = await stack(services(slow=SLOW), workers=2)
    pool = logic.unit.pool
    assert (await logic.post("quick")).status_code == 200
    pool._long._long["", "service:slow"] = pool._clock()  # a job of it has been long
    async with asyncio.TaskGroup() as group:
        slow = [group.create_task(logic.post("slow", str(gate).encode())) for _ in range(3)]
        await until(lambda: pool.waiting == 2)
        assert pool.busy == 1
        assert (await logic.post("quick")).status_code == 200
        slow[2].cancel()
        await until(lambda: pool.waiting == 1)
        for count in (1, 0):
            await asyncio.to_thread(gate.write_text, "x")
            await until(lambda count=count: pool.waiting == 0 and pool.busy == count)  # type: ignore[misc]
    assert [task.result().status_code for task in slow[:2]] == [200, 200]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
async def test_a_services_memory_is_bounded_in_its_stages_and_in_what_it_runs(stack: Any, services: Services) -> None:
    made = await stack(services(greedy=GREEDY))
    for name in ("greedy", "greedy-run"):
        assert (await made.post(name, b"10")).json() == 10 << 20
        answer = await made.post(name, b"200")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "memory_exceeded")
        assert (await made.post(name, b"10")).status_code == 200
