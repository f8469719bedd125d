"""What a provider makes of a proposed resource: the plan, with what is not known yet, and the thing itself."""

import hashlib
import json
import threading
from typing import Any

from .schema import Schema
from .values import Place, at_path, filled_in, invented, known, places, replaced_unknown_blocks
from .wire import UNKNOWN


class Seeds:
    """Words that name one made thing each; from its values, so that a run gives the same ones as the last."""

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
    """The proposed value with defaults and unknowns, and which arguments' change needs a new one."""
    for place in list(places(schema.block, proposed, prior)):
        if place.attribute.get("write_only"):
            place.holder[place.name] = None
        elif place.attribute.get("computed") and place.holder.get(place.name) is None:
            place.holder[place.name] = _not_given(schema, place)
    if prior is None:
        return proposed, []
    changed = [path for path in schema.rule.replace if at_path(prior, path) != at_path(proposed, path)]
    return proposed, sorted({path.partition(".")[0] for path in changed})


def _not_given(schema: Schema, place: Place) -> Any:
    if place.prior is not None and place.name in place.prior:
        return place.prior[place.name]
    if place.path in schema.rule.defaults:
        return schema.rule.defaults[place.path]
    return None if place.attribute.get("type") == "dynamic" else UNKNOWN


def made(schema: Schema, value: dict[str, Any], seed: str) -> dict[str, Any]:
    """A planned resource or a data source's configuration with everything known."""
    replaced_unknown_blocks(schema.block, value)
    for place in list(places(schema.block, value)):
        if place.holder.get(place.name) is UNKNOWN:
            template = schema.rule.set.get(place.path)
            if template is None:
                place.holder[place.name] = invented(place, seed)
            else:
                words = {"seed": seed, **{key: each for key, each in value.items() if each is not UNKNOWN}}
                place.holder[place.name] = filled_in(template, words.get)
    return known(value, f"{seed}-known")
