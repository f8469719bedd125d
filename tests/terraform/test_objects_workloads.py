"""How pods live: probes, security, disks, stopping, identity, disruption."""

from math import ceil
from typing import Any

import pytest

from oriel_gateway import app as gateway_app
from oriel_inference.settings import Settings as InferenceSettings
from oriel_logic.settings import Settings as LogicSettings
from oriel_wire.discovery.discovery import DNS_EVERY_S
from oriel_wire.discovery.endpoint_slices import ACCOUNT
from oriel_wire.process.process import GRACE_S, HARD_EXIT_S

from .conftest import Shared
from .objects import Object, matches, objects, of, pods
from .scheduling import quantity

UNITS = ("gateway", "logic", "inference-cpu", "inference-gpu")
BUNDLED = {"redis_url": None, "redis_tls": False, "redis_auth_secret_ref": None}
EVERYTHING: dict[str, Any] = {
    "infrastructure": BUNDLED,
    "observability": {"otlp": {"endpoint": "https://otlp.example"}},
}
# Of the names' answers in the cluster's DNS: what CoreDNS's kubernetes plug-in says unless it is told otherwise. By
# kubeadm and kind it is (30 s): then a server that drains still answers whom it was named to, and one that is gone is
# found out.
DNS_TTL_S = 5


@pytest.fixture
def found(shared: Shared) -> list[Object]:
    return objects(shared, **EVERYTHING)


def container(template: Object) -> Object:
    (only,) = template["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def test_every_pod_keeps_the_restricted_level_of_pod_security(found: list[Object]) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, and a read-only root beyond it."""
    assert set(pods(found)) >= {*UNITS, "redis", "anchor", "collector"}
    for name, template in pods(found).items():
        spec = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0, name
        # What is mounted belongs to root: the process reads and writes it as its group.
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        allowed = {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "name"}
        assert all(set(volume) <= allowed for volume in spec.get("volumes", [])), name
        for each in spec["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert not any("hostPort" in port for port in each.get("ports", [])), name
    (namespace,) = of(found, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_what_can_be_written_is_bounded_and_what_is_mounted_is_there(found: list[Object]) -> None:
    for name, template in pods(found).items():
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        mounts = [mount for each in template["spec"]["containers"] for mount in each.get("volumeMounts", [])]
        assert {mount["name"] for mount in mounts} == set(volumes), name
        for mount in mounts:
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                assert quantity(volume["emptyDir"]["sizeLimit"]) <= 64 * 2**30, name
            elif "ephemeral" not in volume:
                assert mount["readOnly"] is True, name
        if name in UNITS:
            writable = {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}
            assert {"/tmp", "/var/lib/oriel"} <= writable, name


def test_the_model_cache_is_a_share_of_the_nodes_disk_or_a_disk_of_its_own(shared: Shared) -> None:
    groups = {
        "small": {"accelerator": "cpu", "cache": {"gb": 7}},
        "large": {"accelerator": "cpu", "cache": {"gb": 500, "claim": True}},
    }
    found = pods(objects(shared, model_groups=groups))
    small, large = (found[f"inference-{name}"]["spec"] for name in groups)
    (cache,) = [volume for volume in small["volumes"] if volume["name"] == "models"]
    assert cache["emptyDir"] == {"sizeLimit": "7Gi"}
    assert quantity(small["containers"][0]["resources"]["requests"]["ephemeral-storage"]) >= 7 * 2**30
    (claim,) = [volume["ephemeral"] for volume in large["volumes"] if volume["name"] == "models"]
    asked = claim["volumeClaimTemplate"]["spec"]
    assert asked["storageClassName"] == "gp3" and asked["resources"]["requests"] == {"storage": "500Gi"}
    assert "ephemeral-storage" not in large["containers"][0]["resources"]["requests"]


def test_probes_ask_what_the_units_answer_and_leave_models_time_to_load(shared: Shared) -> None:
    groups = {"slow": {"accelerator": "gpu", "load_grace_s": 3600}}
    found = pods(objects(shared, model_groups=groups))
    paths = {
        "gateway": ("admin", "/health/ready", "/health/live"),
        "logic": ("admin", "/health/ready", "/health/live"),
        "inference-slow": ("http", "/v2/health/ready", "/v2/health/live"),
    }
    for name, (port, ready, live) in paths.items():
        unit = container(found[name])
        assert unit["readinessProbe"]["httpGet"] == {"path": ready, "port": port}
        assert unit["livenessProbe"]["httpGet"] == {"path": live, "port": port}
        # A model server has started when its first load has ended: its grace is for that.
        assert unit["startupProbe"]["httpGet"] == {"path": ready if name == "inference-slow" else live, "port": port}
        assert port in {each["name"] for each in unit["ports"]}
        # Not ready within seconds; killed only after a minute without a word.
        assert unit["readinessProbe"]["periodSeconds"] * unit["readinessProbe"]["failureThreshold"] <= 5
        assert unit["livenessProbe"]["periodSeconds"] * unit["livenessProbe"]["failureThreshold"] >= 60
    startup = container(found["inference-slow"])["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600


def test_a_pod_that_stops_is_out_of_names_and_balancers_first_and_has_the_time_its_unit_takes(
    found: list[Object],
) -> None:
    drains = {"gateway": gateway_app.DRAIN_S, "logic": LogicSettings.__dataclass_fields__["drain_s"].default}
    drains["inference"] = InferenceSettings.__dataclass_fields__["drain_s"].default
    for name in UNITS:
        spec = pods(found)[name]["spec"]
        pause_s = container(pods(found)[name])["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pause_s >= DNS_TTL_S + DNS_EVERY_S * 1.1, name
        assert drains[name.partition("-")[0]] < GRACE_S
        assert spec["terminationGracePeriodSeconds"] >= pause_s + GRACE_S + HARD_EXIT_S, name
    assert container(pods(found)["gateway"])["lifecycle"]["preStop"]["sleep"]["seconds"] >= 20  # cloud load balancers


def test_every_unit_acts_as_itself_and_none_has_a_key_to_kubernetes(shared: Shared) -> None:
    identity: dict[str, Any] = {
        "service_account_annotations": {
            name: {"azure.workload.identity/client-id": f"{name}-id"} for name in ("gateway", "inference")
        },
        "pod_labels": {"azure.workload.identity/use": "true"},
    }
    found = objects(shared, infrastructure={"workload_identity": identity, **BUNDLED})
    accounts = of(found, "ServiceAccount")
    for name in UNITS:
        template, component = pods(found)[name], name.partition("-")[0]
        assert template["spec"]["serviceAccountName"] == component
        assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"
        annotations = accounts[component]["metadata"].get("annotations", {})
        assert annotations == identity["service_account_annotations"].get(component, {})
    for name, template in pods(found).items():
        assert template["spec"]["automountServiceAccountToken"] is False, name
        assert template["spec"]["enableServiceLinks"] is False, (
            name
        )  # ORIEL_* of a Service named oriel would be settings
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    # The label is Azure's webhook's to act on: not for pods that have no identity.
    assert "azure.workload.identity/use" not in pods(found)["redis"]["metadata"]["labels"]


def test_only_the_gateway_may_ask_kubernetes_and_only_for_endpoint_slices(shared: Shared) -> None:
    found = objects(shared, infrastructure=BUNDLED)
    (role,), (binding,) = of(found, "Role").values(), of(found, "RoleBinding").values()
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    assert role["rules"] == [rule]
    assert binding["roleRef"]["kind"] == "Role" and binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "gateway", "namespace": "oriel"}]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "oriel"
    for name, template in pods(found).items():
        projected = [volume for volume in template["spec"].get("volumes", []) if "projected" in volume]
        assert len(projected) == (name == "gateway"), name
    (container,) = pods(found)["gateway"]["spec"]["containers"]
    (volume,) = [each for each in pods(found)["gateway"]["spec"]["volumes"] if "projected" in each]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
    assert mount["mountPath"] == str(ACCOUNT) and mount["readOnly"]
    token, certificate, namespace = volume["projected"]["sources"]
    assert token["serviceAccountToken"]["path"] == "token"
    assert certificate["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert namespace["downwardAPI"]["items"][0]["path"] == "namespace"


def test_a_drain_of_a_node_is_never_refused(found: list[Object]) -> None:
    """No disruption budget with the fewest replicas, no emptyDir and no broken pod blocks the drain."""
    budgets, scalers = of(found, "PodDisruptionBudget"), of(found, "HorizontalPodAutoscaler")
    for name in UNITS:
        spec = budgets[name]["spec"]
        assert matches(spec["selector"]["matchLabels"], pods(found)[name]["metadata"]["labels"])
        least = scalers[name]["spec"]["minReplicas"]
        most = spec["maxUnavailable"]
        allowed = ceil(least * int(most.removesuffix("%")) / 100) if isinstance(most, str) else most
        assert allowed >= 1 and "minAvailable" not in spec and spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for name, template in pods(found).items():
        local = any("emptyDir" in volume for volume in template["spec"].get("volumes", []))
        annotation = template["metadata"].get("annotations", {}).get("cluster-autoscaler.kubernetes.io/safe-to-evict")
        assert annotation == "true" or not local, name


def test_no_selector_finds_another_deployments_pods(found: list[Object]) -> None:
    workloads = [each for each in found if each["kind"] in ("Deployment", "DaemonSet")]
    for one in workloads:
        caught = [
            other["metadata"]["name"]
            for other in workloads
            if matches(one["spec"]["selector"]["matchLabels"], other["spec"]["template"]["metadata"]["labels"])
        ]
        assert caught == [one["metadata"]["name"]]


def test_pods_spread_over_zones_and_nodes_and_gateways_never_share_one_by_chance(found: list[Object]) -> None:
    for name in UNITS:
        template = pods(found)[name]
        spread = {each["topologyKey"]: each for each in template["spec"]["topologySpreadConstraints"]}
        assert set(spread) == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
        for each in spread.values():
            assert matches(each["labelSelector"]["matchLabels"], template["metadata"]["labels"])
            # Nodes it may not use, such as a GPU node, are no place that lacks one.
            assert each["nodeTaintsPolicy"] == "Honor" and each["matchLabelKeys"] == ["pod-template-hash"]
        hard = spread["kubernetes.io/hostname"]["whenUnsatisfiable"] == "DoNotSchedule"
        assert hard == (name == "gateway") and (not hard or template["spec"]["priorityClassName"] == "oriel-gateway")


@pytest.mark.parametrize("given", [{"gpu_enabled": False}, {"placement": {"share_gpu_nodes": False}}])
def test_gateways_make_their_room_also_where_no_gpu_node_is_shared(shared: Shared, given: dict[str, Any]) -> None:
    """Two nodes, one full of others: the second gateway takes its place there instead of the first one's node."""
    spec = pods(objects(shared, **given))["gateway"]["spec"]
    assert spec["priorityClassName"] == "oriel-gateway"
    spread = {each["topologyKey"]: each["whenUnsatisfiable"] for each in spec["topologySpreadConstraints"]}
    assert spread["kubernetes.io/hostname"] == "DoNotSchedule"


def test_memory_is_what_was_asked_for_and_a_rollout_keeps_what_serves(found: list[Object]) -> None:
    for name, template in pods(found).items():
        for each in template["spec"]["containers"]:
            resources = each["resources"]
            assert resources["limits"]["memory"] == resources["requests"]["memory"], name
            assert "cpu" not in resources["limits"] and quantity(resources["requests"]["cpu"]) > 0, name
    for name, each in of(found, "Deployment").items():
        if name in UNITS:
            # Where a spare GPU may not be there, one pod goes before the next comes; else none goes first.
            assert each["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == (1 if name == "inference-gpu" else 0)
            assert "replicas" not in each["spec"]
