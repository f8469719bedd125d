"""A misspelt name in `platform` is said, not dropped: names.tf against the module's own types."""

import re
from collections.abc import Iterator

import hcl2
import pytest

from .harness import TerraformFailed
from .module_files import Module, Type, type_of

OF_THE_ROOT = {"infrastructure", "images", "gpu_enabled", "scale_to_zero"}  # inputs that no caller gives
# registry and tag are variables of the root itself.
OF_IMAGES = {"images", *(f"images.{name}" for name in ("digests", "digests.any", "pull_policy", "pull_secret"))}
OF_AWS = {"charts.cluster_autoscaler", "charts.cluster_autoscaler.version"}


def paths_of(of_type: Type, below: str = "") -> Iterator[str]:
    """Every path into a type: object({a = optional(map(object({b = string})))}) -> a, a.any, a.any.b."""
    if of_type.kind == "map":
        assert of_type.of is not None
        yield f"{below}any"
        yield from paths_of(of_type.of, f"{below}any.")
    for name, each in of_type.members.items():
        yield f"{below}{name}"
        yield from paths_of(each, f"{below}{name}.")


def of_the_module(tree) -> set[str]:
    found = set()
    for name, body in Module(tree / "modules/platform", "variables.tf").blocks("variable").items():
        if name not in OF_THE_ROOT:
            found |= {name} | {f"{name}.{path}" for path in paths_of(type_of(body["type"]))}
    return found


def known(tree) -> dict[str, list[str]]:
    (block,) = hcl2.loads((tree / "modules/roots/names.tf").read_text())["locals"]
    return {
        name.strip('"'): [each.strip('"').replace("\\\\", "\\") for each in patterns]
        for name, patterns in block["platform_names"].items()
        if not name.startswith("__")
    }


def test_each_name_of_the_module_is_known_and_no_other(tree):
    paths, patterns = of_the_module(tree) | OF_IMAGES | OF_AWS, known(tree)
    assert {path for path in paths if "." not in path} == set(patterns)
    for path in paths:
        name, dot, rest = path.partition(".")
        assert not dot or any(re.fullmatch(pattern, rest) for pattern in patterns[name]), path
        if dot and not rest.endswith("any"):
            assert not any(re.fullmatch(pattern, f"{rest}x") for pattern in patterns[name]), f"{path}x"
    last = {path.rpartition(".")[2] for path in paths}
    words = {word for each in patterns.values() for word in re.findall(r"\w{2,}", " ".join(each).replace("\\.", " "))}
    assert words <= last, "a name that the module does not have"


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        ({"polices": {}}, "polices"),
        ({"gateway": {"replicas": {"maximum": 4}}}, "gateway.replicas.maximum"),
        ({"model_groups": {"llm": {"accelerator": "cpu", "cach": {}}}}, "model_groups.llm.cach"),
    ],
)
def test_a_misspelt_name_stops_the_plan_and_is_named(shared, platform, said):
    with pytest.raises(TerraformFailed, match=re.escape(said)):
        shared("gcp").plan(region="europe-west4", platform=platform)


def test_what_is_spelt_right_goes_through(shared):
    shared("gcp").plan(
        region="europe-west4",
        platform={
            "gateway": {"replicas": {"max": 4}, "service_annotations": {"example.com/a.b": "c"}},
            "model_groups": {"llm": {"accelerator": "cpu", "cache": {"gb": 30}}},
            "policies": {"tenants": {"acme": {"tier": "gold", "keys_sha256": ["0" * 64]}}},
        },
    )
