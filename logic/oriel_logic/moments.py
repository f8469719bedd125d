"""Examples for dates and times in a JSON Schema: msgspec says of those whose zone is open only that they are text."""

from collections.abc import Mapping
from typing import Any

from msgspec import inspect as kinds

__all__ = ["add_examples"]

DATE_TIME, TIME = "2026-01-31T12:00:00", "12:00:00"


def add_examples(found: Any, schema: dict[str, Any], components: Mapping[str, dict[str, Any]], prefix: str) -> None:
    """found: the type that `schema` and `components` were written from. prefix: before a component's name in `$ref`."""
    todo = [(kinds.type_info(found), schema)]
    seen = set()
    while todo:
        kind, part = todo.pop()
        if isinstance(kind, kinds.Metadata):
            kind = kind.type
        if "$ref" in part:
            part = components.get(part["$ref"].removeprefix(prefix), {})
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(kind, kinds.DateTimeType | kinds.TimeType):
            if part.get("type") == "string" and kind.tz is not True:
                part.setdefault("examples", [DATE_TIME if isinstance(kind, kinds.DateTimeType) else TIME])
        elif isinstance(kind, kinds.UnionType):
            options = part.get("anyOf", ())
            todo += zip(kind.types, options, strict=True) if len(options) == len(kind.types) else ()
        elif isinstance(kind, kinds.CollectionType | kinds.DictType):
            inner = kind.value_type if isinstance(kind, kinds.DictType) else kind.item_type
            below = part.get("additionalProperties" if isinstance(kind, kinds.DictType) else "items")
            todo += [(inner, below)] if isinstance(below, dict) else ()
        elif isinstance(kind, kinds.TupleType):
            todo += zip(kind.item_types, part.get("prefixItems", ()), strict=False)
        else:
            fields = {each.encode_name: each.type for each in getattr(kind, "fields", ())}
            todo += [(fields[name], each) for name, each in part.get("properties", {}).items() if name in fields]
