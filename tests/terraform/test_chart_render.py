"""What the chart makes of values, without a cluster and without Terraform."""

import gzip
import json
import random
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oriel_policies.documents import compile_documents

from .chart_values import PLAIN, SCHEMA, anything, in_order, named, smallest
from .helm import CHART, KEYS, HelmFailed, helm, rendered
from .judges import VERSIONS, judge
from .objects import of, pods

MODULE = CHART.parents[1] / "terraform/modules/platform"
# All that is in no namespace, so that an uninstall by hand knows what is left.
OF_THE_CLUSTER = {("PriorityClass", f"oriel-{name}") for name in ("gpu", "gateway", "cpu")}
VALUES = pytest.mark.parametrize("values", [smallest(), anything(PLAIN), named(PLAIN)], ids=["few", "texts", "names"])


@VALUES
def test_helm_lint_finds_nothing(values) -> None:
    helm("lint", "--strict", str(CHART), values=values)


@VALUES
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_kubernetes_takes(values, version) -> None:
    for each in rendered(values):
        judge(each, version)


@VALUES
def test_nothing_is_outside_the_namespace_but_priority_classes(values) -> None:
    found = rendered(values, namespace="models")
    outside = {(each["kind"], each["metadata"]["name"]) for each in found if "namespace" not in each["metadata"]}
    assert outside - {("StorageClass", "standard")} == OF_THE_CLUSTER
    assert ("storage" in values["infrastructure"]) == (("StorageClass", "standard") in outside)
    assert {each["metadata"].get("namespace") for each in found} == {"models", None}


def preset(schema: Any) -> dict[str, Any]:
    """Return the defaults of the members that have one, those of their members too, and null for those without."""
    found = {}
    for name, each in schema["properties"].items():
        if name not in schema.get("required", ()):
            found[name] = preset(each) if "properties" in each and "default" in each else each.get("default")
    return found


def below(*path: str) -> dict[str, Any]:
    """Return the defaults at a path; below a map, of its values."""
    schema = SCHEMA
    for name in path:
        schema = schema["properties"][name]
        schema = schema["additionalProperties"] or schema
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return preset(schema)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (lambda more: {"model_groups": {"a": {"accelerator": "cpu", **more}}}, ["model_groups"]),
        (lambda more: {"model_groups": {"a": {"accelerator": "gpu", **more}}}, ["model_groups"]),
        (lambda more: {"policies": {"tenants": {"a": {"tier": "gold", "keys_sha256": [], **more}}}},
         ["policies", "tenants"]),
        (lambda more: {"policies": {"pools": {"a": {"address": "a.b.svc", "port": 1, **more, "models": ["m"]}}}},
         ["policies", "pools"]),
        (lambda more: {"observability": {"otlp": {"endpoint": "https://o", **more}}}, ["observability", "otlp"]),
    ],
)  # fmt: skip
def test_what_is_left_out_below_a_name_has_the_schemas_default(given: Callable[..., Any], path) -> None:
    gpu = {"gpu_enabled": True, "infrastructure": {**smallest()["infrastructure"], "gpu_node_selector": {"a": "b"}}}
    more = below(*path)
    assert more
    assert in_order(rendered(smallest() | gpu | given({}))) == in_order(rendered(smallest() | gpu | given(more)))


def test_keys_are_those_given_or_made_or_somebody_elses() -> None:
    def keys(given: Any) -> Any:
        return of(rendered({**smallest(), "keys": given}), "Secret").get("oriel-keys", {}).get("stringData")

    assert keys(KEYS) == KEYS
    one, other = keys({}), keys({})
    assert all(len(text) >= 32 and text != other[name] for name, text in one.items()) and set(one) == set(KEYS)
    assert keys({"external": True}) is None
    assert "oriel-keys" in str(pods(rendered({**smallest(), "keys": {"external": True}}))["gateway"])


def test_a_key_that_changes_replaces_the_pods_that_read_it_at_their_start() -> None:
    def templates(**more: Any) -> dict[str, Any]:
        return pods(rendered(smallest() | more))

    before = templates()
    assert before == templates(gateway={"plain_http": True}), "what changes no key replaces no pod"
    secrets = {**smallest()["infrastructure"], "secrets": {"redis": {"auth": "x"}}}
    for more, replaced in (
        ({"keys": KEYS | {"redis": "x" * 32}}, {"redis", "gateway"}),
        ({"keys": KEYS | {"admin": "x" * 32}}, {"gateway"}),
        ({"infrastructure": secrets}, {"gateway"}),
    ):
        after = templates(**more)
        assert {name for name in before if before[name] != after[name]} == replaced, more
    assert "x" * 32 not in str(templates(keys=KEYS | {"redis": "x" * 32}))


def test_an_image_is_named_by_its_tag_and_by_its_digest_if_there_is_one() -> None:
    digests = {name: f"sha256:{number}" + "0" * 63 for number, name in enumerate(("gateway", "logic", "inference-cpu"))}
    groups = {name: {"accelerator": name, "models": [name]} for name in ("cpu", "openvino")}
    images = {**smallest()["images"], "digests": digests}
    found = pods(rendered(smallest() | {"images": images, "model_groups": groups}))
    used = {name: each["spec"]["containers"][0]["image"] for name, each in found.items() if name != "redis"}
    assert used == {
        "gateway": f"registry.example/oriel/oriel-gateway:0.1.0@{digests['gateway']}",
        "logic": f"registry.example/oriel/oriel-logic:0.1.0@{digests['logic']}",
        "inference-cpu": f"registry.example/oriel/oriel-inference:0.1.0-cpu@{digests['inference-cpu']}",
        "inference-openvino": "registry.example/oriel/oriel-inference:0.1.0-openvino",
    }


@pytest.mark.parametrize(("least", "counts"), [(0, (0, 3)), (1, (None, 1)), (2, (None, 2))])
def test_a_pool_with_spare_pods_wakes_with_them_and_falls_to_none(least: int, counts: tuple[int | None, int]) -> None:
    replicas = {"min": least, "max": 4, "spare": 2}
    values = {"keda": {"enabled": True}, "logic": {"replicas": replicas}}
    values["model_groups"] = {"a": {"accelerator": "cpu", "replicas": replicas}}
    found = rendered(smallest() | values)
    for each in of(found, "ScaledObject").values():
        assert (each["spec"].get("idleReplicaCount"), each["spec"]["minReplicaCount"]) == counts
        assert ("fallback" in each["spec"]) == bool(least)
    assert scaled(found) == [(least, 2)] * 2
    replicas["spare"] = 4
    with pytest.raises(HelmFailed, match=r"logic.replicas: spare is not less than max"):
        rendered(smallest() | values)


def test_values_of_a_release_before_spare_pods_mean_none() -> None:
    """`helm upgrade --reuse-values` gives the chart no other defaults than those of the release before."""
    assert scaled(rendered(smallest() | {"keda": {"enabled": True}, "logic": {"replicas": {"spare": None}}}))[0] == (
        0,
        0,
    )


def scaled(found: list[Any]) -> list[tuple[int, int]]:
    """Return minimum and spare of the pools of the chart's documents."""
    data = of(found, "ConfigMap")["policies"]["data"]
    pools = compile_documents({name: text.encode() for name, text in data.items()}).pools
    return [(each.scaling.minimum, each.scaling.spare) for each in pools.values() if each.scaling is not None]


def test_an_engine_of_others_finds_its_users_name_and_home_without_a_password_file() -> None:
    engine = {"kind": "vllm", "image": "i:1", "command": ["python3"]}
    values = {"keda": {"enabled": True}, "model_groups": {"own": {"accelerator": "cpu", "engine": engine}}}
    (container,) = pods(rendered(smallest() | values))["inference-own"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    asks = "import getpass, os, pwd; del pwd.getpwuid; print(getpass.getuser(), os.path.expanduser('~'))"
    words = [sys.executable, "-c", asks]
    told = subprocess.run(words, env={k: v for k, v in env.items() if v}, capture_output=True, text=True)
    assert told.stdout.split() == ["oriel", "/var/lib/oriel"], told.stderr


@pytest.mark.parametrize(
    ("service", "is_ours"),
    [
        ({"namespace": "keda", "name": "keda-operator-metrics-apiserver"}, True),
        ({"namespace": "kube-system", "name": "keda-operator-metrics-apiserver"}, False),
        ({"namespace": "keda", "name": "datadog-cluster-agent"}, False),
    ],
)
def test_another_owner_of_the_external_metrics_is_found_by_an_install(tmp_path: Path, service, is_ours) -> None:
    """A cluster's answer stands in place of the question, because no cluster is here."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    checks = chart / "templates/checks.yaml"
    asked = '(lookup "apiregistration.k8s.io/v1" "APIService" "" "v1beta1.external.metrics.k8s.io")'
    words = " ".join(f'"{name}" "{value}"' for name, value in service.items())
    assert checks.read_text().count(asked) == 1
    checks.write_text(checks.read_text().replace(asked, f'(dict "spec" (dict "service" (dict {words})))'))
    assert rendered(smallest(), chart=chart), "nobody is asked without KEDA"
    with_keda = {**smallest(), "keda": {"enabled": True}}
    if is_ours:
        assert rendered(with_keda, chart=chart)
    else:
        with pytest.raises(HelmFailed, match=f"belongs to {service['namespace']}/{service['name']}"):
            rendered(with_keda, chart=chart)


def test_keda_can_be_switched_on_while_the_earlier_autoscalers_are_there() -> None:
    """Helm makes what is new before it deletes what is not named any more, and KEDA's webhook looks at both."""
    earlier = of(rendered(smallest()), "HorizontalPodAutoscaler")
    made = of(rendered({**smallest(), "keda": {"enabled": True}}), "ScaledObject")
    assert made
    for name in made:
        assert earlier[name]["metadata"]["annotations"] == {"validations.keda.sh/hpa-ownership": "false"}


def test_no_two_objects_have_one_name_whatever_a_group_is_called() -> None:
    watched = {"service_monitors": True, "otlp": {"endpoint": "https://otlp.example"}}
    groups = {name: {"accelerator": "cpu", "models": [name]} for name in ("metrics", "internal", "scaler", "cpu")}
    for keda in (False, True):
        values = {"keda": {"enabled": keda}, "model_groups": groups, "observability": watched}
        found = [(each["kind"], each["metadata"]["name"]) for each in rendered(smallest() | values)]
        assert len(found) == len(set(found))


def test_helm_can_keep_the_largest_release_that_a_plan_lets_through() -> None:
    """In a Secret of at most 1 MiB: chart, values and objects, compressed. The rest is for dashboards that grow."""
    (bound,) = re.findall(r"base64gzip\(.*\) <= (\d+)", (MODULE / "variables.tf").read_text())
    services = {"a.py": b64encode(random.Random(1).randbytes(int(bound) * 3 // 4)).decode()}
    groups = {f"group-{i}": {"accelerator": "cpu", "models": [f"model-{i}"]} for i in range(40)}
    watched = {"service_monitors": True, "otlp": {"endpoint": "https://otlp.example"}}
    more = {"keda": {"enabled": True}, "model_groups": groups, "observability": watched}
    values = smallest() | more | {"logic": {"services": services}}
    files = [b64encode(each.read_bytes()).decode() for each in CHART.rglob("*") if each.is_file()]
    objects = helm("template", "oriel", str(CHART), values=values)
    kept = b64encode(gzip.compress(json.dumps([files, values, objects]).encode()))
    assert len(kept) < 1_000_000


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({}, {"gateway", "policies"}),
        ({"gateway": {"source_ranges": ["203.0.113.0/24"]}, "policies": {"store": "s3://policies"}}, set()),
        ({"gateway": {"service_annotations": {"networking.gke.io/load-balancer-type": "Internal"}}}, {"policies"}),
        ({"gateway": {"service_type": "ClusterIP"}, "policies": {"documents": {"a.toml": "[tenants.a]"}}}, set()),
    ],
)
def test_notes_after_an_install_warn_as_a_plan_does(tmp_path, values, warned) -> None:
    copy = shutil.copytree(CHART, tmp_path / "chart")
    notes = (copy / "templates/NOTES.txt").read_text()
    text = f'{{{{- define "notes" }}}}{notes}{{{{ end }}}}kind: Notes\ntext: {{{{ include "notes" . | toJson }}}}\n'
    (copy / "templates/notes.yaml").write_text(text)
    (found,) = [each["text"] for each in rendered(smallest() | values, chart=copy) if each["kind"] == "Notes"]
    assert set(re.findall(r"WARNING: (\w+):", found)) == warned
