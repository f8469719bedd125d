"""Loads models within a budget of memory, and takes others out of memory for that.

`oriel_policies.upstreams.model_memory` decides which.

A backend that knows what a model needs says so before it takes it (`reserve`). If that is more than was planned and
does not fit, the load ends before the memory is taken, and begins once more with the right size, for which other models
may have to go.

A model counts from the moment its load is admitted to the moment its sessions are closed, which is when its last
request has ended. Before its first load it counts with the bytes of its files times a factor that is learned from
earlier loads; afterwards with what was measured: what its sessions report, on a GPU what the device has less than
before, else what this process has grown by, if nothing else was loaded meanwhile. It never counts less than its files.

Owner and single writer: the loop.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from math import ceil
from typing import Any

from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.errors import LoadFailed, ModelMemoryFull
from oriel_inference.models.demand import Demand
from oriel_inference.models.rollout import Rollout
from oriel_inference.repository.outline import HOST, Outline
from oriel_inference.repository.plans import ReserveModel, unbounded
from oriel_policies.upstreams.model_memory import MemoryShare, ModelMemory, ShareState
from oriel_wire.v2.datatypes import quoted

_log = logging.getLogger(__name__)

FIRST_FACTOR = 1.2
FIRST_BYTES = 64 << 20
KEPT_SHARE = 0.9
NO_ROOM_RETRY_S = 60.0
WANTED_S = 60.0
RESERVE_S = 30.0  # for the loop to answer
MOST_LOADS = 3  # loads of one model, each of which found that the model needs more memory
MAX_NAMES = 4096


class MemoryBudget:
    """The memory of all models.

    memory: the rule and its budgets.
    demand: the calls, and the loads of other models, that wait for models.
    spawn: starts a task that ends with the server.
    used_bytes: gives free memory back to the system, and returns device -> bytes in use there, for the devices
        that can be measured; blocks.
    evictions, refusals: model -> times, for the metrics.
    """

    def __init__(
        self,
        memory: ModelMemory,
        catalog: Catalog,
        rollout: Rollout,
        *,
        demand: Demand,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        used_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._rollout = rollout
        self._demand = demand
        self._spawn = spawn
        self._used_bytes = used_bytes
        self._freed = asyncio.Event()
        self._calls: dict[str, int] = {}
        self._counted_s = time.monotonic()
        self._measured: dict[str, tuple[Mapping[str, int], Mapping[str, int]]] = {}  # model -> files, measured
        self._file_bytes, self._real_bytes = float(FIRST_BYTES), FIRST_FACTOR * FIRST_BYTES
        self._loads = 0  # number of loads that have begun
        self._under_way = 0
        self._wanted: dict[str, tuple[float, Mapping[str, int]]] = {}
        self._lacking: set[str] = set()  # models whose load found out that it needs more than there was room for
        self.evictions: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    @property
    def bytes(self) -> dict[str, tuple[int, int, int]]:
        """Return device -> its budget, the bytes in use, and the bytes of models that found no room lately."""
        wanted = [self._wanted[model][1] for model in self.wanted]
        return {
            device: (
                budget,
                self._memory.used_bytes(device),
                sum(sizes.get(device, 0) for sizes in wanted),
            )
            for device, budget in self._memory.budgets.items()
        }

    @property
    def wanted(self) -> Collection[str]:
        """Return the models that found no room lately."""
        since = time.monotonic() - WANTED_S
        self._wanted = {model: each for model, each in self._wanted.items() if each[0] > since}
        return self._wanted.keys()

    def sizes_of(self, model: str) -> dict[str, int]:
        """Return device -> the bytes of a model in memory, or of its latest load; empty if none has shown them."""
        total = _total(each.sizes for each in self._serving(model))
        if not total and model in self._measured:
            total.update(self._measured[model][1])
        if not total and model in self._wanted:
            total.update(self._wanted[model][1])
        return dict(total)

    def forget(self, model: str) -> None:
        """Drop the measured sizes of a model that does not exist any more."""
        self._memory.forget(model)
        self._measured.pop(model, None)
        self._calls.pop(model, None)
        self.released(model)

    async def load(
        self, model: str, outline: Outline, run: Callable[[ReserveModel], Awaitable[str]], *, pinned: bool
    ) -> str:
        """Load a model once there is room for it. run: loads it and returns why (part of) it was refused.

        Raises ModelMemoryFull if there is no room.
        """
        if not self._memory.budgets or not outline.sizes:
            return await run(unbounded)
        failure = ""
        for _ in range(MOST_LOADS):
            self._lacking.discard(model)
            failure = await self._load(model, outline, run, pinned=pinned)
            if model not in self._lacking:
                break
        self._lacking.discard(model)
        return failure

    async def _load(
        self, model: str, outline: Outline, run: Callable[[ReserveModel], Awaitable[str]], *, pinned: bool
    ) -> str:
        share = self._memory.request(model, self._planned(model, outline), pinned=pinned)
        try:
            await self._room(share)
            self._wanted.pop(model, None)
            self._loads += 1
            self._under_way += 1
            number, alone, began_s = self._loads, self._under_way == 1, time.monotonic()
            known: dict[int, Mapping[str, int]] = {}
            try:
                used = await asyncio.to_thread(self._used_bytes)
                failure = await run(self._reserve_for(share, outline, known))
                new = [each for each in self._serving(model) if not each.sizes]
                now_used = await asyncio.to_thread(self._used_bytes)
                undisturbed = alone and number == self._loads
                grown = {each: now_used[each] - size for each, size in used.items() if now_used.get(each, 0) > size}
            finally:
                self._under_way -= 1
            least = dict(share.sizes) if known else outline.sizes
            sizes = await asyncio.to_thread(_reported, new) or (undisturbed and grown) or (least if known else {})
            self._loaded(share, outline.sizes, least, sizes, new, time.monotonic() - began_s)
        finally:
            if share.state in (ShareState.WAITING, ShareState.LOADING):
                self._memory.release(share)
                self._freed.set()
        return failure

    def grow(self, serving: ServingModel, device: str, size_bytes: int) -> bool:
        """Count further bytes of a device's memory for a version that serves; return False if they do not fit.

        Negative bytes are given back.
        """
        if not self._memory.budgets:
            return True
        grown = self._memory.grow(serving.spec.name, {device: size_bytes})
        if grown:
            serving.sizes = {**serving.sizes, device: max(0, serving.sizes.get(device, 0) + size_bytes)}
            self._freed.set()
        return grown

    def released(self, model: str) -> None:
        """Release the memory of a model that was taken out of service, once its last request has ended."""
        for share in self._memory.shares(model):
            if share.state is ShareState.LOADED:
                self._memory.vacate(share)
                self._release_later(share)

    # Sizes that are known before memory is taken ------------------------------------------------------------------

    def _reserve_for(self, share: MemoryShare, outline: Outline, known: dict[int, Mapping[str, int]]) -> ReserveModel:
        """Return the function by which the thread of a load reserves what it needs. known: version -> its bytes, which
        are entered.
        """
        loop = asyncio.get_running_loop()

        async def resize(version: int, sizes: Mapping[str, int]) -> Mapping[str, int]:
            known[version] = sizes
            total = _total(known.values())
            lacking = self._memory.resize(share, total)
            if lacking:
                self._measured[share.name] = outline.sizes, dict(total)
                self._lacking.add(share.name)
            self._freed.set()
            return lacking

        def reserve(version: int, sizes: Mapping[str, int]) -> None:
            lacking = asyncio.run_coroutine_threadsafe(resize(version, dict(sizes)), loop).result(RESERVE_S)
            if lacking:
                needs = ", ".join(f"{sizes[device]} bytes on {device}" for device in sorted(lacking))
                raise LoadFailed(f"it needs {needs}, which is more than the budget of memory has left")

        return reserve

    # Making room --------------------------------------------------------------------------------------------------

    def _planned(self, model: str, outline: Outline) -> dict[str, int]:
        files, measured = self._measured.get(model, ({}, {}))
        if files == outline.sizes and measured:
            return dict(measured)
        factor = max(1.0, self._real_bytes / self._file_bytes)
        return {device: ceil(size * factor) for device, size in outline.sizes.items()}

    async def _room(self, share: MemoryShare) -> None:
        """Wait until a load may start. Raises ModelMemoryFull."""
        while True:
            self._freed.clear()
            self._count_calls()
            plan = self._memory.plan(share, time.monotonic(), self._is_leased)
            if plan.refused:
                raise self._full(share, plan.retry_s)
            for victim in plan.victims:
                self._evict(victim, f"model {share.name}")
            if plan.starts:
                return
            await self._freed.wait()

    def _full(self, share: MemoryShare, retry_s: float | None) -> ModelMemoryFull:
        name = share.name if share.name in self.refusals or len(self.refusals) < MAX_NAMES else ""
        self.refusals[name] += 1
        known = share.name in self.wanted
        self._wanted[share.name] = time.monotonic(), share.sizes
        self._freed.set()
        needs = ", ".join(f"{size} bytes on {device}" for device, size in sorted(share.sizes.items()))
        why = (
            "which is more than there is beside the models that always stay in memory"
            if retry_s is None
            else "and the models in memory have calls, are called more, or are too young to go for it now"
        )
        message = f"model {quoted(share.name)} cannot be loaded: it needs {needs}, {why}"
        if not known:  # a model that is asked for all the time would fill the log
            _log.warning("%s", message)
        return ModelMemoryFull(message, retry_s=NO_ROOM_RETRY_S if retry_s is None else retry_s)

    def _count_calls(self) -> None:
        """Record the calls since the last time: those that ran, and those that found their model not loaded."""
        now, wall_ms, before_s = time.monotonic(), time.time() * 1e3, self._counted_s
        self._counted_s = now
        missed, done, last_ms = self._demand.take_missed(), Counter[str](), dict[str, int]()
        for serving in self._catalog.serving():
            model, statistics = serving.spec.name, serving.batcher.statistics
            done[model] += statistics.success.count + sum(statistics.failures.values())
            last_ms[model] = max(statistics.last_ms, last_ms.get(model, 0))
        for model, count in done.items():
            # Since the time before, also if somebody has set the clock.
            last_s = min(now, max(before_s, now - (wall_ms - last_ms[model]) / 1e3))
            self._memory.called(model, max(0, count - self._calls.get(model, 0)), last_s)
            self._calls[model] = count
        for model, count in missed.items():
            self._memory.called(model, count, now)

    def _is_leased(self, model: str) -> bool:
        """Return whether a model has calls, is needed for others, or is a part of an ensemble that is, or that always
        stays in memory.
        """
        ahead, seen = [model], set[str]()
        while ahead:
            name = ahead.pop()
            if name in seen:
                continue
            seen.add(name)
            if name != model and name not in self._catalog.on_demand:
                return True
            if self._demand.is_needed(name) or self._rollout.is_loading(name):
                return True
            if any(each.is_leased for each in self._serving(name)):
                return True
            ahead += self._rollout.users(name)
        return False

    def _evict(self, share: MemoryShare, reason: str) -> None:
        """Take a model out of service; its memory is free when it is closed."""
        model = share.name
        self.evictions[model if model in self.evictions or len(self.evictions) < MAX_NAMES else ""] += 1
        _log.info("model %s is unloaded to free memory for %s", model, reason)
        withdrawn = [model]
        for each in withdrawn:  # grows while it is walked
            withdrawn += [user for user in self._rollout.users(each) if user not in withdrawn]
        for each in reversed(withdrawn):  # ensembles, which have no memory of their own, before their parts
            self._rollout.withdraw(each)
        self._release_later(share)

    def _release_later(self, share: MemoryShare) -> None:
        self._spawn(self._release(share, self._leaving(share.name)))

    async def _release(self, share: MemoryShare, leaving: list[ServingModel]) -> None:
        try:
            await self._rollout.closed(leaving)
            await asyncio.to_thread(self._used_bytes)
        finally:
            self._memory.release(share)
            self._freed.set()

    def _leaving(self, model: str) -> list[ServingModel]:
        return [each for each in self._catalog.leaving if each.spec.name == model]

    def _serving(self, model: str) -> list[ServingModel]:
        return [entry.serving for entry in self._catalog.entries(model) if entry.serving is not None]

    # Sizes --------------------------------------------------------------------------------------------------------

    def _loaded(
        self,
        share: MemoryShare,
        files: Mapping[str, int],
        least: Mapping[str, int],
        measured: Mapping[str, int],
        new: list[ServingModel],
        load_s: float,
    ) -> None:
        """Record the end of a load. A model of which nothing serves keeps no share. least: the bytes that it counts at
        least, by device.
        """
        model = share.name
        serving = self._serving(model)
        sizes = {device: max(measured.get(device, 0), size) for device, size in least.items()} if measured else {}
        if new and sizes:
            self._file_bytes = self._file_bytes * KEPT_SHARE + sum(files.values())
            self._real_bytes = self._real_bytes * KEPT_SHARE + sum(sizes.values())
            self._measured[model] = dict(files), sizes
        for each in new:
            each.sizes = {device: max(1, size // len(new)) for device, size in (sizes or share.sizes).items()}
        for old in self._memory.shares(model):
            if old is not share and old.state is ShareState.LOADED:
                self._memory.vacate(old)
                self._release_later(old)
        if not serving:
            return
        total = _total(each.sizes for each in serving)
        self._memory.loaded(share, total, load_s, time.monotonic())
        for victim in self._memory.excess(time.monotonic(), self._is_leased):
            self._evict(victim, f"model {model}, which is larger than was expected")
        self._freed.set()


def _total(sizes: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return device -> the sum of its bytes."""
    total: Counter[str] = Counter()
    for each in sizes:
        total.update(each)
    return total


def _reported(servings: list[ServingModel]) -> dict[str, int]:
    """Return the memory that the sessions report themselves; empty if they do not."""
    total = sum(session.memory_bytes() for each in servings for session in each.sessions)
    return {HOST: total} if total else {}
