"""Asks a worker pool to run the functions of `conftest.JOBS`."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from oriel_logic.errors import ModelBusy
from oriel_logic.services.context import Work
from oriel_logic.workers.pool import WorkerPool
from oriel_wire.context import CallContext

PoolMaker = Callable[..., Awaitable[WorkerPool]]
CallMaker = Callable[..., CallContext]
PATIENT_S = 120.0  # for a worker that would end its job by itself, on a machine that is busy with other things


def ref(name: str) -> str:
    return f"function:oriel_services.jobs:{name}"


async def released(gate: Path, text: str = "open") -> None:
    await asyncio.to_thread(gate.write_text, text)


async def read(gate: Path) -> str:
    return await asyncio.to_thread(gate.read_text)


def submit(pool: WorkerPool, call: CallContext, name: str, *arguments: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(value(pool, call, name, *arguments))


async def value(pool: WorkerPool, call: CallContext, name: str, *arguments: Any) -> Any:
    return (await pool.call(Work(ref(name), arguments, call, name))).value


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Doubling:
    """A model. at_once: how many calls it waits for before it answers the first."""

    def __init__(self, at_once: int = 1) -> None:
        self.stuck = asyncio.Event()
        self._awaited = at_once
        self._all_came = asyncio.Event()

    async def infer(self, model: str, value: Any) -> Any:
        if isinstance(value, str) and value == "refuse":
            raise ModelBusy("model 'double': full", retry_after_s=2.0, too_many=True)
        if isinstance(value, str) and value == "stuck":
            self.stuck.set()
            await asyncio.Event().wait()
        self._awaited -= 1
        if self._awaited <= 0:
            self._all_came.set()
        await self._all_came.wait()
        return value * 2
