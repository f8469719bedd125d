"""Decides which servers of a pool have which models in memory, and what to load or take out next. Pure.

Work is measured in shares of a server: a model that keeps half of one server busy has a work of 0.5.

Rules.
1. Models in use are placed in the order of their work, then of their bytes. Work that fills whole servers gets whole
   servers; the rest goes to the fullest server that still has the work and the bytes free (best fit decreasing), and to
   the emptiest one if nobody has that much.
2. A model stays where it is loaded, unless the work that finds no place there would pay for a load elsewhere within
   PAYBACK_S.
3. A model that is not in use stays where it is loaded if nobody needs the bytes. One that is loaded nowhere has a
   server all the same, so that its first calls do not load it on several: the first in the order of a hash of both
   names (rendezvous hashing) among those with room. If servers come or go, few models change theirs.
4. Servers that an autoscaler is about to remove, the youngest ones, get nothing that another server has room for. What
   only they have is therefore loaded elsewhere before they go.
5. A server loads one model at a time. A model is taken out of a server only if something else needs the bytes, and
   only when every server that shall have it has loaded it.
6. Two servers may each have what the other one shall have, and no bytes for it. A model in use that is nowhere then
   goes to any server with the bytes, and takes the place of a second copy on a server that shall have it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Final, Literal

__all__ = ["Home", "PlacedModel", "PlacedServer", "Step", "first_of", "memory_replicas", "next_steps", "place"]

FULL: Final = 0.8  # the share of a server that is planned for
PAYBACK_S: Final = 600.0
_NOTHING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedServer:
    """A server of the pool.

    age_s: how long it has been running.
    budgets: device -> bytes for all models; a device that is missing is not bounded.
    fixed: device -> bytes of models that always stay there.
    loaded, loading: the models on demand that are in memory, and those on their way.
    stays: whether the autoscaler is not about to remove it.
    """

    name: str
    age_s: float
    budgets: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    loaded: Collection[str] = ()
    loading: Collection[str] = ()
    stays: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """A model on demand.

    sizes: device -> bytes. load_s: how long a load takes. work: the share of one server that its calls keep busy.
    in_use: whether it is called at all, or was asked for and found no memory.
    """

    name: str
    sizes: Mapping[str, int]
    load_s: float = 0.0
    work: float = 0.0
    in_use: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The servers that shall have a model, and why; none if no server has room for it."""

    servers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change that a server has to make next."""

    action: Literal["load", "unload"]
    server: str
    model: str


class _Room:
    """The capacity of a server that is left while models are placed."""

    def __init__(self, server: PlacedServer) -> None:
        self.server = server
        self.work = FULL
        self.bytes = {device: budget - server.fixed.get(device, 0) for device, budget in server.budgets.items()}

    def fits(self, sizes: Mapping[str, int]) -> bool:
        return all(size <= self.bytes.get(device, inf) for device, size in sizes.items())

    def has(self, model: PlacedModel) -> bool:
        return model.name in self.server.loaded or model.name in self.server.loading

    def take(self, model: PlacedModel, work: float) -> None:
        self.work -= work
        for device, size in model.sizes.items():
            if device in self.bytes:
                self.bytes[device] -= size


def place(servers: Iterable[PlacedServer], models: Iterable[PlacedModel]) -> dict[str, Home]:
    """Return where each model shall be. The same input gives the same output, in whatever order it comes."""
    rooms = [_Room(server) for server in sorted(servers, key=lambda each: (-each.age_s, each.name))]
    homes: dict[str, Home] = {}
    waiting = sorted(models, key=lambda each: (-each.work, -sum(each.sizes.values()), each.name))
    used = [model for model in waiting if model.in_use]
    chosen = {model.name: _place_used(model, rooms, homes) for model in used}
    unused = [model for model in waiting if not model.in_use]
    # What is in memory already stays there as far as it still fits: first further copies, then what nobody calls.
    for model in (*used, *unused):
        these = chosen.setdefault(model.name, [])
        for room in rooms:
            if room not in these and room.has(model) and room.fits(model.sizes):
                room.take(model, 0.0)
                these.append(room)
        if model.name in homes and these:
            names = tuple([room.server.name for room in these])
            homes[model.name] = Home(servers=names, reason=homes[model.name].reason)
        elif these:
            names = tuple([room.server.name for room in these])
            homes[model.name] = Home(servers=names, reason="not called at present; stays where it is loaded")
    for model in unused:
        if model.name not in homes:
            homes[model.name] = _first_server(model, rooms)
    return homes


def _place_used(model: PlacedModel, rooms: Sequence[_Room], homes: dict[str, Home]) -> list[_Room]:
    """Choose servers for a model in use, and note why."""
    chosen: list[_Room] = []
    left, reason = model.work, ""
    while True:
        free = [room for room in rooms if room not in chosen and room.fits(model.sizes)]
        free = [room for room in free if room.server.stays] or ([] if chosen else free)
        if not free:
            break
        room, why = _choose(model, left, free)
        if chosen and not room.has(model) and left * PAYBACK_S <= model.load_s:
            break
        reason = reason or why
        work = left if left <= room.work else max(0.0, room.work)
        room.take(model, work)
        chosen.append(room)
        left -= work
        if left <= _NOTHING:
            break
    if not chosen:
        needs = ", ".join([f"{size} bytes on {device}" for device, size in sorted(model.sizes.items())])
        homes[model.name] = Home(servers=(), reason=f"no server has room for {needs}")
        return chosen
    if len(chosen) > 1:
        reason = f"its work fills {model.work / FULL:.1f} servers"
    if left > _NOTHING:
        chosen[-1].work -= left
        reason += f"; {left:.2f} of a server more than there is place for"
    homes[model.name] = Home(servers=tuple([room.server.name for room in chosen]), reason=reason)
    return chosen


def _choose(model: PlacedModel, left: float, free: Sequence[_Room]) -> tuple[_Room, str]:
    """Choose the next server for `left` of a model's work. free: not empty, the oldest first."""
    there = [room for room in free if room.has(model)]
    if left >= FULL:  # a whole server
        return max(free, key=lambda room: (room.work, room.has(model))), "its work fills a server"
    enough = [room for room in free if room.work >= left]
    kept = [room for room in there if room.work >= left]
    if kept:
        return min(kept, key=lambda room: room.work), "stays where it is loaded"
    if there:
        roomiest = max(there, key=lambda room: room.work)
        if not enough or (left - max(0.0, roomiest.work)) * PAYBACK_S <= model.load_s:
            return roomiest, "stays where it is loaded: a move would not pay for its load"
        return min(enough, key=lambda room: room.work), "moves to where its work has a place"
    if enough:
        return min(enough, key=lambda room: room.work), "the fullest server with a place for its work and bytes"
    return max(free, key=lambda room: room.work), "the emptiest server: none has a place for all of its work"


def _first_server(model: PlacedModel, rooms: Sequence[_Room]) -> Home:
    """Return where the first call loads a model that is nowhere."""
    if there := tuple([room.server.name for room in rooms if room.has(model)]):
        return Home(servers=there, reason="not called at present; leaves memory because others need it")
    able = [room for room in rooms if room.server.stays and room.fits(model.sizes)]
    able = able or [room for room in rooms if room.fits(model.sizes)]
    reason = "not loaded: the first call loads it there"
    if not able:
        able, reason = (
            list(rooms),
            "not loaded, and no server has room: the first call loads it there in place of another",
        )
    if not able:
        return Home(servers=(), reason="the pool has no server")
    first = max(able, key=lambda room: _weight(room.server.name, model.name))
    return Home(servers=(first.server.name,), reason=reason)


def first_of(servers: Iterable[str], model: str) -> str:
    """Return the server that loads a model of which nothing is known; "" if there is none."""
    return max(servers, key=lambda server: _weight(server, model), default="")


def memory_replicas(servers: Sequence[PlacedServer], models: Iterable[PlacedModel], homes: Mapping[str, Home]) -> float:
    """Return how many servers the models in use need for their bytes; one more than there are if one found no room."""
    used = [model for model in models if model.in_use]
    needed, lacking = 0.0, False
    for device in {device for server in servers for device in server.budgets}:
        free = [server.budgets[device] - server.fixed.get(device, 0) for server in servers if device in server.budgets]
        sizes = [size for model in used if 0 < (size := model.sizes.get(device, 0)) <= max(free)]
        if sizes:
            needed = max(needed, sum(sizes) / max(1, min(free)))
            lacking = lacking or any(
                not homes[model.name].servers for model in used if 0 < model.sizes.get(device, 0) <= max(free)
            )
    return max(needed, len(servers) + 1.0) if lacking else needed


def _weight(server: str, model: str) -> bytes:
    return blake2b(f"{server}\0{model}".encode(), digest_size=8).digest()


def next_steps(servers: Iterable[PlacedServer], models: Iterable[PlacedModel], homes: Mapping[str, Home]) -> list[Step]:
    """Return what has to be done now to come closer to `homes`: at most one step for a server, none while it loads."""
    servers = sorted(servers, key=lambda each: each.name)
    known = {model.name: model for model in models}
    order = sorted(known.values(), key=lambda each: (-each.work, -sum(each.sizes.values()), each.name))
    copies = Counter(name for server in servers for name in (*server.loaded, *server.loading))
    steps = []
    for server in servers:
        if server.loading:
            continue
        wanted = [
            model
            for model in order
            if model.in_use and model.name not in server.loaded and _belongs(homes, model.name, server)
        ]
        if not wanted:
            continue
        room = _Room(server)
        for name in server.loaded:
            if name in known:
                room.take(known[name], 0.0)
        model = wanted[0]
        if room.fits(model.sizes):
            steps.append(Step(action="load", server=server.name, model=model.name))
            continue
        here = [known[name] for name in server.loaded if name in known]
        surplus = [
            each
            for each in here
            if not each.in_use
            or _may_leave(homes, each.name, server, servers)
            or (copies[each.name] > 1 and not copies[model.name] and not _belongs(homes, each.name, server))
        ]
        if surplus:
            least = min(
                surplus, key=lambda each: (_belongs(homes, each.name, server), each.in_use, each.work, each.name)
            )
            copies[least.name] -= 1
            steps.append(Step(action="unload", server=server.name, model=least.name))
    return [*steps, *_loads_elsewhere(servers, known, order, homes, steps)]


def _loads_elsewhere(
    servers: Sequence[PlacedServer],
    known: Mapping[str, PlacedModel],
    order: Sequence[PlacedModel],
    homes: Mapping[str, Home],
    steps: Sequence[Step],
) -> list[Step]:
    """Return loads of models in use that are nowhere, while those that shall have them can neither load nor unload."""
    somewhere = {name for server in servers for name in (*server.loaded, *server.loading)}
    busy = {step.server for step in steps} | {server.name for server in servers if server.loading}
    more = []
    for model in order:
        home = homes.get(model.name)
        if not model.in_use or model.name in somewhere or home is None or not home.servers:
            continue
        if not busy.isdisjoint(home.servers):
            continue
        for server in servers:
            room = _Room(server)
            for name in server.loaded:
                if name in known:
                    room.take(known[name], 0.0)
            if server.name not in busy and room.fits(model.sizes):
                more.append(Step(action="load", server=server.name, model=model.name))
                busy.add(server.name)
                break
    return more


def _belongs(homes: Mapping[str, Home], model: str, server: PlacedServer) -> bool:
    home = homes.get(model)
    return home is not None and server.name in home.servers


def _may_leave(homes: Mapping[str, Home], model: str, server: PlacedServer, servers: Sequence[PlacedServer]) -> bool:
    """Return whether a server shall not have a model, and all servers that shall have it have loaded it."""
    if _belongs(homes, model, server) or not homes[model].servers:
        return False
    return all(model in each.loaded for each in servers if each.name in homes[model].servers)
