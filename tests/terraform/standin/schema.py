"""Schemas in the form of `terraform providers schema -json`, and in the form of the plugin protocol."""

import copy
import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rules import Rule
from .wire import field, message

_NESTING = {"single": 1, "list": 2, "set": 3, "map": 4, "group": 5}


@dataclass(frozen=True, slots=True)
class Schema:
    """One type of resource or of data source ("data.aws_region"), whose rule has been applied to its block."""

    name: str
    block: dict[str, Any]
    rule: Rule
    version: int = 0


@dataclass(frozen=True, slots=True)
class Provider:
    source: str  # registry.terraform.io/hashicorp/aws
    version: str
    config: Schema
    types: dict[str, Schema]


def load(path: Path, rules: dict[str, Rule], used: Container[str] | None = None) -> Provider:
    """The provider of one schema file. used: only these types ("aws_vpc", "data.aws_region"); None: all.

    A rule may name what only another version of the provider has: here it says nothing then (a test looks for rules
    that name what no version has).
    """
    document = json.loads(path.read_text())
    ((source, schemas),) = document["provider_schemas"].items()
    types = {}
    for kind, prefix in (("resource_schemas", ""), ("data_source_schemas", "data.")):
        for short, schema in schemas.get(kind, {}).items():
            name = prefix + short
            if used is None or name in used:
                types[name] = _ruled(name, schema, rules.get(name, Rule()))
    config = _ruled("provider", schemas["provider"], rules.get("provider", Rule()))
    return Provider(source, document["source"]["provider_version"], config, types)


def _ruled(name: str, schema: dict[str, Any], rule: Rule) -> Schema:
    block = copy.deepcopy(schema["block"])
    _without_dynamics_in_sets(block)
    # The packages do not say which arguments the provider fills in or defaults: rules do.
    for path in {"id", "tags_all", *rule.computed, *rule.set, *rule.defaults}:
        attribute = find(block, path)
        if attribute is not None and not attribute.get("required"):
            attribute["computed"] = True
    for flag, paths in (("sensitive", rule.sensitive), ("write_only", rule.write_only)):
        for path in paths:
            attribute = find(block, path)
            if attribute is not None:
                attribute[flag] = True
    return Schema(name, block, rule, schema.get("version", 0))


def find(block: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the attribute, or the type of the block, at a dotted path; None if there is none."""
    head, _, rest = path.partition(".")
    attribute = block.get("attributes", {}).get(head)
    if attribute is not None:
        if not rest:
            return attribute
        nested = attribute.get("nested_type")
        if nested is not None:
            return find(nested, rest)
        # Inside an attribute of object type there is nothing to mark, only something to name.
        return attribute if _names(attribute["type"], rest.split(".")) else None
    nested = block.get("block_types", {}).get(head)
    if nested is None:
        return None
    return find(nested["block"], rest) if rest else nested


def _names(cty: Any, steps: list[str]) -> bool:
    while isinstance(cty, list) and cty[0] in ("list", "set", "map"):
        cty = cty[1]
    if not steps:
        return True
    return isinstance(cty, list) and cty[0] == "object" and steps[0] in cty[1] and _names(cty[1][steps[0]], steps[1:])


def _without_dynamics_in_sets(block: dict[str, Any], inside: bool = False) -> None:
    """Remove dynamic types from blocks that are sets, because Terraform refuses them. They come from recursive
    structures that the packages cut off.
    """
    for attribute in block.get("attributes", {}).values():
        if inside and attribute.get("type") == "dynamic":
            attribute["type"] = "string"
    for nested in block.get("block_types", {}).values():
        if nested["nesting_mode"] in ("map", "single"):
            nested.pop("min_items", None)
            nested.pop("max_items", None)
        _without_dynamics_in_sets(nested["block"], inside or nested["nesting_mode"] == "set")


def cty_of(attribute: dict[str, Any]) -> Any:
    """Return the type of an attribute, with nested ones written out as objects."""
    nested = attribute.get("nested_type")
    if nested is None:
        return attribute["type"]
    shape = ["object", {name: cty_of(each) for name, each in nested["attributes"].items()}]
    return shape if nested["nesting_mode"] == "single" else [nested["nesting_mode"], shape]


def provider_message(provider: Provider) -> bytes:
    """Return the message GetProviderSchema.Response."""

    def types(number: int, data: bool) -> bytes:
        return b"".join(
            message(number, field(1, name.removeprefix("data.")) + message(2, _schema(schema)))
            for name, schema in provider.types.items()
            if name.startswith("data.") == data
        )

    can = field(1, True) + field(2, True)  # plan_destroy, get_provider_schema_optional
    return message(1, _schema(provider.config)) + types(2, False) + types(3, True) + message(6, can)


def _schema(schema: Schema) -> bytes:
    return field(1, schema.version) + message(2, _block(schema.block))


def _block(block: dict[str, Any]) -> bytes:
    attributes = sorted(block.get("attributes", {}).items())
    nested = sorted(block.get("block_types", {}).items())
    return b"".join(message(2, _attribute(name, each)) for name, each in attributes) + b"".join(
        message(
            3,
            field(1, name)
            + message(2, _block(each["block"]))
            + field(3, _NESTING[each["nesting_mode"]])
            + field(4, each.get("min_items"))
            + field(5, each.get("max_items")),
        )
        for name, each in nested
    )


def _attribute(name: str, attribute: dict[str, Any]) -> bytes:
    nested = attribute.get("nested_type")
    if nested is None:
        typed = field(2, json.dumps(attribute["type"]))
    else:
        inner = b"".join(message(1, _attribute(key, each)) for key, each in sorted(nested["attributes"].items()))
        typed = message(10, inner + field(3, _NESTING[nested["nesting_mode"]]))
    flags = ((4, "required"), (5, "optional"), (6, "computed"), (7, "sensitive"), (11, "write_only"))
    return field(1, name) + typed + b"".join(field(number, attribute.get(flag)) for number, flag in flags)
