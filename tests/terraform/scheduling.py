"""The parts of Kubernetes' scheduler and of its cluster autoscaler that decide about our pods.

Filters: node selector, required node affinity, taints, required pod affinity by host, requests. Score: preferred node
affinity. Preemption: lower priorities, lowest first. The autoscaler imagines a new node of a pool, with the pods of
DaemonSets on it, and grows the pool if a pending pod fits there.

Left out: spreading, ports, volumes, anti-affinity. The only objects of ours that forbid a node by these are gateways on
one host.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}


def quantity(text: str | float) -> float:
    """Return cores, bytes or a count: "250m", "512Mi", "2"."""
    text = str(text)
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


@dataclass(slots=True, eq=False)
class Pod:
    name: str
    template: Mapping[str, Any]
    priority: int = 0

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.template["spec"]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    def requests(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for container in self.spec["containers"]:
            for resource, amount in container["resources"]["requests"].items():
                total[resource] = total.get(resource, 0.0) + quantity(amount)
        return total


@dataclass(slots=True, eq=False)
class Node:
    """One node. has: what pods may request, which is less what the system keeps for itself."""

    name: str
    labels: dict[str, str]
    has: dict[str, float]
    taints: list[dict[str, str]] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.labels = {**self.labels, "kubernetes.io/hostname": self.name}

    def left(self) -> dict[str, float]:
        left = dict(self.has)
        for pod in self.pods:
            for resource, amount in pod.requests().items():
                left[resource] = left.get(resource, 0.0) - amount
        return left


def why_not(pod: Pod, node: Node) -> str:
    """Return why the node does not take the pod; "" if it does."""
    spec = pod.spec
    for key, value in spec.get("nodeSelector", {}).items():
        if node.labels.get(key) != value:
            return f"node selector {key}"
    affinity = spec.get("affinity", {})
    required = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    if required and not any(holds(term, node.labels) for term in required["nodeSelectorTerms"]):
        return "node affinity"
    for taint in node.taints:
        if taint["effect"] != "PreferNoSchedule" and not any(
            tolerates(each, taint) for each in spec.get("tolerations", [])
        ):
            return f"taint {taint['key']}"
    for term in affinity.get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", []):
        assert term["topologyKey"] == "kubernetes.io/hostname"
        wanted = term["labelSelector"]["matchLabels"]
        # The exception for a first pod: it matches itself, and no pod anywhere does. None of ours may rely on it.
        assert not agrees(wanted, pod.labels)
        if not any(agrees(wanted, each.labels) for each in node.pods):
            return "pod affinity"
    left = node.left()
    for resource, amount in pod.requests().items():
        if amount > left.get(resource, 0.0):
            return f"not enough {resource}"
    return ""


def holds(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(
        (labels.get(each["key"]) in each["values"]) == {"In": True, "NotIn": False}[each["operator"]]
        for each in term["matchExpressions"]
    )


def agrees(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    return (
        toleration.get("effect") in (None, taint["effect"])
        and toleration.get("key") in (None, taint["key"])
        and (toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))
    )


def score(pod: Pod, node: Node) -> int:
    preferred = pod.spec.get("affinity", {}).get("nodeAffinity", {})
    return sum(
        each["weight"]
        for each in preferred.get("preferredDuringSchedulingIgnoredDuringExecution", [])
        if holds(each["preference"], node.labels)
    )


def place(pod: Pod, nodes: Iterable[Node]) -> Node | None:
    """Put the pod on the node where it fits best; returns the node, or None if it fits nowhere."""
    fitting = [node for node in nodes if not why_not(pod, node)]
    if not fitting:
        return None
    best = max(fitting, key=lambda node: score(pod, node))
    best.pods.append(pod)
    return best


def victims(pod: Pod, node: Node) -> list[Pod] | None:
    """Return the pods that the pod displaces from the node, in order; None if it would not fit even then."""
    gone: list[Pod] = []
    stays = list(node.pods)
    try:
        for candidate in sorted(
            (each for each in stays if each.priority < pod.priority), key=lambda each: each.priority
        ):
            if not why_not(pod, node):
                break
            node.pods.remove(candidate)
            gone.append(candidate)
        return None if why_not(pod, node) else gone
    finally:
        node.pods[:] = stays


def imagined(node: Node, daemons: Iterable[Pod]) -> Node:
    """Return a new node of the same pool as the autoscaler imagines it."""
    new = Node(f"{node.name}-new", dict(node.labels), dict(node.has), list(node.taints))
    for daemon in daemons:
        if not why_not(daemon, new):
            new.pods.append(daemon)
    return new
