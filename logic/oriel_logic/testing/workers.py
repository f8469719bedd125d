"""Threads in place of worker processes, for `def` stages and `ctx.run`."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, ClassVar

from oriel_logic.errors import HandlerFailed, LogicError
from oriel_logic.observe.metrics import Tally
from oriel_logic.services.batching import BatchLimits, rows_in, split
from oriel_logic.services.context import Done, Work
from oriel_logic.services.serving import Services
from oriel_logic.workers.frames import Terms
from oriel_logic.workers.remote import AsyncContext, JobContext, JobModels
from oriel_logic.workers.work import injected

END = object()


class ThreadWorkers:
    """`Workers` that run jobs in threads. The memory and time limits of a service do not apply."""

    waiting = busy = 0
    pids: ClassVar[list[int]] = []

    def __init__(self, services: Services, clock: Callable[[], float]) -> None:
        self._services = services
        self._clock = clock
        self.tally = Tally()

    async def call(self, work: Work) -> Done:
        try:
            value = await self._begin(work)
        except LogicError:
            raise
        except Exception as error:
            raise HandlerFailed(f"the service failed in its stage '{work.stage}'") from error
        return Done(value, 0)

    async def batched(self, work: Work, limits: BatchLimits) -> Done:
        """Run the rows alone: there are no other calls."""
        count = rows_in(work.arguments[0])
        if not count:
            return Done([], 0)
        done = await self.call(work)
        return Done(split(done.value, [count])[0], 0)

    async def stream(self, work: Work) -> AsyncIterator[Any]:
        try:
            pieces = await self._begin(work)
            if isinstance(pieces, Iterator):
                while (piece := await asyncio.to_thread(next, pieces, END)) is not END:
                    yield piece
            else:
                async for piece in pieces:
                    yield piece
        except LogicError:
            raise
        except Exception as error:
            raise HandlerFailed(f"the service failed in its stage '{work.stage}'") from error

    async def close(self) -> None:
        """Do nothing: threads need no clean-up."""

    async def _begin(self, work: Work) -> Any:
        function, arguments, call = self._services.resolve(work.reference), work.arguments, work.call
        wanted = injected(function, len(arguments))
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        terms = Terms(request_id=call.request_id, deadline=call.deadline, tier=call.tier, tenant=call.tenant)
        given: dict[str, Any] = {}
        loop = asyncio.get_running_loop()
        if "models" in wanted:
            given["models"] = work.models if is_async else JobModels(partial(blocking, loop, work.models))
        if "ctx" in wanted:
            given["ctx"] = (AsyncContext if is_async else JobContext)(terms, self._clock)
        if is_async:
            value = function(*arguments, **given)
            return await value if inspect.isawaitable(value) else value
        value = await asyncio.to_thread(function, *arguments, **given)
        return await value if inspect.isawaitable(value) else value


def blocking(loop: asyncio.AbstractEventLoop, models: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
    """Call a model from a thread, and wait for its answer."""
    return asyncio.run_coroutine_threadsafe(getattr(models, method)(*arguments, **keywords), loop).result()
