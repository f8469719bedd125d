"""What runs in the pods: the real units take the planned arguments, the real compiler takes the planned documents, and
every name in them leads to pods of the same plan."""

import argparse
import base64
import json
import re
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest

import oriel_gateway.command
import oriel_inference.command
import oriel_logic.command
from oriel_cli.main import main
from oriel_gateway.call.unread import MAX_BYTES as UNREAD_BYTES
from oriel_gateway.shared.state import CACHE_BYTES
from oriel_inference.flags import settle
from oriel_policies.documents import compile_documents
from oriel_policies.promise.routing import RouteTable
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.peers import TrustedPeers

from .conftest import Shared
from .harness import TerraformFailed
from .helm import KEYS
from .objects import INFRASTRUCTURE, Object, matches, objects, of, pods
from .scheduling import quantity

PARSERS = {"gateway": oriel_gateway.command, "logic": oriel_logic.command, "inference": oriel_inference.command}
BUNDLED = {"redis_url": None, "redis_tls": False, "redis_auth_secret_ref": None}
KEY = "a" * 64
# A gateway at work without bodies takes 70 MB (benchmarks/results, soak).
PYTHON_BYTES = 128 * 2**20
GROUPS = {
    "cpu": {"accelerator": "cpu"},
    "vision": {"accelerator": "openvino", "models": ["vision-*", "odd.name"], "repository": "gs://other/vision"},
    "large": {"accelerator": "tensorrt", "models": ["llama"]},
}
# The variables that change what a container is started with, with two values each.
ONE = {
    "infrastructure": BUNDLED,
    "model_groups": GROUPS,
    "policies": {"tenants": {"acme": {"tier": "gold", "keys_sha256": [KEY]}}},
    "logic": {"services": {"echo.py": "# a service\n"}},
}
OTHER: dict[str, Any] = {
    "gateway": {
        "tls_secret": "public-tls",
        "admin_token_secret_ref": {"name": "admin", "key": "token"},
        "credentials": "policy-store",
    },
    "model_groups": {
        "own": {"accelerator": "cpu", "repository": "s3://https://minio.example:9000/models", "credentials": "minio"},
        "gpu": {"accelerator": "gpu"},
    },
    "logic": {"image": "registry.example/ours:1", "folders": ["/services"], "workers": 3},
    "policies": {"store": "s3://policies.example/oriel"},
    "observability": {"otlp": {"endpoint": "https://otlp.example", "trace_tail": "collector"}},
}


KEDA = {
    **ONE,
    "keda": {"enabled": True},
    "scale_to_zero": True,
    "logic": {"services": {"echo.py": "# a service\n"}},
}


@pytest.fixture(params=[ONE, OTHER, {"gpu_enabled": False}, KEDA], ids=["bundled", "managed", "no-gpu", "keda"])
def found(request: pytest.FixtureRequest, shared: Shared) -> list[Object]:
    return objects(shared, **request.param)


def units(found: list[Object]) -> dict[str, tuple[argparse.Namespace, Object]]:
    """Return name of the Deployment -> what the unit's own parser reads from its arguments, and its container."""
    parsed = {}
    for name, template in pods(found).items():
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if component in PARSERS:
            (container,) = template["spec"]["containers"]
            assert "command" not in container, "the image's entry point is the unit"
            parser = argparse.ArgumentParser(exit_on_error=False)
            PARSERS[component].add_arguments(parser)  # type: ignore[attr-defined]
            parsed[name] = parser.parse_args(container["args"]), container
    return parsed


def test_the_units_take_their_arguments(found: list[Object]) -> None:
    told = units(found)
    assert {"gateway", "logic"} < set(told) and sum(name.startswith("inference-") for name in told)
    for name, (arguments, container) in told.items():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert arguments.host == "0.0.0.0", "probes and callers come from other addresses"
        if name == "gateway":
            scaler = {"scaler": arguments.scaler_port} if arguments.scaler_port else {}
            assert arguments.internal_host == ("0.0.0.0" if scaler else "127.0.0.1")
            internal = {"internal": arguments.internal_port} if scaler else {}
            assert ports == scaler | internal | {
                "http": arguments.http_port, "grpc": arguments.grpc_port, "admin": arguments.admin_port
            }  # fmt: skip
            assert arguments.admin_host == "0.0.0.0"
            continue
        # Headers of the gateway and of logic servers count: they come from any pod address, and network policies let
        # nobody else send some.
        peers = TrustedPeers(getattr(arguments, "trusted_peer", None) or arguments.trusted_peers)
        assert all(each in peers for each in ("10.42.3.7", "172.20.0.9", "192.168.3.4", "100.64.9.9", "fd00::7"))
        assert not any(each in peers for each in ("203.0.113.7", "8.8.8.8", "2001:db8::1"))
        if name == "logic":
            assert ports == {"http": arguments.http_port, "admin": arguments.admin_port}
        else:
            assert ports == {
                "http": arguments.http_port, "grpc": arguments.grpc_port, "metrics": arguments.metrics_port
            }  # fmt: skip
            assert settle(arguments.foreign) == [] and arguments.control_mode == "poll"
            assert 1 <= arguments.cores <= float(container["resources"]["requests"]["cpu"])


def test_a_group_is_an_image_a_repository_and_a_deployment(shared: Shared) -> None:
    told = units(objects(shared, **ONE))
    for group, accelerator, repository in (
        ("cpu", "cpu", "s3://models.example/models/cpu"),
        ("vision", "openvino", "gs://other/vision"),
        ("large", "tensorrt", "s3://models.example/models/large"),
    ):
        arguments, container = told[f"inference-{group}"]
        assert container["image"] == f"registry.example/oriel/oriel-inference:0.1.0-{accelerator}"
        assert container["args"][container["args"].index("--model-repository") + 1] == repository
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (accelerator == "tensorrt")


def test_every_path_is_mounted_and_every_address_is_a_service_here(found: list[Object]) -> None:
    services = of(found, "Service")
    for name, (_, container) in units(found).items():
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for text in container["args"]:
            if text.startswith("/") and not text.startswith("/services"):
                assert any(text == path or text.startswith(f"{path}/") for path in mounts), (name, text)
        for host, port in re.findall(r"(?:redis://|^)([a-z][a-z0-9-]*):([0-9]+)$", "\n".join(container["args"]), re.M):
            leads_to_pods(found, services[host], int(port))


def leads_to_pods(found: list[Object], service: Object, port: int) -> None:
    """The Service has this port, and pods that it selects listen there."""
    (entry,) = [each for each in service["spec"]["ports"] if each["port"] == port]
    selected = [pod for pod in pods(found).values() if matches(service["spec"]["selector"], pod["metadata"]["labels"])]
    assert selected
    for pod in selected:
        ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert ports[entry["targetPort"]] == port


def test_the_documents_are_taken_by_the_check_and_lead_to_the_groups(
    shared: Shared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = objects(shared, **ONE)
    data = of(found, "ConfigMap")["policies"]["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    assert main(["policies", "check", str(tmp_path)]) == 0
    assert "1 tenants" in capsys.readouterr().out
    snapshot = compile_documents({name: text.encode() for name, text in data.items()})
    routes = RouteTable(snapshot.routes)
    for model, pool in (
        ("llama", "inference-large"), ("vision-1", "inference-vision"), ("odd.name", "inference-vision"),
        ("anything", "inference"),
    ):  # fmt: skip
        assert [route.pool for route in routes.for_model(model)] == [pool], model
    assert [route.pool for route in routes.for_service("echo")] == ["logic"]
    services = of(found, "Service")
    for described in snapshot.pools.values():
        for address in (described.discover, described.grpc_discover):
            if address is not None:
                scheme, name = address[0].split(":")
                assert scheme == "kubernetes"
                leads_to_pods(found, services[name], address[1])
                # Each pod by its own address, or logic servers could not tell them apart.
                assert services[name]["spec"]["clusterIP"] == "None"
    assert snapshot.pools["inference"].probe and snapshot.pools["inference"].discover == ("kubernetes:inference", 8000)


def test_what_may_wait_in_a_gateway_fits_its_memory(shared: Shared) -> None:
    """Per pool, bytes that wait for permits, and again for a server; what is bounded for the process."""
    for memory in (1, 3):
        found = objects(shared, gateway={"memory": memory})
        documents = {name: text.encode() for name, text in of(found, "ConfigMap")["policies"]["data"].items()}
        pools = compile_documents(documents).pools.values()
        waiting = sum(2 * pool.max_queue_bytes for pool in pools)
        process = CACHE_BYTES + HttpLimits().max_kept_bytes + UNREAD_BYTES + PYTHON_BYTES
        (container,) = pods(found)["gateway"]["spec"]["containers"]
        assert waiting + process <= quantity(container["resources"]["limits"]["memory"])
        assert all(pool.max_body_bytes <= 0.75 * pool.max_queue_bytes for pool in pools)


def test_documents_of_ones_own_replace_those_of_the_same_name(shared: Shared, tmp_path: Path) -> None:
    own = {"tiers.toml": "[tiers.only]\nband = 0\ntarget_ms = 100\n", "more.toml": "[tenants.x]\ntier = 'only'\n"}
    data = of(objects(shared, policies={"documents": own}), "ConfigMap")["policies"]["data"]
    assert data["tiers.toml"] == own["tiers.toml"] and data["more.toml"] == own["more.toml"]
    snapshot = compile_documents({name: text.encode() for name, text in data.items()})
    assert set(snapshot.tiers) == {"only"} and set(snapshot.tenants) == {"x"}


def test_redis_forgets_no_counter_for_want_of_memory(shared: Shared) -> None:
    """It refuses to count instead, which the gateways see (docs/policies.md); and no password is in its arguments."""
    args = pods(objects(shared, **ONE))["redis"]["spec"]["containers"][0]["args"]
    told = dict(zip(args[::2], args[1::2], strict=True))
    assert told == {
        "--save": "", "--appendonly": "no", "--maxmemory": "128mb", "--maxmemory-policy": "noeviction",
        "--requirepass": "$(REDISCLI_AUTH)",
    }  # fmt: skip


def test_documents_that_helm_or_a_configmap_could_not_take_are_refused(shared: Shared) -> None:
    noise = base64.b64encode(Random(8).randbytes(305_000)).decode()  # compresses to what it was
    # A ConfigMap takes 1 MiB, however well it would compress: 899,999 bytes, and a tenant.
    policies = ONE["policies"] | {"documents": {"a.toml": "#" * 899_999}}
    with pytest.raises(TerraformFailed, match="400 kB together") as refused:
        objects(shared, **{**ONE, "logic": {"services": {"echo.py": noise}}, "policies": policies})
    assert "at most 900 kB" in str(refused.value)


def test_tiers_of_ones_own_are_known_when_planning(shared: Shared) -> None:
    tenants = {"acme": {"tier": "own-tier", "keys_sha256": [KEY]}, "birch": {"tier": "gold", "keys_sha256": []}}
    more = {"more.toml": "[tiers.own-tier]\nband = 0\ntarget_ms = 100\n"}
    assert objects(shared, policies={"tenants": tenants, "documents": more})
    with pytest.raises(Exception, match="tier is gold, silver or bronze"):  # gold went with the document it was in
        objects(shared, policies={"tenants": tenants, "documents": {"tiers.toml": more["more.toml"]}})


def test_a_change_of_policies_or_services_starts_no_pod_anew(shared: Shared) -> None:
    before, after = (objects(shared, **given) for given in (ONE, {**ONE, "policies": {}, "logic": {}}))
    assert of(before, "ConfigMap")["policies"] != of(after, "ConfigMap")["policies"]
    assert of(before, "ConfigMap")["services"] != of(after, "ConfigMap")["services"]
    assert pods(before) == pods(after)
    for name, folder in (("gateway", "/etc/oriel/policies"), ("logic", "/etc/oriel/services")):
        (mount,) = [
            each for each in pods(before)[name]["spec"]["containers"][0]["volumeMounts"] if each["mountPath"] == folder
        ]
        # As one file of it, the kubelet would never change it.
        assert "subPath" not in mount


def test_secrets_are_named_and_never_told(shared: Shared) -> None:
    found = objects(shared, **OTHER)
    ((name, keys),) = of(found, "Secret").items()
    # The values of the keys that are made come beside the others, as sensitive ones.
    assert name == "oriel-keys" and set(keys["stringData"].values()) <= {"", *KEYS.values()}
    assert not [each for each in found if each is not keys and any(key in json.dumps(each) for key in KEYS.values())]
    gateway = pods(found)["gateway"]["spec"]
    env = {each["name"]: each for each in gateway["containers"][0]["env"]}
    assert env["ORIEL_LIMITER_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "oriel-redis-auth", "key": "password"}
    assert env["ORIEL_ADMIN_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "admin", "key": "token"}
    volumes = {each["name"]: each for each in gateway["volumes"]}
    # 0440: of root and the pod's group, nobody else's.
    assert volumes["tls"]["secret"] == {"secretName": "public-tls", "defaultMode": 0o440}
    assert volumes["redis"]["secret"] == {
        "secretName": "oriel-redis-auth", "items": [{"key": "ca.crt", "path": "ca.crt"}], "optional": True
    }  # fmt: skip
    assert gateway["containers"][0]["envFrom"] == [{"secretRef": {"name": "policy-store"}}]
    # Room for a mirror of the store beside the usage ledger.
    assert volumes["state"]["emptyDir"] == {"sizeLimit": "3Gi"}
    (model_server,) = pods(found)["inference-own"]["spec"]["containers"]
    assert model_server["envFrom"] == [{"secretRef": {"name": "minio"}}]
    arguments = units(found)["gateway"][0]
    # In the environment, so that `oriel state export` there finds what gateways share.
    assert env["ORIEL_LIMITER"] == {"name": "ORIEL_LIMITER", "value": "rediss://redis.example:6380"}
    assert arguments.limiter is None and arguments.limiter_ca == Path("/etc/oriel/redis/ca.crt")
    assert str(arguments.policies) == "s3://policies.example/oriel"
    assert arguments.admin_pages == "token" and units(objects(shared))["gateway"][0].admin_pages == "token"


def test_no_port_of_the_balancer_is_probed_by_http(found: list[Object]) -> None:
    """With an application's protocol Azure's balancer would probe "/", where the gateway answers 404."""
    assert not any("appProtocol" in each for each in of(found, "Service")["gateway"]["spec"]["ports"])


@pytest.mark.parametrize("namespace", ["kube-oriel", "default"])
def test_a_namespace_of_others_is_not_taken_over(shared: Shared, namespace: str) -> None:
    with pytest.raises(TerraformFailed, match="it is taken over"):
        objects(shared, namespace=namespace)


SECRET = "My Secret"
WRONG: dict[str, Any] = {
    "images": {"registry": "https://r.example", "tag": "0.1.0", "pull_secret": SECRET},
    "gateway": {"replicas": {"min": 1.5}, "tls_secret": SECRET, "load_balancer_ip": "nope", "cpu": 0},
    "logic": {"replicas": {"max": 9.5}, "workers": 1.5, "cpu": -1},
    "redis": {"memory": 100.5},
    "keda": {"cooldown_s": 0.5, "namespace": "oriel"},
    "model_groups": {
        "folder": {"accelerator": "cpu", "repository": "/models", "memory": 0},
        "grace": {"accelerator": "cpu", "load_grace_s": 900.5, "credentials": SECRET},
    },
    "charts": {"kube_prometheus_stack": {"enabled": True}},
    "observability": {"namespace": "oriel"},
    "infrastructure": {"redis_url": None},
}


def test_what_only_pods_that_never_start_would_tell_is_refused_when_planning(
    shared: Shared,
) -> None:
    """With these mistakes pods would never start, and Helm would wait an hour. One plan covers all."""
    with pytest.raises(TerraformFailed) as refused:
        objects(shared, **WRONG)
    said = "\n".join(each.detail for each in refused.value.diagnostics)
    for each in (
        "images.registry:", "images.pull_secret:", "gateway.replicas: whole", "gateway: tls_secret",
        "gateway.load_balancer_ip:", "gateway: cpu", "logic.replicas: whole", "workers a whole number", "logic: cpu",
        "redis: image", "whole seconds", "has no folder of models", "all of them whole numbers", "model_groups: cpu",
        "model_groups: credentials", "keda.namespace: not the platform's own", "observability.namespace: not",
        "the Redis in the cluster has a password that is made",
    ):  # fmt: skip
        assert each in said, each


def test_a_platform_that_no_caller_could_use_is_a_warning_of_the_plan(shared: Shared) -> None:
    """No tenant; a key's hash that is an example's, or that of a word: in the short way or in a document."""

    def warned(**policies: Any) -> list[str]:
        images = {"registry": "registry.example/oriel", "tag": "0.1.0"}
        gateway = {"plain_http": True}
        one = shared("modules/platform")
        plan = one.plan(infrastructure=INFRASTRUCTURE, images=images, policies=policies, gateway=gateway)
        return [each.detail for each in plan.diagnostics if each.severity == "warning"]

    real, example, word = sha256(b"a key of acme").hexdigest(), "0" * 64, sha256(b"secret").hexdigest()
    document = f'[tenants.birch]\ntier = "gold"\nkeys = [{{ sha256 = "{word}" }}]'
    (said,) = warned()
    assert "no tenant" in said and "`oriel keys new`" in said
    assert warned(documents={"more.toml": document.replace(word, real)}) == []
    (said,) = warned(
        tenants={"acme": {"tier": "gold", "keys_sha256": [real, example]}}, documents={"more.toml": document}
    )
    assert f"{example[:8]}..., {word[:8]}... is no key's SHA-256" in said
