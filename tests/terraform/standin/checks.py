"""The providers' own checks of a configuration that no schema expresses, as far as the rules name them."""

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from .schema import Schema
from .values import at_path, places
from .wire import UNKNOWN


def wrong(schema: Schema, config: dict[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """Return (summary, detail, argument of the resource) for everything that a rule refuses. Unknown values are not
    judged.
    """
    if config is None:
        return
    rule = schema.rule
    for place in places(schema.block, config):
        top = place.path.partition(".")[0]
        for value in _singles(place.holder.get(place.name)):
            for said in _of_value(rule, place.path, value):
                yield f'Invalid value for "{place.path}"', said, top
    for group in rule.conflicts:
        given = [path for path in group if _given(config, path)]
        if len(given) > 1:
            yield "Conflicting configuration arguments", f"only one of {', '.join(group)} may be given", given[0]
    for group in rule.one_of:
        if not any(_given(config, path, unknown=True) for path in group):
            yield "Missing required argument", f"one of {', '.join(group)} has to be given", ""


def unsettable(schema: Schema, config: dict[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """Return the same for arguments that only the provider sets. It checks the configuration, not the plan: there
    `ignore_changes` puts other values.
    """
    for place in places(schema.block, config):
        flags = place.attribute
        only_computed = flags.get("computed") and not (flags.get("optional") or flags.get("required"))
        if only_computed and place.holder.get(place.name) not in (None, [], {}):
            top = place.path.partition(".")[0]
            yield "Value for unconfigurable attribute", f"{place.path} is the provider's to say", top


def out_of_order(schema: Schema, value: dict[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """Return the same for sizes that must not be greater than the next one, which the APIs of the clouds refuse."""
    for group in schema.rule.ordered:
        for sizes in zip(*(at_path(value, path) for path in group), strict=True):
            known = [each for each in sizes if each is not None and each is not UNKNOWN]
            if known != sorted(known):
                yield "Invalid value", f"{' <= '.join(group)} does not hold: {known}", group[0].partition(".")[0]


def _of_value(rule: Any, path: str, value: Any) -> Iterator[str]:
    if path in rule.enum and value not in rule.enum[path]:
        yield f"expected {path} to be one of {rule.enum[path]}, got {value}"
    if path in rule.match and not re.fullmatch(rule.match[path], str(value)):
        yield f"expected {path} to match {rule.match[path]}, got {value}"
    if path in rule.range and not rule.range[path][0] <= value <= rule.range[path][1]:
        yield f"expected {path} to be in {rule.range[path]}, got {value}"
    if path in rule.cidr:
        try:
            ipaddress.ip_network(value)
        except ValueError as error:
            yield f"expected {path} to be a network: {error}"


def _singles(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _singles(each)
    elif value is not None and value is not UNKNOWN and not isinstance(value, dict):
        yield value


def _given(config: dict[str, Any], path: str, unknown: bool = False) -> bool:
    return any(each not in (None, [], {}) and (unknown or each is not UNKNOWN) for each in at_path(config, path))
