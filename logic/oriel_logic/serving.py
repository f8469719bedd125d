"""One service in one process: its instance, what reads its requests, and its stages as jobs for a worker.

A job reads, calls and encodes where the stage runs: a worker gets the request as it came and gives an `Answer`, or
encoded pieces of one. Between the stages of a chain plain values travel.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

from oriel_logic.definition import Definition
from oriel_logic.messages import Request
from oriel_logic.parameters import python_signature
from oriel_logic.signature import Form

__all__ = ["Serving"]


class Serving:
    """`set_up` has run. reader: None for a service without typed inputs. direct: the function of its first stage.
    is_importable: whether a worker can find the service by its name in its module."""

    __slots__ = ("_jobs", "_takes_ctx", "definition", "direct", "functions", "is_importable", "reader")

    def __init__(self, definition: Definition, instance: Any) -> None:
        self.definition = definition
        self.functions = {stage: definition.function(instance, stage) for stage in definition.stages()}
        self.direct = next(iter(self.functions.values()))
        # One that a test defines inside a function is known to no worker.
        self.is_importable = "<" not in getattr(definition.target, "__qualname__", "<")
        post = self.functions.get("post")
        self._takes_ctx = post is not None and "ctx" in python_signature(post).parameters
        self.reader = None
        if definition.signature.body != "raw":
            from oriel_logic.decoding import Reader  # with msgspec and numpy, which raw services do without

            self.reader = Reader(definition.signature)
        self._jobs: dict[str, Callable[..., Any]] = {}

    def job(self, stage: str) -> Callable[..., Any]:
        """The stage for a worker, as a function of what arrives there, the media type and what is injected.

        It is a coroutine function or a generator where the handler is one.
        """
        found = self._jobs.get(stage)
        if found is None:
            found = self._jobs[stage] = self._made(stage)
        return found

    def _made(self, stage: str) -> Callable[..., Any]:
        function = self.functions[stage]
        if stage == "post":
            call = self._post_call
            wanted = ["ctx"] if self._takes_ctx else []
        else:
            call = self._call(function)
            wanted = [name for name in ("models", "ctx") if self.definition.signature.injects(name)]
        made = shaped(function, call, identity if stage == "pre" else self._encoded, self._framed)
        arrive = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("arrived", "media", *wanted)
        ]
        made.__signature__ = inspect.Signature(arrive)  # type: ignore[attr-defined]
        return made

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        plan, reader = self.definition.plan, self.reader

        def call(request: Request, models: Any, ctx: Any) -> Any:
            inputs = () if reader is None else reader.inputs(request)
            return plan.call(function, (request, models, ctx, *inputs))

        return call

    def post(self, outputs: Any, ctx: Any) -> Any:
        """What the last stage of a chain gives, not encoded."""
        function = self.functions["post"]
        return function(outputs, ctx=ctx) if self._takes_ctx else function(outputs)

    def _post_call(self, outputs: Any, models: Any, ctx: Any) -> Any:
        return self.post(outputs, ctx)

    def _encoded(self, value: Any, media: str) -> Any:
        try:
            from oriel_logic.encoding import encode
        except ImportError:  # an environment without msgspec or numpy: the logic process encodes
            return value
        return encode(value, media, service=self.definition.name)

    def _framed(self, media: str) -> Callable[[Any], Any]:
        if self.definition.signature.output.form is not Form.LINES:
            return lambda value: value
        try:
            from oriel_logic.encoding import framing
        except ImportError:
            return lambda value: value
        return framing(media)


def identity(value: Any, media: str) -> Any:
    return value


def shaped(
    function: Callable[..., Any],
    call: Callable[..., Any],
    finish: Callable[[Any, str], Any],
    framed: Callable[[str], Callable[[Any], Any]],
) -> Callable[..., Any]:
    """A function of the same kind as `function` that calls it by `call` and finishes what it gives."""

    if inspect.isasyncgenfunction(function):

        async def agenerator(arrived: Any, media: str, models: Any = None, ctx: Any = None) -> AsyncIterator[Any]:
            frame = framed(media)
            values = cast(AsyncIterator[Any], call(arrived, models, ctx))
            try:
                async for value in values:
                    yield frame(value)
            finally:
                await cast(Any, values).aclose()

        return agenerator
    if inspect.isgeneratorfunction(function):

        def generator(arrived: Any, media: str, models: Any = None, ctx: Any = None) -> Iterator[Any]:
            frame = framed(media)
            values = cast(Iterator[Any], call(arrived, models, ctx))
            try:
                for value in values:
                    yield frame(value)
            finally:
                cast(Any, values).close()

        return generator
    if inspect.iscoroutinefunction(function):

        async def coroutine(arrived: Any, media: str, models: Any = None, ctx: Any = None) -> Any:
            return finish(await cast(Awaitable[Any], call(arrived, models, ctx)), media)

        return coroutine

    def plain(arrived: Any, media: str, models: Any = None, ctx: Any = None) -> Any:
        return finish(call(arrived, models, ctx), media)

    return plain
