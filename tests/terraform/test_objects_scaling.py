"""Every Deployment without a fixed number is scaled by exactly one thing; to no replica only where one can wake it."""

import pytest

from . import objects
from .harness import TerraformFailed

GROUPS = {
    "small": {"accelerator": "cpu", "replicas": {"min": 2, "max": 9}, "load_grace_s": 60},
    "big": {"accelerator": "gpu", "replicas": {"min": 1, "max": 3}, "load_grace_s": 1800},
}


def targets(found: list[objects.Object]) -> list[str]:
    scalers = [each for each in found if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    for each in scalers:
        target = each["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == ("apps/v1", "Deployment")
    return [each["spec"]["scaleTargetRef"]["name"] for each in scalers]


@pytest.mark.parametrize(("gpu", "zero", "keda"), objects.MATRIX)
def test_one_scaler_for_each_deployment_without_a_number(shared, gpu, zero, keda) -> None:
    found = objects.at(shared, gpu, zero, keda)
    free = [name for name, each in objects.of(found, "Deployment").items() if "replicas" not in each["spec"]]
    assert sorted(targets(found)) == sorted(free)
    assert {"gateway", "logic", "inference-cpu"} <= set(free) and ("inference-gpu" in free) == gpu
    assert bool(objects.of(found, "ScaledObject")) == keda
    # KEDA asks the gateway: what scales the gateway must not be KEDA.
    assert set(objects.of(found, "HorizontalPodAutoscaler")) == ({"gateway"} if keda else set(free))


@pytest.mark.parametrize(("gpu", "zero", "keda"), objects.MATRIX)
def test_to_no_replica_only_with_keda_and_when_asked_for(shared, gpu, zero, keda) -> None:
    found = objects.at(shared, gpu, zero, keda)
    for name, each in objects.of(found, "HorizontalPodAutoscaler").items():
        assert each["spec"]["minReplicas"] >= 1, name
    for name, each in objects.of(found, "ScaledObject").items():
        assert (each["spec"]["minReplicaCount"] == 0) == zero, name
        assert each["spec"]["maxReplicaCount"] >= 1
        # A gateway that does not answer is no reason to lose everything.
        assert each["spec"]["fallback"]["replicas"] >= 1


def test_utilisation_is_of_requests_that_are_there(shared) -> None:
    found = objects.at(shared, True, True, False, model_groups=GROUPS)
    templates = objects.pods(found)
    for name, each in objects.of(found, "HorizontalPodAutoscaler").items():
        (metric,) = each["spec"]["metrics"]
        assert metric["resource"]["name"] == "cpu" and 30 <= metric["resource"]["target"]["averageUtilization"] <= 80
        for container in templates[name]["spec"]["containers"]:
            assert container["resources"]["requests"]["cpu"], f"{name}: without a request there is no utilisation"


@pytest.mark.parametrize("keda", [True, False])
def test_up_at_once_down_slowly_and_not_before_a_load_would_have_paid(shared, keda) -> None:
    found = objects.at(shared, True, True, keda, model_groups=GROUPS)
    behaviors = {name: each["spec"]["behavior"] for name, each in objects.of(found, "HorizontalPodAutoscaler").items()}
    for name, each in objects.of(found, "ScaledObject").items():
        own = each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
        # Ours and KEDA's must not have one name: Helm refuses to make what somebody else has made.
        assert own.get("name", f"keda-hpa-{name}") not in behaviors
        behaviors[name] = own["behavior"]
        assert each["spec"]["cooldownPeriod"] >= own["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
    assert set(behaviors) == {"gateway", "logic", "inference-small", "inference-big"}
    for behavior in behaviors.values():
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
        assert 300 <= behavior["scaleDown"]["stabilizationWindowSeconds"] <= 3600
        assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    assert behaviors["inference-big"]["scaleDown"]["stabilizationWindowSeconds"] == 3600
    assert behaviors["inference-small"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_gateway_and_logic_are_two_and_a_model_group_is_one_as_the_readme_says(shared) -> None:
    found = objects.of(objects.objects(shared), "HorizontalPodAutoscaler")
    least = {name: each["spec"]["minReplicas"] for name, each in found.items()}
    assert least == {"gateway": 2, "logic": 2, "inference-cpu": 1, "inference-gpu": 1}


def test_keda_is_refused_until_its_scaler_exists(shared) -> None:
    images = {"registry": "registry.example/oriel", "tag": "0.1.0"}
    with pytest.raises(TerraformFailed, match=r"keda\.enabled: the gateway has no scaler for KEDA yet"):
        shared("modules/platform").plan(infrastructure=objects.INFRASTRUCTURE, images=images, keda={"enabled": True})


def test_bounds_are_the_callers(shared) -> None:
    bounds = {"gateway": {"replicas": {"min": 3, "max": 5}}, "logic": {"replicas": {"min": 2, "max": 4}}}
    found = objects.at(shared, True, False, False, model_groups=GROUPS, **bounds)
    by_cpu = {
        name: (each["spec"]["minReplicas"], each["spec"]["maxReplicas"])
        for name, each in objects.of(found, "HorizontalPodAutoscaler").items()
    }
    assert by_cpu == {"gateway": (3, 5), "logic": (2, 4), "inference-small": (2, 9), "inference-big": (1, 3)}
    found = objects.at(shared, True, False, True, model_groups=GROUPS, **bounds)
    by_queue = {
        name: (each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"], each["spec"]["fallback"]["replicas"])
        for name, each in objects.of(found, "ScaledObject").items()
    }
    assert by_queue == {"logic": (2, 4, 2), "inference-small": (2, 9, 2), "inference-big": (1, 3, 1)}


def test_kedas_trigger_names_the_gateways_reserved_port_and_nothing_public(shared) -> None:
    found = objects.at(shared, True, True, True)
    services = objects.of(found, "Service")
    gateway = objects.pods(found)["gateway"]["metadata"]["labels"]
    for name, each in objects.of(found, "ScaledObject").items():
        (trigger,) = each["spec"]["triggers"]
        assert trigger["type"] == "external-push" and trigger["metadata"]["target"] == name
        host, port = trigger["metadata"]["scalerAddress"].split(":")
        service, namespace, *rest = host.split(".")
        assert (namespace, port, rest) == ("oriel", "8083", ["svc", "cluster", "local"])
        spec = services[service]["spec"]
        assert objects.matches(spec["selector"], gateway) and spec["type"] == "ClusterIP"
        assert [entry["targetPort"] for entry in spec["ports"]] == [8083]
    assert 8083 not in [entry["targetPort"] for entry in services["gateway"]["spec"]["ports"]]
    assert "gateway-scaler" not in objects.of(objects.at(shared, True, True, False), "Service")
