"""Networks and clusters that are there: only what is missing is made, and what they lack is refused when planning."""

from typing import Any

import pytest

from .clouds import REGIONS
from .harness import TerraformFailed

AZURE = "/subscriptions/s/resourceGroups/theirs/providers"
VNET = f"{AZURE}/Microsoft.Network/virtualNetworks/hub"
NETWORKS: dict[str, dict[str, Any]] = {
    "aws": {"id": "vpc-theirs", "subnets": ["subnet-a", "subnet-b"], "public_subnets": ["subnet-c"]},
    "gcp": {"id": "theirs", "subnets": ["theirs-nodes"]},
    "azure": {"id": VNET, "subnets": [f"{VNET}/subnets/nodes", f"{VNET}/subnets/endpoints"]},
}
CLUSTERS = {
    "aws": "theirs",
    "gcp": "theirs",
    "azure": f"{AZURE}/Microsoft.ContainerService/managedClusters/theirs",
}
ADMINISTRATORS = {
    "aws": "arn:aws:iam::123456789012:role/ops",
    "gcp": "group:ops@example.com",
    "azure": "dddddddd-bbbb-cccc-dddd-eeeeeeeeeeee",
}
# Types that belong to a network, and to a cluster.
OF_A_NETWORK = {
    *("aws_vpc", "aws_default_security_group", "aws_internet_gateway", "aws_subnet", "aws_nat_gateway", "aws_route"),
    *("aws_route_table", "aws_route_table_association", "aws_vpc_endpoint", "google_compute_network"),
    *("google_compute_subnetwork", "google_compute_router", "google_compute_router_nat", "azurerm_virtual_network"),
    *("google_service_networking_connection", "azurerm_subnet", "azurerm_nat_gateway"),
}
OF_A_CLUSTER = {
    *("aws_eks_cluster", "aws_eks_addon", "aws_cloudwatch_log_group", "google_container_cluster"),
    *("azurerm_kubernetes_cluster", "azurerm_role_definition"),
}
POOLS = {
    "aws": ("aws_eks_node_group", "node_group_name", {"system", "cpu", "gpu", "cpu-spot", "gpu-spot"}),
    "gcp": ("google_container_node_pool", "name", {"system", "cpu", "gpu", "cpu-spot", "gpu-spot"}),
    "azure": ("azurerm_kubernetes_cluster_node_pool", "name", {"cpu", "gpu", "cpuspot", "gpuspot"}),
}


def given(cloud: str, *, existing: bool, **of_the_cluster: Any) -> dict[str, Any]:
    cluster = {"network": NETWORKS[cloud], "deletion_protection": False} | of_the_cluster
    return {"region": REGIONS[cloud], "cluster": cluster | ({"existing": CLUSTERS[cloud]} if existing else {})}


@pytest.mark.parametrize("cloud", REGIONS)
@pytest.mark.parametrize("existing", [False, True], ids=["network", "cluster"])
def test_only_what_is_missing_is_made_and_taken_away_again(workspace, cloud, existing):
    one = workspace(cloud)
    variables = given(cloud, existing=existing, administrators=[ADMINISTRATORS[cloud]])
    pools = {"cpu_pool": {"spot_max_size": 3}, "gpu_pool": {"spot_max_size": 2}}
    state = one.apply(**variables, **pools)
    types = {address.rpartition("module.platform[0].")[2].partition(".")[0] for address in state.resources()}
    assert not types & OF_A_NETWORK
    assert bool(types & OF_A_CLUSTER) is not existing
    assert ADMINISTRATORS[cloud] in str(state.resources())
    type_name, name, wanted = POOLS[cloud]
    made = state.resources(type_name)
    assert len(made) == len(wanted)
    if existing:
        assert state.outputs["cluster_name"] == "theirs"
        if cloud == "gcp":  # whose own pools may have these names
            assert {each[name] for each in made.values()} == {f"oriel-{pool}" for pool in wanted}
        assert "1.33" in str(made) or cloud == "gcp", "nodes are not newer than their cluster"
    assert not one.plan(**variables, **pools).changes
    assert one.destroy(**variables, **pools).resources() == {}


# Of each cloud: the data source, what it answers, and how the refusal reads.
REFUSED = [
    ("aws", "data.aws_vpc", {"enable_dns_hostnames": False}, "DNS host names"),
    ("aws", "data.aws_subnet", {"vpc_id": "vpc-other"}, "is in vpc-other"),
    ("aws", "data.aws_subnet", {"availability_zone": "one"}, "one per zone"),
    ("aws", "data.aws_eks_cluster", {"version": "1.29"}, "1.30 or newer"),
    ("aws", "data.aws_eks_cluster", {"access_config": [{"authentication_mode": "CONFIG_MAP"}]}, "authentication mode"),
    ("aws", "data.aws_eks_addon", "no such add-on", "no such add-on"),
    ("gcp", "data.google_compute_subnetwork", {"private_ip_google_access": False}, "Private Google Access"),
    ("gcp", "data.google_compute_subnetwork", {"network": "x/other"}, "one subnet, which is in"),
    ("gcp", "data.google_container_cluster", {"network": "x/other"}, "a regional cluster of"),
    ("gcp", "data.google_container_cluster", {"workload_identity_config": []}, "needs workload identity"),
    ("gcp", "data.google_container_cluster", {"datapath_provider": "LEGACY_DATAPATH"}, "no network policies"),
    ("gcp", "data.google_container_cluster", {"master_version": "1.29.1-gke.1"}, "1.30 or newer"),
    ("azure", "data.azurerm_virtual_network", {"location": "eastus"}, "is in eastus"),
    ("azure", "data.azurerm_kubernetes_cluster", {"oidc_issuer_enabled": False}, "OIDC issuer"),
    ("azure", "data.azurerm_kubernetes_cluster", {"network_profile": []}, "no network policies"),
    ("azure", "data.azurerm_kubernetes_cluster", {"kubernetes_version": "1.29.9"}, "1.30 or newer"),
]


@pytest.mark.parametrize(("cloud", "source", "answer", "said"), REFUSED)
def test_what_it_lacks_is_refused_when_planning(shared, cloud, source, answer, said):
    one = shared(cloud)
    if isinstance(answer, dict) and "access_config" in answer:
        answer["access_config"][0]["bootstrap_cluster_creator_admin_permissions"] = False
    with one.reading({source: answer}), pytest.raises(TerraformFailed) as refused:
        one.plan(**given(cloud, existing=True))
    assert said in " ".join(str(refused.value).split())


@pytest.mark.parametrize(
    ("cloud", "source", "answer", "said"),
    [
        ("gcp", "data.google_compute_subnetwork", {"secondary_ip_range": []}, "secondary ranges called pods"),
        ("azure", "data.azurerm_virtual_network", {"address_space": ["10.0.0.0/8"]}, "has to lie outside of"),
        ("azure", "data.azurerm_virtual_network", {"address_space": ["10.42.7.0/24"]}, "has to lie outside of"),
    ],
)
def test_a_network_that_a_new_cluster_cannot_use_is_refused(shared, cloud, source, answer, said):
    one = shared(cloud)
    with one.reading({source: answer}), pytest.raises(TerraformFailed) as refused:
        one.plan(**given(cloud, existing=False))
    assert said in " ".join(str(refused.value).split())


def test_a_cluster_without_its_network_and_a_name_without_a_public_subnet_are_refused(shared):
    with pytest.raises(TerraformFailed, match="name the network"):
        shared("gcp").plan(region=REGIONS["gcp"], cluster={"existing": "theirs"})
    private = given("aws", existing=False, network=NETWORKS["aws"] | {"public_subnets": []})
    dns = {"zone": "example.com", "host": "api.example.com"}
    with pytest.raises(TerraformFailed, match="public_subnets are given"):
        shared("aws").plan(**private, dns=dns)


def test_where_a_subnet_has_a_route_table_azure_nodes_go_out_by_it(shared):
    one = shared("azure")
    found = set()
    for table in ("", "/subscriptions/s/out"):
        with one.reading({"data.azurerm_subnet": {"route_table_id": table}}):
            plan = one.plan(**given("azure", existing=False))
        (profile,) = plan.values("azurerm_kubernetes_cluster.this[0]")["network_profile"]
        found.add((bool(table), profile["outbound_type"]))
    assert found == {(False, "userAssignedNATGateway"), (True, "userDefinedRouting")}
