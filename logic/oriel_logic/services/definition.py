"""`@service`: how a function or a class becomes a service.

Three shapes, each ten lines of user code:

    @service                                     # a function: typed parameters, `models` and `ctx` if it wants them
    async def sentiment(text: str, models) -> Verdict: ...

    @service                                     # something to load first
    class Thumbnails:
        def setup(self): ...
        def predict(self, image: Image.Image, width: int = 128) -> Image.Image: ...

    @service                                     # the usual chain: pre -> one model -> post
    class Digits:
        model = "digits"
        def pre(self, image: Image.Image): ...   # gives {input name: array}
        async def post(self, outputs) -> Digit: ...  # takes the model's outputs, gives the answer

`def` stages run in worker processes, `async def` stages on the loop. `setup(self)` runs once in every process that
will call the methods, before the first request. A file with one service serves it under the file's name, unless the
decorator names it.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Literal, TypeVar, cast, overload

from oriel_logic.bodies.schemas import Schemas, schemas_of
from oriel_logic.bodies.signature import NotAService, Output, Plan, Signature, plan_of, python_signature, read

MARK = "__oriel_service__"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
SHOWN_BYTES = 64 * 1024  # the largest sample that the description of a service shows
Shape = Literal["function", "class", "chain"]
T = TypeVar("T", bound=Callable[..., Any])
NO_INPUT = Signature(parameters=(), output=Output(), body="raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the decorator beside the name; None stands for the server's default.

    timeout_s: time limit, whatever the caller allows.
    memory_mb: memory limit of the worker that runs it.
    max_body_bytes: limit of a request's body, files included.
    sample: a body that has to work (JSON-able, or bytes), for the self-test and the docs page.
    sample_type: its media type.
    """

    timeout_s: float | None = None
    memory_mb: int | None = None
    max_body_bytes: int | None = None
    sample: Any = None
    sample_type: str = "application/json"

    @property
    def shown(self) -> tuple[str, bytes] | None:
        """Media type and bytes of the sample."""
        if self.sample is None:
            return None
        return self.sample_type, self.sample if isinstance(self.sample, bytes) else json.dumps(self.sample).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """The place where a stage runs. streams: True if it yields its answer piece by piece."""

    where: Literal["loop", "worker"]
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A service as `@service` read it.

    target: the function or the class itself, None if only another interpreter has it.
    is_named: True if the decorator gave the name.
    facts: the facts by stage: "" for a function, "predict" for a class, "pre" and "post" for a chain.
    signature: the parameters of the stage that reads the request, with the output of the stage that answers.
    plan: the argument order of that stage.
    reads_stream: True if it reads its body while it arrives.
    shown: media type and bytes of the sample for descriptions, if there is one.
    """

    name: str
    target: Callable[..., Any] | None
    shape: Shape
    is_named: bool = False
    model: str = ""
    model_version: str = ""
    description: str = ""
    signature: Signature = NO_INPUT
    plan: Plan = plan_of(NO_INPUT)
    schemas: Schemas
    facts: Mapping[str, StageFacts]
    options: Options = field(default_factory=Options)
    reads_stream: bool = False
    shown: tuple[str, bytes] | None = None
    offers: tuple[str, ...] = field(init=False)
    is_streamed: bool = field(init=False)
    is_direct: bool = field(init=False)

    def __post_init__(self) -> None:
        # The media types to choose from; none if the handler does not declare its answer, or declares bytes.
        gives = tuple(self.schemas.output)
        object.__setattr__(self, "offers", () if gives in (("*/*",), ("application/octet-stream",)) else gives)
        # Called with the request as it came, on the loop, and whatever it returns is the answer.
        on_loop = [each.where for each in self.facts.values()] == ["loop"]
        is_streamed = any(each.streams for each in self.facts.values())
        plain = self.signature.body == "raw" and not self.schemas.gives_media
        object.__setattr__(self, "is_direct", plain and on_loop and not is_streamed and self.target is not None)
        object.__setattr__(self, "is_streamed", is_streamed)

    def stages(self) -> tuple[str, ...]:
        """Return the names of the methods (or "" for the function itself) that a call runs, in order."""
        return tuple(self.facts)

    def runs_in_worker(self, stage: str) -> bool:
        return self.facts[stage].where == "worker"

    def renamed(self, name: str) -> "Definition":
        """Return the service under another name, the file's."""
        return replace(self, name=checked(name), schemas=schemas_of(self.signature, name))

    def make(self) -> Any:
        """Make the object whose methods are the stages: an instance of the class after its `setup`, None for a
        function.

        Raises whatever the service's code raises.
        """
        if self.shape == "function" or self.target is None:
            return None
        instance = self.target()
        prepare = getattr(instance, "setup", None)
        if prepare is not None:
            prepare()
        return instance

    def function(self, instance: Any, stage: str) -> Callable[..., Any]:
        """Return the function of a stage, bound to the result of `make`."""
        found: Callable[..., Any] = getattr(instance, stage) if stage else cast(Callable[..., Any], self.target)
        return found

    def without_code(self) -> "Definition":
        """Return the definition without the parts that only a process which imports the service can have."""
        return replace(self, target=None, is_named=True, signature=NO_INPUT, plan=plan_of(NO_INPUT))

    def in_workers(self) -> "Definition":
        """Return the definition of a service whose code only its workers can import: every stage runs there.

        Raises NotAService if it reads its body while it arrives: workers get whole requests.
        """
        if self.reads_stream:
            raise NotAService(
                "a service with an environment of its own cannot read an Upload or a stream: it gets requests whole"
            )
        return replace(self, facts={name: replace(each, where="worker") for name, each in self.facts.items()})


@overload
def service(target: T, /) -> T: ...
@overload
def service(
    *,
    name: str = "",
    timeout_s: float | None = None,
    memory_mb: int | None = None,
    max_body_bytes: int | None = None,
    sample: Any = None,
    sample_type: str = "application/json",
) -> Callable[[T], T]: ...
def service(target: T | None = None, /, *, name: str = "", **options: Any) -> T | Callable[[T], T]:
    """Make `target` the service `POST /v1/services/<name>`; see Options for the rest.

    The name defaults to the file's if it is the file's only service, else to its own, a class's in lower case.
    Raises NotAService with what to change. `target` stays as it is and may be called in tests.
    """
    chosen = options_of(options)
    if target is None:
        return lambda found: marked(found, name, chosen)
    return marked(target, name, chosen)


def marked(target: T, name: str, options: Options) -> T:
    setattr(target, MARK, define(target, name, options))
    return target


def options_of(given: Mapping[str, Any]) -> Options:
    try:
        options = Options(**given)
    except TypeError as error:
        known = ", ".join(["name", *(each.name for each in fields(Options))])
        raise NotAService(f"@service: {error}: it takes {known}".replace("Options.__init__() ", "")) from error
    for name in ("timeout_s", "memory_mb", "max_body_bytes"):
        value = getattr(options, name)
        kinds = (int, float) if name == "timeout_s" else (int,)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or value <= 0):
            raise NotAService(f"@service: {name} must be a number above 0, not {str(value)[:40]!r}")
    if options.sample is not None and not isinstance(options.sample, bytes):
        try:
            json.dumps(options.sample)
        except (TypeError, ValueError, RecursionError) as error:
            raise NotAService(f"@service: sample must be bytes or what JSON can say: {error}") from error
    return options


def define(target: Callable[..., Any], name: str = "", options: Options | None = None) -> Definition:
    """Read a function or a class as a service. Raises NotAService."""
    if inspect.isclass(target):
        own = target.__name__.lower()
        stages = class_stages(target)
    elif inspect.isfunction(target):
        own, stages = target.__name__, {"": target}
    else:
        raise NotAService("@service goes on a function or a class")
    chosen = checked(name or own)
    is_class, is_chain = inspect.isclass(target), "pre" in stages
    signature = signature_of(stages, is_class)
    facts = {stage: facts_of(function) for stage, function in stages.items()}
    if signature.streams_in is not None and any(each.where == "worker" for each in facts.values()):
        raise NotAService(f"'{signature.streams_in.name}' is read while it comes: make `{own}` an `async def`")
    schemas = schemas_of(signature, chosen)
    load_for(signature, schemas)
    return Definition(
        name=chosen,
        target=target,
        shape="chain" if is_chain else "class" if is_class else "function",
        is_named=bool(name),
        model=str(getattr(target, "model", "")) if is_chain else "",
        model_version=str(getattr(target, "model_version", "")) if is_chain else "",
        description=(inspect.getdoc(target) or "").split("\n\n", 1)[0][:500],
        signature=signature,
        plan=plan_of(signature),
        schemas=schemas,
        facts=facts,
        options=options or Options(),
        reads_stream=signature.streams_in is not None,
        shown=options.shown if options is not None else None,
    )


def load_for(signature: Signature, schemas: Schemas) -> None:
    """Import what requests will need: workers are forked later and share it, instead of each loading it again."""
    if signature.body != "raw":
        import_module("oriel_logic.bodies.decoding")
    if schemas.gives_media or "image/png" in schemas.input or "contentMediaType" in str(schemas.components):
        with suppress(ImportError):  # a service of another environment may do without Pillow
            import_module("oriel_logic.images")


def checked(name: str) -> str:
    if NAME.match(name) is None:
        raise NotAService(f"'{name[:64]}' is not a service name: letters, digits, '.', '_' and '-', at most 64")
    return name


def class_stages(target: type) -> dict[str, Callable[..., Any]]:
    if not takes_nothing(target):
        raise NotAService(
            f"class {target.__name__} must be constructible without arguments: load things in setup(self)"
        )
    if hasattr(target, "predict"):
        return {"predict": method_of(target, "predict", "the request's fields")}
    if not isinstance(getattr(target, "model", None), str) or not getattr(target, "model", ""):
        raise NotAService(
            f'class {target.__name__} needs `model = "..."`, the model that runs between pre and post, or one method '
            "`predict`"
        )
    return {"pre": method_of(target, "pre", "request"), "post": method_of(target, "post", "outputs")}


def method_of(target: type, name: str, argument: str) -> Callable[..., Any]:
    method = getattr(target, name, None)
    if not inspect.isfunction(method):
        raise NotAService(f"class {target.__name__} needs a method {name}(self, {argument})")
    return cast(Callable[..., Any], method)


def takes_nothing(target: Callable[..., Any]) -> bool:
    try:
        python_signature(target).bind()
    except TypeError:
        return False
    return True


def signature_of(stages: Mapping[str, Callable[..., Any]], is_class: bool) -> Signature:
    """Return the signature of the stage that reads the request, with the output of the last stage."""
    first = read(next(iter(stages.values())), method=is_class)
    if "post" not in stages:
        return first
    last = read(stages["post"], method=True, given="outputs")
    if first.streams_in is not None:
        raise NotAService("pre cannot read a stream: write an `async def` function instead of a chain")
    return Signature(parameters=first.parameters, output=last.output, body=first.body)


def facts_of(function: Callable[..., Any]) -> StageFacts:
    on_loop = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    streams = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
    return StageFacts(where="loop" if on_loop else "worker", streams=streams)


def definition_of(value: object) -> Definition | None:
    """Return the definition that `@service` left on `value` itself (not on a base class), or None."""
    found = getattr(value, "__dict__", {}).get(MARK)
    return found if isinstance(found, Definition) else None
