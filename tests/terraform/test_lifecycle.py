"""From nothing to everything and back by the real terraform: per cloud, with GPUs and scaled to zero, and with neither.

What is asserted is what the providers were asked for: in which order, that what was made is deleted, that nothing can
be reached from outside but the gateway, and that an apply which failed midway is finished by the next.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from .clouds import REGIONS
from .harness import TerraformFailed, name_of

# No resource of a cloud depends on both variables; the platform's objects are planned with every combination of them
# (objects.MATRIX).
POINTS = [
    pytest.param(cloud, gpu, zero, id=f"{cloud}-{'gpu' if gpu else 'cpu'}-{'zero' if zero else 'one'}")
    for cloud, (gpu, zero) in itertools.product(REGIONS, ((True, True), (False, False)))
]
CPU_POOL = {
    "aws": 'aws_eks_node_group.this["cpu"]',
    "gcp": 'google_container_node_pool.scaled["cpu"]',
    "azure": 'azurerm_kubernetes_cluster_node_pool.scaled["cpu"]',
}
# What no reference says and the clouds need all the same: without it an apply fails there, or a destroy leaves things.
AFTER = {
    # EKS takes the cluster's role as it is at that moment; nodes without their policies or a way out never join.
    # Whoever installs has to be allowed to; pods need their identities when they start.
    "aws": {
        "aws_eks_cluster.this": {
            "aws_cloudwatch_log_group.cluster",
            "aws_iam_role_policy.cluster",
            "aws_iam_role_policy_attachment.cluster",
            "aws_vpc_security_group_ingress_rule.api",
        },
        "aws_nat_gateway.this": {"aws_internet_gateway.this", "aws_route.public", "aws_route_table_association.public"},
        "aws_eks_addon.node": {"aws_eks_addon.pod_identity", "aws_iam_role_policy_attachment.pod"},
        "aws_eks_node_group.this": {
            "aws_eip.gateway",
            "aws_eks_addon.node",
            "aws_iam_role_policy_attachment.node",
            "aws_nat_gateway.this",
            "aws_route.private",
            "aws_route_table_association.private",
            "aws_vpc_endpoint.interface",
            "aws_vpc_endpoint.s3",
            "aws_vpc_security_group_ingress_rule.endpoints",
        },
        "aws_eks_addon.system": {
            "aws_eks_node_group.this",
            "aws_iam_role_policy.pod",
            "aws_iam_role_policy_attachment.pod",
        },
        "helm_release.autoscaler": {
            "aws_autoscaling_group_tag.local_storage",
            "aws_eks_access_policy_association.deployer",
            "aws_eks_addon.system",
            "aws_eks_pod_identity_association.this",
        },
        "module.platform.helm_release.namespace": {
            "aws_eks_access_policy_association.deployer",
            "aws_eks_addon.system",
        },
        "module.platform.helm_release.oriel": {
            "module.platform.helm_release.namespace",
            "aws_eip.gateway",
            "aws_eks_pod_identity_association.this",
            "aws_elasticache_replication_group.limiter",
            "aws_route.public",
            "aws_route_table_association.public",
            "aws_vpc_security_group_ingress_rule.redis",
            "helm_release.autoscaler",
        },
        "aws_s3_bucket_policy.models": {"aws_s3_bucket_public_access_block.models"},
        "aws_s3_bucket_lifecycle_configuration.models": {"aws_s3_bucket_versioning.models"},
    },
    "gcp": {
        "google_compute_network.this": {"google_project_service.this"},
        "google_container_cluster.this": {
            "google_compute_router_nat.this",
            "google_kms_crypto_key_iam_member.this",
            "google_project_iam_member.nodes",
        },
        # GKE taints a GPU pool only where there are other nodes; the identity pool comes with the cluster.
        "google_container_node_pool.scaled": {"google_container_node_pool.system"},
        "google_storage_bucket_iam_member.readers": {"google_container_cluster.this"},
        "google_redis_instance.this": {"google_service_networking_connection.this"},
        "google_storage_bucket.models": {"google_kms_crypto_key_iam_member.this"},
        "module.platform.helm_release.namespace": {"google_container_node_pool.system"},
        "module.platform.helm_release.oriel": {
            "google_redis_instance.this",
            "google_storage_bucket_iam_member.readers",
            "module.platform.helm_release.namespace",
        },
    },
    "azure": {
        "azurerm_kubernetes_cluster.this": {
            "azurerm_nat_gateway_public_ip_association.this",
            "azurerm_role_assignment.network",
            "azurerm_role_assignment.nodes",
            "azurerm_role_assignment.operator",  # minutes before its first use: a fresh role does not count at once
            "azurerm_role_assignment.subnet",
            "azurerm_subnet_nat_gateway_association.nodes",
        },
        "module.platform.helm_release.namespace": {"azurerm_role_assignment.registry"},
        "module.platform.helm_release.oriel": {
            "azurerm_federated_identity_credential.units",
            "azurerm_kubernetes_cluster_node_pool.scaled",
            "azurerm_managed_redis.this",
            "azurerm_private_endpoint.this",
            "azurerm_role_assignment.models",
            "module.platform.helm_release.namespace",
        },
    },
}
EVERYONE = {"0.0.0.0/0", "::/0", "Internet", "allUsers", "allAuthenticatedUsers"}
# (type.name, argument): ways out, not in; azure's are its own default rules.
OUTWARD = {("aws_route.public", "destination_cidr_block"), ("aws_route.private", "destination_cidr_block")}
# Arguments that open something to the internet, and the only value they may have here.
CLOSED: dict[str, Any] = {
    "allow_nested_items_to_be_public": False,
    "anonymous_pull_enabled": False,
    "block_public_acls": True,
    "block_public_policy": True,
    "enable_private_endpoint": True,
    "enable_private_nodes": True,
    "endpoint_private_access": True,
    "endpoint_public_access": False,
    "ignore_public_acls": True,
    "map_public_ip_on_launch": False,
    "node_public_ip_enabled": False,
    "private_cluster_enabled": True,
    "public_access_prevention": "enforced",
    "public_network_access": "Disabled",
    "public_network_access_enabled": False,
    "publicly_accessible": False,
    "restrict_public_buckets": True,
}
# Addresses that the internet can see: the gateway's, and that which the nodes go out by.
ADDRESSES = {
    "aws_eip.gateway",
    "aws_eip.nat",
    "google_compute_address.gateway",
    "azurerm_public_ip.gateway",
    "azurerm_public_ip.nat",
}


def point(cloud, gpu=True, zero=True):
    more = {"cluster": {"deletion_protection": False}}
    return {"region": REGIONS[cloud], "gpu_enabled": gpu, "scale_to_zero": zero, **more}


def made(calls):
    """Address -> call of what was created."""
    return {call.address: call for call in calls if call.action == "create" and not call.failed}


def left_over(history):
    """What was created more often than it was deleted, or the other way round, by type and id."""
    done = Counter((call.type, call.id) for call in history if call.action == "create" and call.id)
    done.subtract((call.type, call.id) for call in history if call.action == "delete" and not call.failed)
    return {each: count for each, count in done.items() if count}


def dependencies_come_first(calls, dependencies, action):
    """Every call of the action ended before one began that needs it (create) or is needed by it (delete)."""
    by_name: dict[str, list] = {}
    for call in calls:
        if call.action == action:
            by_name.setdefault(name_of(call.address), []).append(call)
    for name, needs in dependencies.items():
        for need in needs & set(by_name):
            first, second = (need, name) if action == "create" else (name, need)
            for before, after in itertools.product(by_name.get(first, ()), by_name.get(second, ())):
                assert before.done_s <= after.at_s, f"{action}: {after.address} before {before.address} was done"


def opened(name, values: Any, argument="") -> Iterator[str]:
    """Every argument of a resource that lets the internet in."""
    if isinstance(values, dict):
        for key, each in values.items():
            if key in CLOSED and each is not None and each != CLOSED[key]:
                yield f"{name}: {key} = {each}"
            yield from opened(name, each, key)
    elif isinstance(values, list):
        for each in values:
            yield from opened(name, each, argument)
    elif isinstance(values, str) and values in EVERYONE and (name, argument) not in OUTWARD:
        yield f"{name}: {argument} = {values}"


@pytest.mark.parametrize(("cloud", "gpu", "zero"), POINTS)
def test_apply_change_and_destroy(workspace, cloud, gpu, zero):
    one = workspace(cloud)
    given = point(cloud, gpu, zero)
    state = one.apply(**given)
    calls = [call for call in one.calls if call.rpc == "ApplyResourceChange"]
    created = made(calls)
    # Terraform's own type needs no provider.
    assert set(created) == {each for each in state.resources() if "terraform_data." not in each}
    assert not [call for call in calls if call.action != "create"]

    dependencies = state.dependencies()
    dependencies_come_first(calls, dependencies, "create")
    for name, needs in AFTER[cloud].items():
        assert needs <= dependencies[name], f"{name} does not wait for {needs - dependencies[name]}"

    assert [said for call in calls for said in opened(name_of(call.address), call.values)] == []
    addresses = {name_of(address) for address in created if "_eip." in address or "public_ip." in address}
    external = {each for each, call in created.items() if call.values.get("address_type") == "EXTERNAL"}
    assert addresses | set(map(name_of, external)) <= ADDRESSES

    # Nothing else changes: the plan without a change is empty, as after the faults below.
    if gpu:
        assert one.plan(**given, cpu_pool={"max_size": 7}).actions() == {CPU_POOL[cloud]: "update"}
    else:
        assert one.plan(**given, image_tag="0.2.0").actions() == {"module.platform[0].helm_release.oriel": "update"}

    assert one.destroy(**given).resources() == {}
    dependencies_come_first(one.calls, dependencies, "delete")
    assert left_over(one.history) == {}


# Each of them needs the one before: what does not goes on while it fails, and would be there already.
FAULTS = {
    "aws": [("aws_vpc", 1, False), ("aws_eks_cluster", 1, True), ("aws_eks_node_group", 2, False)],
    "gcp": [
        ("google_compute_network", 1, False),
        ("google_container_cluster", 1, True),
        ("google_container_node_pool", 2, True),
    ],
    "azure": [
        ("azurerm_virtual_network", 1, True),
        ("azurerm_kubernetes_cluster", 1, False),
        ("azurerm_kubernetes_cluster_node_pool", 1, True),
    ],
}


@pytest.mark.parametrize("cloud", REGIONS)
def test_what_failed_midway_is_finished_by_the_next_apply(workspace, cloud):
    one = workspace(cloud)
    given = point(cloud)
    for type_name, nth, half_done in (*FAULTS[cloud], ("helm_release", 1, True)):
        one.fail_at(type_name, nth, half_done=half_done)
        with pytest.raises(TerraformFailed, match=f"{type_name}: injected fault"):
            one.apply(**given)
    one.apply(**given)
    assert not one.plan(**given).changes
    cluster = FAULTS[cloud][1][0]
    one.fail_at(cluster, action="delete")
    with pytest.raises(TerraformFailed, match="injected fault"):
        one.destroy(**given)
    assert one.state().resources(cluster)
    assert one.destroy(**given).resources() == {}
    assert left_over(one.history) == {}


@pytest.mark.parametrize("root", [*REGIONS, "local", "modules/platform"])
def test_it_is_valid_without_a_warning(workspace, root):
    assert workspace(root).validate() == []


@pytest.mark.parametrize(("root", "least"), [("aws", 11), ("gcp", 4), ("azure", 4), ("local", 6)])
def test_its_own_terraform_tests_pass(shared, root, least):
    runs = shared(root).test()
    assert len(runs) >= least and {each["status"] for each in runs} == {"pass"}
