"""The order in which Terraform installs its releases, and what each of them is given."""

import json
import re
from typing import Any

from . import objects

ALL = {
    "nvidia_device_plugin": {"enabled": True},
    "metrics_server": {"enabled": True},
    "prometheus_operator_crds": {"enabled": True},
}


def given(**variables: Any) -> dict[str, Any]:
    images = {"registry": "registry.example/oriel", "tag": "0.1.0"}
    return {"infrastructure": objects.INFRASTRUCTURE, "images": images, **variables}


def order(calls: Any, action: str) -> list[str]:
    made = [call for call in calls if call.rpc == "ApplyResourceChange" and call.type == "helm_release"]
    return [call.address or call.id for call in made if call.action == action]


def test_releases_are_made_in_order_and_destroyed_the_other_way_round(workspace) -> None:
    one = workspace("modules/platform")
    variables = given(keda={"enabled": True}, model_groups=objects.NAMED, charts=ALL, observability=objects.WATCHED)
    one.apply(**variables)
    made = order(one.calls, "create")
    assert made[0] == "helm_release.namespace"
    assert {name.split('"')[1] for name in made[1:-1]} == {
        "keda",
        "nvidia-device-plugin",
        "metrics-server",
        "prometheus-operator-crds",
    }
    assert made[-1] == "helm_release.oriel"
    assert not one.plan(**variables).changes
    one.destroy(**variables)
    gone = [call.type for call in one.calls if call.action == "delete"]
    assert gone.count("helm_release") == len(made) and not one.state().resources()


def test_a_release_that_fails_is_rolled_back_and_models_have_the_time_they_need(shared) -> None:
    bounds = {"load_grace_s": 1800, "replicas": {"min": 1, "max": 8}}
    one = shared("modules/platform")
    for accelerator, pods_in_turn in (("cpu", 4), ("gpu", 8)):
        groups = {"slow": {"accelerator": accelerator, **bounds}}
        plan = one.plan(**given(keda={"enabled": True}, model_groups=groups))
        for address, release in plan.resources("helm_release").items():
            assert release["atomic"] and release["cleanup_on_fail"] and release["wait"], address
            assert release["timeout"] >= 300 and release["max_history"] == 10
        # A node, and then one pod after another, or a quarter of them at a time.
        assert plan.values("helm_release.oriel")["timeout"] >= 900 + pods_in_turn * 1800


def test_a_namespace_that_is_there_for_its_secrets_is_taken_over_and_left(shared) -> None:
    """docs/deploy.md: Secrets are put there before the first apply. No other release takes what is not its own."""
    plan = shared("modules/platform").plan(**given())
    taking = {address for address, each in plan.resources("helm_release").items() if each.get("take_ownership")}
    assert taking == {"helm_release.namespace"}
    annotations = {each["kind"]: each["metadata"].get("annotations", {}) for each in plan.objects()}
    kept = {kind: each for kind, each in annotations.items() if "helm.sh/resource-policy" in each}
    assert kept == {"Namespace": {"helm.sh/resource-policy": "keep"}}


def test_charts_of_others_are_pinned_and_there_only_when_asked_for(shared) -> None:
    one = shared("modules/platform")
    versions = {"keda": "2.18.1", "nvidia-device-plugin": "0.18.2", "metrics-server": "3.13.0"}
    charts = one.plan(
        **given(
            keda={"enabled": True},
            model_groups=objects.NAMED,
            charts=ALL | {"kube_prometheus_stack": {"enabled": True}},
        )
    )
    found = {each["name"]: each for each in charts.resources("helm_release").values() if each.get("repository")}
    assert set(found) == {*versions, "kube-prometheus-stack"}, "its own custom resources come with the whole stack"
    for name, release in found.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", release["version"]) and release["repository"].startswith("https://")
        assert release["version"] == versions.get(name, release["version"])
    values = json.loads(found["nvidia-device-plugin"]["values"][0])
    # The chart's own affinity asks for labels of node-feature-discovery, which is not there; null takes it away.
    assert values["affinity"] is None and values["nodeSelector"] == objects.INFRASTRUCTURE["gpu_node_selector"]
    assert values["tolerations"][0]["key"] == objects.INFRASTRUCTURE["gpu_taint"]["key"]
    assert json.loads(found["keda"]["values"][0])["watchNamespace"] == "oriel"
    few = one.plan(**given(gpu_enabled=False))
    assert set(few.resources("helm_release")) == {"helm_release.namespace", "helm_release.oriel"}
