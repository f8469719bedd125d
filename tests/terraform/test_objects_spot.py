"""Model groups on several GPUs and on spot machines: placement, routes, floors, and the time that a notice leaves."""

import pytest

from oriel_policies.documents import compile_documents
from oriel_policies.promise.routing import RouteTable

from . import objects
from .harness import TerraformFailed

GROUPS = {
    "small": {"accelerator": "cpu", "spot": {"replicas": 3}},
    "chat": {
        "accelerator": "gpu",
        "models": ["chat-*"],
        "gpus": 2,
        "replicas": {"min": 1},
        "spot": {"replicas": 2, "tiers": ["bronze", "silver"]},
    },
}
KEDA = {"enabled": True}


def found(shared, cloud="aws"):
    return objects.objects(shared, model_groups=GROUPS, keda=KEDA, infrastructure={"cloud": cloud})


def test_copies_on_spot_machines_come_and_go_and_floors_stay_on_demand(shared):
    scaled = objects.of(found(shared), "ScaledObject")
    bounds = {name: (each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"]) for name, each in scaled.items()}
    assert bounds["inference-chat"] == (1, 4) and bounds["inference-chat-spot"] == (0, 2)
    assert bounds["inference-small-spot"] == (0, 3)
    pods = objects.pods(found(shared))
    for name, on_gpu in (("small", False), ("chat", True)):
        usual, spot = pods[f"inference-{name}"]["spec"], pods[f"inference-{name}-spot"]["spec"]
        assert spot["nodeSelector"]["oriel.dev/spot"] == "true"
        assert "oriel.dev/spot" not in usual.get("nodeSelector", {})
        tolerated = [{each["key"] for each in spec["tolerations"]} for spec in (usual, spot)]
        assert tolerated[1] - tolerated[0] == {"oriel.dev/spot", "kubernetes.azure.com/scalesetpriority"}
        (container,), (other,) = spot["containers"], usual["containers"]
        assert container["args"][:2] == other["args"][:2], "the same models"
        limits = [each["resources"]["limits"].get("nvidia.com/gpu") for each in (container, other)]
        assert limits == (["2", "2"] if on_gpu else [None, None])
    # CPU pods only go where an anchor is.
    assert {each["key"] for each in pods["anchor"]["spec"]["tolerations"]} >= {"oriel.dev/spot"}


def test_tenants_of_those_tiers_go_there_first_and_nobody_else(shared):
    documents = objects.of(found(shared), "ConfigMap")["policies"]["data"]
    snapshot = compile_documents({name: text.encode() for name, text in documents.items()})
    routes = RouteTable(snapshot.routes)
    for model, group, tiers in (("chat-x", "chat", {"bronze", "silver"}), ("any", "small", {"bronze"})):
        for tier in ("gold", "silver", "bronze"):
            first = routes.for_model(model, "", tier)[0]
            own = f"inference-{group}"
            assert first.pool == (f"{own}-spot" if tier in tiers else own), (model, tier)
            assert [each.pool for each in first.fallback] == ([own] if tier in tiers else [])
    assert snapshot.pools["inference-chat-spot"].scaling.minimum == 0


# Seconds from the notice until pods are killed: of Google's 30 s the kubelet leaves them 15.
@pytest.mark.parametrize(("cloud", "notice_s"), [("aws", 120), ("azure", 30), ("gcp", 15)])
def test_a_drain_on_a_spot_machine_ends_within_the_notice(shared, cloud, notice_s):
    for name in ("inference-small-spot", "inference-chat-spot"):
        spec = objects.pods(found(shared, cloud))[name]["spec"]
        (container,) = spec["containers"]
        drain_s = int(container["args"][container["args"].index("--exit-timeout-secs") + 1])
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pause_s + drain_s + 2 <= spec["terminationGracePeriodSeconds"] <= notice_s


def test_spot_without_keda_is_refused_since_nothing_would_start_its_pods(shared):
    with pytest.raises(TerraformFailed, match=r"so\s+does\s+spot"):
        objects.objects(shared, model_groups={"small": GROUPS["small"]})
    with pytest.raises(TerraformFailed, match=r"gpus\s+from\s+1\s+to\s+16"):
        objects.objects(shared, model_groups={"big": {"accelerator": "gpu", "gpus": 17}})
