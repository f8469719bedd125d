"""Decides on which servers of a pool a model in use shall be loaded. Pure.

Every model has an order of all servers, given by a hash of both names (rendezvous hashing): each gateway and each start
computes the same, and a server that comes or goes changes the first places of few models. The first call for a model
loads it on the first server of its order. A model in use gets further servers until they have room for its work beside
the work of other models: those that have it already, then those of its order that have room. Servers take models out of
memory by their own budgets.

Work is measured in shares of a server: a model that keeps half of one server busy has a work of 0.5.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from oriel_policies.upstreams.assignment import Rendezvous

FULL: Final = 0.8  # the share of a server that is planned for
PAYBACK_S: Final = 600.0  # in which a further server has to take over more work than its load costs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedServer:
    """A server of the pool.

    budgets: device -> bytes for all models; a device that is missing is not bounded.
    fixed: device -> bytes of models that always stay there.
    work: model -> the share of the server that its calls keep busy.
    has: models on demand that are in memory or are being loaded.
    refused: models that the server could not load lately, mostly for lack of memory.
    stays: False if the autoscaler is about to remove the server.
    """

    name: str
    budgets: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    has: Collection[str] = ()
    refused: Collection[str] = ()
    stays: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """A model on demand.

    sizes: device -> bytes.
    load_s: seconds that a load takes.
    in_use: True if the model was called or asked for lately.
    """

    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    load_s: float = 0.0
    in_use: bool = False


class Placement:
    """The servers of a pool, the models on demand, and where the models belong.

    servers: at least one.
    """

    def __init__(self, servers: Sequence[PlacedServer], models: Sequence[PlacedModel]) -> None:
        self.servers = servers
        self.models = models
        self._staying = [server for server in servers if server.stays] or servers
        self._table = Rendezvous([server.name for server in self._staying])
        self._busy = {server.name: sum(server.work.values()) for server in servers}
        self._room = [FULL - self._busy[server.name] for server in self._staying]

    def first_server(self, model: str, able: Collection[str]) -> str | None:
        """Return the server that loads a model which none has: the first of its order whose name is among `able`."""
        barred = [index for index, name in enumerate(self._table.names) if name not in able]
        index = self._table.first(model, barred)
        return None if index is None else self._table.names[index]

    def loaded(self, model: str) -> list[str]:
        """Return the names of the servers that have a model."""
        return [server.name for server in self.servers if model in server.has]

    def work(self, model: str) -> float:
        """Return the work of a model on all servers."""
        return sum(server.work.get(model, 0.0) for server in self.servers)

    def servers_for(self, model: PlacedModel) -> list[str]:
        """Return the names of the servers that shall have a model; none if all of them refused it."""
        order = [index for index, server in enumerate(self._staying) if model.name in server.has]
        passed = [index for index, server in enumerate(self._staying) if model.name in server.refused]
        if order:  # a further server has to take over enough work; where all are full, a load would only cost more
            passed += [index for index, room in enumerate(self._room) if room * PAYBACK_S <= model.load_s]
        left, chosen = self.work(model.name), 0
        while not chosen or left * PAYBACK_S > model.load_s:
            if chosen == len(order):
                index = self._table.first(model.name, [*order, *passed])
                if index is None:
                    break
                order.append(index)
            server = self._staying[order[chosen]]
            left -= max(0.0, FULL - self._busy[server.name] + server.work.get(model.name, 0.0))
            chosen += 1
        return [self._table.names[index] for index in order[:chosen]]

    def next_loads(self) -> dict[str, str]:
        """Return server -> the model that it has to load next. A model that no server has is left to its next call."""
        loads: dict[str, str] = {}
        for model in self.models:
            if model.in_use and (loaded := self.loaded(model.name)):
                for name in self.servers_for(model):
                    if name not in loaded:
                        loads.setdefault(name, model.name)
        return loads

    def replicas(self) -> float:
        """Return how many servers the models in use need for their bytes; one more than there are if one found no
        room.
        """
        servers, used = self.servers, [model for model in self.models if model.in_use]
        needed, lacking = 0.0, False
        for device in {device for server in servers for device in server.budgets}:
            free = [each.budgets[device] - each.fixed.get(device, 0) for each in servers if device in each.budgets]
            fitting = [model for model in used if 0 < model.sizes.get(device, 0) <= max(free)]
            needed = max(needed, sum(model.sizes[device] for model in fitting) / max(1, min(free)))
            refused = {name for server in servers for name in server.refused}
            lacking = lacking or any(model.name in refused and not self.loaded(model.name) for model in fitting)
        return max(needed, len(servers) + 1.0) if lacking else needed
