"""Where pods go: CPU pods beside GPU pods, never instead of them and never on a GPU node of their own."""

from itertools import permutations
from typing import Any

import pytest

from .conftest import Shared
from .objects import Object, objects, of, pods
from .scheduling import Node, Pod, imagined, place, quantity, score, victims, why_not

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
GI = 2**30
BUNDLED = {"redis_url": None, "redis_tls": False, "redis_auth_secret_ref": None}
# The pools' defaults less what the clouds keep for the kubelet and the system, the most of the three: GKE's memory.
CPU_NODE = {"cpu": 3.86, "memory": 12.6 * GI, "ephemeral-storage": 80 * GI}
GPU_NODE = {"cpu": 7.82, "memory": 27.0 * GI, "ephemeral-storage": 160 * GI, "nvidia.com/gpu": 1}
SYSTEM_NODE = {"cpu": 1.93, "memory": 5.6 * GI, "ephemeral-storage": 40 * GI}
# What the clouds run on each node: network, DNS cache, storage driver, logs, metrics (GKE's, the most of the three).
DAEMONS = {"cpu": 0.7, "memory": 0.9 * GI}
# Two CPUs on GPU nodes, as the cost model in terraform/README.md has it.
GPU_DAEMONS = {"cpu": 2.0, "memory": 2.0 * GI}


def less(has: dict[str, float], daemons: dict[str, float]) -> dict[str, float]:
    return {key: value - daemons.get(key, 0.0) for key, value in has.items()}


def system_node(name: str = "system") -> Node:
    return Node(name, {"oriel.dev/pool": "system"}, less(SYSTEM_NODE, DAEMONS))


def cpu_node(name: str = "cpu") -> Node:
    return Node(name, {"oriel.dev/pool": "cpu"}, less(CPU_NODE, DAEMONS))


def gpu_node(name: str = "gpu") -> Node:
    return Node(name, {"oriel.dev/pool": "gpu"}, less(GPU_NODE, GPU_DAEMONS), [GPU_TAINT])


class Cluster:
    """Pods by the Deployment's or DaemonSet's name, as the plan has them, with the priorities it has."""

    def __init__(self, found: list[Object]) -> None:
        self.objects = found
        self._values = {name: each["value"] for name, each in of(found, "PriorityClass").items()}
        self._templates = pods(found)

    def pod(self, name: str) -> Pod:
        template = self._templates[name]
        wanted = template["spec"].get("priorityClassName")
        return Pod(name, template, self._values[wanted] if wanted else 0)

    def has(self, name: str) -> bool:
        return name in self._templates

    def running(self, node: Node) -> Node:
        """The same node with its DaemonSet pods."""
        node.pods.extend(daemon for daemon in self.daemons() if not why_not(daemon, node))
        return node

    def daemons(self) -> list[Pod]:
        return [self.pod(name) for name in of(self.objects, "DaemonSet")]


@pytest.fixture
def cluster(shared: Shared) -> Cluster:
    return Cluster(objects(shared, infrastructure=BUNDLED))


CPU_PODS = ("logic", "inference-cpu")


@pytest.mark.parametrize("name", CPU_PODS)
def test_a_cpu_pod_fits_every_cpu_node_and_only_a_gpu_node_that_is_paid_for(cluster: Cluster, name: str) -> None:
    pod = cluster.pod(name)
    assert why_not(pod, cluster.running(cpu_node())) == ""
    empty = cluster.running(gpu_node())
    assert empty.pods == [] and why_not(pod, empty) == "pod affinity"
    assert place(cluster.pod("inference-gpu"), [empty]) is empty
    assert why_not(pod, empty) == ""


@pytest.mark.parametrize("name", CPU_PODS)
def test_a_cpu_pod_grows_the_cpu_pool_and_never_the_gpu_pool(cluster: Cluster, name: str) -> None:
    daemons = cluster.daemons()
    assert why_not(cluster.pod(name), imagined(cpu_node(), daemons)) == ""
    assert why_not(cluster.pod(name), imagined(gpu_node(), daemons)) == "pod affinity"
    assert why_not(cluster.pod("inference-gpu"), imagined(gpu_node(), daemons)) == ""
    assert why_not(cluster.pod("inference-gpu"), imagined(cpu_node(), daemons)) != ""
    # An existing GPU node that is full of its GPU's pod and others does not lend its right to a new one.
    full = cluster.running(gpu_node())
    full.has["cpu"] = cluster.pod("inference-gpu").requests()["cpu"]
    assert place(cluster.pod("inference-gpu"), [full]) and why_not(cluster.pod(name), full) == "not enough cpu"
    assert why_not(cluster.pod(name), imagined(full, daemons)) == "pod affinity"


def test_a_cpu_pod_prefers_the_gpu_node_that_is_paid_for_then_the_cpu_pool(cluster: Cluster) -> None:
    system, cpu, gpu = (cluster.running(node) for node in (system_node(), cpu_node(), gpu_node()))
    assert place(cluster.pod("inference-gpu"), [system, cpu, gpu]) is gpu
    for name in CPU_PODS:
        pod = cluster.pod(name)
        assert score(pod, gpu) > score(pod, cpu) > score(pod, system)
        assert place(pod, [system, cpu, gpu]) is gpu


def test_a_gpu_pod_displaces_cpu_pods_and_nobody_displaces_it(cluster: Cluster) -> None:
    node = cluster.running(gpu_node())
    gpu, cpu, gateway = cluster.pod("inference-gpu"), cluster.pod("inference-cpu"), cluster.pod("gateway")
    assert gpu.priority > gateway.priority > cpu.priority == cluster.pod("logic").priority == 0
    for name, each in of(cluster.objects, "PriorityClass").items():
        # They displace (the default), and are for pods that name them: not for everybody's in the cluster.
        assert each.get("preemptionPolicy") in (None, "PreemptLowerPriority") and not each.get("globalDefault"), name
    node.has["nvidia.com/gpu"] = 2
    assert place(cluster.pod("inference-gpu"), [node]) and place(cluster.pod("inference-cpu"), [node])
    assert place(cluster.pod("logic"), [node])
    displaced = victims(gpu, node)
    assert displaced and {pod.name for pod in displaced} <= set(CPU_PODS)
    # The other way round nothing moves, however full the node is.
    node.pods[:] = [pod for pod in node.pods if pod.name == "inference-gpu"]
    node.has["cpu"] = gpu.requests()["cpu"]
    assert victims(cpu, node) is None and victims(gateway, node) is None


def test_the_gateway_and_redis_stay_off_gpu_nodes_and_take_their_place_from_cpu_pods(cluster: Cluster) -> None:
    gpu = cluster.running(gpu_node())
    assert place(cluster.pod("inference-gpu"), [gpu])
    for name in ("gateway", "redis"):
        assert why_not(cluster.pod(name), gpu) == "taint nvidia.com/gpu"
        assert place(cluster.pod(name), [cluster.running(cpu_node()), cluster.running(system_node())]).name == "system"  # type: ignore[union-attr]
    node = cluster.running(cpu_node())
    while place(cluster.pod("logic"), [node]):
        pass
    node.has["cpu"] = sum(pod.requests()["cpu"] for pod in node.pods)
    displaced = victims(cluster.pod("gateway"), node)
    assert displaced and {pod.name for pod in displaced} == {"logic"}


def test_the_anchor_is_on_every_node_without_a_gpu_and_costs_next_to_nothing(cluster: Cluster) -> None:
    anchor = cluster.pod("anchor")
    assert cluster.daemons()[0].name == "anchor" and len(cluster.daemons()) == 1
    assert (
        why_not(anchor, cpu_node())
        == why_not(anchor, system_node())
        == why_not(anchor, Node("bare", {}, CPU_NODE))
        == ""
    )
    untainted = Node("gpu", {"oriel.dev/pool": "gpu"}, GPU_NODE)  # someone took the taint off, or has not set it yet
    assert why_not(anchor, gpu_node()) and why_not(anchor, untainted) == "node affinity"
    assert anchor.requests()["cpu"] <= 0.001 and anchor.requests()["memory"] <= quantity("8Mi")
    full = cpu_node()
    full.has["cpu"] = cluster.pod("logic").requests()["cpu"]
    full.pods.append(cluster.pod("logic"))
    assert [pod.name for pod in victims(anchor, full) or []] == ["logic"]


@pytest.mark.parametrize("variables", [{"placement": {"share_gpu_nodes": False}}, {"gpu_enabled": False}])
def test_without_sharing_cpu_pods_keep_to_cpu_nodes(shared: Shared, variables: dict[str, Any]) -> None:
    cluster = Cluster(objects(shared, **variables))
    assert not cluster.has("anchor")
    # They stay: pods of before still name them while the change is on its way, or rolled back.
    assert set(of(cluster.objects, "PriorityClass")) == {"oriel-gpu", "oriel-gateway", "oriel-cpu"}
    named = {name for name, pod in pods(cluster.objects).items() if "priorityClassName" in pod["spec"]}
    assert named == {"gateway"}
    full = system_node()
    while place(cluster.pod("logic"), [full]):
        pass
    assert why_not(cluster.pod("gateway"), full) and victims(cluster.pod("gateway"), full)
    for name in CPU_PODS:
        if not cluster.has(name):
            continue
        assert why_not(cluster.pod(name), cpu_node()) == ""
        gpu = gpu_node()
        if cluster.has("inference-gpu"):
            assert place(cluster.pod("inference-gpu"), [gpu])
        assert why_not(cluster.pod(name), gpu) == "taint nvidia.com/gpu"
    assert cluster.has("inference-gpu") == ("gpu_enabled" not in variables)


def test_a_cluster_of_ones_own_may_select_its_gpu_nodes_by_several_labels(shared: Shared) -> None:
    selector = {"example.com/gpu": "l4", "example.com/team": "serving"}
    taint = {"key": "dedicated", "value": "gpu", "effect": "NoExecute"}
    given = {"gpu_node_selector": selector, "gpu_taint": taint}
    cluster = Cluster(objects(shared, infrastructure=given))
    gpu = Node("gpu", selector, less(GPU_NODE, GPU_DAEMONS), [taint])
    assert place(cluster.pod("inference-gpu"), [gpu]) is gpu
    assert why_not(cluster.pod("logic"), gpu) == "" and why_not(cluster.pod("gateway"), gpu) == "taint dedicated"
    # One of two labels does not make a GPU node.
    for one in selector:
        assert why_not(cluster.pod("anchor"), Node("other", {one: selector[one]}, CPU_NODE)) == ""
    assert why_not(cluster.pod("anchor"), Node("gpu", selector, CPU_NODE)) == "node affinity"


def test_the_defaults_fit_the_default_nodes(cluster: Cluster) -> None:
    """One GPU node carries its GPU pod, a CPU model server and a logic server; the rest of a first start needs one CPU
    node; two system nodes carry the gateways and Redis. In whatever order the pods come."""
    names = ("inference-gpu", "inference-cpu", "logic")
    for order in permutations(names):
        node = cluster.running(gpu_node())
        pending = [cluster.pod(name) for name in order]
        for _ in names:  # what waits for an anchor is tried again
            pending = [pod for pod in pending if place(pod, [node]) is None]
        assert not pending, [why_not(pod, node) for pod in pending]
    alone = cluster.running(cpu_node())
    assert place(cluster.pod("logic"), [alone]) and place(cluster.pod("inference-cpu"), [alone])
    system = [cluster.running(system_node(f"system-{number}")) for number in range(2)]
    for name, each in (("gateway", system[0]), ("gateway", system[1])):
        assert place(cluster.pod(name), [each]), why_not(cluster.pod(name), each)
    assert place(cluster.pod("redis"), system)
