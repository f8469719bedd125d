"""What a provider makes of a proposed resource: the plan, with values that are not known yet, and the resource."""

import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

from .schema import Schema, cty_of
from .values import Place, at_path, cty_of_block, filled_in, invented, known, places
from .wire import UNKNOWN


class Seeds:
    """Unique words for created resources. They follow from the values of a resource, so that each run gives the same
    ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}

    def next(self, schema: Schema, value: Any) -> str:
        text = json.dumps(known(value, ""), sort_keys=True, default=str)
        seed = f"{schema.name.removeprefix('data.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        with self._lock:
            again = self._used[seed] = self._used.get(seed, 0) + 1
        return seed if again == 1 else f"{seed}-{again}"


def planned(schema: Schema, prior: Any, proposed: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the proposed value with defaults and unknown values, and the arguments whose change needs a new one."""
    for place in list(places(schema.block, proposed, prior)):
        if place.attribute.get("write_only"):
            place.holder[place.name] = None
        elif place.attribute.get("computed") and place.holder.get(place.name) is None:
            place.holder[place.name] = _not_given(schema, place)
    for name in computed_blocks(schema):
        if not proposed.get(name):
            proposed[name] = (prior or {}).get(name) or UNKNOWN
    if prior is None:
        return proposed, []
    changed = [path for path in schema.rule.replace if at_path(prior, path) != at_path(proposed, path)]
    return proposed, sorted({path.partition(".")[0] for path in changed})


def computed_blocks(schema: Schema) -> list[str]:
    """Return the blocks that the provider creates if none is written: those that a rule calls computed, or sets values
    in.
    """
    named = {*schema.rule.computed, *(path.partition(".")[0] for path in schema.rule.set)}
    return [
        name
        for name, nested in schema.block.get("block_types", {}).items()
        if name in named and not nested.get("min_items")
    ]


def _not_given(schema: Schema, place: Place) -> Any:
    if place.prior is not None and place.name in place.prior:
        return place.prior[place.name]
    if place.path in schema.rule.defaults:
        return schema.rule.defaults[place.path]
    return None if place.attribute.get("type") == "dynamic" else UNKNOWN


def made(schema: Schema, value: dict[str, Any], seed: str) -> dict[str, Any]:
    """Return a planned resource, or a data source's configuration, with all values known."""
    words = {"seed": seed, **{key: each for key, each in value.items() if each is not UNKNOWN}}

    def pinned(path: str) -> Any:
        template = schema.rule.set.get(path)
        return None if template is None else filled_in(template, words.get)

    _make_blocks(schema.block, value, "", lambda cty, path: invented(cty, path, seed, pinned), computed_blocks(schema))
    for place in list(places(schema.block, value)):
        if place.holder.get(place.name) is UNKNOWN:
            place.holder[place.name] = invented(cty_of(place.attribute), place.path, seed, pinned)
    return known(value, f"{seed}-known")


def _make_blocks(
    block: dict[str, Any], value: Any, at: str, invent: Callable[[Any, str], Any], computed: list[str]
) -> None:
    """Make known a block that was planned as unknown: a dynamic one over unknown values, or a computed one."""
    if not isinstance(value, dict):
        return
    for name, nested in block.get("block_types", {}).items():
        if value.get(name) is UNKNOWN:
            value[name] = invent(["list", cty_of_block(nested["block"])], at + name) if name in computed else []
        for each in value[name] if isinstance(value.get(name), list) else [value.get(name)]:
            _make_blocks(nested["block"], each, f"{at}{name}.", invent, [])
