"""Judges guides before the engine sees them: all sequences of a model wait while a new one is compiled, and a guide
that the engine cannot compile breaks the step of everybody, or its whole process.

So a guide is a JSON schema of the keywords below, whose values are what they must be. Measured with a vocabulary of
49,152 tokens on two cores: 12 ms for each character of a string of bounded length, 2.2 s for 400 optional properties,
10 s for 500 levels (docs/decisions/0251-guides-of-language-models.md).
"""

import re
from typing import Any

import msgspec

from oriel_inference.errors import InvalidRequest
from oriel_inference.language.engine import Guide

MAX_BYTES = 16 << 10
MAX_LEVELS = 32
MAX_REPEATED = 48
MAX_PROPERTIES = 100
MAX_LIMIT = 10**15
_NAME = re.compile(r"[\w.$-]{1,64}")
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"})
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_SHARED = ("$defs", "definitions")
_GIVEN_BY_TYPE: dict[Any, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "format"),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
    "number": _LIMITS,
    "integer": _LIMITS,
}


def check_guide(guide: Guide) -> None:
    """Raise InvalidRequest if a guide may not be compiled, or would take too long for those who wait for it."""
    if guide.kind != "json_schema":
        raise InvalidRequest(f"the guide is of the kind {guide.kind!r}, only 'json_schema' is taken from callers")
    if (size_bytes := len(guide.text.encode())) > MAX_BYTES:
        raise _refused("", f"has {size_bytes} bytes, at most {MAX_BYTES} are compiled while other calls wait")
    try:
        schema = msgspec.json.decode(guide.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the guide is no JSON: {str(error)[:200]}") from error
    counted = _Schema(schema)
    for what, count, most in (
        ("properties", counted.properties, MAX_PROPERTIES),
        ("characters and items of bounded repetitions", counted.repeated, MAX_REPEATED),
    ):
        if count > most:
            reason = f"has {count} {what}, at most {most} are compiled while other calls wait"
            raise _refused("", f"{reason}: leave some out, and check the answer instead")


class _Schema:
    """A JSON schema that is judged. properties, repeated: what takes time in it."""

    def __init__(self, schema: object) -> None:
        self.properties = self.repeated = 0
        shared = [each for key in _SHARED if isinstance(schema, dict) and isinstance(each := schema.get(key), dict)]
        self._shared = {name: inner for each in shared for name, inner in each.items()}
        self._walk(schema, "", 1)
        for name, inner in self._shared.items():
            if isinstance(inner, dict) and "$ref" in inner:
                raise _refused(name, "refers on to another part: name that one")
            self._walk(inner, name, 2)

    def _walk(self, schema: Any, path: str, level: int) -> None:
        if level > MAX_LEVELS:
            raise _refused(path, f"has more than {MAX_LEVELS} levels")
        if not isinstance(schema, dict):
            raise _refused(path, "is no object")
        own = schema.keys() - _NOTES - (set(_SHARED) if level == 1 else set())
        if "$ref" in own:
            self._reference(schema["$ref"], own, path)
        elif own & {"enum", "const"}:
            values = schema["enum"] if "enum" in own else [schema["const"]]
            if own - {"enum", "const", "type"} or not isinstance(values, list) or not values:
                raise _refused(path, "has an enum or a const, and beside it only a type")
            if any(isinstance(each, list | dict) for each in values):
                raise _refused(path, "has an enum or a const of more than single values")
        elif "anyOf" in own:
            choices = schema["anyOf"]
            if own != {"anyOf"} or not isinstance(choices, list) or not choices:
                raise _refused(path, "has anyOf, which stands alone, with at least one schema")
            for each in choices:
                self._walk(each, f"{path}.anyOf", level + 1)
        elif own:
            self._typed(schema, own, path, level)

    def _reference(self, target: object, own: set[str], path: str) -> None:
        name = str(target).rpartition("/")[2]
        if own != {"$ref"} or target not in {f"#/{key}/{name}" for key in _SHARED} or name not in self._shared:
            raise _refused(path, "has a $ref, which stands alone and names a part in $defs")

    def _typed(self, schema: dict[str, Any], own: set[str], path: str, level: int) -> None:
        named = schema.get("type")
        kinds = named if isinstance(named, list) else [named]
        if not kinds or any(each not in _TYPES for each in kinds):
            raise _refused(path, f"needs a type, one of {', '.join(_TYPES)}, or anyOf, enum, const or $ref")
        if unknown := sorted(own - {"type", *(key for each in kinds for key in _GIVEN_BY_TYPE.get(each, ()))}):
            raise _refused(path, f"has {unknown[0]!r}, which is not served for the type {named}")
        if "format" in own and (schema["format"] not in _FORMATS or own & {"minLength", "maxLength"}):
            raise _refused(path, f"has a format, which stands without lengths and is one of {', '.join(_FORMATS)}")
        counts = [schema[key] for key in _COUNTS if key in own]
        if any(type(each) is not int or each < 0 for each in counts) or counts != sorted(counts):
            raise _refused(path, "has a least number that is above the most, or no whole number")
        self.repeated += max(counts, default=0)
        limits = [schema[key] for key in _LIMITS if key in own]
        if any(type(each) is not int or abs(each) > MAX_LIMIT for each in limits):
            raise _refused(path, f"has a minimum or a maximum that is no whole number up to {MAX_LIMIT}")
        least = [schema[key] + (key == _LIMITS[2]) for key in _LIMITS[::2] if key in own]
        most = [schema[key] - (key == _LIMITS[3]) for key in _LIMITS[1::2] if key in own]
        if least and most and max(least) > min(most):
            raise _refused(path, "has a minimum that is above the maximum")
        if "array" in kinds:
            if "minItems" in own and "items" not in own:
                raise _refused(path, "has minItems without items")
            self._walk(schema.get("items", {}), f"{path}.items", level + 1)
        if "object" in kinds:
            self._object(schema, path, level)

    def _object(self, schema: dict[str, Any], path: str, level: int) -> None:
        named, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(named, dict) or not isinstance(required, list) or not set(map(str, required)) <= named.keys():
            raise _refused(path, "requires what is not among its properties")
        self.properties += len(named)
        for name, inner in named.items():
            if not _NAME.fullmatch(name):
                raise _refused(path, f"names a property {name[:64]!r}: letters, digits and any of _ - . $ are taken")
            self._walk(inner, f"{path}.{name[:32]}", level + 1)
        more = schema.get("additionalProperties", False)
        if not isinstance(more, bool):
            self._walk(more, f"{path}.additionalProperties", level + 1)


def _refused(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the guide {why}" if not path else f"the guide's part {path.lstrip('.')[:200]!r} {why}")
