"""Runs one service for one request, under one deadline.

The deadline is absolute and covers everything: waiting for a worker, the worker, the model, the handler's own code.
Each part gives up by itself and says which stage it was; the timeout around them is for what does not.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from oriel_logic.context import Context, Workers
from oriel_logic.definition import Definition
from oriel_logic.errors import DeadlineExceeded, HandlerFailed, LogicError
from oriel_logic.messages import Request
from oriel_logic.models import Models
from oriel_logic.stages import Ledger
from oriel_logic.workers.references import Services, for_stage
from oriel_wire.context import CallContext

__all__ = ["Pipeline"]


class ModelServers(Protocol):
    """What is needed of `inference.InferenceServers`."""

    def bind(self, call: CallContext, ledger: Ledger) -> Models: ...


class Pipeline:
    """services: set up in this process, for the stages that are `async def`."""

    def __init__(
        self,
        services: Services,
        workers: Workers,
        inference: ModelServers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._workers = workers
        self._inference = inference
        self._clock = clock

    async def run(self, definition: Definition, request: Request, call: CallContext, ledger: Ledger) -> Any:
        """What the service answers, not yet encoded.

        Raises LogicError only. Cancelled: queued work of this request is gone, calls under way are closed.
        """
        context = Context(call, ledger, self._workers, clock=self._clock)
        models = self._inference.bind(call, ledger)
        try:
            async with asyncio.timeout(call.remaining_s(self._clock())) as limit:
                if definition.shape == "chain":
                    return await self._chain(definition, request, context, models, ledger)
                return await self._function(definition, request, context, models)
        except LogicError:
            raise
        except Exception as error:  # the handler's own: its log entry is written where the answer is made
            if isinstance(error, TimeoutError) and limit.expired():
                raise DeadlineExceeded(ledger.interrupted) from error
            meant = first_logic_error(error)
            if meant is not None:
                raise meant from error
            raise HandlerFailed("the service failed: its log says why under this request id") from error

    async def _function(self, definition: Definition, request: Request, context: Context, models: Models) -> Any:
        (stage,) = definition.stages()
        if definition.runs_in_worker(stage):
            return await context.work(for_stage(definition.name, stage), (request,), stage or "work")
        handler = self._services.stage(definition.name, stage)
        return await definition.plan.call(handler, (request, models, context))

    async def _chain(
        self, definition: Definition, request: Request, context: Context, models: Models, ledger: Ledger
    ) -> Any:
        inputs = await self._stage(definition, "pre", request, context, ledger)
        if not isinstance(inputs, Mapping):
            raise HandlerFailed(f"pre of service '{definition.name}' must give a dict of input name -> array")
        outputs = await models.infer(definition.model, inputs, version=definition.model_version)
        return await self._stage(definition, "post", outputs, context, ledger)

    async def _stage(self, definition: Definition, stage: str, value: Any, context: Context, ledger: Ledger) -> Any:
        if definition.runs_in_worker(stage):
            return await context.work(for_stage(definition.name, stage), (value,), stage)
        with ledger.stage(stage):
            return await self._services.stage(definition.name, stage)(value)


def first_logic_error(error: BaseException) -> LogicError | None:
    """What a task group of the handler wrapped: the first refusal, so that its meaning is not lost."""
    if isinstance(error, LogicError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = first_logic_error(inner)
            if found is not None:
                return found
    return None
