"""terraform/azure, applied to the stand-in: what is encrypted, public, allowed, and made after what."""

import ipaddress
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from .clouds import applied_root, given, the_object
from .harness import TerraformFailed, Workspace

GIVEN = given("azure")
GROUP = "/subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/oriel"
TENANT = "66666666-7777-8888-9999-000000000000"
OPERATOR = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
KEY = "c29tZS1rZXktb2YtcmVkaXM+Lz0="


@pytest.fixture(scope="module")
def applied(terraform, tree, tmp_path_factory) -> Iterator[SimpleNamespace]:
    with applied_root("azure", tmp_path_factory.mktemp("azure"), tree) as found:
        yield found


def pools(resources: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {
        each["name"]: each for address, each in resources.items() if "azurerm_kubernetes_cluster_node_pool" in address
    }
    return found | {"system": resources["azurerm_kubernetes_cluster.this[0]"]["default_node_pool"][0]}


def test_a_zone_that_is_briefly_away_moves_nothing(applied):
    zones = [{"logical_zone": number, "physical_zone": f"westeurope-az{number}"} for number in ("2", "3")]
    with applied.workspace.reading({"data.azurerm_location": {"zone_mappings": zones}}):
        assert applied.workspace.plan(**GIVEN).actions() == {}


def test_what_cannot_change_in_place_is_refused_while_protected(applied):
    other = {"name": "other", "network_cidr": "10.50.0.0/16", "region": "northeurope"}
    public = {"cluster": {"api_access_cidrs": ["203.0.113.0/24"]}}
    subscription = {"subscription_id": "99999999-2222-3333-4444-555555555555"}
    with (
        applied.workspace.reading({"data.azurerm_client_config": subscription}),
        pytest.raises(TerraformFailed) as refused,
    ):
        applied.workspace.plan(**GIVEN | other | public)
    (error,) = refused.value.diagnostics
    for said in (
        'api is "private" and would become "public"',
        'name is "oriel" and would become "other"',
        'network_cidr is "10.42.0.0/16" and would become "10.50.0.0/16"',
        'region is "westeurope" and would become "northeurope"',
        'subscription is "11111111-2222-3333-4444-555555555555" and would become "99999999-',
        "cluster.deletion_protection",
    ):
        assert said in error.detail
    with pytest.raises(TerraformFailed, match="cluster.deletion_protection is true"):
        applied.workspace.destroy(**GIVEN)
    assert not [call for call in applied.workspace.calls if call.action == "delete"]


def test_encrypted_at_rest_and_on_the_way(applied):
    """What Azure does by itself (etcd, disks, registry) has no argument; what has one is on."""
    account = applied.made["azurerm_storage_account.models"]
    assert account["infrastructure_encryption_enabled"] is True and account["https_traffic_only_enabled"] is True
    assert account["min_tls_version"] == "TLS1_2"
    (database,) = applied.made["azurerm_managed_redis.this[0]"]["default_database"]
    assert database["client_protocol"] == "Encrypted" and database["access_keys_authentication_enabled"] is True
    assert database["clustering_policy"] == "NoCluster", "the gateway does not speak Redis Cluster's redirections"
    assert database["eviction_policy"] == "NoEviction"
    assert applied.made["azurerm_managed_redis.this[0]"]["high_availability_enabled"] is True
    assert applied.state.outputs["redis_url"].startswith("rediss://") and applied.state.outputs["redis_tls"] is True
    # A machine's own disk is encrypted only where the subscription has asked for it.
    assert {pool["os_disk_type"] for pool in pools(applied.made).values()} == {"Managed"}


def test_redis_key_is_in_the_secret_and_nowhere_else(applied):
    (given,) = applied.made["module.platform[0].helm_release.oriel"]["set_sensitive"]
    reference = applied.state.outputs["redis_auth_secret_ref"]
    path = f"infrastructure.secrets.{reference['name']}"
    assert (given["name"], given["value"]) == (f"{path}.{reference['key']}", KEY)
    assert KEY not in json.dumps(applied.state.document["outputs"])
    assert KEY not in json.dumps([each["values"] for each in applied.state.resources("helm_release").values()])


def test_nothing_is_public_but_the_gateways_address(applied):
    cluster = applied.made["azurerm_kubernetes_cluster.this[0]"]
    assert cluster["private_cluster_public_fqdn_enabled"] is False
    assert cluster["private_dns_zone_id"] == "System" and cluster["api_server_access_profile"] == []
    assert cluster["run_command_enabled"] is False
    account = applied.made["azurerm_storage_account.models"]
    assert account["network_rules"][0]["default_action"] == "Deny"
    assert applied.made["azurerm_storage_container.models"]["container_access_type"] == "private"
    # The NAT gateway's takes no call; nodes have none.
    assert set(applied.state.resources("azurerm_public_ip")) == {
        "azurerm_public_ip.gateway[0]",
        "azurerm_public_ip.nat[0]",
    }


def test_nobody_gets_in_with_a_key(applied):
    assert applied.made["azurerm_kubernetes_cluster.this[0]"]["local_account_disabled"] is True
    (entra,) = applied.made["azurerm_kubernetes_cluster.this[0]"]["azure_active_directory_role_based_access_control"]
    assert entra["azure_rbac_enabled"] is True and entra["tenant_id"] == TENANT
    account = applied.made["azurerm_storage_account.models"]
    assert account["shared_access_key_enabled"] is False and account["local_user_enabled"] is False
    assert applied.made["azurerm_container_registry.images"]["admin_enabled"] is False


def test_registry_models_and_redis_have_private_endpoints_with_their_names(applied):
    for name, (target, part, zone) in {
        "registry": ("azurerm_container_registry.images", "registry", "privatelink.azurecr.io"),
        "models": ("azurerm_storage_account.models", "blob", "privatelink.blob.core.windows.net"),
        "redis": ("azurerm_managed_redis.this[0]", "redisEnterprise", "privatelink.redis.azure.net"),
    }.items():
        endpoint = applied.made[f'azurerm_private_endpoint.this["{name}"]']
        (connection,) = endpoint["private_service_connection"]
        assert connection["private_connection_resource_id"] == applied.made[target]["id"]
        assert connection["subresource_names"] == [part]
        assert endpoint["subnet_id"] == applied.made["azurerm_subnet.endpoints[0]"]["id"]
        known = applied.made[f'azurerm_private_dns_zone.this["{name}"]']
        assert known["name"] == zone
        assert endpoint["private_dns_zone_group"][0]["private_dns_zone_ids"] == [known["id"]]
        link = applied.made[f'azurerm_private_dns_zone_virtual_network_link.this["{name}"]']
        assert link["private_dns_zone_name"] == zone
        assert link["virtual_network_id"] == applied.made["azurerm_virtual_network.this[0]"]["id"]


def test_networks_are_apart_as_aks_wants_them(applied):
    (profile,) = applied.made["azurerm_kubernetes_cluster.this[0]"]["network_profile"]
    network = ipaddress.ip_network(applied.made["azurerm_virtual_network.this[0]"]["address_space"][0])
    nodes, endpoints = (
        ipaddress.ip_network(applied.made[f"azurerm_subnet.{name}[0]"]["address_prefixes"][0])
        for name in ("nodes", "endpoints")
    )
    services, pods = ipaddress.ip_network(profile["service_cidr"]), ipaddress.ip_network(profile["pod_cidr"])
    assert nodes.subnet_of(network) and endpoints.subnet_of(network) and not nodes.overlaps(endpoints)
    assert not services.overlaps(network) and not pods.overlaps(network) and not pods.overlaps(services)
    assert ipaddress.ip_address(profile["dns_service_ip"]) in services
    assert all(each.subnet_of(ipaddress.ip_network("10.42.0.0/16")) for each in (network, services, pods))
    assert (profile["network_plugin"], profile["network_plugin_mode"]) == ("azure", "overlay")
    assert (profile["network_data_plane"], profile["network_policy"]) == ("cilium", "cilium")
    assert profile["outbound_type"] == "userAssignedNATGateway"
    associated = applied.made["azurerm_subnet_nat_gateway_association.nodes[0]"]
    assert associated["subnet_id"] == applied.made["azurerm_subnet.nodes[0]"]["id"]


def test_api_access_opens_api_registry_and_models_to_those_networks_only(planned):
    cidrs = ["198.51.100.7/32", "192.0.2.4/31", "203.0.113.0/24"]
    plan = planned.plan(region="westeurope", cluster={"api_access_cidrs": cidrs}, deploy_platform=False)
    cluster = plan.values("azurerm_kubernetes_cluster.this[0]")
    assert cluster["private_cluster_enabled"] is False
    # Together they are refused; the NAT gateway's own address, which the nodes come from, is known after apply.
    assert cluster.get("private_dns_zone_id") is None
    registry = plan.values("azurerm_container_registry.images")
    assert registry["public_network_access_enabled"] is True
    (rules,) = registry["network_rule_set"]
    assert rules["default_action"] == "Deny" and {each["ip_range"] for each in rules["ip_rule"]} == set(cidrs)
    (rules,) = plan.values("azurerm_storage_account.models")["network_rules"]
    assert rules["default_action"] == "Deny" and rules["bypass"] == ["None"]
    # A storage account takes single addresses without a mask.
    assert set(rules["ip_rules"]) == {"198.51.100.7", "192.0.2.4", "192.0.2.5", "203.0.113.0/24"}
    assert plan.values("azurerm_managed_redis.this[0]")["public_network_access"] == "Disabled"


def test_the_nodes_own_way_out_may_reach_a_public_api(workspace):
    one = workspace("azure")
    state = one.apply(region="westeurope", cluster={"api_access_cidrs": ["198.51.100.7/32"]}, deploy_platform=False)
    (profile,) = state.values("azurerm_kubernetes_cluster.this[0]")["api_server_access_profile"]
    nat = state.values("azurerm_public_ip.nat[0]")["ip_address"]
    assert set(profile["authorized_ip_ranges"]) == {"198.51.100.7/32", f"{nat}/32"}


def test_every_right_that_is_given(applied):
    """Least privilege: this is the whole list; a line more is a decision."""
    registry, container, documents, subnet, address, nodes = (
        applied.made[each]["id"]
        for each in (
            "azurerm_container_registry.images",
            "azurerm_storage_container.models",
            "azurerm_storage_container.policies",
            "azurerm_subnet.nodes[0]",
            "azurerm_public_ip.gateway[0]",
            "azurerm_user_assigned_identity.nodes[0]",
        )
    )
    (kubelet,) = applied.made["azurerm_kubernetes_cluster.this[0]"]["kubelet_identity"]
    assert kubelet["user_assigned_identity_id"] == nodes
    network = applied.made["azurerm_virtual_network.this[0]"]["id"]
    join = applied.made["azurerm_role_definition.network[0]"]
    (rights,) = join["permissions"]
    # What linking a private DNS zone to the network asks for, on the network itself.
    assert rights["actions"] == [
        "Microsoft.Network/virtualNetworks/join/action",
        "Microsoft.Network/virtualNetworks/read",
    ]
    assert not rights["data_actions"] and join["assignable_scopes"] == [GROUP]
    given = {
        (each["role_definition_name"] or each["role_definition_id"], each["scope"], each["principal_id"])
        for each in applied.state.resources("azurerm_role_assignment").values()
    }
    assert given == {
        ("AcrPull", registry, "principal-of-oriel-nodes"),
        (join["role_definition_resource_id"], network, "principal-of-oriel-cluster"),
        ("Network Contributor", subnet, "principal-of-oriel-cluster"),
        ("Network Contributor", address, "principal-of-oriel-cluster"),
        ("Managed Identity Operator", nodes, "principal-of-oriel-cluster"),
        ("Reader", GROUP, "principal-of-oriel-cluster"),
        ("Azure Kubernetes Service RBAC Cluster Admin", GROUP, OPERATOR),
        ("Storage Blob Data Reader", documents, "principal-of-oriel-gateway"),
        ("Storage Blob Data Reader", container, "principal-of-oriel-inference"),
    }
    assert container.endswith("/blobServices/default/containers/models"), "the container, not the account"
    assert documents.endswith("/blobServices/default/containers/policies")


def test_pods_exchange_their_service_accounts_token(applied):
    cluster = applied.made["azurerm_kubernetes_cluster.this[0]"]
    assert cluster["oidc_issuer_enabled"] is True and cluster["workload_identity_enabled"] is True
    for unit in ("gateway", "logic", "inference"):
        credential = applied.made[f'azurerm_federated_identity_credential.units["{unit}"]']
        assert credential["issuer"] == cluster["oidc_issuer_url"]
        assert credential["subject"] == f"system:serviceaccount:oriel:{unit}"
        assert credential["audience"] == ["api://AzureADTokenExchange"]
        assert credential["parent_id"].endswith(f"/oriel-{unit}")
    identity = applied.state.outputs["workload_identity"]
    assert identity["pod_labels"] == {"azure.workload.identity/use": "true"}
    for unit in ("gateway", "logic"):
        account = the_object(applied, "ServiceAccount", unit)
        annotation = {"azure.workload.identity/client-id": f"client-of-oriel-{unit}"}
        assert identity["service_account_annotations"][unit] == annotation
        assert account["metadata"]["annotations"].items() >= annotation.items()
    gateway = the_object(applied, "Deployment", "gateway")
    assert gateway["spec"]["template"]["metadata"]["labels"]["azure.workload.identity/use"] == "true"


def test_pools_grow_from_zero_and_gpu_nodes_have_our_taint(applied):
    made = pools(applied.made)
    assert {name: pool["node_labels"]["oriel.dev/pool"] for name, pool in made.items()} == {
        name: name for name in ("system", "cpu", "gpu")
    }
    # The load balancer sends to nodes that stay.
    excluded = "node.kubernetes.io/exclude-from-external-load-balancers"
    assert {name for name, pool in made.items() if pool["node_labels"].get(excluded) == "true"} == {"cpu", "gpu"}
    assert made["system"]["node_count"] == 2 and not made["system"]["only_critical_addons_enabled"]
    for name, most in (("cpu", 10), ("gpu", 4)):
        assert made[name]["auto_scaling_enabled"] is True and made[name]["mode"] == "User"
        assert (made[name]["min_count"], made[name]["max_count"]) == (0, most)
    taint = applied.state.outputs["gpu_taint"]
    assert made["gpu"]["node_taints"] == [f"{taint['key']}={taint['value']}:{taint['effect']}"]
    assert made["cpu"]["node_taints"] == []
    assert made["gpu"]["gpu_driver"] == "Install"
    (upgrade,) = made["gpu"]["upgrade_settings"]
    assert upgrade["max_unavailable"] == "1", "no node over max_size, which the quota may not have"
    assert made["system"]["zones"] == made["cpu"]["zones"] == ["1", "2", "3"]
    # A change of size or disk makes the nodes anew under these names, at most 12 letters and digits.
    assert {pool["temporary_name_for_rotation"] for pool in made.values()} == {"systemtmp", "cputmp", "gputmp"}


def test_empty_nodes_leave_though_they_hold_scratch_and_cluster_services(applied):
    (profile,) = applied.made["azurerm_kubernetes_cluster.this[0]"]["auto_scaler_profile"]
    assert profile["skip_nodes_with_local_storage"] is False and profile["skip_nodes_with_system_pods"] is False


def test_the_device_plugin_is_installed_and_metrics_server_is_not(applied):
    charts = {each["chart"] for each in applied.state.resources("helm_release").values()}
    assert "nvidia-device-plugin" in charts and "metrics-server" not in charts


def test_the_gateways_address_and_name(applied):
    address = applied.made["azurerm_public_ip.gateway[0]"]
    record = applied.made["azurerm_dns_a_record.gateway[0]"]
    assert (record["name"], record["zone_name"], record["resource_group_name"]) == ("api", "example.com", "names")
    assert record["records"] == [address["ip_address"]]
    annotations = the_object(applied, "Service", "gateway")["metadata"]["annotations"]
    prefix = "service.beta.kubernetes.io/"
    assert annotations[f"{prefix}azure-pip-name"] == address["name"]
    assert annotations[f"{prefix}azure-load-balancer-resource-group"] == address["resource_group_name"]
    for port in the_object(applied, "Service", "gateway")["spec"]["ports"]:
        # AKS would probe GET / for what is called http; the gateway answers that with 404.
        assert annotations[f"{prefix}port_{port['port']}_health-probe_protocol"] == "tcp"


@pytest.fixture
def planned(shared) -> Workspace:
    """A workspace in which nothing is applied, for plans with other variables."""
    return shared("azure")


def test_without_gpus_scaling_to_zero_redis_and_a_name(planned):
    plan = planned.plan(region="westeurope", gpu_enabled=False, scale_to_zero=False, redis={"managed": False})
    made = plan.resources()
    assert set(pools(made)) == {"system", "cpu"} and pools(made)["cpu"]["min_count"] == 1
    for absent in (
        "azurerm_managed_redis",
        "azurerm_dns",
        "azurerm_public_ip.gateway",
        'this["redis"]',
    ):
        assert not any(absent in address for address in made), absent
    assert plan.outputs()["redis_url"] is None and plan.outputs()["redis_auth_secret_ref"] is None


def test_the_longest_name_fits_every_limit(planned):
    """The stand-in's rules hold Azure's own: 24 small letters and digits for a storage account, 50 for a registry."""
    made = planned.plan(region="westeurope", name="a-name-of-20-letters", deploy_platform=False).resources()
    account = made["azurerm_storage_account.models"]["name"]
    assert account.startswith("anameof20letters") and len(account) <= 24
    short = planned.plan(region="northeurope", name="abc", deploy_platform=False).resources()
    assert short["azurerm_container_registry.images"]["name"] != "abc"


def test_a_region_without_zones(workspace):
    one = workspace("azure", rules={"data.azurerm_location": {"set": {"zone_mappings": []}}})
    made = one.plan(region="westus", deploy_platform=False).resources()
    assert made["azurerm_storage_account.models"]["account_replication_type"] == "LRS"
    assert made["azurerm_container_registry.images"]["zone_redundancy_enabled"] is False
    assert not any(pool.get("zones") for pool in pools(made).values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu_pool": {"max_size": 100}, "cpu_pool": {"max_size": 40}}, "pod addresses for 128 nodes"),
        ({"redis": {"size": "cache.t4g.small"}}, "sku_name"),
        ({"cluster": {"api_access_cidrs": ["0.0.0.0/0"]}}, "never 0.0.0.0/0"),
    ],
)
def test_what_azure_would_refuse_is_refused_when_planning(planned, given, said):
    with pytest.raises(TerraformFailed) as caught:
        planned.plan(region="westeurope", **given)
    assert said in str(caught.value)
