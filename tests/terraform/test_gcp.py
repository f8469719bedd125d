"""terraform/gcp, applied to the stand-in: what is encrypted, public, allowed, and made after what."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from .clouds import applied_root, given, the_object
from .harness import TerraformFailed, Workspace

GIVEN = given("gcp")
NUMBER = "123456789012"
PASSWORD = "11111111-2222-3333-4444-555555555555"
NODES = "serviceAccount:oriel-nodes@example-project.iam.gserviceaccount.com"
SUBJECT = (
    f"principal://iam.googleapis.com/projects/{NUMBER}/locations/global/workloadIdentityPools/"
    "example-project.svc.id.goog/subject/ns/oriel/sa/"
)


@pytest.fixture(scope="module")
def applied(terraform, tree, tmp_path_factory) -> Iterator[SimpleNamespace]:
    with applied_root("gcp", tmp_path_factory.mktemp("gcp"), tree) as found:
        yield found


def pools(resources: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for address, each in resources.items() if "google_container_node_pool" in address}


def test_a_zone_that_is_briefly_away_moves_nothing(applied):
    zones = {"names": ["europe-west4-c", "europe-west4-b", "europe-west4-d"]}
    away = {"data.google_compute_zones": zones, "data.google_compute_machine_types": {"machine_types": []}}
    with applied.workspace.reading(away):
        assert applied.workspace.plan(**GIVEN).actions() == {}


def test_what_cannot_change_in_place_is_refused_while_protected(applied):
    other = GIVEN | {"name": "other", "network_cidr": "10.50.0.0/16", "region": "europe-west1"}
    with (
        applied.workspace.reading({"data.google_client_config": {"project": "another-project"}}),
        pytest.raises(TerraformFailed) as refused,
    ):
        applied.workspace.plan(**other)
    (error,) = refused.value.diagnostics
    for said in (
        'name is "oriel" and would become "other"',
        'network_cidr is "10.42.0.0/16" and would become "10.50.0.0/16"',
        'project is "example-project" and would become "another-project"',
        'region is "europe-west4" and would become "europe-west1"',
        "cluster.deletion_protection",
    ):
        assert said in error.detail
    with pytest.raises(TerraformFailed, match="cluster.deletion_protection is true"):
        applied.workspace.destroy(**GIVEN)
    assert not [call for call in applied.workspace.calls if call.action == "delete"]


def test_secrets_disks_and_models_are_encrypted_with_a_key_each(applied):
    keys = {each["name"]: each["id"] for each in applied.state.resources("google_kms_crypto_key").values()}
    assert set(keys) == {"secrets", "disks", "models"}
    assert all(
        each["rotation_period"] == "7776000s" for each in applied.state.resources("google_kms_crypto_key").values()
    )
    cluster = applied.made["google_container_cluster.this[0]"]
    assert cluster["database_encryption"] == [{"state": "ENCRYPTED", "key_name": keys["secrets"]}]
    assert {name: pool["node_config"][0]["boot_disk_kms_key"] for name, pool in pools(applied.made).items()} == {
        "system": keys["disks"],
        "cpu": keys["disks"],
        "gpu": keys["disks"],
    }
    assert cluster["node_config"][0]["boot_disk_kms_key"] == keys["disks"], "the nodes GKE makes first, and that go"
    assert applied.made["google_storage_bucket.models"]["encryption"] == [{"default_kms_key_name": keys["models"]}]
    storage = the_object(applied, "StorageClass", applied.state.outputs["storage_class"])
    assert storage["parameters"]["disk-encryption-kms-key"] == keys["disks"]


def test_redis_has_a_replica_tls_a_password_and_a_private_address(applied):
    redis = applied.made["google_redis_instance.this[0]"]
    assert redis["tier"] == "STANDARD_HA"
    assert redis["transit_encryption_mode"] == "SERVER_AUTHENTICATION" and redis["auth_enabled"] is True
    assert redis["connect_mode"] == "PRIVATE_SERVICE_ACCESS"
    assert redis["authorized_network"] == applied.made["google_compute_network.this[0]"]["id"]
    assert applied.state.outputs["redis_url"] == "rediss://10.42.32.4:6378"
    assert applied.state.outputs["redis_tls"] is True


def test_redis_password_is_in_the_secret_and_nowhere_else(applied):
    authority, given = applied.made["module.platform[0].helm_release.oriel"]["set_sensitive"]
    reference = applied.state.outputs["redis_auth_secret_ref"]
    assert (given["name"], given["value"]) == (
        f"infrastructure.secrets.{reference['name']}.{reference['key']}",
        PASSWORD,
    )
    assert authority["name"] == f"infrastructure.secrets.{reference['name']}.ca\\.crt"
    assert authority["value"].startswith("-----BEGIN CERTIFICATE-----"), "who signs for this one instance"
    assert PASSWORD not in json.dumps(applied.state.document["outputs"])
    assert PASSWORD not in json.dumps([each["values"] for each in applied.state.resources("helm_release").values()])


def test_nothing_is_public_but_the_gateways_address(applied):
    cluster = applied.made["google_container_cluster.this[0]"]
    (asked,) = cluster["master_authorized_networks_config"]
    assert [each["cidr_block"] for each in asked["cidr_blocks"]] == ["10.42.0.0/16"]
    assert asked["gcp_public_cidrs_access_enabled"] is False
    assert applied.made["google_storage_bucket.models"]["uniform_bucket_level_access"] is True
    assert list(applied.state.resources("google_compute_address")) == ["google_compute_address.gateway[0]"]
    assert applied.made["google_compute_global_address.google_services[0]"]["address_type"] == "INTERNAL"
    assert not any(address.startswith("google_compute_firewall") for address in applied.made)
    nat = applied.made["google_compute_router_nat.this[0]"]
    assert nat["nat_ip_allocate_option"] == "AUTO_ONLY"


def test_the_kubernetes_api_reaches_kedas_ports_where_keda_is(shared):
    """GKE opens none but 443 and 10250 for it (test_nothing_is_public_but_the_gateways_address)."""
    groups = {"cpu": {"accelerator": "cpu"}}
    plan = shared("gcp").plan(region="europe-west4", platform={"keda": {"enabled": True}, "model_groups": groups})
    opened = plan.values("google_compute_firewall.keda[0]")
    assert opened["allow"] == [{"protocol": "tcp", "ports": ["6443", "9443"]}] and not opened.get("deny")


def test_google_apis_are_reached_without_the_internet_and_the_rest_by_nat(applied):
    subnet = applied.made["google_compute_subnetwork.nodes[0]"]
    assert subnet["private_ip_google_access"] is True
    (out,) = applied.made["google_compute_router_nat.this[0]"]["subnetwork"]
    assert out["name"] == subnet["id"] and out["source_ip_ranges_to_nat"] == ["ALL_IP_RANGES"]
    ranges = {each["range_name"]: each["ip_cidr_range"] for each in subnet["secondary_ip_range"]}
    services = applied.made["google_compute_global_address.google_services[0]"]
    taken = [subnet["ip_cidr_range"], ranges["pods"], ranges["services"], f"{services['address']}/20"]
    assert taken == ["10.42.0.0/20", "10.42.128.0/17", "10.42.16.0/20", "10.42.32.0/20"], "apart from one another"


def test_api_access_opens_the_api_to_those_networks_only(applied):
    plan = applied.workspace.plan(**GIVEN | {"cluster": {"api_access_cidrs": ["198.51.100.7/32"]}})
    cluster = plan.values("google_container_cluster.this[0]")
    assert cluster["private_cluster_config"][0]["enable_private_endpoint"] is False
    assert cluster["private_cluster_config"][0]["enable_private_nodes"] is True
    (asked,) = cluster["master_authorized_networks_config"]
    assert {each["cidr_block"] for each in asked["cidr_blocks"]} == {"10.42.0.0/16", "198.51.100.7/32"}
    assert plan.actions()["google_container_cluster.this[0]"] == "update"
    assert plan.outputs()["cluster_endpoint"] == "https://203.0.113.40"


def test_every_right_that_is_given(applied):
    """Least privilege: this is the whole list; a line more is a decision."""
    given = {
        (address.split("[")[0].split(".")[0], each["role"], each["member"])
        for address, each in applied.made.items()
        if "_iam_" in address
    }
    agent = f"serviceAccount:service-{NUMBER}@"
    use = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
    assert given == {
        ("google_kms_crypto_key_iam_member", use, f"{agent}container-engine-robot.iam.gserviceaccount.com"),
        ("google_kms_crypto_key_iam_member", use, f"{agent}compute-system.iam.gserviceaccount.com"),
        ("google_kms_crypto_key_iam_member", use, f"{agent}gs-project-accounts.iam.gserviceaccount.com"),
        ("google_project_iam_member", "roles/container.defaultNodeServiceAccount", NODES),
        ("google_artifact_registry_repository_iam_member", "roles/artifactregistry.reader", NODES),
        ("google_storage_bucket_iam_member", "roles/storage.objectViewer", f"{SUBJECT}gateway"),
        ("google_storage_bucket_iam_member", "roles/storage.objectViewer", f"{SUBJECT}inference"),
    }
    bucket = applied.made["google_storage_bucket.models"]["name"]
    assert applied.state.outputs["model_repository_url"] == f"gs://{bucket}/models"
    for unit, folder in (("gateway", "policies"), ("inference", "models")):
        (only,) = applied.made[f'google_storage_bucket_iam_member.readers["{unit}"]']["condition"]
        reads, lists = only["expression"].split(" || ")
        assert reads == f"resource.name.startsWith('projects/_/buckets/{bucket}/objects/{folder}/')"
        assert lists == f"api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('{folder}/')"
    keys = {
        each["crypto_key_id"].rsplit("/", 1)[1]: each["member"]
        for each in applied.state.resources("google_kms_crypto_key_iam_member").values()
    }
    assert {name: member.split("@")[1].split(".")[0] for name, member in keys.items()} == {
        "secrets": "container-engine-robot",
        "disks": "compute-system",
        "models": "gs-project-accounts",
    }


def test_pods_are_known_by_their_service_account(applied):
    assert applied.state.outputs["workload_identity"] == {"service_account_annotations": {}, "pod_labels": {}}
    assert applied.made["google_container_cluster.this[0]"]["workload_identity_config"] == [
        {"workload_pool": "example-project.svc.id.goog"}
    ]
    for pool in pools(applied.made).values():
        assert pool["node_config"][0]["workload_metadata_config"] == [{"mode": "GKE_METADATA"}], pool["name"]
        assert pool["node_config"][0]["service_account"] == NODES.removeprefix("serviceAccount:"), pool["name"]
    accounts = {each["metadata"]["name"] for each in applied.state.objects() if each["kind"] == "ServiceAccount"}
    assert {"gateway", "inference"} <= accounts
    elsewhere = applied.workspace.plan(**GIVEN | {"platform": {"namespace": "serving"}})
    members = {each["member"] for each in elsewhere.resources("google_storage_bucket_iam_member").values()}
    assert {member.split("/ns/")[1] for member in members} == {"serving/sa/gateway", "serving/sa/inference"}


def test_pools_grow_from_zero_and_gke_taints_gpu_nodes_itself(applied):
    made = pools(applied.made)
    labels = {name: pool["node_config"][0]["labels"] for name, pool in made.items()}
    assert {name: each["oriel.dev/pool"] for name, each in labels.items()} == {
        name: name for name in ("system", "cpu", "gpu")
    }
    assert (made["system"]["node_count"], len(made["system"]["node_locations"])) == (1, 2), "two nodes in two zones"
    for name, most in (("cpu", 10), ("gpu", 4)):
        (scaling,) = made[name]["autoscaling"]
        assert (scaling["total_min_node_count"], scaling["total_max_node_count"]) == (0, most)
        assert made[name]["initial_node_count"] == 0
    # GKE puts nvidia.com/gpu=present:NoSchedule there by itself; written twice it would be refused.
    assert not any(pool["node_config"][0]["taint"] for pool in made.values())
    assert applied.state.outputs["gpu_taint"] == {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    (gpu,) = made["gpu"]["node_config"][0]["guest_accelerator"]
    assert (gpu["type"], gpu["count"]) == ("nvidia-l4", 1)
    assert gpu["gpu_driver_installation_config"] == [{"gpu_driver_version": "LATEST"}]
    assert made["gpu"]["upgrade_settings"][0]["max_surge"] == 0
    assert not any(made[name]["node_config"][0]["guest_accelerator"] for name in ("system", "cpu"))


def test_nodes_keep_out_of_ai_zones(applied):
    """Google lists them among the region's zones; GKE refuses them beside the others."""
    usual = {"europe-west4-a", "europe-west4-b", "europe-west4-c"}
    assert set(applied.made["google_container_cluster.this[0]"]["node_locations"]) == usual
    assert all(set(pool["node_locations"]) <= usual for pool in pools(applied.made).values())


def test_gke_brings_device_plugin_and_metrics_itself(applied):
    charts = {each["chart"] for each in applied.state.resources("helm_release").values()}
    assert not charts & {"nvidia-device-plugin", "metrics-server"}


def test_shielded_nodes_and_the_ways_in_that_are_shut(applied):
    cluster = applied.made["google_container_cluster.this[0]"]
    assert cluster["enable_shielded_nodes"] is True and cluster["datapath_provider"] == "ADVANCED_DATAPATH"
    assert cluster["network_policy"] == [], "Dataplane V2 enforces by itself, and refuses the older kind beside it"
    assert cluster["master_auth"][0]["client_certificate_config"] == [{"issue_client_certificate": False}]
    assert cluster["release_channel"] == [{"channel": "REGULAR"}] and cluster["deletion_protection"] is True
    assert cluster["remove_default_node_pool"] is True
    for name, pool in pools(applied.made).items():
        (shield,) = pool["node_config"][0]["shielded_instance_config"]
        assert shield == {"enable_integrity_monitoring": True, "enable_secure_boot": name != "gpu"}
        assert pool["node_config"][0]["metadata"] == {"disable-legacy-endpoints": "true"}


def test_the_gateways_address_and_name(applied):
    address = applied.made["google_compute_address.gateway[0]"]["address"]
    record = applied.made["google_dns_record_set.gateway[0]"]
    assert (record["managed_zone"], record["name"], record["rrdatas"]) == ("example-com", "api.example.com.", [address])
    service = the_object(applied, "Service", "gateway")
    assert service["spec"]["loadBalancerIP"] == address
    assert service["metadata"]["annotations"] == {"cloud.google.com/l4-rbs": "enabled"}


@pytest.fixture
def planned(shared) -> Workspace:
    """A workspace in which nothing is applied, for plans with other variables."""
    return shared("gcp")


def test_without_gpus_scaling_to_zero_redis_and_a_name(planned):
    plan = planned.plan(region="europe-west4", gpu_enabled=False, scale_to_zero=False, redis={"managed": False})
    made = plan.resources()
    assert set(pools(made)) == {"system", "cpu"}
    assert pools(made)["cpu"]["autoscaling"][0]["total_min_node_count"] == 1
    for absent in ("google_redis", "google_service_networking", "google_dns", "google_compute_address"):
        assert not any(absent in address for address in made), absent
    assert plan.outputs()["redis_url"] is None and plan.outputs()["redis_auth_secret_ref"] is None
    assert "redis.googleapis.com" not in {each["service"] for each in plan.resources("google_project_service").values()}


def test_the_longest_name_fits_every_limit(planned):
    """The stand-in's rules hold Google's own: 30 letters for a service account, 63 for a bucket, 41 for Redis."""
    made = planned.plan(region="europe-west4", name="a-name-of-20-letters").resources()
    bucket = made["google_storage_bucket.models"]["name"]
    assert bucket.startswith("a-name-of-20-letters-models-") and len(bucket) <= 63
    elsewhere = planned.plan(region="us-central1", name="a-name-of-20-letters").resources()
    assert elsewhere["google_storage_bucket.models"]["name"] != bucket


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu_pool": {"instance_type": "e2-standard-8"}}, "gpu_pool.instance_type"),
        ({"gpu_pool": {"max_size": 200}, "cpu_pool": {"max_size": 60}}, "pod addresses for 256 nodes"),
        ({"redis": {"size": "cache.t4g.small"}}, "memory in GB"),
        ({"dns": {"zone": "example.org", "host": "api.example.org"}}, "0 public zones example.org"),
    ],
)
def test_what_google_would_refuse_is_refused_when_planning(planned, given, said):
    with pytest.raises(TerraformFailed) as caught:
        planned.plan(region="europe-west4", **given)
    assert said in str(caught.value)


def test_a_region_without_that_gpu_is_refused_when_planning(workspace):
    none = {"data.google_compute_machine_types": {"set": {"machine_types": []}}}
    one = workspace("gcp", rules=none)
    with pytest.raises(TerraformFailed) as caught:
        one.plan(region="europe-west4")
    assert "has g2-standard-8: choose another region" in str(caught.value)
    one.plan(region="europe-west4", gpu_enabled=False)


def test_another_gpu_and_processor(planned):
    made = pools(
        planned.plan(
            region="europe-west4",
            cpu_pool={"instance_type": "c4-standard-8"},
            gpu_pool={"instance_type": "a2-highgpu-1g"},
        ).resources()
    )
    assert made["cpu"]["node_config"][0]["disk_type"] == "hyperdisk-balanced", "c4 takes no other"
    assert made["gpu"]["node_config"][0]["guest_accelerator"][0]["type"] == "nvidia-tesla-a100"


def test_no_project_is_said_before_anything_is_made(workspace):
    with pytest.raises(TerraformFailed) as caught:
        workspace("gcp", rules={"data.google_client_config": {"set": {"project": ""}}}).plan(region="europe-west4")
    assert "set GOOGLE_PROJECT" in str(caught.value)
