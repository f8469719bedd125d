"""`@service`: how a function or a class becomes a service.

Three shapes, each ten lines of user code:

    @service                                     # full control, runs on the loop
    async def digits(request, models, ctx):
        image = await ctx.run(prepare, request)  # a plain function, in a worker process
        ...

    @service                                     # no model, or not one of ours: the whole call in a worker process
    def thumbnail(request): ...

    @service                                     # the usual chain: pre -> one model -> post
    class Digits:
        model = "digits"
        def pre(self, request): ...              # gives {input name: array}
        async def post(self, outputs): ...       # takes the model's outputs, gives the answer

`def` stages run in worker processes, `async def` stages on the loop. A class may have `setup(self)`: it runs once in
every process that will call its methods, before the first request.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

__all__ = ["Definition", "NotAService", "definition_of", "describe", "service"]

MARK = "__oriel_service__"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
Shape = Literal["function", "chain"]
T = TypeVar("T", bound=Callable[..., Any])


class NotAService(TypeError):
    """`@service` was put on something that cannot be one; the text says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What `@service` found. `target` is the function or the class itself."""

    name: str
    target: Callable[..., Any]
    shape: Shape
    model: str = ""
    model_version: str = ""
    description: str = ""

    def stages(self) -> tuple[str, ...]:
        """Names of the methods (or "" for the function itself) that a call runs."""
        return ("",) if self.shape == "function" else ("pre", "post")

    def runs_in_worker(self, stage: str) -> bool:
        """Whether this stage is plain `def`."""
        return not inspect.iscoroutinefunction(getattr(self.target, stage) if stage else self.target)


@overload
def service(target: T, /) -> T: ...
@overload
def service(*, name: str) -> Callable[[T], T]: ...
def service(target: T | None = None, /, *, name: str = "") -> T | Callable[[T], T]:
    """Make `target` the service `POST /v1/services/<name>`; the name defaults to its own, a class's in lower case.

    Raises NotAService with what to change. `target` stays as it is and may be called in tests.
    """
    if target is None:
        return lambda found: service_named(found, name)
    return service_named(target, name)


def service_named(target: T, name: str) -> T:
    setattr(target, MARK, define(target, name))
    return target


def define(target: Callable[..., Any], name: str = "") -> Definition:
    if inspect.isclass(target):
        name = name or target.__name__.lower()
        check_chain(target)
    elif inspect.isfunction(target):
        name = name or target.__name__
        check_function(target)
    else:
        raise NotAService("@service goes on a function or a class")
    if NAME.match(name) is None:
        raise NotAService(f"'{name[:64]}' is no service name: letters, digits, '.', '_' and '-', at most 64")
    return Definition(
        name=name,
        target=target,
        shape="chain" if inspect.isclass(target) else "function",
        model=getattr(target, "model", "") if inspect.isclass(target) else "",
        model_version=str(getattr(target, "model_version", "")) if inspect.isclass(target) else "",
        description=(inspect.getdoc(target) or "").split("\n\n", 1)[0][:500],
    )


def check_function(target: Callable[..., Any]) -> None:
    wanted = ("request", "models", "ctx") if inspect.iscoroutinefunction(target) else ("request",)
    kind = "async def" if len(wanted) == 3 else "def"
    if not takes(target, len(wanted)):
        raise NotAService(f"`{kind} {target.__name__}` must take ({', '.join(wanted)})")


def check_chain(target: type) -> None:
    if not isinstance(getattr(target, "model", None), str) or not target.model:  # type: ignore[attr-defined]
        raise NotAService(f'class {target.__name__} needs `model = "..."`, the model that runs between pre and post')
    for stage, argument in (("pre", "request"), ("post", "outputs")):
        method = getattr(target, stage, None)
        if not inspect.isfunction(method) or not takes(method, 2):
            raise NotAService(f"class {target.__name__} needs a method {stage}(self, {argument})")
    if not takes(target, 0):
        raise NotAService(
            f"class {target.__name__} must be constructible without arguments: load things in setup(self)"
        )


def takes(target: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(target).bind(*(None,) * count)
    except TypeError:
        return False
    return True


def definition_of(value: object) -> Definition | None:
    """The definition that `@service` left on `value` itself (not on a base class)."""
    found = getattr(value, "__dict__", {}).get(MARK)
    return found if isinstance(found, Definition) else None


def describe(definition: Definition) -> dict[str, Any]:
    """As plain values, for a process that cannot import the service itself."""
    stages = {
        stage: {"where": "worker" if definition.runs_in_worker(stage) else "loop"} for stage in definition.stages()
    }
    return {
        "name": definition.name,
        "shape": definition.shape,
        "stages": stages,
        "model": definition.model,
        "model_version": definition.model_version,
        "description": definition.description,
    }
