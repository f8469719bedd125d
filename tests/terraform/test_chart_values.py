"""The chart's values: named, typed and preset as the Terraform module's variables, and refused where a plan refuses."""

import re
from typing import Any

import pytest
import yaml

from .chart_values import SCHEMA
from .harness import TerraformFailed
from .helm import CHART, HelmFailed, helm
from .module_files import Module, Type, type_of
from .objects import INFRASTRUCTURE

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# Of a cloud's own, of charts of others, and of the release.
TERRAFORM_ONLY = frozenset(
    {
        "infrastructure.cluster_name",
        "infrastructure.cluster_endpoint",
        "infrastructure.cluster_ca_certificate",
        "infrastructure.cluster_auth",
        "infrastructure.registry_url",
        "namespace",
        "charts",
        "keda.chart_version",
        "keda.install",
    }
)
CHART_ONLY = frozenset({"keys", "namespace_labels"})
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


# Wrong values, as variables of the module, and the paths that helm names of them.
GROUP = {"accelerator": "cpu"}
POOL = {"address": "a.b.svc", "port": 8000, "models": ["m"]}
WRONG: list[tuple[dict[str, Any], set[str]]] = [
    (
        {
            "infrastructure": {"gpu_taint": {"key": "k", "value": "v", "effect": "NO"}, "redis_url": "redis://u:p@h:1"},
            "store_networks": ["10.1.2.0/33"],
            "images": {"registry": "https://r", "tag": "latest", "pull_policy": "Maybe", "pull_secret": "A"},
            "gateway": {
                "replicas": {"min": 0},
                "cpu": 0,
                "tls_secret": "A_B",
                "load_balancer_ip": "1.2.3.400",
                "service_type": "Pod",
                "source_ranges": ["203.0.113.0"],
            },
            "logic": {
                "replicas": {"max": 0},
                "memory": 0,
                "services": {"a/b.py": ""},
                "workers": 0,
                "folders": ["relative"],
            },
            "model_groups": {
                "Upper": GROUP,
                "speed": {"accelerator": "tpu"},
                "names": {**GROUP, "models": ["a b"]},
                "counts": {**GROUP, "replicas": {"max": 201}, "load_grace_s": 29},
                "sizes": {**GROUP, "cpu": 0},
                "urls": {**GROUP, "repository": "/models"},
                "secrets": {**GROUP, "credentials": "A"},
                "placed": {"accelerator": "gpu", "models": ["g"], "place_models": True},
                "engine": {**GROUP, "engine": {"kind": "other", "image": "i", "command": []}},
            },
            "redis": {"image": "redis", "memory": 15},
            "placement": {"pause_image": "pause"},
            "keda": {"polling_interval_s": 0, "namespace": "Upper"},
            "observability": {
                "namespace": "Upper",
                "otlp": {
                    "endpoint": "host:4318",
                    "sample_ratio": 2,
                    "image": "x:latest",
                    "trace_tail": "both",
                    "decision_wait_s": 1,
                },
            },
        },
        {
            "infrastructure.gpu_taint.effect", "infrastructure.redis_url", "store_networks.0", "images.registry",
            "images.tag", "images.pull_policy", "images.pull_secret", "gateway.replicas.min", "gateway.cpu",
            "gateway.tls_secret", "gateway.load_balancer_ip", "gateway.service_type", "gateway.source_ranges.0",
            "logic.replicas.max", "logic.memory", "logic.services", "logic.workers", "logic.folders.0", "model_groups",
            "model_groups.speed.accelerator", "model_groups.names.models.0", "model_groups.counts.replicas.max",
            "model_groups.counts.load_grace_s", "model_groups.sizes.cpu", "model_groups.urls.repository",
            "model_groups.secrets.credentials", "model_groups.placed", "model_groups.engine.engine.kind",
            "model_groups.engine.engine.command", "redis.image", "redis.memory", "placement.pause_image",
            "keda.polling_interval_s", "keda.namespace", "observability.namespace", "observability.otlp.endpoint",
            "observability.otlp.sample_ratio", "observability.otlp.image", "observability.otlp.trace_tail",
            "observability.otlp.decision_wait_s",
        },
    ),
    (
        {
            "policies": {
                "tenants": {
                    "a b": {"tier": "gold", "keys_sha256": []},
                    "plain": {"tier": "gold", "keys_sha256": ["key"]},
                },
                "documents": {"a.txt": ""},
                "pools": {
                    "inference-x": POOL,
                    "far": {**POOL, "address": "far.example"},
                    "port": {**POOL, "port": 65536},
                    "nothing": {"address": "a.b.svc", "port": 8000},
                },
                "store": "file:///x",
            },
        },
        {
            "policies.tenants", "policies.tenants.plain.keys_sha256.0", "policies.documents", "policies.pools",
            "policies.pools.far.address", "policies.pools.port.port", "policies.pools.nothing", "policies.store",
        },
    ),
    (
        {
            "infrastructure": {"redis_url": None},
            "gpu_enabled": False,
            "model_groups": {"gpu": {"accelerator": "gpu"}},
        },
        {"infrastructure.redis_auth_secret_ref", "model_groups.gpu.accelerator"},
    ),
    (
        {"model_groups": {"idle": {**GROUP, "replicas": {"min": 0}}}, "logic": {"replicas": {"min": 0}}},
        {"model_groups.idle.replicas.min", "logic.replicas.min"},
    ),
    (
        {
            "gateway": {"replicas": {"min": 11}},
            "logic": {"replicas": {"min": 11}, "services": {"a.py": "#" * 900_001}},
            "model_groups": {"a": {**GROUP, "models": ["m"], "replicas": {"min": 5}}, "b": {**GROUP, "models": ["m"]}},
        },
        {
            "gateway.replicas", "logic.replicas", "logic.services", "model_groups.a.replicas", "model_groups.b",
        },
    ),
    (
        {
            "policies": {
                "tenants": {"t": {"tier": "platinum", "keys_sha256": []}},
                "documents": {"a.json": "{", "b.ndjson": "{}\n1,2", "c.ndjson": '[1]\n\n{"Error": ""}', "d.json": "[]"},
            },
        },
        {"policies.tenants.t.tier", "policies.documents.a.json", "policies.documents.b.ndjson"},
    ),
    (
        {"keda": {"enabled": True}, "model_groups": {"a": GROUP, "b": {**GROUP, "models": ["m"]}, "c": GROUP},
         "policies": {"pools": {"p": POOL}}},
        {"keda.enabled", "policies.pools.p"},
    ),
    (
        {"model_groups": {"a": {**GROUP, "place_models": True}, "b": GROUP}},
        {"model_groups.a.place_models"},
    ),
]  # fmt: skip
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
    infrastructure = {
        name: each
        for name, each in variables["infrastructure"].items()
        if f"infrastructure.{name}" not in TERRAFORM_ONLY
    }
    return {**variables, "infrastructure": infrastructure}


@pytest.mark.parametrize(("variables", "paths"), WRONG)
def test_helm_names_every_value_that_is_wrong(variables, paths) -> None:
    with pytest.raises(HelmFailed) as failed:
        helm("template", "oriel", str(CHART), values=of_the_chart_only(given(variables)))
    named = set(re.findall(r"^(?:- )?([a-z][\w.-]+):? ", str(failed.value), re.M))
    assert paths <= named and not {each for each in named - paths if "policies.documents." in each}, paths - named


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
