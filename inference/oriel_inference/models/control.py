"""Model control: decides which models are loaded when. `rollout` decides how versions replace one another.

Poll mode acts on a change when two scans in a row found the same files, so that files that are still being copied are
left alone. A change is scanned a second time shortly after the first, and the time between polls allows for that, so
that a complete upload is being loaded one poll later at the latest. Each repository is scanned separately: one that
cannot be read changes nothing and delays no other. The same holds for models: one that takes long to load delays no
other.

Mode "demand" polls, too, but a model is loaded by the first call for it (`demand`), and may be taken out of memory for
another one (`memory_budget`). In modes "none", "poll" and "demand" the configuration of a model decides that for itself
with the parameter `oriel.load`: "demand" or "pinned".

In the other modes nothing is polled, except for what was missing at the start for a reason that may pass (a repository
that could not be read, an object that was refused, a full disk): that is scanned again until it is loaded.

Loading an ensemble first loads the models of its steps that do not serve yet. Unloading it with its dependents unloads
them again, except for those that were requested by name or that another ensemble runs on.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from asyncio import sleep
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oriel_inference.artefacts.keeper import ArtefactKeeper
from oriel_inference.artefacts.records import ArtefactSettings
from oriel_inference.catalog import Catalog, Entry, ServingModel
from oriel_inference.errors import (
    ControlRefused,
    InferenceError,
    LoadFailed,
    LoadRefused,
    NoVersion,
    ServerStopping,
    UnknownModel,
    not_polled,
)
from oriel_inference.model import ModelState, base_name
from oriel_inference.models.loader import Loader
from oriel_inference.models.rollout import LoadTools, Rollout
from oriel_inference.repository.compiling import Compilation
from oriel_inference.repository.scan import Found, Repositories, Repository
from oriel_inference.stores import ModelStore
from oriel_inference.stores.local import LocalStore
from oriel_policies.upstreams.model_memory import ModelMemory
from oriel_wire.near_names import did_you_mean
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)

OUTAGE_POLL_S = 10.0
SETTLE_S = 0.5


class ModelControl:
    """Loads and unloads models.

    mode: "none", "poll", "explicit" or "demand".
    poll_s: time between polls.
    memory: the budgets of memory.
    used_bytes: returns device -> bytes in use there now; blocks.
    artefacts: keeper of compiled artefacts; None makes none, whatever configurations ask for.
    repositories, rollout, loader: the parts that others may ask.
    """

    def __init__(
        self,
        catalog: Catalog,
        stores: Sequence[ModelStore],
        tools: LoadTools,
        *,
        mode: str,
        poll_s: float,
        memory: ModelMemory,
        used_bytes: Callable[[], Mapping[str, int]],
        artefacts: ArtefactSettings | None = None,
    ) -> None:
        self._catalog = catalog
        self.repositories = Repositories(stores)
        self._mode = mode
        self._poll_s = poll_s
        self._settle_s = min(SETTLE_S, poll_s / 4)
        self._check = tools.check
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._requested: set[str] = set()
        self._replaced: set[str] = set()  # models on demand that were loaded with a configuration of a request
        self.rollout = Rollout(catalog, tools, spawn=self.spawn, published=self._published)
        self.loader = Loader(
            catalog,
            self.repositories,
            self.rollout,
            mode=mode,
            memory=memory,
            used_bytes=used_bytes,
        )
        self.demand, self.memory = self.loader.demand, self.loader.memory
        self.artefacts: ArtefactKeeper | None = None
        if artefacts is not None:
            self.artefacts = ArtefactKeeper(
                artefacts,
                catalog=catalog,
                spawn=self.spawn,
                from_thread=tools.machine.clock.call_from_thread,
                grow=self.memory.grow,
            )

    def _published(self, serving: ServingModel, compilation: Compilation) -> None:
        if self.artefacts is not None:
            self.artefacts.published(serving, compilation)

    # Start and stop ---------------------------------------------------------------------------------------------

    async def start(self, load_models: Sequence[str] = ()) -> None:
        """Load what the mode asks for, then poll the repositories in poll mode. Raises LoadFailed if none can be read,
        or if a folder cannot.
        """
        await self.repositories.scan()
        unseen = self.repositories.unseen()
        for each in unseen:
            if len(unseen) == len(list(self.repositories)) or not each.store.fetches:
                raise LoadFailed(each.failure)
        everything = self._mode != "explicit" or "*" in load_models
        wanted = sorted(self.repositories.names() if everything else set(load_models))
        if self._mode != "explicit":
            await asyncio.gather(*(self._offer_first(name) for name in wanted))
        self._requested = set(wanted)
        self._catalog.required = {*wanted, *load_models} - {"*"} - self._catalog.on_demand
        self._catalog.unseen = [each.store.shown for each in unseen] if everything else []
        for name in self._catalog.required:
            self._catalog.publish(name, [Entry(name=name, version=0, state=ModelState.LOADING)])
        models = len(wanted)
        early = self._catalog.on_demand.intersection(wanted if "*" in load_models else load_models)
        await asyncio.gather(
            *(self._load_first(name, models=models) for name in sorted(self._catalog.required)),
            *(self._load_early(name) for name in sorted(early)),
        )
        if self._check is not None:
            await asyncio.to_thread(self._check.close_idle)
        self._catalog.loading = False
        if self._mode in ("poll", "demand"):
            for each in self.repositories:
                self.spawn(self._watch(each))
        else:
            for each in self.repositories:
                self.spawn(self._complete(each, set(wanted), everything=everything))

    async def _offer_first(self, name: str) -> None:
        seen = {each: (each.found or {}).get(name) for each in self.repositories}
        if await self.loader.offer(name):
            for each, found in seen.items():
                each.changes.applied(name, found)

    async def _load_early(self, name: str) -> None:
        try:
            await self.demand.load(name, again=True)
        except InferenceError as refusal:
            _log.error("model %s: %s", name, refusal.message)

    async def _load_first(self, name: str, *, models: int) -> None:
        where = self.repositories.where(name)
        seen = {each: (each.found or {}).get(name) for each in self.repositories}
        if not where:
            unread = "".join(f"; {each.failure}" for each in self.repositories.unseen())
            self.rollout.refuse(name, f"no model repository has it{unread}")
        else:
            await self.loader.load(name, where, models=models)
        for each, found in seen.items():
            each.changes.applied(name, found)

    async def close(self) -> None:
        """End what is in progress and load nothing afterwards. Versions that serve are left to the caller."""
        self._closed = True
        self.demand.close()
        self.repositories.close()
        self.rollout.slots.close()
        if self.artefacts is not None:
            self.artefacts.close()
        if self._check is not None:
            self._check.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._check is not None:
            await asyncio.to_thread(self._check.close_idle)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that ends with this object."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        # A refusal belongs to the caller of the task, who may have left.
        if error is not None and not isinstance(error, InferenceError):
            _log.error("model control failed unexpectedly", exc_info=error)

    # Requests of clients ----------------------------------------------------------------------------------------

    async def index(self, *, ready: bool = False) -> list[Entry | str]:
        """Return the catalog's entries, and the names of models in the repositories that were never loaded."""
        entries: list[Entry | str] = [
            entry for entry in self._catalog.index() if not ready or entry.state is ModelState.READY
        ]
        if self._mode == "explicit" and not ready:
            known = set(self._catalog.names())
            entries.extend(sorted(await self._stored() - known))
        return entries

    async def _stored(self) -> set[str]:
        """Return the models of all repositories that can be listed."""
        await self.repositories.scan()
        return self.repositories.names()

    async def members(self, name: str) -> Iterable[str]:
        """Return the models that an ensemble runs on, directly or not. Raises LoadFailed."""
        where = self.repositories.where(name)
        return await self.loader.members(name, await self.loader.outline(name, where)) if where else ()

    async def load(
        self, name: str, *, config: pb.ModelConfig | None = None, files: Mapping[str, bytes | memoryview] | None = None
    ) -> None:
        """Load or reload a model. Continues if the caller is cancelled. Raises InferenceError.

        config: replaces the configuration file.
        files: `<version>/<path>` -> bytes; replaces the version folders.
        """
        self._permit()
        await asyncio.shield(self.spawn(self._load(name, config, files or {})))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Take a model out of service; its requests in flight finish afterwards. A model that is not loaded but could
        be stays as it is. Raises InferenceError.

        dependents: True to unload the models of an ensemble's steps too, but those that were requested by name or that
        another ensemble runs on.
        """
        self._permit()
        parts = self.rollout.parts(name) if dependents else []
        self._catalog.required.discard(name)
        self._requested.discard(name)
        if name in self._replaced:
            self._replaced.discard(name)
            self._catalog.on_demand.add(name)
        if not await self.loader.unload(name) and name not in await self._stored():
            near = did_you_mean(name, self._catalog.names())
            raise UnknownModel(f"Request for unknown model: {quoted(name)} is not loaded{near}")
        while parts:
            part = parts.pop()
            if part not in self._requested and not self.rollout.users(part):
                parts.extend(self.rollout.parts(part))
                await self.loader.unload(part)

    async def mount(self, store: ModelStore, name: str) -> None:
        """Add a repository, and load a model of it. Raises InferenceError; then the repository is removed again."""
        self.repositories.add(store)
        try:
            await self.load(name)
        except Exception:
            await self.unmount(store)
            raise

    async def unmount(self, store: ModelStore) -> None:
        """Remove a repository and all that was loaded from it; return when its models are closed."""
        repository = self.repositories.remove(store)
        names = list(repository.found or ())
        self._requested.difference_update(names)
        for name in names:
            await self._follow(repository, name, None)
        await self.rollout.closed([each for each in self._catalog.leaving if each.spec.name in names])

    def _permit(self) -> None:
        if self._closed:
            raise ServerStopping
        if self._mode not in ("explicit", "demand"):
            raise ControlRefused(
                f"explicit model load / unload is not allowed if polling is enabled, or in mode {self._mode}"
            )

    async def _load(self, name: str, config: pb.ModelConfig | None, files: Mapping[str, bytes | memoryview]) -> None:
        if files:
            folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="oriel-upload-"))
            try:
                try:
                    await asyncio.to_thread(_write, folder / name, files)
                except LoadFailed as failure:
                    raise LoadRefused(f"failed to load {quoted(name)}: {failure.reason}") from failure
                failure_text = await self._load_from(name, (LocalStore(folder, runs_code=False),), config)
            finally:
                # The runtime has read or mapped the files it needs.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        else:
            try:
                where = await self.repositories.find(name)
            except LoadFailed as failure:
                raise LoadRefused(f"{not_polled(name)}: {failure.reason}") from failure
            if not where and (same := [each for each in self.repositories.names() if base_name(each) == name]):
                for each in sorted(same):
                    await self._load(each, config, files)
                return
            if not where:
                near = did_you_mean(name, sorted(self.repositories.names()))
                raise UnknownModel(f"{not_polled(name)}: no model repository has it{near}")
            failure_text = await self._load_from(name, where, config)
        if failure_text:
            raise LoadRefused(f"failed to load {quoted(name)}: {failure_text}")

    async def _load_from(self, name: str, stores: Sequence[ModelStore], config: pb.ModelConfig | None) -> str:
        models = len({name, *self._catalog.names()})
        if config is None and name in self._catalog.on_demand and not self._catalog.is_ready(name):
            try:
                return await self.demand.load(name, again=True)
            except NoVersion as failure:
                return failure.message
        outline = await self.loader.outline(name, stores, config)
        if self._mode == "explicit":
            self._requested.add(name)
            await self.loader.load_parts(name, outline, models=models)
        elif outline.parts:
            await self.loader.bring_parts(name, outline)
        failure_text = await self.loader.install(name, stores, outline, models=models, override=config)
        if config is not None and name in self._catalog.on_demand and not failure_text:
            # A call cannot load a configuration again that came with a request: the model stays until it is unloaded.
            self._catalog.on_demand.discard(name)
            self._replaced.add(name)
        return failure_text

    # Polling the repositories -----------------------------------------------------------------------------------

    async def _watch(self, repository: Repository) -> None:
        delay_s = self._poll_s - self._settle_s
        while True:
            await sleep(delay_s)
            try:
                delay_s = await self._poll(repository)
            except Exception:
                # An unexpected error in one scan must not end the polling.
                _log.exception("scanning the model repository failed")
                delay_s = max(self._poll_s, OUTAGE_POLL_S)

    async def _poll(self, repository: Repository) -> float:
        """Scan once, and a second time if something has changed; return the seconds until the next poll."""
        began = time.monotonic()
        readable = await self._scan(repository)
        if readable and repository.changes.unsettled:
            await sleep(self._settle_s)
            readable = await self._scan(repository)
        if not readable:
            return max(self._poll_s, OUTAGE_POLL_S)
        return max(self._settle_s, began + self._poll_s - self._settle_s - time.monotonic())

    async def _scan(self, repository: Repository) -> bool:
        """Scan a repository and act on settled changes; return False if it cannot be read."""
        if not await repository.scan():
            return False
        models = repository.found or {}
        self._seen(repository, models)
        for name, found in repository.changes.due(models):
            self.spawn(self._follow(repository, name, found))
        return True

    def _seen(self, repository: Repository, models: Iterable[str]) -> None:
        """Add the models of a repository that can be read for the first time: they belong to the start, too."""
        if repository.store.shown in self._catalog.unseen:
            self._catalog.unseen.remove(repository.store.shown)
            if self._mode != "demand":
                self._catalog.required.update(models)

    async def _follow(self, repository: Repository, name: str, found: Found) -> None:
        """Load, replace or unload a model according to what the repositories hold."""
        try:
            self.demand.changed(name)
            if name in self._replaced:
                return  # it came with a request, and stays until it is unloaded
            if where := self.repositories.where(name):
                if not await self.loader.offer(name):
                    await self.loader.load(name, where, models=len(self.repositories.names()))
                elif self._catalog.is_ready(name):
                    await self.loader.renew(name, where)
                self._catalog.required -= self._catalog.on_demand
            else:
                self._catalog.required.discard(name)
                self._catalog.on_demand.discard(name)
                await self.rollout.remove(name)
                self.memory.forget(name)
        finally:
            repository.changes.applied(name, found)

    async def _complete(self, repository: Repository, wanted: set[str], *, everything: bool) -> None:
        """Load those models of the start that failed for a reason that may pass.

        everything: True if all models of the repository are wanted, not only the named ones.
        """
        store = repository.store
        lacking = {name for name in wanted if store.retries(name)}
        while lacking or repository.found is None:
            first = repository.found is None
            await sleep(OUTAGE_POLL_S)
            if not await repository.scan():
                continue
            found = set(repository.found or ())
            if first:
                self._seen(repository, found)
                self._requested |= found if everything else set()
                lacking = found if everything else found & wanted
            due = [name for name in lacking & found & self._requested if not store.retries(name)]
            await asyncio.gather(*(self._load_again(name) for name in due))
            lacking = {name for name in lacking & found & self._requested if store.retries(name)}

    async def _load_again(self, name: str) -> None:
        where, models = self.repositories.where(name), len(self.repositories.names())
        if self._mode == "explicit" or not await self.loader.offer(name):
            await self.loader.load(name, where, models=models)


def _write(folder: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Write the files that a client sent with its load request. Raises LoadFailed for a name that is not
    `<version>/<path>`.
    """
    for name, data in files.items():
        parts = name.split("/")
        inside = all(part not in ("", ".", "..") and "\0" not in part and len(part) <= 255 for part in parts)
        if not inside or not 2 <= len(parts) <= 16 or not parts[0].isdigit():
            raise LoadFailed(f"Invalid file path {name[:100]!r}, it must be <version>/<path>")
        if "*" in name:
            raise LoadFailed(f"file {name[:100]!r} must have no asterisk in its name")
        path = folder.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise LoadFailed(f"file {name[:100]!r} cannot be written: {error.strerror}") from error
