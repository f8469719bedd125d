"""terraform/local: the same platform on any kubeconfig, checked when planning."""

import json

import pytest

from .harness import TerraformFailed

GIVEN = {
    "kubeconfig_path": "tests/kubeconfig.yaml",
    "model_repository_url": "s3://https://store.example.com:9000/models/oriel",
    "image_registry": "registry.example.com/oriel",
}
SERVED = {"data.kubernetes_server_version": {"set": {"version": "1.33.4"}}}


@pytest.fixture
def local(workspace):
    return workspace("local", rules=SERVED)


def test_from_nothing_to_nothing_again(local):
    assert local.validate() == []
    plan = local.plan(**GIVEN)
    kinds = {each["kind"] for each in plan.objects()}
    assert {"Namespace", "Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    text = json.dumps(plan.objects())
    assert "registry.example.com/oriel/oriel-gateway:0.1.0" in text
    assert "s3://https://store.example.com:9000/models/oriel/cpu" in text
    assert "nvidia.com/gpu" not in {
        key
        for each in plan.objects()
        if each["kind"] == "Deployment"
        for container in each["spec"]["template"]["spec"]["containers"]
        for key in container["resources"]["requests"]
    }
    local.apply(**GIVEN)
    helm = next(call for call in local.calls if call.type.endswith("/helm")).values["kubernetes"]
    assert helm == {"config_path": "tests/kubeconfig.yaml", "config_context": "rack"} | {
        key: None for key in helm if key not in ("config_path", "config_context")
    }
    assert not local.plan(**GIVEN).changes
    assert local.destroy(**GIVEN).resources() == {}


def test_gpu_nodes_are_known_by_what_is_said(local):
    plan = local.plan(
        **GIVEN,
        gpu_enabled=True,
        gpu_node_selector={"nvidia.com/gpu.present": "true"},
        gpu_taint={"key": "gpu", "value": "yes", "effect": "NoExecute"},
    )
    (server,) = [
        each for each in plan.objects() if each["metadata"]["name"] == "inference-gpu" and each["kind"] == "Deployment"
    ]
    pod = server["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert "gpu" in {each["key"] for each in pod["tolerations"]}


@pytest.mark.parametrize("version", ["1.29.15", "unknown"])
def test_a_cluster_that_is_too_old_is_refused_when_planning(workspace, version):
    old = workspace("local", rules={"data.kubernetes_server_version": {"set": {"version": version}}})
    with pytest.raises(TerraformFailed, match="1.30 or newer"):
        old.plan(**GIVEN)


def owner(name: str, namespace: str = "keda", release: str = "keda") -> dict[str, object]:
    """The external metrics API of a cluster, and whose it is."""
    annotations = {"meta.helm.sh/release-name": release}
    return {"metadata": {"annotations": annotations}, "spec": {"service": {"name": name, "namespace": namespace}}}


def type_of(value: object) -> object:
    """Terraform's type of objects of texts. A value of a dynamic type is sent as its type and itself."""
    return ["object", {name: type_of(each) for name, each in value.items()}] if isinstance(value, dict) else "string"


OPERATOR = "keda-operator-metrics-apiserver"


@pytest.mark.parametrize(
    ("keda", "found", "said"),
    [
        ({}, owner("datadog-cluster-agent", "datadog"), "belongs to datadog/datadog-cluster-agent"),
        ({}, owner(OPERATOR, "kube-system"), "belongs to kube-system/keda-operator-metrics-apiserver"),
        ({}, owner(OPERATOR, release="theirs"), "a KEDA that was not installed from here"),
        ({"install": False}, None, "this cluster has no KEDA"),
        ({}, None, ""),
        ({}, owner(OPERATOR), ""),
        ({"install": False, "namespace": "kube-system"}, owner(OPERATOR, "kube-system"), ""),
    ],
)
def test_whose_the_external_metrics_are_is_asked_when_planning(workspace, keda, found, said):
    objects = {} if found is None else {"found": [json.dumps(type_of(found)), found]}
    asked = SERVED | {"data.kubernetes_resources": {"set": {"objects": objects}}}
    given = GIVEN | {"platform": {"keda": {"enabled": True, **keda}}}
    if said:
        with pytest.raises(TerraformFailed, match=said):
            workspace("local", rules=asked).plan(**given)
        return
    plan = workspace("local", rules=asked).plan(**given)
    assert any(each["kind"] == "ScaledObject" for each in plan.objects())
    assert ('module.platform.helm_release.charts["keda"]' in plan.actions()) == keda.get("install", True)
