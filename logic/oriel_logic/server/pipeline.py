"""Runs one service for one request, under one deadline.

The deadline is absolute and covers everything: the wait for a worker, the worker, the model, the handler's own code.
Each part gives up by itself and names its stage; the timeout around them is for code that does not. For a stream the
deadline bounds the first piece; each further one has `STREAM_STEP_S`, and so have model calls from then on.

The media type is negotiated before the service runs. Reading a request and encoding an answer cost CPU: a `def` stage
does both in its worker; an `async def` stage does small ones here, large ones and pictures in a worker.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import msgspec

from oriel_logic.bodies.encoding import Frame, as_json, encode, framing, is_heavy
from oriel_logic.bodies.messages import Answer, Request
from oriel_logic.client.models import ArrayLike, Models, Outputs
from oriel_logic.errors import DeadlineExceeded, HandlerFailed, HandlerTimedOut, LogicError, NotAcceptable
from oriel_logic.observe.stages import Ledger
from oriel_logic.server.failures import close, failed
from oriel_logic.server.negotiate import choose
from oriel_logic.server.replies import Reply, reply_of
from oriel_logic.services.context import Context, Workers
from oriel_logic.services.definition import Definition
from oriel_logic.services.serving import (
    Services,
    Serving,
    encode_in_worker,
    for_function,
    for_stage,
    read_in_worker,
)
from oriel_wire.context import CallContext

STREAM_STEP_S = 60.0
SLACK_S = 1.0


class BoundModels(Models, Protocol):
    """The models of one request."""

    def rebind(self, call: CallContext) -> None:
        """Give later calls another deadline."""

    def stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
        tap: Callable[[bytes], bool] | None = None,
    ) -> AsyncGenerator[Outputs, None]:
        """Yield what `Models.stream` yields, without the answers that `tap` uses.

        tap: called with the text of an answer that is one text, when it comes and all before it were taken; it returns
        True if it has used it, and must not raise.
        """
        ...

    async def parameters(self, model: str, *, version: str = "") -> Mapping[str, str]:
        """Return the parameters of the model's configuration, at most 2 s old. Raises as `infer`."""
        ...


Bind = Callable[[CallContext, Ledger], BoundModels]


class Pipeline:
    """Runs services.

    services: the services set up in this process, for stages that are `async def`.
    bind: makes the models of one request.
    """

    def __init__(
        self,
        services: Services,
        workers: Workers,
        bind: Bind,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._workers = workers
        self._bind = bind
        self._clock = clock

    async def run(
        self,
        definition: Definition,
        request: Request,
        call: CallContext,
        ledger: Ledger,
        pieces: AsyncIterator[bytes] | None = None,
        limit_bytes: int = 0,
    ) -> Reply:
        """Run a service and return its encoded answer.

        pieces: the body, for a service that reads it while it arrives, at most `limit_bytes` of it.
        Raises LogicError only.
        Cancelled: queued work of this request is removed, and calls under way are closed.
        """
        media = negotiated(definition, request) if definition.offers else ""
        options = definition.options
        limit_s = options.timeout_s  # None: the request's own deadline is earlier
        if limit_s is not None:
            own = self._clock() + limit_s
            if own < call.deadline:
                call = msgspec.structs.replace(call, deadline=own)
            else:
                limit_s = None
        context = Context(
            call,
            ledger,
            self._workers,
            run_s=options.timeout_s,
            memory_mb=options.memory_mb or 0,
            clock=self._clock,
        )
        models = self._bind(call, ledger)
        if definition.is_streamed:
            run = Run(self._services, definition, request, media, context, models, pieces, limit_bytes)
            values = Streamed(run, call, self._clock)
            return Reply(status=200, content_type=media or "application/octet-stream", pieces=values)
        try:
            with Deadline(call.remaining_s(self._clock())) as limit:
                if definition.is_direct:
                    handler = self._services.serving(definition.name).direct
                    value = await definition.plan.call(handler, (request, models, context))
                    body = as_json(value, media)
                    if body is not None:
                        return Reply(status=200, body=body)
                    return await encoded(value, media, definition, context)
                run = Run(self._services, definition, request, media, context, models, pieces, limit_bytes)
                if definition.shape == "chain":
                    return await run.chain(ledger)
                return await run.function()
        except DeadlineExceeded as error:
            if limit_s is None:
                raise
            raise too_slow(error.stage, limit_s) from None
        except LogicError:
            raise
        except asyncio.CancelledError as error:
            if was_cancelled():
                raise
            raise failed(error) from error
        except BaseException as error:  # raised by the handler; logged where the reply is made
            if isinstance(error, TimeoutError) and limit.is_past:
                stage = ledger.interrupted
                raise (DeadlineExceeded(stage) if limit_s is None else too_slow(stage, limit_s)) from error
            raise failed(error) from error


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """One run of one service."""

    _services: Services
    definition: Definition
    _request: Request
    media: str
    context: Context
    models: BoundModels
    _pieces: AsyncIterator[bytes] | None
    _limit_bytes: int

    async def function(self) -> Reply:
        """Run a function, or a class's `predict`."""
        definition = self.definition
        (stage,) = definition.stages()
        if definition.runs_in_worker(stage):
            return await self._answer(await self._work(stage, self._request))
        serving = self._services.serving(definition.name)
        given = await self._given(serving, stage)
        return await self._answer(await definition.plan.call(serving.functions[stage], given))

    async def chain(self, ledger: Ledger) -> Reply:
        """Run `pre`, the model and `post`."""
        definition = self.definition
        if definition.runs_in_worker("pre"):
            inputs = await self._work("pre", self._request)
        else:
            serving = self._services.serving(definition.name)
            given = await self._given(serving, "pre")
            with ledger.stage("pre"):
                inputs = await definition.plan.call(serving.functions["pre"], given)
        if not isinstance(inputs, Mapping):
            raise HandlerFailed(f"pre of service '{definition.name}' must give a dict of input name -> array")
        outputs = await self.models.infer(definition.model, inputs, version=definition.model_version)
        if definition.runs_in_worker("post"):
            return await self._answer(await self._work("post", outputs))
        with ledger.stage("post"):
            value = await self._services.serving(definition.name).post(outputs, self.context)
        return await self._answer(value)

    async def values(self) -> AsyncIterator[Any]:
        definition = self.definition
        (stage,) = definition.stages()
        if definition.runs_in_worker(stage):
            return self.context.stream(
                for_stage(definition.name, stage),
                (self._request, self.media),
                stage or "work",
                **self._terms(),
            )
        serving = self._services.serving(definition.name)
        values: AsyncIterator[Any] = definition.plan.call(serving.functions[stage], await self._given(serving, stage))
        return values

    async def _given(self, serving: Serving, stage: str) -> tuple[Any, ...]:
        """Return the arguments of the handler: request, models, ctx and its inputs."""
        reader, request = serving.reader, self._request
        if reader is None:
            return (request, self.models, self.context)
        if self._pieces is not None:
            inputs = await reader.open(request, self._pieces, self._limit_bytes)
        elif reader.is_heavy(request) and serving.is_importable:
            assert self.definition.target is not None  # it runs here
            where = for_function(self.definition.target)
            inputs = await self.context.work(for_function(read_in_worker), (where, request), "read")
        else:
            inputs = reader.inputs(request)
        return (request, self.models, self.context, *inputs)

    async def _work(self, stage: str, arrived: Any) -> Any:
        definition = self.definition
        return await self.context.work(
            for_stage(definition.name, stage),
            (arrived, self.media),
            stage or "work",
            **self._terms(),
        )

    def _terms(self) -> dict[str, Any]:
        options = self.definition.options
        return {"models": self.models, "run_s": options.timeout_s, "memory_mb": options.memory_mb or 0}

    async def _answer(self, value: Any) -> Reply:
        if not self.definition.schemas.gives_media:
            body = as_json(value, self.media)
            if body is not None:
                return Reply(status=200, body=body)
        return await encoded(value, self.media, self.definition, self.context)


async def encoded(value: Any, media: str, definition: Definition, context: Context) -> Reply:
    """Encode an answer that is not JSON, or that is so expensive to encode that a worker does it."""
    service = definition.name
    if not isinstance(value, Answer) and (definition.schemas.gives_media or is_heavy(value)):
        value = await context.work(for_function(encode_in_worker), (value, media, service), "encode")
    return reply_of(encode(value, media, service=service))


class Streamed:
    """The encoded pieces of a generator's answer. Raises LogicError only, and ends then."""

    __slots__ = ("_call", "_clock", "_frame", "_is_over", "_run", "_values")

    def __init__(self, run: Run, call: CallContext, clock: Callable[[], float]) -> None:
        self._run = run
        self._call = call
        self._clock = clock
        self._values: AsyncIterator[Any] | None = None
        self._frame: Frame | None = None  # None for pieces that a worker has framed
        self._is_over = False

    def __aiter__(self) -> "Streamed":
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            values = self._values
            if values is None:
                values = await self._begin()
            else:
                self._lengthen()
            value = await anext(values)
            if self._frame is None:
                piece: bytes = value
                return piece
            try:
                return self._frame(value)
            except (TypeError, ValueError, RecursionError, OverflowError) as error:
                raise HandlerFailed("a piece of the service's answer cannot be sent: its log says why") from error
        except BaseException as error:
            await self.aclose()
            if isinstance(error, LogicError | StopAsyncIteration | GeneratorExit):
                raise
            if isinstance(error, asyncio.CancelledError) and was_cancelled():
                raise
            raise failed(error) from error  # raised by the handler

    async def aclose(self) -> None:
        """Close the handler's generator; no further piece comes."""
        self._is_over = True
        values, self._values = self._values, None
        await close(values)

    async def _begin(self) -> AsyncIterator[Any]:
        run = self._run
        self._values = values = await run.values()
        if not run.definition.runs_in_worker(run.definition.stages()[0]):
            self._frame = framing(run.media)
        return values

    def _lengthen(self) -> None:
        """Give the next piece its time, to within `SLACK_S`: few pieces need a new context then."""
        deadline = self._clock() + STREAM_STEP_S
        if deadline > self._call.deadline + SLACK_S:
            self._call = call = msgspec.structs.replace(self._call, deadline=deadline)
            self._run.context.rebind(call)
            self._run.models.rebind(call)


def negotiated(definition: Definition, request: Request) -> str:
    """Choose the media type of the answer. Raises NotAcceptable."""
    chosen = choose(request.headers.get("accept", ""), definition.offers)
    if chosen is None:
        raise NotAcceptable(f"this service answers {', '.join(definition.offers)}: none of them is in Accept")
    return chosen


def too_slow(stage: str, limit_s: float) -> HandlerTimedOut:
    """Make the error for a service's own time limit: more time from its caller would not help."""
    return HandlerTimedOut(f"the service took longer than its own limit of {limit_s:g} s, in its stage '{stage}'")


def was_cancelled() -> bool:
    """Return whether the request itself was cancelled, seen from an `except CancelledError`.

    Otherwise something that the handler awaited was cancelled, which is the handler's failure.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Deadline:
    """A time limit for the body of a `with`, at a quarter of the cost of `asyncio.timeout`.

    As with `asyncio.timeout` the body is cancelled and TimeoutError raised; a cancellation from elsewhere passes
    through. `is_past` tells whether the time is over. It is not `async`, cannot be moved, and may be entered once.
    """

    __slots__ = ("_cancelling", "_handle", "_seconds", "_task", "is_past")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._task: asyncio.Task[object] | None = None
        self.is_past = False

    def __enter__(self) -> "Deadline":
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        self._handle = asyncio.get_running_loop().call_later(max(0.0, self._seconds), self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        task, self._task = self._task, None  # a task keeps the traceback of its cancellation, which keeps this object
        assert task is not None
        if self.is_past and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _end(self) -> None:
        self.is_past = True
        if self._task is not None:
            self._task.cancel()
