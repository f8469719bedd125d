"""Every Deployment without a fixed number is scaled by exactly one thing; to no replica only where one can wake it."""

from hashlib import sha256

import pytest

from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.promise.routing import RouteTable

from . import objects
from .harness import TerraformFailed

GROUPS = {
    "small": {"accelerator": "cpu", "replicas": {"min": 2, "max": 9}, "load_grace_s": 60, "start_s": 10},
    "big": {"accelerator": "gpu", "models": ["big-*"], "replicas": {"min": 1, "max": 3}, "load_grace_s": 1800},
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
        times = (each["spec"]["pollingInterval"], each["spec"]["cooldownPeriod"], each["spec"]["initialCooldownPeriod"])
        assert times == (5, 30, 300)
        # A gateway that does not answer is no reason to lose everything, nor to wake what nobody calls.
        assert ("fallback" in each["spec"]) == (not zero)
        assert zero or each["spec"]["fallback"]["replicas"] >= 1


def test_utilisation_is_of_requests_that_are_there(shared) -> None:
    found = objects.at(shared, True, True, False, model_groups=GROUPS)
    templates = objects.pods(found)
    for name, each in objects.of(found, "HorizontalPodAutoscaler").items():
        (metric,) = each["spec"]["metrics"]
        assert metric["resource"]["name"] == "cpu" and 30 <= metric["resource"]["target"]["averageUtilization"] <= 80
        for container in templates[name]["spec"]["containers"]:
            assert container["resources"]["requests"]["cpu"], f"{name}: without a request there is no utilisation"


@pytest.mark.parametrize("keda", [True, False])
def test_up_at_once_and_down_as_planned_or_not_before_a_start_would_have_paid(shared, keda) -> None:
    found = objects.at(shared, True, True, keda, model_groups=GROUPS)
    behaviors = {name: each["spec"]["behavior"] for name, each in objects.of(found, "HorizontalPodAutoscaler").items()}
    for name, each in objects.of(found, "ScaledObject").items():
        own = each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
        # Ours and KEDA's must not have one name: Helm refuses to make what somebody else has made.
        assert own.get("name", f"keda-hpa-{name}") not in behaviors
        behaviors[name] = own["behavior"]
        # One poll of the HorizontalPodAutoscaler, every 15 s, is enough for as many as there may be.
        most = {"type": "Pods", "value": each["spec"]["maxReplicaCount"], "periodSeconds": 15}
        assert own["behavior"]["scaleUp"]["policies"] == [most]
        # The gateway plans falls by how long a start takes: the autoscaler must not make them slower.
        assert own["behavior"]["scaleDown"]["policies"] == [most]
    assert set(behaviors) == {"gateway", "logic", "inference-small", "inference-big"}
    for name, behavior in behaviors.items():
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
        slowly = [{"type": "Pods", "value": 1, "periodSeconds": 60}]
        assert (behavior["scaleDown"]["policies"] == slowly) == (name == "gateway" or not keda)
    windows = {name: behavior["scaleDown"]["stabilizationWindowSeconds"] for name, behavior in behaviors.items()}
    # Starts of 120, 300 and 10 s, of which the second is on a GPU. With KEDA logic may have ten pods, the others fewer.
    by_cpu = {"logic": 360, "inference-big": 600, "inference-small": 60}
    by_plan = {"logic": 60, "inference-big": 0, "inference-small": 0}
    assert windows == {"gateway": 300, **(by_plan if keda else by_cpu)}


def test_gateway_and_logic_are_two_and_a_model_group_is_one_as_the_readme_says(shared) -> None:
    found = objects.of(objects.objects(shared), "HorizontalPodAutoscaler")
    least = {name: each["spec"]["minReplicas"] for name, each in found.items()}
    assert least == {"gateway": 2, "logic": 2, "inference-cpu": 1, "inference-gpu": 1}


def test_a_group_that_no_call_could_name_is_refused_with_keda_only(shared) -> None:
    groups = {name: {**each, "models": []} for name, each in GROUPS.items()}
    for given in ({"model_groups": groups}, {}):  # {}: the default groups, cpu and gpu
        with pytest.raises(TerraformFailed, match="several model groups name no models, so that a call could not tell"):
            objects.objects(shared, keda={"enabled": True}, **given)
    assert objects.objects(shared, model_groups=groups)
    assert objects.objects(shared, gpu_enabled=False, keda={"enabled": True})


def snapshot(found: list[objects.Object]) -> Snapshot:
    data = objects.of(found, "ConfigMap")["policies"]["data"]
    return compile_documents({name: text.encode() for name, text in data.items()})


MODELS = {
    "chat": {"accelerator": "gpu", "models": ["chat-*"], "replicas": {"max": 2}, "start_s": 240},
    "embed": {"accelerator": "cpu", "models": ["chat-embed", "chat-", "*-small"], "replicas": {"min": 1, "max": 3}},
    "rest": {"accelerator": "cpu"},
}


def test_a_call_says_which_group_it_needs(shared) -> None:
    documents = snapshot(objects.at(shared, True, True, True, model_groups=MODELS))
    routes = RouteTable(documents.routes)
    for model, pool in {
        "chat-7b": "inference-chat",
        "chat-embed": "inference-embed",  # a name before patterns,
        "chat-": "inference-embed",  # also a shorter one
        "chat-small": "inference-embed",  # and a longer pattern before a shorter one
        "digits": "inference-rest",
    }.items():
        assert [route.pool for route in routes.for_model(model)][:1] == [pool], model
    assert {name: pool.discover for name, pool in documents.pools.items()} == {
        "logic": ("kubernetes:logic", 8090),
        **{f"inference-{name}": (f"kubernetes:inference-{name}", 8000) for name in MODELS},
    }


def test_a_model_of_no_group_wakes_nobody_if_every_group_names_its_own(shared) -> None:
    groups = {name: each for name, each in MODELS.items() if name != "rest"}
    routes = RouteTable(snapshot(objects.at(shared, True, True, True, model_groups=groups)).routes)
    assert routes.for_model("digits") == () and [each.pool for each in routes.for_service("s")] == ["logic"]


def test_routes_of_ones_own_without_a_plan_for_keda_are_a_warning(shared) -> None:
    def warned(text: str) -> list[str]:
        policies = {
            "tenants": {"acme": {"tier": "gold", "keys_sha256": [sha256(b"a key").hexdigest()]}},
            "documents": {"routes.toml": text},
        }
        given = {"infrastructure": objects.INFRASTRUCTURE, "images": {"registry": "r.example/oriel", "tag": "0.1.0"}}
        given |= {"keda": {"enabled": True}, "gpu_enabled": False, "gateway": {"plain_http": True}}
        plan = shared("modules/platform").plan(**given, policies=policies)
        return [each.detail for each in plan.diagnostics if each.severity == "warning"]

    (said,) = warned("[pools.logic.scaling]\n")
    assert "no document has [pools.inference-cpu.scaling]: nothing would be scaled up" in said
    assert warned("[pools.logic.scaling]\n[pools.inference-cpu.scaling]\n") == []


@pytest.mark.parametrize("zero", [True, False])
def test_the_gateway_plans_for_each_scaled_object_within_its_bounds(shared, zero) -> None:
    found = objects.at(shared, True, zero, True, model_groups=MODELS)
    pools = snapshot(found).pools
    scaled = objects.of(found, "ScaledObject")
    assert set(pools) == set(scaled)
    for name, each in scaled.items():
        scaling = pools[name].scaling
        assert scaling is not None, name
        assert (scaling.minimum, scaling.maximum) == (each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"])
        assert ("fallback" in each["spec"]) == (scaling.minimum > 0)
        # A call that wakes a group lives longer than the start that it waits for.
        assert scaling.hold_s == (None if scaling.minimum else 1.5 * scaling.start_s), name
    bounds = {name: (pool.scaling.minimum, pool.scaling.maximum) for name, pool in pools.items() if pool.scaling}
    least = (0, 0, 0) if zero else (1, 1, 2)
    assert bounds == {
        "inference-chat": (least[0], 2), "inference-embed": (1, 3), "inference-rest": (least[1], 4),
        "logic": (least[2], 10),
    }  # fmt: skip
    starts = {name: pool.scaling.start_s for name, pool in pools.items() if pool.scaling}
    assert starts == {"inference-chat": 240, "inference-embed": 120, "inference-rest": 120, "logic": 120}


def test_without_keda_nothing_is_planned_and_no_port_is_open_for_it(shared) -> None:
    found = objects.at(shared, True, True, False)
    assert not any(pool.scaling for pool in snapshot(found).pools.values())
    (container,) = objects.pods(found)["gateway"]["spec"]["containers"]
    assert "--scaler-port" not in container["args"]
    assert 8083 not in [port["containerPort"] for port in container["ports"]]
    (container,) = objects.pods(objects.at(shared, True, True, True))["gateway"]["spec"]["containers"]
    assert container["args"][container["args"].index("--scaler-port") + 1] == "8083"
    assert {"name": "scaler", "containerPort": 8083, "protocol": "TCP"} in container["ports"]


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


def test_scaled_models_are_called_through_the_internal_port_whether_or_not_the_public_ones_speak_tls(shared) -> None:
    for secret in (None, "public"):
        found = objects.at(shared, True, True, True, model_groups=MODELS, gateway={"tls_secret": secret})
        (container,) = objects.pods(found)["logic"]["spec"]["containers"]
        assert container["args"][container["args"].index("--gateway") + 1] == "gateway-internal:8084"
        assert not [each for each in container["args"] if each.startswith("--inference")]
        assert "secretKeyRef" not in str(container["env"]), "logic has no secret"
        pool = snapshot(found).pools["logic"]
        assert (pool.max_inflight, pool.learn_concurrency) == (1024, False)
        policies, services = objects.of(found, "NetworkPolicy"), objects.of(found, "Service")
        reached = [each["port"] for rule in policies["logic"]["spec"]["egress"] for each in rule["ports"]]
        assert 8084 in reached and not {8000, 8081} & set(reached)
        (opened,) = [
            rule for rule in policies["gateway"]["spec"]["ingress"] if 8084 in [each["port"] for each in rule["ports"]]
        ]
        (peer,) = opened["from"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "logic"
        assert services["gateway-internal"]["spec"]["clusterIP"] == "None"
        assert "internal" not in [each["targetPort"] for each in services["gateway"]["spec"]["ports"]]
        (keys,) = [
            each
            for each in objects.pods(found)["gateway"]["spec"]["containers"][0]["env"]
            if each["name"] == "ORIEL_TICKET_KEYS"
        ]
        assert keys["valueFrom"] == {"secretKeyRef": {"name": "oriel-keys", "key": "tickets"}}


def test_without_scaling_or_if_told_so_models_are_called_directly(shared) -> None:
    for keda, through in ((False, None), (True, False)):
        found = objects.at(shared, True, True, keda, model_groups=MODELS, logic={"through_gateway": through})
        assert "--inference" in objects.pods(found)["logic"]["spec"]["containers"][0]["args"]
        assert "gateway-internal" not in objects.of(found, "Service")
        assert "8084" not in str(objects.of(found, "NetworkPolicy"))
        assert "TICKET" not in str(objects.pods(found)["gateway"])
        assert snapshot(found).pools["logic"].learn_concurrency
