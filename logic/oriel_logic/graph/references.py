"""The expressions of declared pipelines: references to values, and comparisons. They are parsed, never run as code.

request.json.user.age      a field of the JSON body         ctx.tier       the caller's tier
request, request.text ...  the request, its text, bytes     rank.score     an output of the step `rank`
rank                       all its outputs                  'fixed text'   itself

guard.bad >= 0.5           a condition: a value that is one number, text or truth, and what to compare it with
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oriel_logic.errors import HandlerFailed

Scalar = bool | int | float | str
ROOTS = {"request": ("json", "text", "body", "query"), "ctx": ("tier", "tenant")}
NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
REFERENCE = re.compile(rf"({NAME})((?:\.{NAME})*)\Z")
QUOTED = re.compile(r"'([^']*)'\Z")
CONDITION = re.compile(rf"\s*({NAME}(?:\.{NAME})*)\s*(==|!=|<=|>=|<|>)\s*(\S.*)\Z")
MAX_LENGTH = 256
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a value. root: a step, "request" or "ctx". path: the part of it; empty for all."""

    root: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join((self.root, *self.path))


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that the file itself contains."""

    value: Any


@dataclass(frozen=True, slots=True)
class Condition:
    source: Reference
    compare: str
    value: Scalar

    def holds(self, found: Scalar) -> bool:
        """Compare. Raises HandlerFailed for values that cannot be compared, such as text with a number."""
        try:
            return COMPARE[self.compare](found, self.value)
        except TypeError as error:
            raise HandlerFailed(f"the condition '{self}' cannot be decided: the value is {found!r:.40}") from error

    def __str__(self) -> str:
        return f"{self.source} {self.compare} {self.value!r}"


def parse_source(text: object) -> Reference | Fixed:
    """Parse a reference or a fixed value. Raises ValueError with a text for the author."""
    if not isinstance(text, str):
        return Fixed(text)
    quoted = QUOTED.match(text)
    if quoted is not None:
        return Fixed(quoted[1])
    match = REFERENCE.match(text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise ValueError(
            f"{text[:64]!r} is not a reference: write step.output, request.json.field, or 'text' in quotes"
        )
    root, path = match[1], tuple(match[2].split(".")[1:])
    if root in ROOTS and path and path[0] not in ROOTS[root]:
        raise ValueError(f"{text[:64]!r}: {root} has {', '.join(ROOTS[root])}")
    if (root == "ctx" and len(path) != 1) or (len(path) > 1 and path[0] != "json"):
        raise ValueError(f"{text[:64]!r} has the wrong number of parts: write step.output or {root}.{ROOTS['ctx'][0]}")
    return Reference(root, path)


def parse_condition(text: str) -> Condition:
    """Parse a condition. Raises ValueError with a text for the author."""
    match = CONDITION.match(text.rstrip()) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise ValueError(f"{text[:64]!r} is not a condition: write step.output >= 0.5, with ==, !=, <, <=, > or >=")
    source = parse_source(match[1])
    assert isinstance(source, Reference)
    if not source.path:
        raise ValueError(f"{text[:64]!r} compares {source.root} as a whole: name one of its values")
    return Condition(source, match[2], parse_scalar(match[3]))


def parse_scalar(text: str) -> Scalar:
    quoted = QUOTED.match(text)
    if quoted is not None:
        return quoted[1]
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text[:64]!r} is no number, true, false or 'text' in quotes") from None
