"""Reads msgspec's errors: the path of the value that is wrong, and the values that are allowed there. Pure."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import inspect

MAX_LISTED = 300  # characters
_SENTENCE = re.compile(r"(Invalid (?:enum )?value [^`]*?)( - at (`key` in )?`(\$[^`]*)`)?\Z", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def with_values(error: msgspec.ValidationError, wanted: Any) -> str:
    """The text of `error`, with the values that the type `wanted` allows at that place if they are a fixed set."""
    text = str(error)
    found = _SENTENCE.match(text)
    if found is None:
        return text
    try:
        nodes = list(_open(_described(wanted)))
        for name, _ in _STEP.findall(found[4] or "$"):
            nodes = [each for node in nodes for each in _below(node, name)]
        if found[3]:
            nodes = [each for node in nodes if isinstance(node, inspect.DictType) for each in _open(node.key_type)]
    except TypeError:  # a type that msgspec cannot describe
        return text
    values = list(dict.fromkeys(value for node in nodes for value in _values(node)))
    return f"{found[1]}, it is one of {listed(values)}{found[2] or ''}" if values else text


def split_path(text: str) -> tuple[str, str]:
    """Split an error text into its sentence and the path of the value, "$" if it says none."""
    sentence, _, path = text.rpartition(" - at ")
    path = path.removeprefix("`key` in ")
    return (sentence, path[1:-1]) if sentence and path.startswith("`$") and path.endswith("`") else (text, "$")


def listed(values: Iterable[object]) -> str:
    """The values as `'a', 'b' and 3 more`, with as many of them as fit into MAX_LISTED characters."""
    shown = [repr(value) for value in values]
    ends = list(accumulate(len(each) + 2 for each in shown))
    count = max(1, bisect_right(ends, MAX_LISTED))
    return ", ".join(shown[:count])[:MAX_LISTED] + (f" and {len(shown) - count} more" if len(shown) > count else "")


@lru_cache(maxsize=256)
def _described(wanted: Any) -> inspect.Type:
    return inspect.type_info(wanted)


def _open(node: inspect.Type) -> Iterator[inspect.Type]:
    """The types that a value may have here, taken out of unions and annotations."""
    if isinstance(node, inspect.Metadata):
        yield from _open(node.type)
    elif isinstance(node, inspect.UnionType):
        for each in node.types:
            yield from _open(each)
    else:
        yield node


def _below(node: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The types of the field `name`, or of an item where `name` is empty."""
    if name and isinstance(node, inspect.StructType) and name == node.tag_field:
        yield inspect.LiteralType((node.tag,))
    elif name:
        for field in getattr(node, "fields", ()):
            if field.encode_name == name:
                yield from _open(field.type)
    elif isinstance(node, inspect.DictType):
        yield from _open(node.value_type)
    elif isinstance(node, inspect.TupleType):
        for each in node.item_types:
            yield from _open(each)
    elif isinstance(node, inspect.CollectionType):
        yield from _open(node.item_type)


def _values(node: inspect.Type) -> Iterator[object]:
    if isinstance(node, inspect.LiteralType):
        yield from sorted(node.values, key=str)  # msgspec gives them in no order
    elif isinstance(node, inspect.EnumType):
        yield from (each.value for each in node.cls)
