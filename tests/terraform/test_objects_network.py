"""Who reaches whom, on every port that anything listens on: exactly the pairs of the table, everything else refused."""

import itertools
from typing import Any
from urllib.parse import urlsplit

import pytest

from . import objects
from .reach import Network, Peer

PORTS = (
    *(22, 53, 80, 443, 988, 4317, 4318, 6379, 6380, 6443, 8000, 8001, 8002),
    *(8080, 8081, 8082, 8083, 8084, 8090, 8092, 8888, 9000, 13133),
)

OUTSIDE = [
    Peer("internet", "203.0.113.9"),
    Peer("managed redis", "10.42.200.4"),
    Peer("node metadata", "169.254.169.254"),
    Peer("aws identity", "169.254.170.23"),
    Peer("dns cache", "169.254.20.10"),
    Peer("dns", "10.42.0.10", "kube-system", {"k8s-app": "kube-dns"}),
    Peer("system pod", "10.42.0.11", "kube-system", {"k8s-app": "other"}),
    Peer("prometheus", "10.42.0.12", "monitoring", {"app": "prometheus"}),
    Peer("keda", "10.42.0.13", "keda", {"app.kubernetes.io/name": "keda-operator"}),
    Peer("keda webhook", "10.42.0.14", "keda", {"app.kubernetes.io/name": "keda-admission-webhooks"}),
    Peer("stranger", "10.42.0.15", "default", {"app.kubernetes.io/component": "gateway"}),
    Peer("neighbour", "10.42.0.16", "oriel", {"app": "something"}),
]
# No policy of ours is on them: they come to every open door, and are reached on the ports an egress rule names.
OPEN = {each.name for each in OUTSIDE} - {"neighbour"}


def peers(found: list[objects.Object]) -> list[Peer]:
    """The pods by the labels of their templates, and whoever else is there."""
    ours = [
        Peer(name, f"10.42.1.{number}", "oriel", template["metadata"]["labels"])
        for number, (name, template) in enumerate(sorted(objects.pods(found).items()), 1)
    ]
    return ours + OUTSIDE


def reached(found: list[objects.Object]) -> set[tuple[str, str, int]]:
    """Return every allowed (source, target, port), without pairs that have no pod of ours."""
    network = Network(objects.of(found, "NetworkPolicy").values())
    return {
        (source.name, target.name, port)
        for source, target in itertools.permutations(peers(found), 2)
        for port in PORTS
        if "oriel" in (source.namespace, target.namespace) and network.allowed(source, target, port)
    }


def table(**groups: set[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
    return set().union(*groups.values())


def between(sources: Any, targets: Any, *ports: int) -> set[tuple[str, str, int]]:
    return set(itertools.product(sources, targets, ports))


MODELS = ("inference-cpu", "inference-gpu")
CALLERS = ("gateway", "logic", *MODELS)
LINK_LOCAL = {"node metadata", "aws identity", "dns cache"}


def expected(
    *, keda: bool, bundled: bool, identity: set[tuple[str, int]], collected: bool, local: bool
) -> set[tuple[str, str, int]]:
    """The table. What is not in it must not be reached."""
    asks = {"gateway", "logic", *MODELS, *({"collector"} if collected else ())}
    stores = {"gateway", *MODELS, *({"collector"} if collected else ())}
    return table(
        # Only the gateway is public, and only by its two doors.
        public=between(OPEN, ["gateway"], 8080, 8081),
        # With KEDA logic servers call models through the gateway's internal port, which nobody else reaches.
        calls=between(["gateway"], ["logic"], 8090)
        | between(["gateway"] if keda else ["gateway", "logic"], MODELS, 8000, 8001)
        | (between(["logic"], ["gateway"], 8084) if keda else set()),
        metrics=between(["prometheus"], ["gateway"], 8082)
        | between(["prometheus"], ["logic"], 8092)
        | between(["prometheus"], MODELS, 8002)
        | (between(["prometheus"], ["collector"], 8888) if collected else set()),
        scaler=between(["keda"], ["gateway"], 8083) if keda else set(),
        spans=between(CALLERS, ["collector"], 4318) if collected else set(),
        redis=between(["gateway"], ["redis"], 6379) if bundled else between(["gateway"], OPEN - LINK_LOCAL, 6380),
        dns=between(asks, ["dns", "dns cache"], 53),
        # Object stores, issuers of tokens, the endpoint for spans: one port of public addresses, and of private ones
        # where they are named or nobody knows where the stores lie. The Kubernetes API has a private address.
        https=between(stores, OPEN - LINK_LOCAL if local else {"internet"}, 443)
        | between(["gateway"], OPEN - LINK_LOCAL, 443),
        # The Kubernetes API of kind and kubeadm; clouds have it on 443.
        kubernetes=between(["gateway"], OPEN - LINK_LOCAL, 6443) if local else set(),
        identity={(pod, name, port) for pod in ("gateway", *MODELS) for name, port in identity},
    )


# 169.254.169.254 is the node's own, and none for a pod, but on GKE, where the metadata server answers for the pod.
POINTS = [
    ("aws", True, False, True, {("aws identity", 80)}),
    ("gcp", False, True, False, {("node metadata", 80)}),
    ("azure", False, False, True, set()),
    ("local", True, True, False, set()),
]


@pytest.mark.parametrize(("cloud", "keda", "bundled", "collected", "identity"), POINTS)
def test_exactly_these_reach_each_other(shared, cloud, keda, bundled, collected, identity) -> None:
    infrastructure = {"cloud": cloud} | ({"redis_url": None, "redis_auth_secret_ref": None} if bundled else {})
    watched = objects.WATCHED if collected else {}
    found = objects.at(shared, True, True, keda, infrastructure=infrastructure, observability=watched)
    local = cloud == "local"
    assert reached(found) == expected(keda=keda, bundled=bundled, identity=identity, collected=collected, local=local)


def test_each_door_holds_by_itself(shared) -> None:
    """Ingress rules alone already give the same result, as if no pod's egress were restricted."""
    found = objects.at(shared, True, True, True, infrastructure={"redis_url": None, "redis_auth_secret_ref": None})
    doors = [
        each | {"spec": each["spec"] | {"policyTypes": ["Ingress"]}} if each["kind"] == "NetworkPolicy" else each
        for each in found
    ]
    ours = set(objects.pods(found))
    inside = {each for each in reached(doors) if {each[0], each[1]} <= ours and each[1] != "gateway"}
    inside |= {each for each in reached(doors) if each[0] in ours and each[1:] == ("gateway", 8084)}
    assert inside == {each for each in reached(found) if {each[0], each[1]} <= ours}


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_names_are_looked_up_by_both_protocols(shared, protocol) -> None:
    found = objects.at(shared, True, True, False)
    network = Network(objects.of(found, "NetworkPolicy").values())
    named = {each.name: each for each in peers(found)}
    for pod in (*CALLERS, "collector"):
        assert network.allowed(named[pod], named["dns"], 53, protocol)
        assert not network.allowed(named[pod], named["system pod"], 53, protocol)
    assert not network.allowed(named["anchor"], named["dns"], 53, protocol)


@pytest.mark.parametrize(("gpu", "zero", "keda"), objects.MATRIX)
def test_nothing_is_public_but_the_gateway(shared, gpu, zero, keda) -> None:
    found = objects.at(shared, gpu, zero, keda)
    assert not {each["kind"] for each in found} & {"Ingress", "Gateway", "HTTPRoute"}
    public = [
        each for each in objects.of(found, "Service").values() if each["spec"].get("type", "ClusterIP") != "ClusterIP"
    ]
    assert [each["metadata"]["name"] for each in public] == ["gateway"]
    template = objects.pods(found)["gateway"]
    named = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert {named[port["targetPort"]] for port in public[0]["spec"]["ports"]} == {8080, 8081}
    for name, pod in objects.pods(found).items():
        assert not pod["spec"].get("hostNetwork") and not pod["spec"].get("hostPID"), name
        for container in pod["spec"]["containers"]:
            assert not [port for port in container.get("ports", []) if "hostPort" in port], name
    for service in objects.of(found, "Service").values():
        assert "externalIPs" not in service["spec"]


@pytest.mark.parametrize(
    ("url", "endpoint", "port"),
    [
        ("s3://http://minio.example:9000/bucket/models", "http://otlp.example", 9000),
        ("s3://http://minio.example/bucket/models", "https://otlp.example", 80),
        ("s3://bucket/models", "https://otlp.example:4318/v1", 443),
    ],
)
def test_stores_and_collectors_on_other_ports_are_reached(shared, url, endpoint, port) -> None:
    found = objects.at(
        shared,
        True,
        True,
        False,
        infrastructure={"model_repository_url": url},
        observability={"otlp": {"endpoint": endpoint}},
    )
    asked = reached(found)
    assert ("inference-gpu", "internet", port) in asked
    address = urlsplit(endpoint)
    assert ("collector", "internet", address.port or {"http": 80, "https": 443}[address.scheme]) in asked
    assert ("logic", "internet", port) not in asked


def test_servers_that_run_elsewhere_are_reached_by_the_gateway_alone_and_at_their_ports(shared) -> None:
    labels = {"app.kubernetes.io/component": "gateway"}  # of the stranger
    pod = {"address": "neuron.default.svc", "port": 8000, "grpc_port": 8001, "models": ["m"], "pod_labels": labels}
    other = {"address": "llm.example", "port": 9000, "services": ["chat.completions"], "networks": ["10.42.200.0/24"]}
    pools = {"neuron": pod, "none": pod | {"pod_labels": {"app": "absent"}, "models": ["n"]}, "language": other}
    found, without = (reached(objects.at(shared, True, True, False, policies={"pools": each})) for each in (pools, {}))
    assert found - without == between(["gateway"], ["stranger"], 8000, 8001) | {("gateway", "managed redis", 9000)}


def public_warnings(shared, **gateway) -> list[str]:
    key = "b3a8e0e1f9ab1bfe3a36f231f676f78bb30a519d2b21e6c530c0eee8ebb4a5d0"
    given = {"infrastructure": objects.INFRASTRUCTURE, "images": {"registry": "r.example/oriel", "tag": "0.1.0"}}
    policies = {"tenants": {"acme": {"tier": "gold", "keys_sha256": [key]}}}
    plan = shared("modules/platform").plan(**given, policies=policies, gateway=gateway)
    return [each.detail for each in plan.diagnostics if each.severity == "warning"]


@pytest.mark.parametrize(
    ("gateway", "warned"),
    [
        ({}, True),
        ({"service_annotations": {"example.com/team": "internal-tools"}}, True),
        ({"service_annotations": {"service.beta.kubernetes.io/azure-load-balancer-internal": "false"}}, True),
        ({"plain_http": True}, False),
        ({"tls_secret": "public"}, False),
        ({"source_ranges": ["203.0.113.0/24"]}, False),
        ({"service_type": "ClusterIP"}, False),
        ({"service_annotations": {"service.beta.kubernetes.io/aws-load-balancer-ssl-cert": "arn:aws:acm:x"}}, False),
        ({"service_annotations": {"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"}}, False),
        ({"service_annotations": {"service.beta.kubernetes.io/azure-load-balancer-internal": "true"}}, False),
        ({"service_annotations": {"networking.gke.io/load-balancer-type": "Internal"}}, False),
    ],
)
def test_a_plan_that_takes_keys_over_plain_http_from_everywhere_warns(shared, gateway, warned) -> None:
    said = public_warnings(shared, **gateway)
    assert len(said) == warned and all("plain HTTP from everywhere" in each for each in said)


def test_keys_that_nobody_names_are_made_and_the_bundled_redis_has_one(shared) -> None:
    bundled = {"redis_url": None, "redis_auth_secret_ref": None}
    found = objects.at(shared, True, True, True, infrastructure=bundled)
    pods = objects.pods(found)
    own = {name: {"secretKeyRef": {"name": "oriel-keys", "key": name}} for name in ("admin", "redis", "tickets")}
    env = {each["name"]: each.get("valueFrom") for each in pods["gateway"]["spec"]["containers"][0]["env"]}
    assert env["ORIEL_ADMIN_TOKEN"] == own["admin"] and env["ORIEL_TICKET_KEYS"] == own["tickets"]
    assert env["ORIEL_LIMITER_PASSWORD"] == own["redis"]
    (redis,) = pods["redis"]["spec"]["containers"]
    assert redis["env"] == [{"name": "REDISCLI_AUTH", "valueFrom": own["redis"]}]
    assert redis["args"][redis["args"].index("--requirepass") + 1] == "$(REDISCLI_AUTH)"
    refs = {name: {"name": "mine", "key": name} for name in ("admin", "tickets")}
    gateway = {f"{name}_secret_ref": refs[key] for name, key in (("admin_token", "admin"), ("ticket_keys", "tickets"))}
    found = objects.at(shared, True, True, True, gateway=gateway)
    assert "oriel-keys" not in str(objects.pods(found))


@pytest.mark.parametrize(
    ("cloud", "networks", "own", "reached_too"),
    [
        ("aws", None, [], set()),
        ("aws", ["10.42.200.0/24"], [], {"managed redis"}),
        ("azure", None, ["10.42.200.0/24"], {"managed redis"}),
        ("local", None, [], {"managed redis", "stranger"}),
        ("local", ["10.42.200.0/24"], [], {"managed redis"}),
        ("local", [], [], set()),
    ],
)
def test_model_servers_reach_private_addresses_only_where_stores_are_said_to_be(
    shared, cloud, networks, own, reached_too
) -> None:
    """Code of models had a way to pods, services and the Kubernetes API."""
    found = objects.at(
        shared, True, True, False, infrastructure={"cloud": cloud, "store_networks": own}, store_networks=networks
    )
    network = Network(objects.of(found, "NetworkPolicy").values())
    named = {each.name: each for each in peers(found)}
    for model in MODELS:
        assert network.allowed(named[model], named["internet"], 443)
        for target in ("managed redis", "stranger"):
            assert network.allowed(named[model], named[target], 443) == (target in reached_too)
