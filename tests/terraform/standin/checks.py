"""The providers' own checks of a configuration, as far as the rules name them: what a schema does not say."""

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from .schema import Schema
from .values import at_path, places
from .wire import UNKNOWN


def wrong(schema: Schema, config: dict[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """(summary, detail, argument of the resource) of everything a rule refuses; what is unknown is not judged."""
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
