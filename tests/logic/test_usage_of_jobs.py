"""The processor time of every job of a worker is recorded once, however the job ends."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from oriel_logic.workers.frames import Frame
from oriel_logic.workers.pool import WorkerPool
from oriel_logic.workers.worker import Job, Worker

from ..waiting import until

Services = Callable[..., Path]
BURNS = """
    import os, time
    from oriel_logic import Refused, Request, batched, service

    def burn(seconds=0.01):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    @service
    def ends(request: Request) -> str:
        burn()
        return "well"

    @service
    def refuses(request: Request) -> str:
        burn()
        raise Refused("not this one")

    @service
    def fails(request: Request) -> str:
        burn()
        raise ValueError("of the service")

    @service
    def dies(request: Request) -> str:
        burn()
        os.abort()

    @service(timeout_s=0.2)
    def overruns(request: Request) -> str:
        burn(3600)

    @service
    def waits(request: Request) -> str:
        burn()
        with open(request.body) as gate:
            return gate.read()

    @service
    async def forgets(request: Request, models, ctx) -> str:
        try:
            await ctx.run(fail)
        except Exception:
            return "well"

    def fail():
        burn()
        raise ValueError("of the function")

    @batched(max_rows=8, max_delay_ms=1)
    def together(rows: list[int]) -> list[int]:
        burn()
        return rows

    @service
    async def batches(request: Request, models, ctx) -> int:
        [row] = await ctx.run(together, [1])
        return row

    @service
    def streams(request: Request):
        burn()
        yield "one"
        burn()
        yield "two"
"""
WHY = {
    "ends": "",
    "streams": "",
    "batches": "",
    "refuses": "failed",
    "fails": "failed",
    "dies": "failed",
    "overruns": "failed",
    "forgets": "failed",
    "late": "left",
    "left": "left",
}


class Measured:
    """What workers measured of their jobs, added up on their way to the pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_us = 0
        self.jobs = 0
        answered, gone = WorkerPool.job_finished, WorkerPool.gone

        def count_answered(pool: WorkerPool, worker: Worker, job: Job, frame: Frame) -> None:
            self.jobs += 1
            self.cpu_us += frame.cpu_us
            answered(pool, worker, job, frame)

        def count_gone(pool: WorkerPool, worker: Worker, job: Job | None) -> None:
            if job is not None:
                self.jobs += 1
                self.cpu_us += worker.spent_us
            gone(pool, worker, job)

        monkeypatch.setattr(WorkerPool, "job_finished", count_answered)
        monkeypatch.setattr(WorkerPool, "gone", count_gone)


async def test_all_jobs_are_recorded_for_their_tenant_with_the_reason_why_nobody_is_charged(
    stack: Any, services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of jobs that were refused, failed, were killed or left nothing was recorded, and of streams neither."""
    measured = Measured(monkeypatch)
    logic = await stack(services(burns=BURNS), workers=2)
    mix = [*WHY, *WHY]
    random.Random(1).shuffle(mix)
    expected: Counter[str] = Counter()

    async def ask(number: int, kind: str, **more: str) -> httpx.Response:
        gate = tmp_path / f"gate{number}"
        return await logic.post(  # type: ignore[no-any-return]
            "waits" if kind in ("late", "left") else kind,
            str(gate).encode(),
            x_oriel_tenant=f"tenant{number % 2}",
            x_oriel_tier="gold",
            **more,
        )

    for number, kind in enumerate(mix):
        before = measured.jobs
        if kind in ("late", "left"):
            os.mkfifo(tmp_path / f"gate{number}")
            asked = asyncio.ensure_future(ask(number, kind, x_oriel_timeout_ms="200" if kind == "late" else "60000"))
            await until(lambda: logic.unit.pool.busy == 1)
            if kind == "late":
                assert (await asked).status_code == 504
            else:
                asked.cancel()
                await until(lambda: not logic.unit.envelope.in_flight)
            await asyncio.to_thread((tmp_path / f"gate{number}").write_text, "late")
        else:
            await ask(number, kind)
        await until(lambda before=before: measured.jobs > before and not logic.unit.pool.busy)  # type: ignore[misc]
        expected[WHY[kind]] += 1
    await until(lambda: not logic.unit.envelope.in_flight)
    lines = logic.unit.usage.added("2026-11-24T17:05")
    assert sum(line.cpu_ns for line in lines) == measured.cpu_us * 1000
    assert {line.tenant for line in lines} == {"tenant0", "tenant1"}
    for why, count in expected.items():
        assert sum(line.cpu_ns for line in lines if line.why == why) >= count * 9_000_000, (why, lines)
