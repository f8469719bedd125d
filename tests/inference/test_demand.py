"""The calls that wait for a model to be loaded, in virtual time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from oriel_inference.catalog import Catalog
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import InferenceError, ModelMemoryFull, ModelNotReady, NoVersion, QueueFull, ServerStopping
from oriel_inference.models.demand import FULL_PAUSE_S, PIECE, Demand
from oriel_wire.context import CallContext
from oriel_wire.observe.trace import TraceContext

from ..waiting import until


class Loads:
    """A demand whose loads end when the test says so.

    began: one for each load, in order.
    leaves_after: the number of calls after whose begin the model serves no more.
    """

    def __init__(self, **bounds: int) -> None:
        self.clock = VirtualClock()
        self.catalog = ReadyCatalog()
        self.began: list[asyncio.Future[str]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.outcomes: list[tuple[str, str]] = []
        self.leaves_after = 0
        limits = {"max_items": 100, "max_bytes": 1 << 20} | bounds
        self.demand = Demand(self.catalog, clock=self.clock, spawn=self._spawn, bring=self._bring, **limits)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> object:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _bring(self, model: str) -> str:
        self.began.append(asyncio.get_running_loop().create_future())
        return await self.began[-1]

    async def begun(self, count: int) -> None:
        await until(lambda: len(self.began) == count)

    async def end(self, reason: str = "") -> None:
        """End the load under way, and wait until all that follows has happened."""
        self.catalog.ready = not reason
        self.began[-1].set_result(reason)
        await until(lambda: not self.tasks)

    def call(self, name: str, *, within_s: float = 60.0, band: int = 1) -> Any:
        now = self.clock.now()
        ctx = CallContext(
            request_id=name,
            deadline=now + within_s,
            trace=TraceContext(1, 1, False),
            band=band,
            tier="",
            tenant="",
            models=(),
        )

        def resume() -> None:
            self.outcomes.append((name, "begun"))
            if len(self.outcomes) == self.leaves_after:
                self.catalog.ready = False

        def refuse(error: InferenceError) -> None:
            self.outcomes.append((name, error.outcome.value))

        return self.demand.wait("m", ctx, size_bytes=1000, resume=resume, refuse=refuse)


class ReadyCatalog(Catalog):
    """A catalog in which every model serves, or none."""

    ready = False

    def is_ready(self, name: str) -> bool:
        return self.ready


async def test_calls_begin_in_the_order_of_the_queue_after_one_load() -> None:
    loads = Loads()
    for name, band, within_s in (("late", 1, 50.0), ("soon", 1, 20.0), ("urgent", 0, 60.0)):
        loads.call(name, band=band, within_s=within_s)
    await loads.begun(1)
    await loads.end()
    assert loads.outcomes == [("urgent", "begun"), ("soon", "begun"), ("late", "begun")]
    assert len(loads.began) == 1 and loads.demand.waiting == {}


async def test_a_call_that_cannot_be_in_time_is_refused_at_once_and_the_load_starts() -> None:
    loads = Loads()
    loads.call("first", within_s=1000.0)
    await loads.begun(1)
    loads.clock.advance(8.0)
    await loads.end()
    loads.catalog.ready = False
    with pytest.raises(ModelNotReady, match=r"takes 8\.0 s more") as refused:
        loads.call("short", within_s=5.0)
    assert refused.value.retry_s == 8.0
    await loads.begun(2)
    loads.clock.advance(6.0)
    with pytest.raises(ModelNotReady) as refused:
        loads.call("short", within_s=1.0)
    assert refused.value.retry_s == 2.0
    loads.call("long", within_s=5.0)
    await loads.end()
    assert loads.outcomes == [("first", "begun"), ("long", "begun")]


async def test_deadlines_pass_callers_leave_and_the_load_goes_on() -> None:
    loads = Loads()
    loads.call("late", within_s=2.0)
    leave = loads.call("left")
    loads.call("stays")
    await loads.begun(1)
    leave()
    leave()
    loads.clock.advance(2.0)
    assert loads.outcomes == [("late", "deadline_exceeded")] and loads.demand.waiting == {"m": 1}
    await loads.end()
    assert loads.outcomes[1:] == [("stays", "begun")]


async def test_what_waits_is_bounded_and_the_more_urgent_displaces() -> None:
    loads = Loads(max_items=2)
    loads.call("a", band=2)
    loads.call("b", band=1)
    with pytest.raises(QueueFull):
        loads.call("c", band=2)
    loads.call("d", band=0)
    assert loads.outcomes == [("a", "queue_full")]
    loads = Loads(max_bytes=1500)
    loads.call("a")
    with pytest.raises(QueueFull):
        loads.call("b")


async def test_a_failed_load_is_not_tried_again_at_once() -> None:
    loads = Loads()
    loads.call("a")
    loads.call("b")
    await loads.begun(1)
    loads.clock.advance(2.0)
    await loads.end("its file is broken")
    assert loads.outcomes == [("a", "no_available_version"), ("b", "no_available_version")]
    with pytest.raises(NoVersion, match="its file is broken"):
        loads.call("c")
    loads.clock.advance(19.9)
    with pytest.raises(NoVersion):
        loads.call("c")
    loads.clock.advance(0.2)
    loads.call("d")
    await loads.begun(2)
    await loads.end("still broken")
    loads.demand.changed("m")
    loads.call("e")
    await loads.begun(3)
    await loads.end()
    assert loads.outcomes[-1] == ("e", "begun")


async def test_a_model_that_leaves_before_all_have_begun_is_loaded_again() -> None:
    loads = Loads()
    loads.leaves_after = PIECE
    for number in range(3 * PIECE):
        loads.call(str(number))
    await loads.begun(1)
    loads.catalog.ready = True
    loads.began[-1].set_result("")
    await loads.begun(2)
    assert len(loads.outcomes) == PIECE and loads.demand.is_needed("m")
    await loads.end()
    assert sorted(loads.outcomes) == sorted((str(number), "begun") for number in range(3 * PIECE))
    assert not loads.demand.is_needed("m")


async def test_a_stop_refuses_what_waits_and_what_comes() -> None:
    loads = Loads()
    loads.call("a")
    loads.demand.close()
    assert loads.outcomes == [("a", "server_stopping")]
    with pytest.raises(ServerStopping):
        loads.call("b")
    await loads.begun(1)
    await loads.end()


async def test_a_model_that_finds_no_memory_again_and_again_is_tried_less_often() -> None:
    """Each try costs a millisecond: with twenty models in vain they took a tenth of a core."""
    loads = Loads()
    pauses: list[float] = []
    for number in range(6):
        loads.call("a")
        await loads.begun(number + 1)
        loads.began[-1].set_exception(ModelMemoryFull("it needs more", retry_s=30.0))
        await until(lambda: not loads.tasks)
        pause_s = next(each.until_s for each in loads.demand._full.values()) - loads.clock.now()
        pauses.append(pause_s)
        loads.clock.advance(pause_s)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    loads.clock.advance(10.0)
    loads.call("a")
    await loads.begun(7)
    loads.began[-1].set_exception(ModelMemoryFull("it needs more", retry_s=30.0))
    await until(lambda: not loads.tasks)
    assert loads.demand._full["m"].pause_s == FULL_PAUSE_S


async def test_a_load_without_memory_is_not_tried_by_every_call() -> None:
    loads = Loads()
    loads.call("a")
    await loads.begun(1)
    loads.began[-1].set_exception(ModelMemoryFull("it needs more", retry_s=30.0))
    await until(lambda: not loads.tasks)
    assert loads.outcomes == [("a", "model_memory_full")]
    for _ in range(3):
        with pytest.raises(ModelMemoryFull, match="it needs more") as refused:
            loads.call("b")
        assert refused.value.retry_s == 30.0
    loads.clock.advance(FULL_PAUSE_S)
    loads.call("c")
    await loads.begun(2)
    await loads.end()
    assert loads.outcomes[1:] == [("c", "begun")]
