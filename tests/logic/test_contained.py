"""Tasks of a handler that fail or exit make only their own request fail."""

import asyncio
import sys
from contextvars import copy_context
from typing import Any

import pytest

from oriel_logic.server.failures import TaskExited, contained

HANDLERS = """
    import asyncio, sys
    from oriel_logic import service

    async def leave():
        sys.exit(4)

    @service
    async def exits(request, models, ctx):
        task = asyncio.create_task(leave())
        await asyncio.wait([task])
        await task

    @service
    async def group(request, models, ctx):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave())

    @service
    async def cancels(request, models, ctx):
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    @service
    async def closes(request, models, ctx):
        raise GeneratorExit

    @service
    async def cancels_midway(request, models, ctx):
        yield 1
        raise asyncio.CancelledError

    @service
    async def well(request, models, ctx):
        return "well"
"""


async def test_a_handler_that_ends_its_tasks_fails_its_own_request(stack: Any, services: Any) -> None:
    logic = await stack(services(handlers=HANDLERS))
    asyncio.get_running_loop().set_task_factory(contained)
    for service in ("exits", "group", "cancels", "closes"):
        answer = await asyncio.wait_for(logic.post(service), 120)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "handler_failed")
    assert (await logic.post("well")).json() == "well"
    answer = await asyncio.wait_for(logic.post("cancels_midway"), 120)
    first, last = answer.text.splitlines()
    assert first == "1" and "handler_failed" in last
    assert logic.unit.envelope.in_flight == 0


async def test_a_contained_task_is_a_task() -> None:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(contained)

    async def value(gate: asyncio.Event) -> int:
        await gate.wait()
        return 3

    async def leave() -> None:
        raise SystemExit(2)

    gate = asyncio.Event()
    kept, cancelled, never = (asyncio.create_task(value(gate)) for _ in range(3))
    never.cancel()  # before it has begun
    await asyncio.sleep(0)
    cancelled.cancel()
    gate.set()
    assert await kept == 3
    for task in (cancelled, never):
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(TaskExited, match="SystemExit: 2"):
        await asyncio.create_task(leave())


@pytest.mark.parametrize("eager", [None, False, True])
async def test_whatever_a_loop_passes_to_a_task_is_taken(eager: bool | None) -> None:
    """uvloop passes `eager_start` from Python 3.13 on, asyncio `name` from 3.13.3 on."""
    options: dict[str, Any] = {"name": "mine", "context": copy_context()}
    if sys.version_info >= (3, 12):
        options["eager_start"] = eager

    async def leave() -> None:
        raise SystemExit(2)

    task = contained(asyncio.get_running_loop(), leave(), **options)
    assert task.get_name() == "mine"
    with pytest.raises(TaskExited, match="SystemExit: 2"):
        await task
