"""Pools of the clouds' roots: spot machines, several GPUs, ARM, pools that others make, versions and administrators."""

from typing import Any

import pytest

from .clouds import REGIONS
from .harness import HERE, Plan, TerraformFailed
from .standin import rules

POOLS = {
    "aws": "aws_eks_node_group.this",
    "gcp": "google_container_node_pool.scaled",
    "azure": "azurerm_kubernetes_cluster_node_pool.scaled",
}


def planned(shared, cloud: str, **variables: Any) -> Plan:
    return shared(cloud).plan(region=REGIONS[cloud], **variables)


def pool(plan: Plan, cloud: str, name: str) -> dict[str, Any]:
    values = plan.values(f'{POOLS[cloud]}["{name if cloud != "azure" else name.replace("-", "")}"]')
    return values["node_config"][0] | values if cloud == "gcp" else values


def taints(values: dict[str, Any]) -> set[str]:
    found = values.get("node_taints") or values.get("taint") or []
    return {each.partition("=")[0] if isinstance(each, str) else each["key"] for each in found}


@pytest.mark.parametrize("cloud", REGIONS)
def test_spot_pools_hold_only_what_tolerates_them_and_floors_stay_on_demand(shared, cloud):
    sizes = {"cpu_pool": {"spot_max_size": 3}, "gpu_pool": {"spot_max_size": 2}}
    plan = planned(shared, cloud, scale_to_zero=False, **sizes)
    for name, most in (("cpu", 3), ("gpu", 2)):
        spot, usual = (pool(plan, cloud, each) for each in (f"{name}-spot", name))
        labels = spot.get("node_labels") or spot["labels"]
        assert (labels["oriel.dev/pool"], labels["oriel.dev/spot"]) == (name, "true")
        assert "oriel.dev/spot" in taints(spot) and "oriel.dev/spot" not in taints(usual)
        scaling = {
            "aws": lambda each: (each["scaling_config"][0]["min_size"], each["scaling_config"][0]["max_size"]),
            "gcp": lambda each: tuple(each["autoscaling"][0][f"total_{end}_node_count"] for end in ("min", "max")),
            "azure": lambda each: (each["min_count"], each["max_count"]),
        }[cloud]
        assert scaling(spot) == (0, most) and scaling(usual)[0] == 1
        kind = {"aws": "capacity_type", "gcp": "spot", "azure": "priority"}[cloud]
        assert (str(spot[kind]).upper(), usual.get(kind)) in (("SPOT", "ON_DEMAND"), ("TRUE", None), ("SPOT", None))
        if cloud == "azure":  # refuses them for spot machines
            assert (spot["upgrade_settings"], spot["eviction_policy"]) == ([], "Delete")


MACHINE = rules.load(HERE / "rules" / "google.toml")["data.google_compute_machine_types"].set["machine_types"][0]
FOUR = {"guest_accelerator_count": 4, "guest_accelerator_type": "nvidia-l4"}
COUNTED = {
    "aws": {"data.aws_ec2_instance_type": {"gpus": [{"count": 4, "manufacturer": "", "memory_size": 1, "name": ""}]}},
    "gcp": {"data.google_compute_machine_types": {"machine_types": [MACHINE | {"accelerators": [FOUR]}]}},
}


@pytest.mark.parametrize(("cloud", "kind"), [("aws", "g6.12xlarge"), ("gcp", "g2-standard-48")])
def test_several_gpus_are_those_of_the_machine(shared, cloud, kind):
    with shared(cloud).reading(COUNTED[cloud]):
        plan = planned(shared, cloud, gpu_pool={"instance_type": kind, "gpus": 4})
        if cloud == "gcp":
            (accelerator,) = pool(plan, cloud, "gpu")["guest_accelerator"]
            assert (accelerator["type"], accelerator["count"]) == ("nvidia-l4", 4)
        with pytest.raises(TerraformFailed, match=f"gpu_pool.gpus: {kind} has 4 GPUs"):
            planned(shared, cloud, gpu_pool={"instance_type": kind, "gpus": 2})


def test_arm_nodes_get_the_image_for_arm(shared):
    arm = {"data.aws_ec2_instance_type": {"supported_architectures": ["arm64"]}}
    with shared("aws").reading(arm):
        plan = planned(shared, "aws", cpu_pool={"instance_type": "m7g.xlarge"})
    assert pool(plan, "aws", "cpu")["ami_type"] == "AL2023_ARM_64_STANDARD"
    assert pool(plan, "aws", "gpu")["ami_type"] == "AL2023_x86_64_NVIDIA"


@pytest.mark.parametrize("cloud", REGIONS)
def test_pools_of_karpenter_or_auto_provisioning_are_not_made(shared, cloud):
    """They cannot place CPU pods beside GPU pods: a plan that asks for it is refused."""
    selector = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    variables = {"cpu_pool": {"max_size": 0}, "gpu_pool": {"max_size": 0, "node_selector": selector}}
    with pytest.raises(TerraformFailed, match="share_gpu_nodes = false"):
        planned(shared, cloud, **variables)
    platform = {"placement": {"share_gpu_nodes": False}, "charts": {"cluster_autoscaler": {"enabled": False}}}
    plan = planned(shared, cloud, platform=platform, **variables)
    assert [each for each in plan.resources() if each.startswith(POOLS[cloud]) and '"system"' not in each] == []
    assert plan.outputs()["gpu_node_selector"] == selector
    assert not [each for each in plan.resources() if "autoscaler" in each]
    with pytest.raises(TerraformFailed, match="only for nodes that others make"):
        planned(shared, cloud, gpu_pool={"node_selector": selector})


def test_support_ends_or_is_paid_for_as_asked(shared):
    for extended, said in ((False, ("STANDARD", "REGULAR", "Standard")), (True, ("EXTENDED", "EXTENDED", "Premium"))):
        plans = {cloud: planned(shared, cloud, cluster={"extended_support": extended}) for cloud in REGIONS}
        (policy,) = plans["aws"].values("aws_eks_cluster.this[0]")["upgrade_policy"]
        (channel,) = plans["gcp"].values("google_container_cluster.this[0]")["release_channel"]
        aks = plans["azure"].values("azurerm_kubernetes_cluster.this[0]")
        assert (policy["support_type"], channel["channel"], aks["sku_tier"]) == said
        assert (aks.get("support_plan") == "AKSLongTermSupport") is extended


def test_each_administrator_is_named_once(shared):
    """Who applies first is one already, and the clouds refuse the same entry twice."""
    first = "arn:aws:iam::123456789012:role/deployer"
    plan = planned(shared, "aws", cluster={"administrators": [first, "arn:aws:iam::123456789012:role/ops"]})
    entries = plan.resources("aws_eks_access_entry")
    assert sorted(each["principal_arn"].rpartition("/")[2] for each in entries.values()) == ["deployer", "ops"]
    assert len(plan.resources("aws_eks_access_policy_association")) == 2
    first = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
    plan = planned(shared, "azure", cluster={"administrators": [first, "dddddddd-bbbb-cccc-dddd-eeeeeeeeeeee"]})
    roles = plan.resources("azurerm_role_assignment").values()
    admins = [each["principal_id"] for each in roles if str(each["role_definition_name"]).endswith("Cluster Admin")]
    assert len(admins) == len(set(admins)) == 2


def test_a_group_that_asks_for_more_gpus_than_a_node_has_is_refused(shared):
    with pytest.raises(TerraformFailed, match="asks for more GPUs than a node has"):
        planned(shared, "aws", platform={"model_groups": {"chat": {"accelerator": "gpu", "gpus": 2}}})


def test_arm_on_gke_is_refused_since_no_pod_would_ever_go_there(shared):
    with pytest.raises(TerraformFailed, match="GKE taints ARM nodes"):
        planned(shared, "gcp", cpu_pool={"instance_type": "c4a-standard-4"})
