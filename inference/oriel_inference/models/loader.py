"""Loads one model at a time with what it needs: the models of an ensemble's steps, and memory.

A model is on demand if its configuration says so with the parameter `oriel.load`, or else if the control mode is
"demand". Then a call loads it, and so does an ensemble that runs on it. In mode "explicit" no model is on demand.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oriel_inference.catalog import Catalog
from oriel_inference.ensembles.parts import MAX_DEPTH
from oriel_inference.errors import InferenceError, LoadFailed, ModelMemoryFull
from oriel_inference.model import base_name
from oriel_inference.models.demand import Demand
from oriel_inference.models.memory_budget import MemoryBudget
from oriel_inference.models.rollout import Rollout
from oriel_inference.repository.outline import HOST, Outline, read_outline
from oriel_inference.repository.plans import ReserveModel
from oriel_inference.repository.scan import Repositories
from oriel_inference.stores import ModelStore
from oriel_policies.upstreams.model_memory import ModelMemory
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)


class LoadProgress:
    """The progress of all loads since the last moment in which there was none, in bytes of model files.

    Single writer: the loop.
    """

    def __init__(self) -> None:
        self.done_bytes = 0
        self.total_bytes = 0
        self._under_way = 0

    def begin(self, size_bytes: int) -> None:
        """Count the bytes of a load that begins."""
        if not self._under_way:
            self.done_bytes = self.total_bytes = 0
        self._under_way += 1
        self.total_bytes += size_bytes

    def end(self, size_bytes: int) -> None:
        """Count the bytes of a load that has ended, well or not."""
        self._under_way -= 1
        self.done_bytes += size_bytes


class Loader:
    """Loads models. Single writer: the loop.

    mode: the control mode.
    memory: the budgets of memory.
    used_bytes: returns device -> bytes in use there now; blocks.
    """

    def __init__(
        self,
        catalog: Catalog,
        repositories: Repositories,
        rollout: Rollout,
        *,
        mode: str,
        memory: ModelMemory,
        used_bytes: Callable[[], Mapping[str, int]],
    ) -> None:
        tools, spawn = rollout.tools, rollout.spawn
        self._catalog = catalog
        self._repositories = repositories
        self._rollout = rollout
        self._mode = mode
        self._find_backend = tools.find_backend if memory.budgets.keys() - {HOST} else None
        self.demand = Demand(
            catalog,
            clock=tools.machine.clock,
            spawn=spawn,
            bring=self._bring,
            max_items=tools.machine.max_items,
            max_bytes=tools.machine.max_bytes,
        )
        self.progress = LoadProgress()
        self.memory = MemoryBudget(memory, catalog, rollout, demand=self.demand, spawn=spawn, used_bytes=used_bytes)

    async def load(self, name: str, where: Sequence[ModelStore], *, models: int) -> str:
        """Load a model that is not on demand, after the models of its steps that are not loaded without it. Returns why
        (part of) it was refused; errors are also shown in its lines of the index.
        """
        outline = await self.outline(name, where)
        try:
            if self._mode == "explicit":
                await self.load_parts(name, outline, models=models)
            elif outline.parts and self._catalog.on_demand:
                await self.bring_parts(name, outline)
            return await self.install(name, where, outline, models=models)
        except InferenceError as refusal:
            return self._rollout.refuse(name, refusal.message)

    async def install(
        self,
        name: str,
        stores: Sequence[ModelStore],
        outline: Outline,
        *,
        models: int,
        override: pb.ModelConfig | None = None,
    ) -> str:
        """Load a model within the budget of memory. Raises ModelMemoryFull."""

        def run(reserve: ReserveModel) -> Coroutine[Any, Any, str]:
            return self._rollout.replace(name, stores, models=models, override=override, reserve=reserve)

        pinned = override is not None or name not in self._catalog.on_demand
        size_bytes = sum(outline.sizes.values())
        self.progress.begin(size_bytes)
        try:
            return await self.memory.load(name, outline, run, pinned=pinned)
        finally:
            self.progress.end(size_bytes)

    async def outline(self, name: str, stores: Sequence[ModelStore], override: pb.ModelConfig | None = None) -> Outline:
        store, base = stores[0], base_name(name)
        read = partial(
            read_outline, find_backend=self._find_backend, config_name=self._rollout.tools.defaults.config_name
        )
        found = await asyncio.to_thread(read, store, base, override)
        return replace(found, parts=tuple([self._repositories.resolve(part, store) for part in found.parts]))

    # Loads by calls ---------------------------------------------------------------------------------------------

    async def offer(self, name: str) -> bool:
        """List a model as available on demand if its configuration, or else the mode, says so. Return whether."""
        if not (where := self._repositories.where(name)):
            return False
        outline = await self.outline(name, where)
        if (outline.load or ("demand" if self._mode == "demand" else "")) != "demand":
            self._catalog.on_demand.discard(name)
            return False
        self._catalog.on_demand.add(name)
        if not self._catalog.is_ready(name) and not self._rollout.is_loading(name):
            self._rollout.offer(name, outline.config)
        return True

    async def _bring(self, name: str) -> str:
        """Load a model because a call asked for it. Raises InferenceError."""
        where, models = self._repositories.where(name), len(self._repositories.names())
        if not where:
            return "no model repository has it"
        outline = await self.outline(name, where)
        try:
            if outline.parts:
                await self.bring_parts(name, outline)
            return await self.install(name, where, outline, models=models)
        except ModelMemoryFull as full:
            if not self._catalog.is_ready(name):
                self._rollout.offer(name, outline.config, full.message)
            raise

    async def bring_parts(self, name: str, outline: Outline) -> None:
        """Load an ensemble's on-demand models that are missing: first models, then ensembles from the inside out."""
        members = await self.members(name, outline)
        self.demand.need(name, members)
        models = len(self._repositories.names())
        missing = [each for each in members if each in self._catalog.on_demand and not self._catalog.is_ready(each)]
        await asyncio.gather(*(self.demand.load(each) for each in missing if not members[each].parts))
        for each in missing:
            if members[each].parts:
                await self.install(each, self._repositories.where(each), members[each], models=models)

    async def members(self, name: str, outline: Outline) -> dict[str, Outline]:
        """Return the models that an ensemble runs on, directly or not, the innermost first."""
        found: dict[str, Outline] = {}

        async def visit(part: str, above: tuple[str, ...]) -> None:
            where = self._repositories.where(part)
            if part in above or part in found or not where or len(above) > MAX_DEPTH:
                return
            inner = await self.outline(part, where)
            for each in inner.parts:
                await visit(each, (*above, part))
            found[part] = inner

        for part in outline.parts:
            await visit(part, (name,))
        return found

    # Parts in explicit mode -------------------------------------------------------------------------------------

    async def load_parts(self, name: str, outline: Outline, *, models: int, above: tuple[str, ...] = ()) -> None:
        """Load the models of an ensemble's steps that do not serve; errors are shown in their lines of the index."""
        above = (*above, name)
        missing = [part for part in outline.parts if part not in above and not self._catalog.is_ready(part)]
        if missing and len(above) <= MAX_DEPTH:
            await asyncio.gather(*(self._load_part(part, models=models, above=above) for part in missing))

    async def _load_part(self, name: str, *, models: int, above: tuple[str, ...]) -> None:
        try:
            where = await self._repositories.find(name)
        except LoadFailed as failure:
            _log.warning("the model repository cannot be read: %s", failure.reason)
            return
        if where:
            outline = await self.outline(name, where)
            await self.load_parts(name, outline, models=models, above=above)
            try:
                await self.install(name, where, outline, models=models)
            except ModelMemoryFull as full:
                self._rollout.refuse(name, full.message)

    async def renew(self, name: str, where: Sequence[ModelStore]) -> None:
        """Replace what serves of a model on demand. Without memory for both it is taken out of service: the next call
        loads the new files.
        """
        outline = await self.outline(name, where)
        try:
            await self.install(name, where, outline, models=len(self._repositories.names()))
        except ModelMemoryFull:
            await self.unload(name)

    async def unload(self, name: str) -> bool:
        """Take a model out of service, and release its memory when it is closed. Returns False if it is unknown."""
        known = await self._rollout.unload(name)
        self.memory.released(name)
        for user in self._rollout.users(name):
            if user in self._catalog.on_demand:
                await self.unload(user)  # a call loads it again, with this model
        return known
