"""Reads a handler's signature once: its inputs, its answer, and what the server injects.

`models`, `ctx` and `request` are injected, by name or by annotation. Every other parameter is an input. A single input
whose type is an object (dataclass, msgspec.Struct, TypedDict, pydantic model, dict) is the whole body; otherwise the
inputs are the fields of one object, by their names. No other module uses `inspect` or `typing` for this.
"""

import collections.abc
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from oriel_logic.bodies.audio import Audio
from oriel_logic.bodies.messages import Answer
from oriel_logic.bodies.tensors import Tensors
from oriel_logic.bodies.upload import Upload

MISSING: Any = inspect.Parameter.empty
Injected = Literal["request", "models", "ctx", ""]
# Found by its name, because Context is defined in a room above this one.
INJECTED: tuple[tuple[str, str, Injected], ...] = (
    ("oriel_logic.bodies.messages", "Request", "request"),
    ("oriel_logic.client.models", "Models", "models"),
    ("oriel_logic.services.context", "Context", "ctx"),
)
STREAMS = (collections.abc.AsyncIterator, collections.abc.AsyncIterable, collections.abc.AsyncGenerator)
PLAIN_STREAMS = (collections.abc.Iterator, collections.abc.Generator)


class NotAService(TypeError):
    """`@service` was put on something that cannot be a service; the text says what to change."""


class Form(Enum):
    """The kind of a value, which decides its media types beside JSON. JSON has no others."""

    JSON = "json"
    TEXT = "text"
    BYTES = "bytes"
    IMAGE = "image"
    AUDIO = "audio"
    ARRAY = "array"
    TENSORS = "tensors"
    UPLOAD = "upload"
    LINES = "lines"
    """A stream of `type`: NDJSON or server-sent events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter.

    type: the type of one item for Form.LINES.
    optional: True if None is an allowed value.
    """

    name: str
    injected: Injected = ""
    form: Form = Form.JSON
    type: Any = Any
    default: Any = MISSING
    by_keyword: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer of a handler.

    type: the type of one item for Form.LINES.
    declared: True if the handler has a return annotation.
    """

    form: Form = Form.JSON
    type: Any = Any
    declared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parameters and the answer of a handler.

    body: "raw" for no typed input, "whole" if the single input is the body, "fields" if inputs are fields of one
        object.
    """

    parameters: tuple[Parameter, ...]
    output: Output
    body: Literal["raw", "whole", "fields"]

    @property
    def inputs(self) -> tuple[Parameter, ...]:
        return tuple(each for each in self.parameters if not each.injected)

    @property
    def streams_in(self) -> Parameter | None:
        """The input that the handler reads while it arrives, or None."""
        return next((each for each in self.inputs if each.form in (Form.UPLOAD, Form.LINES)), None)

    def injects(self, what: Injected) -> bool:
        return any(each.injected == what for each in self.parameters)


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of a handler's arguments: which of (request, models, ctx, *inputs) goes where. Made once per
    handler.
    """

    positions: tuple[int, ...]
    keywords: tuple[tuple[str, int], ...]
    in_order: bool = False

    def call(self, function: Callable[..., Any], given: Sequence[Any]) -> Any:
        """Call `function` with its arguments in order.

        given: request, models, ctx, then the inputs in the order of the signature.
        """
        if self.in_order:
            return function(*given)
        arguments = [given[place] for place in self.positions]
        if not self.keywords:
            return function(*arguments)
        return function(*arguments, **{name: given[place] for name, place in self.keywords})


def plan_of(signature: Signature) -> Plan:
    ranks: dict[str, int] = {"request": 0, "models": 1, "ctx": 2}
    found = {each.name: 3 + place for place, each in enumerate(signature.inputs)}
    pairs = [(each, ranks[each.injected] if each.injected else found[each.name]) for each in signature.parameters]
    positions = tuple(place for each, place in pairs if not each.by_keyword)
    keywords = tuple((each.name, place) for each, place in pairs if each.by_keyword)
    return Plan(positions, keywords, not keywords and positions == tuple(range(3 + len(found))))


def read(function: Callable[..., Any], *, method: bool = False, given: str = "") -> Signature:
    """Read the signature of a handler.

    method: True if the first parameter is `self`.
    given: the name of the first parameter if the server fills it ("outputs" of a chain's `post`).
    Raises NotAService.
    """
    signature = python_signature(function)
    found = list(signature.parameters.values())[1 if method else 0 :]
    if given:
        if not found or found[0].kind in (found[0].VAR_KEYWORD, found[0].KEYWORD_ONLY):
            raise NotAService(f"`{function.__name__}` must take {given}")
        found = found[1:]
    parameters = tuple(parameter_of(function, each) for each in found)
    inputs = [each for each in parameters if not each.injected]
    streaming = [each.name for each in inputs if each.form in (Form.UPLOAD, Form.LINES)]
    if len(streaming) > 1:
        raise NotAService(f"`{function.__name__}` can read one stream, not {' and '.join(streaming)}")
    if given and inputs:
        raise NotAService(f"`{function.__name__}` takes {given}, and beside it only `ctx`, not '{inputs[0].name}'")
    alone = len(inputs) == 1 and inputs[0].form is Form.JSON and is_object(inputs[0].type)
    body: Literal["raw", "whole", "fields"] = "raw" if not inputs else "whole" if alone else "fields"
    return Signature(parameters=parameters, output=output_of(function, signature.return_annotation), body=body)


def parameter_of(function: Callable[..., Any], found: inspect.Parameter) -> Parameter:
    name = found.name
    if found.kind in (found.VAR_POSITIONAL, found.VAR_KEYWORD):
        raise NotAService(f"`{function.__name__}` must name its parameters: '{found}' cannot be served")
    by_keyword = found.kind is found.KEYWORD_ONLY
    if found.annotation is MISSING:
        if name in ("request", "models", "ctx"):
            return Parameter(name=name, injected=typing.cast(Injected, name), by_keyword=by_keyword)
        return Parameter(name=name, default=found.default, by_keyword=by_keyword)
    if name in ("models", "ctx"):  # always these, so that their annotation may be anything, also unimportable here
        return Parameter(name=name, injected=typing.cast(Injected, name), by_keyword=by_keyword)
    hint = resolved(function, name, found.annotation)
    injected: Injected = next((what for home, each, what in INJECTED if is_named(hint, home, each)), "")
    if not injected and name == "request" and hint in (Any, object):
        injected = "request"
    if injected:
        return Parameter(name=name, injected=injected, by_keyword=by_keyword)
    form, type_, optional = form_of(hint)
    return Parameter(
        name=name,
        form=form,
        type=hint if form is Form.JSON else type_,
        default=found.default,
        by_keyword=by_keyword,
        optional=optional,
    )


def output_of(function: Callable[..., Any], hint: Any) -> Output:
    """Read the answer's type. hint: the return annotation, or MISSING."""
    generates = inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function)
    if hint is MISSING:
        return Output(form=Form.LINES if generates else Form.JSON)
    hint = resolved(function, "return", hint)
    if hint in (Any, object, Answer):
        return Output(form=Form.LINES if generates else Form.JSON)
    if typing.get_origin(hint) in PLAIN_STREAMS or hint in PLAIN_STREAMS:
        return Output(form=Form.LINES, type=item_of(hint), declared=True)
    form, type_, _ = form_of(hint)
    if generates and form is not Form.LINES:
        raise NotAService(f"`{function.__name__}` yields its answer: annotate it `-> AsyncIterator[...]`")
    return Output(form=form, type=hint if form is Form.JSON else type_, declared=True)


def resolved(function: Callable[..., Any], name: str, hint: Any) -> Any:
    """Evaluate an annotation that is a string or a forward reference, in the module that defines the function."""
    holder = types.SimpleNamespace(__annotations__={name: hint})
    try:
        found = typing.get_type_hints(
            holder, globalns=getattr(function, "__globals__", {}), localns=enclosed(function), include_extras=True
        )
    except Exception as error:  # whatever evaluating a user's text raises
        where = "answer" if name == "return" else f"parameter '{name}'"
        raise NotAService(
            f"the annotation of the {where} of `{function.__name__}` cannot be looked up: {error}"
        ) from error
    return expanded(found[name])


def expanded(hint: Any) -> Any:
    """Return what an alias made by a `type` statement (Python 3.12) stands for; numpy's NDArray is one from 2.5 on."""
    while type(alias := typing.get_origin(hint) or hint).__name__ == "TypeAliasType":
        given = dict(zip(alias.__type_params__, typing.get_args(hint), strict=False))
        open_ = getattr(alias.__value__, "__parameters__", ())
        hint = alias.__value__[tuple(given.get(each, each) for each in open_)] if given and open_ else alias.__value__
    return hint


def enclosed(function: Callable[..., Any]) -> dict[str, Any]:
    cells, code = getattr(function, "__closure__", None) or (), getattr(function, "__code__", None)
    names = code.co_freevars if code is not None else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}


def form_of(hint: Any) -> tuple[Form, Any, bool]:
    """Return (form, type without None, whether None is allowed); of a stream the type of one item."""
    whole, optional = without_none(hint)
    bare = expanded(typing.get_args(whole)[0]) if typing.get_origin(whole) is typing.Annotated else whole
    origin = typing.get_origin(bare)
    if bare is str:
        return Form.TEXT, whole, optional
    for kind, form in ((bytes, Form.BYTES), (Audio, Form.AUDIO), (Tensors, Form.TENSORS), (Upload, Form.UPLOAD)):
        if bare is kind:
            return form, bare, optional
    if is_named(origin or bare, "numpy", "ndarray"):
        return Form.ARRAY, bare, optional
    if is_named(bare, "PIL.Image", "Image"):
        return Form.IMAGE, bare, optional
    if origin in STREAMS or bare in STREAMS:
        return Form.LINES, item_of(bare), optional
    return Form.JSON, whole, optional


def item_of(hint: Any) -> Any:
    arguments = typing.get_args(hint)
    return arguments[0] if arguments else Any


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return (the type without None, whether None is allowed)."""
    hint = expanded(hint)
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = [each for each in typing.get_args(hint) if each is not type(None)]
    if len(members) == len(typing.get_args(hint)) or len(members) != 1:
        return hint, len(members) != len(typing.get_args(hint))
    return expanded(members[0]), True


def is_named(hint: Any, module: str, name: str) -> bool:
    """Return whether a type is the class `name` of `module`, without importing that module.

    A service that reads no images runs without Pillow, and a worker's own environment may lack numpy and msgspec.
    """
    return getattr(hint, "__module__", "") == module and getattr(hint, "__name__", "") == name


def is_pydantic(hint: Any) -> bool:
    return inspect.isclass(hint) and hasattr(hint, "model_validate") and hasattr(hint, "model_json_schema")


def is_object(hint: Any) -> bool:
    """Return whether JSON of this type is an object."""
    hint, _ = without_none(hint)
    if typing.get_origin(hint) is typing.Annotated:
        hint = expanded(typing.get_args(hint)[0])
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return all(is_object(each) for each in typing.get_args(hint) if each is not type(None))
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Mapping):
        return True  # dict, Mapping, TypedDict
    if hasattr(origin, "__struct_config__"):
        return not origin.__struct_config__.array_like
    return dataclasses.is_dataclass(origin) or typing.is_typeddict(origin) or is_pydantic(origin)


FOR_HINTS: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    from annotationlib import Format

    FOR_HINTS["annotation_format"] = Format.FORWARDREF


def python_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the same as inspect.signature; from Python 3.14 on, an annotation that cannot be looked up is a
    ForwardRef. Raises TypeError and ValueError.
    """
    return inspect.signature(function, **FOR_HINTS)
