"""Packs the replicas of services into nodes of several kinds, for little money. Pure; amounts are integers.

Theory. This is vector bin packing with bins of several prices, which is NP-hard. Replicas of one service are alike, so
whole groups of equal nodes are opened at once. Which node to open next is decided as in the greedy rule for weighted
set cover (Chvatal 1979): the one that holds the most for its price, where a replica is worth what it costs on nodes
that hold nothing but its service. The idle CPUs of a node with an accelerator are so filled with services that need
none before a node is opened for these. The rule is run on several sets of kinds, the cheapest result is taken, and
each of its nodes becomes the cheapest kind that holds the same. Another rule, one node for each replica, is the last
resort, so no result is dearer than that.

`lower_bound` says what no packing can be cheaper than. Where a result reaches it, it is the best one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product

from oriel_policies.errors import DoesNotFit

MOST_SETS = 64  # sets of kinds that are tried
MOST_CHOICES = 256  # choices of accelerators that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """A kind of node. price: of an hour, in 10^-9 units of the currency.

    accelerator: kind of its accelerators, "" if it has none.
    """

    name: str
    cpu_millis: int
    memory_mib: int
    price: int
    accelerator: str = ""
    accelerators: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one replica of a service needs, and how many replicas there are. accelerator: "" if it needs none."""

    service: str
    cpu_millis: int
    memory_mib: int
    replicas: int
    accelerator: str = ""
    accelerators: int = 0

    def fits(self, kind: NodeKind) -> bool:
        """Return whether an empty node of this kind holds a replica."""
        return _Room(kind).holds(self) > 0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes. replicas: service -> how many of it are on each of them."""

    kind: NodeKind
    count: int
    replicas: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Packing:
    """Where all replicas are. needs: of the services, as they were chosen."""

    nodes: Sequence[Nodes]
    needs: Sequence[Need] = field(default=())

    @property
    def price(self) -> int:
        """What all nodes cost in an hour."""
        return sum([nodes.count * nodes.kind.price for nodes in self.nodes])

    @property
    def cpu_millis(self) -> int:
        """The CPUs of all nodes."""
        return sum([nodes.count * nodes.kind.cpu_millis for nodes in self.nodes])


class _Room:
    """What is free on one node."""

    __slots__ = ("accelerator", "accelerators", "cpu_millis", "memory_mib")

    def __init__(self, kind: NodeKind) -> None:
        self.cpu_millis = kind.cpu_millis
        self.memory_mib = kind.memory_mib
        self.accelerator = kind.accelerator
        self.accelerators = kind.accelerators

    def holds(self, need: Need) -> int:
        """Return how many replicas fit into what is free."""
        most = need.replicas
        if need.accelerators:
            if need.accelerator != self.accelerator:
                return 0
            most = min(most, self.accelerators // need.accelerators)
        if need.cpu_millis:
            most = min(most, self.cpu_millis // need.cpu_millis)
        if need.memory_mib:
            most = min(most, self.memory_mib // need.memory_mib)
        return most

    def take(self, need: Need, count: int) -> None:
        self.cpu_millis -= count * need.cpu_millis
        self.memory_mib -= count * need.memory_mib
        self.accelerators -= count * need.accelerators


def pack(services: Iterable[Sequence[Need]], kinds: Sequence[NodeKind], *, apart: bool = False) -> Packing:
    """Pack all replicas. Raises DoesNotFit.

    services: for each of them one need or several to choose from, as a service that runs on either of two accelerators
    with different numbers of replicas.
    apart: services without accelerators stay off nodes that have some.
    """
    found: list[Packing] = []
    refused: DoesNotFit | None = None
    for needs in islice(product(*services), MOST_CHOICES):
        try:
            found.append(_packed([need for need in needs if need.replicas], kinds, apart=apart))
        except DoesNotFit as wrong:
            refused = wrong
    if refused is not None and not found:
        raise refused
    return min(found, key=lambda packing: packing.price)


def one_node_each(needs: Sequence[Need], kinds: Sequence[NodeKind], *, apart: bool = False) -> Packing:
    """Give every replica a node of its own, of the cheapest kind that holds it. Raises DoesNotFit."""
    nodes = []
    for need in needs:
        fitting = [kind for kind in kinds if need.fits(kind) and _may(need, kind, apart)]
        if not fitting:
            raise DoesNotFit(f"a replica of {need.service} fits on no kind of node")
        cheapest = min(fitting, key=lambda kind: kind.price)
        nodes.append(Nodes(cheapest, need.replicas, {need.service: 1}))
    return Packing(nodes, tuple(needs))


def lower_bound(needs: Sequence[Need], kinds: Sequence[NodeKind]) -> int:
    """Return a price below which no packing is: the dearest of the resources, each at its cheapest price by itself."""
    bounds = [
        _least(sum([need.replicas * need.cpu_millis for need in needs]), [(k.price, k.cpu_millis) for k in kinds]),
        _least(sum([need.replicas * need.memory_mib for need in needs]), [(k.price, k.memory_mib) for k in kinds]),
    ]
    # Nodes of different accelerators are different nodes, so what they cost adds up.
    accelerated = 0
    for name in {need.accelerator for need in needs if need.accelerators}:
        wanted = sum([need.replicas * need.accelerators for need in needs if need.accelerator == name])
        accelerated += _least(wanted, [(k.price, k.accelerators) for k in kinds if k.accelerator == name])
    return max(*bounds, accelerated)


def _least(amount: int, offers: Sequence[tuple[int, int]]) -> int:
    """Return what an amount of one resource costs at least. offers: (price, how much of it)."""
    return min([-(-amount * price // size) for price, size in offers if size], default=0) if amount else 0


def _may(need: Need, kind: NodeKind, apart: bool) -> bool:
    return bool(need.accelerators) or not (apart and kind.accelerators)


def _packed(needs: Sequence[Need], kinds: Sequence[NodeKind], *, apart: bool) -> Packing:
    best = one_node_each(needs, kinds, apart=apart)
    for chosen in _sets(kinds):
        nodes = _greedy(needs, chosen, apart)
        if nodes is not None:
            packing = Packing([_cheapest(each, needs, kinds, apart) for each in nodes], tuple(needs))
            best = min(best, packing, key=lambda packing: packing.price)
    return best


def _sets(kinds: Sequence[NodeKind]) -> Iterator[Sequence[NodeKind]]:
    """All kinds, and then ever fewer of them: a kind that looks best at first may be the wrong one in the end."""
    every = (chosen for size in range(len(kinds), 0, -1) for chosen in combinations(kinds, size))
    return islice(every, MOST_SETS)


def _greedy(needs: Sequence[Need], kinds: Sequence[NodeKind], apart: bool) -> list[Nodes] | None:
    """Open nodes until all replicas have a place; None if some fit on no kind."""
    worth: dict[str, float] = {}
    for need in needs:
        alone = [kind.price / _Room(kind).holds(need) for kind in kinds if need.fits(kind) and _may(need, kind, apart)]
        if not alone:
            return None
        worth[need.service] = min(alone)
    left = {need.service: need.replicas for need in needs}
    # What is hardest to place comes first: accelerators, then the largest.
    order = sorted(needs, key=lambda need: (-need.accelerators, -worth[need.service]))
    opened: list[Nodes] = []
    while any(left.values()):
        best: tuple[float, NodeKind, dict[str, int]] | None = None
        for kind in kinds:
            for first in order:
                if not left[first.service] or not _may(first, kind, apart):
                    continue
                content = _filled(kind, [first, *(need for need in order if need is not first)], left, apart)
                if not content.get(first.service):
                    continue
                value = sum([worth[service] * count for service, count in content.items()])
                ratio = value / kind.price if kind.price else value * 1e18
                if best is None or ratio > best[0]:
                    best = (ratio, kind, content)
        assert best is not None
        _, kind, content = best
        count = min(left[service] // each for service, each in content.items())
        opened.append(Nodes(kind, count, content))
        for service, each in content.items():
            left[service] -= count * each
    return opened


def _filled(kind: NodeKind, order: Sequence[Need], left: Mapping[str, int], apart: bool) -> dict[str, int]:
    """Return what one node holds if services take their places in this order."""
    room, content = _Room(kind), dict[str, int]()
    for need in order:
        if _may(need, kind, apart) and (count := min(left[need.service], room.holds(need))):
            room.take(need, count)
            content[need.service] = count
    return content


def _cheapest(nodes: Nodes, needs: Sequence[Need], kinds: Sequence[NodeKind], apart: bool) -> Nodes:
    """Return the same replicas on the cheapest kind of node that holds them."""
    content = [need for need in needs if nodes.replicas.get(need.service)]
    found = nodes.kind
    for kind in kinds:
        room = _Room(kind)
        for need in content:
            count = nodes.replicas[need.service]
            if not _may(need, kind, apart) or room.holds(need) < count:
                break
            room.take(need, count)
        else:
            if kind.price < found.price:
                found = kind
    return Nodes(found, nodes.count, nodes.replicas)
