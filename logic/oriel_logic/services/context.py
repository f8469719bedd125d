"""`ctx`: what a handler knows about its request beside the body (time left, tier), and its access to the workers."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from oriel_logic.observe.stages import Ledger, Stage
from oriel_logic.services.batching import BatchLimits, limits_of
from oriel_logic.services.serving import for_function
from oriel_wire.context import CallContext

if TYPE_CHECKING:  # workers do without the library of metrics
    from oriel_logic.observe.metrics import Tally

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job.

    value: the result of the function.
    cpu_us: processor time that the worker spent.
    stages: (name, start, end) of what the function timed with `ctx.stage`, and before them `wait` if every worker was
    busy; monotonic seconds.
    """

    value: Any
    cpu_us: int
    stages: Sequence[tuple[str, float, float]] = ()


Spent = Callable[[int, bool], None]  # called at a job's end: its processor microseconds, True if they are lost


def uncounted(cpu_us: int, is_lost: bool) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work for a worker: the referenced function and its arguments. stage: its name in errors.

    models: answers the model calls of the job. run_s, memory_mb: the service's own limits. spent: called at its end.
    """

    reference: str
    arguments: Sequence[Any]
    call: CallContext
    stage: str
    models: Any = None
    run_s: float | None = None
    memory_mb: int = 0
    spent: Spent = uncounted


class Workers(Protocol):
    """The workers of a deployment: processes (`workers.pool`), or threads in tests (`testing.workers`)."""

    @property
    def tally(self) -> "Tally": ...
    @property
    def waiting(self) -> int: ...
    @property
    def busy(self) -> int: ...
    @property
    def pids(self) -> list[int]: ...
    async def call(self, work: Work) -> Done: ...
    def stream(self, work: Work) -> AsyncIterator[Any]: ...
    async def batched(self, work: Work, limits: BatchLimits) -> Done: ...
    async def close(self) -> None: ...


class Context:
    """One request's context; `ctx` in handlers. run_s, memory_mb: the service's limits for functions in workers."""

    __slots__ = ("_call", "_clock", "_ledger", "_memory_mb", "_run_s", "_workers")

    def __init__(
        self,
        call: CallContext,
        ledger: Ledger,
        workers: Workers,
        *,
        run_s: float | None = None,
        memory_mb: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._run_s = run_s
        self._memory_mb = memory_mb
        self._ledger = ledger
        self._workers = workers
        self._clock = clock

    def rebind(self, call: CallContext) -> None:
        """Set another deadline, because a stream goes on."""
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
        """Seconds until the deadline; a handler may choose a smaller model when they are few."""
        return self._call.remaining_s(self._clock())

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Time a part of a handler: `with ctx.stage("rank"):` shows in `Server-Timing`, the metrics and the trace.

        name: letters, digits and `_.-`, at most 48; other characters are shown as "_".
        """
        return self._ledger.stage(name)

    async def run(self, function: Callable[P, R], /, *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run a plain function in a worker process, as a stage of its own name, and return its value.

        The function must be defined at the top of a file; arguments and result are pickled. A `@batched` function takes
        rows, which are combined with those of other requests.
        Raises the Refused that it raised, HandlerFailed for anything else it raised, DeadlineExceeded, Saturated,
        WorkerDied, HandlerTimedOut or MemoryExceeded.
        Cancelled: it does not start any more, or its result is dropped.
        """
        if keywords:
            raise TypeError("ctx.run takes positional arguments only")
        limits = limits_of(function)
        reference, stage = for_function(function), function.__name__
        if limits is not None:
            with self._ledger.stage(stage) as timed:
                done = await self._workers.batched(self._work(reference, arguments, timed.name, {}), limits)
                return cast(R, self._accounted(done, timed))
        bounds = {"run_s": self._run_s, "memory_mb": self._memory_mb}
        return cast(R, await self.work(reference, arguments, stage, **bounds))

    async def work(self, reference: str, arguments: Sequence[Any], stage: str, **terms: Any) -> Any:
        """Run referenced code in a worker. terms: `models` that the job may call, and its limits `run_s` and
        `memory_mb`.
        """
        with self._ledger.stage(stage) as timed:
            done = await self._workers.call(self._work(reference, arguments, timed.name, terms))
            return self._accounted(done, timed)

    def _accounted(self, done: Done, timed: Stage) -> Any:
        timed.attributes["oriel.cpu_us"] = done.cpu_us
        for name, start_s, end_s in done.stages:
            inner = self._ledger.stage(name)
            inner.start_s, inner.end_s = start_s, end_s
        return done.value

    def stream(self, reference: str, arguments: Sequence[Any], stage: str, **terms: Any) -> AsyncIterator[Any]:
        """Yield the pieces of a generator that runs in a worker; see `work`."""
        return self._workers.stream(self._work(reference, arguments, stage, terms))

    def _work(self, reference: str, arguments: Sequence[Any], stage: str, terms: dict[str, Any]) -> Work:
        return Work(reference, arguments, self._call, stage, spent=self._ledger.spent, **terms)
