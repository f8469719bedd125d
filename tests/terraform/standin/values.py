"""Values of a resource against its schema: mark what is not known yet, invent it, and walk over everything."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .schema import cty_of
from .wire import UNKNOWN

_BASE64_PEM = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCkZBS0UKLS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo="


@dataclass(frozen=True, slots=True)
class Place:
    """One attribute of one element, whose value is `holder[name]`."""

    path: str  # dotted, without indices
    attribute: dict[str, Any]
    holder: dict[str, Any]
    name: str
    prior: dict[str, Any] | None  # the same element as it was; None: there was none


def places(block: dict[str, Any], value: Any, prior: Any = None, at: str = "") -> Iterator[Place]:
    """Yield every attribute that has a value, null included, outer ones first. Elements of lists are addressed by
    index.
    """
    if not isinstance(value, dict):
        return
    before = prior if isinstance(prior, dict) else None
    for name, attribute in block.get("attributes", {}).items():
        yield Place(at + name, attribute, value, name, before)
        if "nested_type" in attribute:
            mode = attribute["nested_type"]["nesting_mode"]
            for inner, was in _elements(mode, value.get(name), (before or {}).get(name)):
                yield from places(attribute["nested_type"], inner, was, f"{at}{name}.")
    for name, nested in block.get("block_types", {}).items():
        for inner, was in _elements(nested["nesting_mode"], value.get(name), (before or {}).get(name)):
            yield from places(nested["block"], inner, was, f"{at}{name}.")


def _elements(mode: str, value: Any, prior: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list):
        former = prior if isinstance(prior, list) else []
        for index, each in enumerate(value):
            yield each, former[index] if index < len(former) else None
    elif isinstance(value, dict):
        if mode == "map":
            was = prior if isinstance(prior, dict) else {}
            for key, each in value.items():
                yield each, was.get(key)
        else:
            yield value, prior


def at_path(value: Any, path: str) -> list[Any]:
    """Return the values at a dotted path, of every element."""
    found = [value]
    for step in path.split("."):
        found = [inner for each in found for inner in (each if isinstance(each, list) else [each])]
        found = [each.get(step) for each in found if isinstance(each, dict)]
    return found


def has_unknown(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_unknown, value.values()))
    return any(map(has_unknown, value)) if isinstance(value, list) else value is UNKNOWN


def known(value: Any, word: str) -> Any:
    """Return the value with `word` in place of what is unknown inside maps, lists and objects."""
    if value is UNKNOWN:
        return word
    if isinstance(value, dict):
        return {key: known(each, word) for key, each in value.items()}
    return [known(each, word) for each in value] if isinstance(value, list) else value


def invented(cty: Any, path: str, seed: str, pinned: Callable[[str], Any]) -> Any:
    """Return a value of a type. pinned: what a rule says for a path, or None."""
    said = pinned(path)
    if said is not None:
        return said
    leaf = path.rsplit(".", 1)[-1]
    if isinstance(cty, list):
        kind, inner = cty
        if kind == "object":
            return {name: invented(each, f"{path}.{name}", seed, pinned) for name, each in inner.items()}
        if kind == "map":
            return {}
        return [invented(each, path, seed, pinned) for each in (inner if kind == "tuple" else [inner])]
    if cty != "string":
        return {"number": 0, "bool": False}.get(cty)
    if leaf == "arn" or leaf.endswith("_arn"):
        return f"arn:aws:invented:eu-central-1:000000000000:{seed}"
    if "certificate" in path or leaf in ("data", "client_key"):
        return _BASE64_PEM
    if leaf in ("endpoint", "issuer", "self_link") or leaf.endswith(("_url", "_uri")):
        return f"https://{seed}.invalid/{leaf}"
    return f"{seed}-{leaf}"


def cty_of_block(block: dict[str, Any]) -> Any:
    """Return the object type of one element of a block."""
    inner = {name: cty_of(each) for name, each in block.get("attributes", {}).items()}
    for name, nested in block.get("block_types", {}).items():
        inner[name] = [nested["nesting_mode"], cty_of_block(nested["block"])]
    return ["object", inner]


def filled_in(template: Any, value_of: Callable[[str], Any]) -> Any:
    """Return a rule's value, in which {name} is replaced by another argument's value, if that is known."""

    def one(match: re.Match[str]) -> str:
        found = value_of(match[1])
        return str(found) if isinstance(found, (str, int, float)) else match[0]

    if isinstance(template, str):
        return re.sub(r"\{([\w.]+)\}", one, template)
    if isinstance(template, list):
        return [filled_in(each, value_of) for each in template]
    if isinstance(template, dict):
        return {key: filled_in(each, value_of) for key, each in template.items()}
    return template
