"""Runs a declared pipeline as a handler: models by `models.infer`, functions in worker processes."""

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np

from oriel_logic.bodies.messages import Request
from oriel_logic.bodies.schemas import Writer
from oriel_logic.bodies.signature import python_signature
from oriel_logic.client.models import Models
from oriel_logic.errors import HandlerFailed, Refused
from oriel_logic.graph.document import RUN, GraphError, StepTable, parse
from oriel_logic.graph.plan import Plan, Progress, Step, plan_of
from oriel_logic.graph.references import Reference
from oriel_logic.graph.schema import input_of, output_of
from oriel_logic.services.context import Context
from oriel_logic.services.definition import MARK, definition_of, marked
from oriel_logic.services.references import for_function


@dataclass(frozen=True, slots=True)
class Function:
    """The function of a step.

    order: for each positional parameter the input's name, or (default,).
    returns: its return annotation; Any without one.
    """

    reference: str
    order: tuple[str | tuple[Any], ...]
    returns: Any


def handler_of(path: Path, module: ModuleType, beside: str) -> Callable[..., Any]:
    """Make the service that a file declares, as a handler of `module`.

    beside: the package under which files beside it are imported.
    Raises GraphError.
    """
    document, answers, options = parse(path.read_bytes(), path.name)
    plan = plan_of(document, answers, path.name)
    functions = {
        step.name: function_of(step, beside, f"{path.name}: step '{step.name}'") for step in document.step if step.run
    }
    returns = {name: each.returns for name, each in functions.items()}

    async def handler(request: Request, models: Models, ctx: Context) -> Any:
        return await run(plan, functions, request, models, ctx)

    handler.__name__ = handler.__qualname__ = path.stem
    handler.__module__ = module.__name__
    handler.__doc__ = document.description
    return described(marked(handler, path.stem, options), plan, document.takes, returns)


def described(
    handler: Callable[..., Any], plan: Plan, takes: Mapping[str, Any], returns: Mapping[str, Any]
) -> Callable[..., Any]:
    """Add to the definition what the file and the types of its functions declare, which the handler's signature
    cannot.
    """
    found = definition_of(handler)
    assert found is not None
    declared = {media: {"schema": schema} if schema else {} for media, schema in takes.items()}
    writer = Writer(found.name, is_lenient=True)
    schemas = replace(
        found.schemas,
        input=declared or input_of(plan) or found.schemas.input,
        output=output_of(plan, returns, writer),
        components={**found.schemas.components, **writer.components},
    )
    setattr(handler, MARK, replace(found, schemas=schemas))
    return handler


def function_of(step: StepTable, beside: str, where: str) -> Function:
    match = RUN.match(step.run)
    assert match is not None
    try:
        found = getattr(importlib.import_module(f"{beside}.{match[1]}"), match[2])
    except ModuleNotFoundError as error:
        raise GraphError(f"{where}: run: there is no file {match[1]}.py beside this one ({error})") from error
    except AttributeError as error:
        raise GraphError(f"{where}: run: {match[1]}.py has no function {match[2]}") from error
    if not inspect.isfunction(found) or inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise GraphError(f"{where}: run: {match[2]} must be a plain `def`: it runs in a worker process")
    try:
        bound = python_signature(found).bind(**dict.fromkeys(step.inputs))
    except TypeError as error:
        raise GraphError(f"{where}: inputs: {match[2]} cannot be called with them: {error}") from error
    bound.apply_defaults()
    if bound.kwargs:
        raise GraphError(f"{where}: run: {match[2]} must not have keyword-only parameters")
    names = list(bound.arguments)
    order = tuple(name if name in step.inputs else (bound.arguments[name],) for name in names)
    return Function(for_function(found), order, returned(found))


def returned(function: Callable[..., Any]) -> Any:
    """Return a function's return annotation; Any without one, or with one that cannot be resolved."""
    try:
        return get_type_hints(function).get("return", Any)
    except Exception:  # annotations are expressions of the file's author
        return Any


async def run(plan: Plan, functions: Mapping[str, Function], request: Request, models: Models, ctx: Context) -> Any:
    """Run the pipeline and return its answer. Independent steps run at the same time; the answer cancels the rest."""
    progress = Progress(plan, reader(request, ctx), scalar)
    tasks: dict[asyncio.Task[Mapping[str, Any]], str] = {}
    try:
        while True:
            starting = progress.startable()
            try:
                answer = progress.answer()
            except LookupError as error:
                raise HandlerFailed("the pipeline has no answer for this request: its conditions leave none") from error
            if answer is not None:
                return answer[0]
            if len(starting) == 1 and not tasks:  # the usual chain: it needs no task
                (step, inputs) = starting[0]
                progress.settle(step.table.name, await one(step, inputs, functions, models, ctx))
                continue
            for step, inputs in starting:
                task = asyncio.create_task(one(step, inputs, functions, models, ctx), name=step.table.name)
                tasks[task] = step.table.name
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                progress.settle(tasks.pop(task), task.result())
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


async def one(
    step: Step, inputs: dict[str, Any], functions: Mapping[str, Function], models: Models, ctx: Context
) -> Mapping[str, Any]:
    """Run one step and return its outputs by name."""
    table = step.table
    function = functions.get(table.name)
    if function is None:
        model, version = chosen(table, ctx)
        with ctx.stage(table.name):
            return named(await models.infer(model, inputs, outputs=table.outputs, version=version), step)
    arguments = [inputs[each] if isinstance(each, str) else each[0] for each in function.order]
    value = await ctx.work(function.reference, arguments, table.name)
    return named(value if isinstance(value, Mapping) else {"value": value}, step)


def chosen(table: StepTable, ctx: Context) -> tuple[str, str]:
    """Choose the model and version for a request, by its time left and its tier."""
    other = table.fallback
    if other is not None and (ctx.tier in other.tiers or ctx.remaining_s * 1000.0 < other.min_remaining_ms):
        return other.model, other.version
    return table.model, table.version


class Named(dict[str, Any]):
    """A step's outputs; a missing one is an error of the pipeline, and reported as such."""

    def __init__(self, step: str, outputs: Mapping[str, Any]) -> None:
        super().__init__(outputs)
        self.step = step

    def __missing__(self, name: str) -> Any:
        raise HandlerFailed(f"step '{self.step}' gave no '{name}': it gave {', '.join(map(str, self)) or 'nothing'}")


def named(outputs: Mapping[str, Any], step: Step) -> Named:
    return Named(step.table.name, outputs)


def reader(request: Request, ctx: Context) -> Callable[[Reference], Any]:
    decoded: list[Any] = []

    def read(reference: Reference) -> Any:
        if reference.root == "ctx":
            return getattr(ctx, reference.path[0])
        match reference.path:
            case ():
                return request
            case ("json", *fields):
                if not decoded:
                    decoded.append(request.json())
                return field_of(decoded[0], fields)
            case ("text",):
                return request.text()
            case (name,):
                return getattr(request, name)
        raise AssertionError(reference)

    return read


def field_of(value: Any, fields: list[str]) -> Any:
    for place, name in enumerate(fields):
        if not isinstance(value, dict) or name not in value:
            raise Refused(f"the field '{'.'.join(fields[: place + 1])}' is missing")
        value = value[name]
    return value


def scalar(source: Reference, found: Any) -> Any:
    """Return the one number, text or truth value of a condition. Raises HandlerFailed for anything else."""
    if isinstance(found, np.ndarray | np.generic):
        if found.size != 1:
            raise HandlerFailed(f"the condition on '{source}' needs one value, there are {found.size}")
        found = found.reshape(-1)[0]
        found = found.item() if isinstance(found, np.generic) else found
    if isinstance(found, bytes):
        found = found.decode(errors="replace")
    if not isinstance(found, bool | int | float | str):
        raise HandlerFailed(f"the condition on '{source}' needs a number, text or truth, not {type(found).__name__}")
    return found
