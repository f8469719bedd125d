"""The chart's values: named, typed and preset as the Terraform module's variables, and refused where a plan refuses."""

import re
from typing import Any

import pytest
import yaml

from .chart_values import SCHEMA, load, replaced
from .harness import TerraformFailed
from .helm import CHART, HelmFailed, helm
from .module_files import Module, Type, type_of
from .objects import INFRASTRUCTURE

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# Of a cloud's own, of charts of others, and of the release.
OF_A_CLOUD = ("cluster_name", "cluster_endpoint", "cluster_ca_certificate", "cluster_auth", "registry_url")
TERRAFORM_ONLY = frozenset(
    {"namespace", "charts", "keda.chart_version", "keda.install", *(f"infrastructure.{name}" for name in OF_A_CLOUD)}
)
CHART_ONLY = frozenset({"keys"})
# Given by every root, so that the module has no default.
PRESET = {
    "infrastructure.cloud": "local",
    "infrastructure.redis_tls": False,
    "infrastructure.workload_identity": {},
    "infrastructure.gpu_node_selector": {},
    "infrastructure.gpu_taint": {},
    "infrastructure.storage_class": "standard",
}
REQUIRED = "required"
# Path -> kinds of JSON's, default. The default of an object is {}: those of its members stand below their own paths.
Named = dict[str, tuple[frozenset[str], Any]]


def of_the_module(path: str, of_type: Type, default: Any) -> Named:
    kind = {"bool": "boolean", "list": "array", "map": "object"}.get(of_type.kind, of_type.kind)
    found: Named = {path: (frozenset({kind, "null"} if default is None else {kind}), default)}
    if of_type.of is not None:
        found |= of_the_module(f"{path}.*", of_type.of, REQUIRED)
    for name, each in of_type.members.items():
        found |= of_the_module(f"{path}.{name}", each, each.default if each.optional else REQUIRED)
    return found


def of_the_chart(path: str, schema: Any, value: Any, required: bool) -> Named:
    """value: the one of values.yaml or, below a map or null, the default of the schema."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    kinds = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    given = value if isinstance(value, dict) else {}
    preset = REQUIRED if required else {} if given else value
    found = {path: (frozenset("number" if each == "integer" else each for each in kinds), preset)}
    inner = schema.get("items") or schema.get("additionalProperties")
    if inner:
        found |= of_the_chart(f"{path}.*", inner, None, True)
    else:
        assert "object" not in kinds or schema["additionalProperties"] is False, path
    for name, each in schema.get("properties", {}).items():
        assert name not in given or "default" not in each, f"{path}.{name}: values.yaml has its default"
        default = given.get(name, each.get("default"))
        found |= of_the_chart(f"{path}.{name}", each, default, name in schema.get("required", ()))
    return found


def without(found: Named, names: frozenset[str]) -> Named:
    return {path: each for path, each in found.items() if not any(f"{path}.".startswith(f"{name}.") for name in names)}


def test_names_types_and_defaults_are_those_of_the_modules_variables(tree) -> None:
    module: Named = {}
    for name, body in Module(tree / "modules/platform", "variables.tf").blocks("variable").items():
        module |= of_the_module(name, type_of(body["type"]), body.get("default", REQUIRED))
    chart: Named = {}
    for name in VALUES:
        chart |= of_the_chart(name, SCHEMA["properties"][name], VALUES[name], name in SCHEMA["required"])
    module, chart = without(module, TERRAFORM_ONLY), without(chart, CHART_ONLY)
    for path, default in PRESET.items():
        module[path] = (module[path][0], default)
    assert chart == module
    assert set(VALUES) == set(SCHEMA["properties"]) - {"global"} and SCHEMA["additionalProperties"] is False


WRONG = [(each["values"], set(each["paths"])) for each in replaced(load("wrong"), "#" * 900_001, "LONG")]
# Of Terraform's own; and what only a plan can measure: the compressed size of a release.
NOT_OF_THE_CHART = (
    "namespace:",
    "keda.chart_version:",
    "keda.namespace: not",
    "charts:",
    "observability.namespace: not",
    "logic.services and",
)


def given(variables: dict[str, Any]) -> dict[str, Any]:
    images = {"registry": "registry.example/oriel", "tag": "0.1.0", **variables.get("images", {})}
    return {**variables, "images": images, "infrastructure": INFRASTRUCTURE | variables.get("infrastructure", {})}


def of_the_chart_only(variables: dict[str, Any]) -> dict[str, Any]:
    kept = {name: each for name, each in variables["infrastructure"].items() if name not in OF_A_CLOUD}
    return {**variables, "infrastructure": kept}


@pytest.mark.parametrize(("variables", "paths"), WRONG)
def test_helm_names_every_value_that_is_wrong(variables, paths) -> None:
    with pytest.raises(HelmFailed) as failed:
        helm("template", "oriel", str(CHART), values=of_the_chart_only(given(variables)))
    named = set(re.findall(r"^(?:- )?([a-z][\w.-]+):? ", str(failed.value), re.M))
    assert paths <= named and not {each for each in named - paths if "policies.documents." in each}, paths - named


PORTS = {
    "images.registry": "r.example:65536/oriel",
    "infrastructure.model_repository_url": "s3://https://h:65536/b",
    "infrastructure.redis_url": "redis://h:99999",
    "model_groups.a.repository": "s3://h:70000/b",
    "observability.otlp.endpoint": "http://h:0",
    "policies.store": "s3://https://h:655360/b",
}


@pytest.mark.parametrize("path", PORTS)
def test_a_port_that_there_is_not_is_refused(path) -> None:
    """The network policies would name it too, and Kubernetes refuses those in the middle of an install."""
    groups = {"a": {"accelerator": "cpu"}}

    def values(text: str) -> dict[str, Any]:
        *above, last = path.split(".")
        found = of_the_chart_only(given({"gpu_enabled": False, "model_groups": groups}))
        place = found
        for name in above:
            place = place.setdefault(name, {})
        place[last] = text
        return found

    with pytest.raises(HelmFailed, match=path):
        helm("template", "oriel", str(CHART), values=values(PORTS[path]))
    assert helm("template", "oriel", str(CHART), values=values(re.sub(r":\d+", ":65535", PORTS[path])))


def test_a_plan_refuses_the_same_ports(shared) -> None:
    given_all: dict[str, Any] = {"model_groups": {"a": {"accelerator": "cpu"}}}
    for path, text in PORTS.items():
        place = given_all
        for name in path.split(".")[:-1]:
            place = place.setdefault(name, {})
        place[path.rpartition(".")[2]] = text
    with pytest.raises(TerraformFailed) as failed:
        shared("modules/platform").plan(**given(given_all))
    said = "\n".join(each.detail for each in failed.value.diagnostics)
    assert all(re.search(rf"^{re.escape(path.partition('.')[0])}\b.*", said, re.M) for path in PORTS), said
    assert len(failed.value.diagnostics) == len(PORTS), said


def test_every_refusal_of_a_plan_is_one_of_those(shared, tree) -> None:
    """So a validation that is new in the module needs its counterpart in the chart."""
    module = Module(tree / "modules/platform")
    known = {
        each["error_message"].replace('\\"', '"')
        for body in module.blocks("variable").values()
        for each in body.get("validation", ())
    }
    known = {each for each in known if not each.startswith(NOT_OF_THE_CHART)}
    said = set()
    for variables, _ in WRONG:
        with pytest.raises(TerraformFailed) as failed:
            shared("modules/platform").plan(**given(variables))
        said |= {each.detail.partition("\n")[0] for each in failed.value.diagnostics}
    assert not known - said
