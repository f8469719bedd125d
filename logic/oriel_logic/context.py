"""What a handler knows about its request beside the body: time left, tier, and the workers."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from oriel_logic.batched import BatchLimits, limits_of
from oriel_logic.stages import Ledger
from oriel_logic.workers.references import for_function
from oriel_wire.context import CallContext

__all__ = ["Context", "Workers"]

P = ParamSpec("P")
R = TypeVar("R")


class Finished(Protocol):
    @property
    def value(self) -> Any: ...
    @property
    def cpu_us(self) -> int: ...


class Workers(Protocol):
    """What is needed of `workers.pool.WorkerPool`."""

    async def call(
        self,
        reference: str,
        arguments: Sequence[Any],
        *,
        call: CallContext,
        stage: str,
        models: Any = None,
        run_s: float | None = None,
        memory_mb: int = 0,
    ) -> Finished: ...
    async def batched(
        self, reference: str, rows: Any, limits: BatchLimits, *, call: CallContext, stage: str
    ) -> Finished: ...
    def stream(
        self,
        reference: str,
        arguments: Sequence[Any],
        *,
        call: CallContext,
        stage: str,
        models: Any = None,
        run_s: float | None = None,
        memory_mb: int = 0,
    ) -> AsyncIterator[Any]: ...


class Context:
    """One request's context; `ctx` in handlers."""

    __slots__ = ("_call", "_clock", "_ledger", "_workers")

    def __init__(
        self, call: CallContext, ledger: Ledger, workers: Workers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call = call
        self._ledger = ledger
        self._workers = workers
        self._clock = clock

    def rebind(self, call: CallContext) -> None:
        """A stream goes on: it has until another deadline."""
        self._call = call

    @property
    def request_id(self) -> str:
        return self._call.request_id

    @property
    def tier(self) -> str:
        """The caller's tier, for example "gold"; "" if the request did not come through a gateway."""
        return self._call.tier

    @property
    def tenant(self) -> str:
        return self._call.tenant

    @property
    def remaining_s(self) -> float:
        """Seconds until the request is given up; a handler may choose a smaller model when it is little."""
        return self._call.remaining_s(self._clock())

    def stage(self, name: str) -> AbstractContextManager[object]:
        """`with ctx.stage("rank"):` times a part of a handler under that name, in `Server-Timing` and the trace."""
        return self._ledger.stage(name)

    async def run(self, function: Callable[P, R], /, *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run a plain function in a worker process, as a stage of its own name; its value comes back.

        The function must be defined at the top of a file; arguments and result are pickled. Raises the Refused that
        it raised, HandlerFailed for anything else it raised, DeadlineExceeded, Saturated or WorkerDied. Cancelled: it
        does not start any more, or its result is dropped.
        """
        if keywords:
            raise TypeError("ctx.run takes positional arguments")
        limits = limits_of(function)
        if limits is not None:
            (rows,) = arguments
            return cast(R, await self._together(for_function(function), rows, limits, function.__name__))
        result: R = await self.work(for_function(function), arguments, function.__name__)
        return result

    async def _together(self, reference: str, rows: Any, limits: BatchLimits, stage: str) -> Any:
        with self._ledger.stage(stage) as timed:
            done = await self._workers.batched(reference, rows, limits, call=self._call, stage=stage)
            timed.attributes["oriel.cpu_us"] = done.cpu_us
            self._ledger.cost_us += done.cpu_us
            return done.value

    async def work(self, reference: str, arguments: Sequence[Any], stage: str, **terms: Any) -> Any:
        """terms: `models` that the job may call, and its limits `run_s` and `memory_mb`."""
        with self._ledger.stage(stage) as timed:
            done = await self._workers.call(reference, arguments, call=self._call, stage=stage, **terms)
            timed.attributes["oriel.cpu_us"] = done.cpu_us
            self._ledger.cost_us += done.cpu_us
            return done.value

    def stream(self, reference: str, arguments: Sequence[Any], stage: str, **terms: Any) -> AsyncIterator[Any]:
        """The pieces of a generator that runs in a worker; see `work`."""
        return self._workers.stream(reference, arguments, call=self._call, stage=stage, **terms)
