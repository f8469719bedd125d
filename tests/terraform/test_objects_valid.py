"""Every object of every point of the matrix, judged by Kubernetes' own schemas; custom ones by schemas of our own."""

import copy
from collections import Counter

import pytest

from . import objects
from .judges import VERSIONS, WRONG, judge


@pytest.mark.parametrize(("gpu", "zero", "keda"), objects.MATRIX)
def test_every_object_is_one_that_kubernetes_takes(shared, gpu, zero, keda) -> None:
    found = objects.at(shared, gpu, zero, keda)
    assert {"Deployment", "Service", "NetworkPolicy", "ConfigMap", "Namespace"} <= {each["kind"] for each in found}
    for each in found:
        for version in VERSIONS:
            judge(each, version)


@pytest.mark.parametrize(("gpu", "zero", "keda"), objects.MATRIX)
def test_no_name_twice_and_all_in_the_namespace(shared, gpu, zero, keda) -> None:
    found = objects.at(shared, gpu, zero, keda)
    names = Counter((each["kind"], each["metadata"]["name"]) for each in found)
    assert not [name for name, count in names.items() if count > 1]
    for each in found:
        if each["kind"] in ("Namespace", "PriorityClass"):
            assert "namespace" not in each["metadata"]
        else:
            assert each["metadata"]["namespace"] == "oriel", each["metadata"]["name"]
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "oriel"


@pytest.mark.parametrize("other", [{}, {"redis_url": None, "redis_auth_secret_ref": None, "cloud": "local"}])
def test_no_value_is_null(shared, other) -> None:
    for each in objects.at(shared, True, True, True, infrastructure=other):
        assert not [path for path, value in objects.leaves(each) if value is None], each["kind"]


def test_the_objects_of_a_bundled_redis_and_of_given_services_are_valid_too(shared) -> None:
    found = objects.at(
        shared,
        True,
        False,
        False,
        infrastructure={"redis_url": None, "redis_auth_secret_ref": None},
        logic={"services": {"hello.py": "async def handle(request): ..."}},
        gateway={"tls_secret": "tls", "load_balancer_ip": "203.0.113.9", "source_ranges": ["198.51.100.0/24"]},
        model_groups={"big": {"accelerator": "tensorrt", "cache": {"gb": 50, "claim": True}, "models": ["llm-*"]}},
    )
    assert "redis" in objects.pods(found) and "inference-big" in objects.pods(found)
    assert objects.of(found, "Service")["gateway"]["spec"]["loadBalancerSourceRanges"] == ["198.51.100.0/24"]
    for each in found:
        for version in VERSIONS:
            judge(each, version)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Deployment", lambda each: each["spec"]["template"]["spec"].update(terminationGracePeriod=3)),
        ("NetworkPolicy", lambda each: each["spec"].update(policyTypes="Ingress")),
        ("HorizontalPodAutoscaler", lambda each: each["spec"].pop("maxReplicas")),
        ("ScaledObject", lambda each: each["spec"].update(minReplicas=0)),
        ("ScaledObject", lambda each: each["spec"]["triggers"][0]["metadata"].update(value=1)),
        ("ServiceMonitor", lambda each: each["spec"]["endpoints"][0].update(targetPort="metrics", interval="30")),
        ("PrometheusRule", lambda each: each["spec"]["groups"][0]["rules"][0].update(record=None)),
    ],
)
def test_the_judges_refuse_what_is_wrong(shared, kind, change) -> None:
    found = objects.objects(shared, keda={"enabled": True}, model_groups=objects.NAMED, observability=objects.WATCHED)
    each = copy.deepcopy(next(iter(objects.of(found, kind).values())))
    change(each)
    for version in VERSIONS:
        with pytest.raises(WRONG):
            judge(each, version)
