"""The committed schemas and rules: complete for what the .tf files use, and traceable to where they are from."""

import json

import pytest

from .harness import HERE, PROVIDERS, used_types
from .schemas.generate import PACKAGES
from .standin import rules, schema

FILES = sorted((HERE / "schemas").glob("*.json"))
LICENSES = {"@cdktf/provider-" + name: "MPL-2.0" for name in PROVIDERS}


def document(name):
    (file,) = [file for file in FILES if file.name.startswith(f"{name}-")]
    return json.loads(file.read_text())


def types_of(document):
    ((_, schemas),) = document["provider_schemas"].items()
    return set(schemas["resource_schemas"]) | {f"data.{name}" for name in schemas["data_source_schemas"]}


def test_every_type_in_use_has_its_schema_and_no_other_is_there(tree):
    known = set().union(*(types_of(document(name)) for name in PROVIDERS))
    assert used_types(tree) - {"terraform_data"} == known, "run tests/terraform/schemas/generate.py"


def test_where_they_are_from_is_recorded():
    said = sorted(json.loads(file.read_text())["source"]["npm"] for file in FILES)
    assert said == sorted(f"@cdktf/provider-{name}@{version}" for name, version in PACKAGES)
    for file in FILES:
        source = json.loads(file.read_text())["source"]
        name, _, version = file.stem.partition("-")
        assert source["provider_version"] == version
        assert source["license"] == LICENSES[f"@cdktf/provider-{name}"]


@pytest.mark.parametrize("name", sorted(path.stem for path in (HERE / "rules").glob("*.toml")))
def test_rules_name_types_in_use_and_arguments_that_exist(name, tree):
    file = HERE / "rules" / f"{name}.toml"
    assert name in PROVIDERS
    ((_, schemas),) = document(name)["provider_schemas"].items()
    blocks = {"provider": schemas["provider"]["block"]}
    for kind, prefix in (("resource_schemas", ""), ("data_source_schemas", "data.")):
        blocks |= {prefix + short: each["block"] for short, each in schemas[kind].items()}
    for type_name, rule in rules.load(file).items():
        assert type_name in blocks, f"[{type_name}] of {file.name} is used by nothing"
        for path in rule.paths():
            assert schema.find(blocks[type_name], path), f"{type_name} has no {path}"
