"""Who reaches whom: NetworkPolicies of networking.k8s.io/v1, evaluated over pods.

A connection is allowed if the source's policies let it out and the destination's let it in; a pod that no policy of a
direction selects is open in that direction. Addresses of pods count for ipBlocks as well: what a cluster's network does
there is its own affair, so the worst is assumed. Ports are numbers, selectors without operators but In, NotIn, Exists
and DoesNotExist; anything else raises.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod; or, if its namespace is None, an address outside of the cluster."""

    name: str
    address: str
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    if set(selector) - {"matchLabels", "matchExpressions"}:
        raise ValueError(f"not known: {selector}")
    wanted = [labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()]
    for each in selector.get("matchExpressions", []):
        has = each["key"] in labels
        inside = has and labels[each["key"]] in each.get("values", [])
        wanted.append({"In": inside, "NotIn": not inside, "Exists": has, "DoesNotExist": not has}[each["operator"]])
    return all(wanted)


class Network:
    """The pods and their policies. policies: NetworkPolicy objects."""

    def __init__(self, policies: Iterable[Object]) -> None:
        self._policies: Sequence[Object] = list(policies)
        self._rules: dict[tuple[str, str], Sequence[Object] | None] = {}

    def allowed(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        out = self._passes("Egress", source, target, port, protocol)
        return out and self._passes("Ingress", target, source, port, protocol)

    def _passes(self, direction: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
        rules = self._rules_of(direction, pod)
        return rules is None or any(_rule(rule, direction.lower(), pod, other, port, protocol) for rule in rules)

    def _rules_of(self, direction: str, pod: Peer) -> Sequence[Object] | None:
        """Return the rules that apply; None if no policy selects the pod, so that everything is allowed."""
        if (direction, pod.name) not in self._rules:
            subject = [
                each["spec"]
                for each in self._policies
                if each["metadata"]["namespace"] == pod.namespace
                and direction in each["spec"]["policyTypes"]
                and selects(each["spec"]["podSelector"], pod.labels)
            ]
            rules = [rule for spec in subject for rule in spec.get(direction.lower(), [])]
            self._rules[direction, pod.name] = rules if subject else None
        return self._rules[direction, pod.name]


def _rule(rule: Object, key: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
    """Evaluate a rule. Without `ports` it allows every port, without `from` or `to` every peer; empty lists mean the
    same.
    """
    if set(rule) - {"from", "to", "ports"}:
        raise ValueError(f"not known: {rule}")
    ports = rule.get("ports", [])
    if any(not isinstance(each["port"], int) or "endPort" in each for each in ports):
        raise ValueError(f"ports by number only: {ports}")
    if ports and not any(each["port"] == port and each.get("protocol", "TCP") == protocol for each in ports):
        return False
    peers = rule.get("from" if key == "ingress" else "to", [])
    return not peers or any(_peer(each, pod, other) for each in peers)


@cache
def _inside(address: str, network: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network)


def _peer(peer: Object, pod: Peer, other: Peer) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        return _inside(other.address, block["cidr"]) and not any(
            _inside(other.address, each) for each in block.get("except", [])
        )
    if other.namespace is None:
        return False
    if "namespaceSelector" in peer:
        inside = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
    else:
        inside = other.namespace == pod.namespace
    return inside and selects(peer.get("podSelector", {}), other.labels)
