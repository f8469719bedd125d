"""The services of one process: their instances, the readers of their requests, and their stages as jobs for workers.

A job reads, calls and encodes where the stage runs: a worker gets the request as it came and returns an `Answer`, or
encoded pieces of one. Between the stages of a chain plain values are sent.

A job names its code by a reference: `service:<name>:` is a function service as a whole, `service:<name>:<stage>` a
method of a class, and `function:<module>:<qualified name>` any function that a fresh import finds.
"""

import importlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from oriel_logic.bodies.encoding import encode, framing
from oriel_logic.bodies.messages import Answer, Request
from oriel_logic.bodies.signature import python_signature
from oriel_logic.errors import HandlerFailed
from oriel_logic.services.definition import Definition, definition_of

if TYPE_CHECKING:
    from oriel_logic.bodies.decoding import Reader

READERS: "dict[str, Reader]" = {}  # readers of the services that `read_in_worker` was called for


class Serving:
    """One service whose `setup` has run.

    reader: None for a service without typed inputs.
    direct: the function of its first stage.
    is_importable: True if a worker can find the service by its name in its module.
    """

    __slots__ = ("_jobs", "_takes_ctx", "definition", "direct", "functions", "is_importable", "reader")

    def __init__(self, definition: Definition, instance: Any) -> None:
        self.definition = definition
        self.functions = {stage: definition.function(instance, stage) for stage in definition.stages()}
        self.direct = next(iter(self.functions.values()))
        # No worker can find a service that a test defines inside a function.
        self.is_importable = "<" not in getattr(definition.target, "__qualname__", "<")
        post = self.functions.get("post")
        self._takes_ctx = post is not None and "ctx" in python_signature(post).parameters
        self.reader = None
        if definition.signature.body != "raw":
            from oriel_logic.bodies.decoding import Reader  # with msgspec and numpy, which raw services do without

            self.reader = Reader(definition.signature)
        self._jobs: dict[str, Callable[..., Any]] = {}

    def job(self, stage: str) -> Callable[..., Any]:
        """Return the stage as a function of its input, the media type and the injected arguments, for a worker.

        It is a coroutine function or a generator if the handler is one.
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
        made = shaped(function, call, identity if stage == "pre" else self._encoded)
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
        """Run the last stage of a chain; its value is not encoded."""
        function = self.functions["post"]
        return function(outputs, ctx=ctx) if self._takes_ctx else function(outputs)

    def _post_call(self, outputs: Any, models: Any, ctx: Any) -> Any:
        return self.post(outputs, ctx)

    def _encoded(self, value: Any, media: str) -> Any:
        return encode(value, media, service=self.definition.name)


def identity(value: Any, media: str) -> Any:
    return value


def shaped(
    function: Callable[..., Any],
    call: Callable[..., Any],
    finish: Callable[[Any, str], Any],
) -> Callable[..., Any]:
    """Make a function of the same kind as `function` that calls it through `call` and finishes its value."""

    if inspect.isasyncgenfunction(function):

        async def agenerator(arrived: Any, media: str, models: Any = None, ctx: Any = None) -> AsyncIterator[Any]:
            frame = framing(media)
            values = cast(AsyncIterator[Any], call(arrived, models, ctx))
            try:
                async for value in values:
                    yield frame(value)
            finally:
                await cast(Any, values).aclose()

        return agenerator
    if inspect.isgeneratorfunction(function):

        def generator(arrived: Any, media: str, models: Any = None, ctx: Any = None) -> Iterator[Any]:
            frame = framing(media)
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


class Services:
    """The services that are set up in one process, each with one instance of its class.

    Single writer: the code that sets the process up.
    """

    def __init__(self) -> None:
        self._servings: dict[str, Serving] = {}

    def set_up(self, definition: Definition) -> None:
        """Make an instance of the service's class and run its `setup`. Raises whatever the service's code raises."""
        self._servings[definition.name] = Serving(definition, definition.make())

    def serving(self, service: str) -> Serving:
        """The service of this name. Raises KeyError if it is not set up in this process."""
        return self._servings[service]

    def resolve(self, reference: str) -> Callable[..., Any]:
        """The code that a job names. Raises LookupError, ImportError or AttributeError if there is none."""
        kind, first, second = reference.split(":", 2)
        return self._servings[first].job(second) if kind == "service" else found_by(reference)


def for_stage(service: str, stage: str) -> str:
    return f"service:{service}:{stage}"


def for_function(function: Callable[..., Any]) -> str:
    """Return the reference of a function. Raises HandlerFailed if another process cannot find it by name."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None)
    if not name or not module or "<" in name or not callable(function):
        raise HandlerFailed("only functions defined at the top of a file can run in a worker process")
    return f"function:{module}:{name}"


def found_by(reference: str) -> Callable[..., Any]:
    """Return the function that a `function:` reference names. Raises ImportError or AttributeError."""
    _, module, name = reference.split(":", 2)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    named: Callable[..., Any] = found
    return named


def encode_in_worker(value: Any, media: str, service: str) -> Answer:
    """Encode a large answer of a service that runs on the loop. Raises HandlerFailed."""
    return encode(value, media, service=service)


def read_in_worker(reference: str, request: Request) -> tuple[Any, ...]:
    """Read the inputs of the service whose function or class `reference` names.

    Raises what `Reader.inputs` raises.
    """
    reader = READERS.get(reference)
    if reader is None:
        from oriel_logic.bodies.decoding import Reader

        definition = definition_of(found_by(reference))
        assert definition is not None
        reader = READERS[reference] = Reader(definition.signature)
    return reader.inputs(request)
