"""The committed schemas and rules: complete for what the .tf files use, and traceable to where they are from."""

import json
import re

import pytest

from .harness import HERE, PROVIDERS, used_types
from .schemas.generate import PACKAGES
from .standin import rules, schema

FILES = sorted((HERE / "schemas").glob("*.json"))
LICENSES = {"@cdktf/provider-" + name: "MPL-2.0" for name in PROVIDERS}


def documents(name):
    return [json.loads(file.read_text()) for file in FILES if file.name.startswith(f"{name}-")]


def types_of(document):
    ((_, schemas),) = document["provider_schemas"].items()
    return set(schemas["resource_schemas"]) | {f"data.{name}" for name in schemas["data_source_schemas"]}


def test_every_type_in_use_has_its_schema_in_every_version(tree):
    used = used_types(tree)
    for name in PROVIDERS:
        of_provider = {each for each in used if re.fullmatch(rf"(data\.)?{name}_.+", each)}
        for document in documents(name):
            missing = of_provider - types_of(document)
            assert not missing, f"run tests/terraform/schemas/generate.py: {document['source']['npm']} lacks {missing}"
    known = {each for name in PROVIDERS for document in documents(name) for each in types_of(document)}
    assert used - known - {"terraform_data"} == set()


def test_no_schema_is_there_that_nothing_uses(tree):
    used = used_types(tree) | used_types(HERE / "roots")
    for file in FILES:
        unused = types_of(json.loads(file.read_text())) - used
        assert not unused, f"run tests/terraform/schemas/generate.py: {file.name} has {unused}"


def test_where_they_are_from_is_recorded():
    said = sorted(json.loads(file.read_text())["source"]["npm"] for file in FILES)
    assert said == sorted(f"@cdktf/provider-{name}@{version}" for name, version in PACKAGES)
    for file in FILES:
        source = json.loads(file.read_text())["source"]
        name, _, version = file.stem.partition("-")
        assert source["provider_version"] == version
        assert source["license"] == LICENSES[f"@cdktf/provider-{name}"]


def test_they_stay_subsets():
    for file in FILES:
        assert file.stat().st_size < 200_000, file.name


@pytest.mark.parametrize("name", sorted(path.stem for path in (HERE / "rules").glob("*.toml")))
def test_rules_name_types_in_use_and_arguments_that_exist(name, tree):
    file = HERE / "rules" / f"{name}.toml"
    assert name in PROVIDERS
    blocks: dict[str, list[dict]] = {}
    for document in documents(name):
        ((_, schemas),) = document["provider_schemas"].items()
        blocks.setdefault("provider", []).append(schemas["provider"]["block"])
        for kind, prefix in (("resource_schemas", ""), ("data_source_schemas", "data.")):
            for short, each in schemas[kind].items():
                blocks.setdefault(prefix + short, []).append(each["block"])
    for type_name, rule in rules.load(file).items():
        assert type_name in blocks, f"[{type_name}] of {file.name} is used by nothing"
        for path in rule.paths():
            assert any(schema.find(block, path) for block in blocks[type_name]), f"{type_name} has no {path}"
