"""Replaces one set of versions by another, and updates the ensembles that run on it.

Rules.
1. A version is loaded, checked and warmed up before it is published; only then the one it replaces leaves. A version
   that leaves accepts nothing new and finishes its requests, including those that ensembles have begun with it.
2. A version that serves continues to serve when newer files of it are refused; the index shows the reason. If nothing
   serves yet and the newest version is refused, the newest one that works serves in its place.
3. One load per model at a time, MAX_SLOTS models at a time, each in a thread; everything else runs on the loop. A load
   that has begun is finished. A load that takes long leaves its slot to the next one, and one that fetches its files
   from an object store holds no slot meanwhile, see `load_slots`.
4. An ensemble serves while every model of its steps serves and fits. Whenever one of them changes, the ensemble is
   checked again in the same turn of the loop, so that no request sees the new model with the old result. An ensemble
   that fits again serves again by itself.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from oriel_inference.backends import Backend
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.catalog import ON_DEMAND, UNLOADED, UNTRIED, Catalog, Entry, ServingModel
from oriel_inference.ensembles.parts import judge, labelled
from oriel_inference.ensembles.scheduler import Ensemble
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import ModelState, base_name
from oriel_inference.models.load_slots import LoadSlots
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.compiling import Compilation
from oriel_inference.repository.config import CONFIG_FILE
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.repository.plans import ReserveModel, unbounded
from oriel_inference.stores import ModelStore
from oriel_policies.artefacts.lifecycle import ArtefactState
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)

MAX_SLOTS = 16
CHECK_IDLE_S = 3.0
LEAVE_POLL_S = 0.02

_Versions = Mapping[int, LoadedVersion | LoadFailed | None]


MAX_NAMES = 4096


class LoadFailures:
    """The number of refused loads. Single writer: the loop.

    counts: (model, kind) -> refused loads; beyond `max_names` pairs the model's name is left out.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.max_names = MAX_NAMES

    def add(self, model: str, failure: LoadFailed | None = None, *, kind: str = "") -> None:
        """Count a refused load. kind: "repository" or "internal"; it follows from `failure` if that is given."""
        if failure is not None:
            kind = "config" if isinstance(failure, ConfigInvalid) else "model"
        key = (model, kind)
        if key not in self.counts and len(self.counts) >= self.max_names:
            key = ("", kind)
        self.counts[key] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTools:
    """The means of a server to load versions.

    find_backend: returns the backend that a configuration names.
    make_scheduler: returns the batcher or the ensemble of a version that is loaded.
    leave_s: seconds that a version that leaves may take to finish its requests.
    check: tries model files in other processes first; None opens them at once.
    load_threads: number of models that load at once (at most MAX_SLOTS); 0 lets the server choose.
    """

    find_backend: Callable[[str], Backend]
    make_scheduler: Callable[[LoadedVersion], Scheduler]
    machine: Machine
    leave_s: float
    check: CheckPool | None
    defaults: LoadDefaults = field(default_factory=LoadDefaults)
    load_threads: int = 0


class Rollout:
    """Loads, publishes and closes versions.

    spawn: starts a task that ends with the server.
    published: called for each new version that serves and whose configuration asks for a compiled artefact.
    """

    def __init__(
        self,
        catalog: Catalog,
        tools: LoadTools,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        published: Callable[[ServingModel, Compilation], None] | None = None,
    ) -> None:
        self._published = published
        self._catalog = catalog
        self.tools = tools
        self.spawn = spawn
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # One file that hangs must not stop all loads, not even on one core.
        self.slots = LoadSlots(min(MAX_SLOTS, tools.load_threads or max(2, tools.machine.cores.total)))
        self._ensembles: dict[str, dict[int, ServingModel]] = {}  # the newest of each, whether it can serve or not
        self._last_load = 0.0
        self._closing: dict[ServingModel, asyncio.Task[None]] = {}
        self.failures = LoadFailures()

    # Loading and publishing -------------------------------------------------------------------------------------

    async def replace(
        self,
        name: str,
        stores: Sequence[ModelStore],
        *,
        models: int,
        override: pb.ModelConfig | None = None,
        reserve: ReserveModel = unbounded,
    ) -> str:
        """Load `name` and publish the result. Returns why (part of) it was refused, "" if all went well.

        models: number of models that share the machine.
        override: replaces the model's configuration file.
        reserve: see `Loading`; called in the thread of the load.
        """
        async with self._lock(name):
            if len(stores) > 1:
                # The result must not depend on the order of the repositories.
                return self.refuse(name, f"model {name!r} is in more than one model repository")
            (store,) = stores
            old = self._serving(name)
            if not old:
                self._set(name, [Entry(name=name, version=0, state=ModelState.LOADING)])
            have = {version: serving.identity for version, serving in old.items()}
            try:
                loading = Loading(
                    store,
                    base_name(name),
                    find_backend=self.tools.find_backend,
                    cores=self.tools.machine.cores.total,
                    models=models,
                    check=self.tools.check,
                    override=override,
                    have=have,
                    defaults=self.tools.defaults,
                    devices=self.tools.machine.devices,
                    slot=self.slots.taken,
                    reserve=reserve,
                    limiter=self.tools.machine.limiter,
                )
                loop = asyncio.get_running_loop()
                versions = await loop.run_in_executor(self.slots.threads(store), load_model, loading)
            except LoadFailed as failure:
                return self.refuse(name, failure.reason, failure)
            except Exception:
                # An unexpected error in one model must not keep the others from serving.
                _log.exception("model %s could not be loaded", name)
                return self.refuse(name, "the model could not be loaded, the server's log says why", kind="internal")
            else:
                return self._publish(name, _in_namespace(versions, name, store.namespace), old)
            finally:
                store.loaded(base_name(name))
                self._end_check_later()

    def refuse(self, name: str, reason: str, failure: LoadFailed | None = None, *, kind: str = "repository") -> str:
        """Record that the model as a whole cannot be (re)loaded; what serves continues. Returns the reason."""
        self.failures.add(name, failure, kind=kind)
        _log.error("model %s: %s", name, reason)
        ready = [e for e in self._catalog.entries(name) if e.serving is not None]
        self._want(name, self._serving(name))
        entries = [_refused(name, entry.version, reason, entry.serving) for entry in ready]
        config = failure.config if failure is not None else None
        self._set(name, entries or [_refused(name, 0, reason, None, config)])
        return reason

    def _publish(self, name: str, versions: _Versions, old: Mapping[int, ServingModel]) -> str:
        """Publish loaded versions. old: the versions that served when the load began; meanwhile an ensemble may have
        lost a model, and its place.
        """
        current = self._serving(name)
        entries: dict[int, Entry] = {}
        reasons: list[str] = []
        made = {
            version: self._make(loaded) if isinstance(loaded, LoadedVersion) else old[version]
            for version, loaded in versions.items()
            if not isinstance(loaded, LoadFailed)
        }
        for version, loaded in versions.items():
            if isinstance(loaded, LoadFailed):
                self.failures.add(name, loaded)
                entry = _refused(name, version, loaded.reason, current.get(version), loaded.config)
            else:
                entry = self._entry(made[version], current.get(version))
            entries[version] = entry
            if entry.reason:
                level = logging.INFO if entry.state is ModelState.LOADING else logging.ERROR
                _log.log(level, "model %s version %s: %s", name, version, entry.reason)
            elif loaded is not None:
                _log_ready(made[version])
                if made[version].untried:
                    level = logging.WARNING if current else logging.INFO
                    _log.log(level, "model %s version %s is %s", name, version, UNTRIED)
            if entry.reason and entry.state is not ModelState.LOADING:
                reasons.append(loaded.reason if isinstance(loaded, LoadFailed) else entry.reason)
        if reasons:
            # A version was refused: those that it would have replaced stay.
            for version, serving in current.items():
                if version not in entries:
                    entries[version] = Entry(name=name, version=version, state=ModelState.READY, serving=serving)
        kept = [entry.serving for entry in entries.values() if entry.serving is not None]
        newest = {**{each.spec.version: each for each in kept}, **made}
        self._want(name, newest)
        self._set(name, list(entries.values()))
        self._leave(each for each in current.values() if each not in kept and each not in newest.values())
        for version, loaded in versions.items():
            if isinstance(loaded, LoadedVersion) and loaded.compilation is not None and self._published is not None:
                self._published(made[version], loaded.compilation)
        if (fallback := self._catalog.fallback(name)) is not None:
            _log.warning("model %s version %s %s", name, fallback.serving, fallback.reason)
            reasons.append(f"version {fallback.serving} {fallback.reason}")
        return "; ".join(reasons)

    def _make(self, loaded: LoadedVersion) -> ServingModel:
        return ServingModel(
            loaded.spec,
            loaded.config,
            self.tools.make_scheduler(loaded),
            loaded.sessions,
            loaded.load_s,
            loaded.identity,
            tried=loaded.tried,
            note=loaded.note,
        )

    def _end_check_later(self) -> None:
        self._last_load = time.monotonic()
        if self.tools.check is not None and not self._catalog.loading:
            self.spawn(self._end_check(self.tools.check, self._last_load))

    async def _end_check(self, check: CheckPool, since: float) -> None:
        await asyncio.sleep(CHECK_IDLE_S)
        if self._last_load == since:
            await asyncio.to_thread(check.close_idle)

    # Ensembles --------------------------------------------------------------------------------------------------

    def users(self, name: str) -> list[str]:
        """Return the ensembles with a step that runs on `name`, whether they can serve now or not."""
        base = base_name(name)
        return sorted(each for each in self._ensembles if base in [base_name(part) for part in self.parts(each)])

    def parts(self, name: str) -> list[str]:
        """Return the models of an ensemble's steps; empty for other models."""
        known = [*self._ensembles.get(name, {}).values(), *self._serving(name).values()]
        return sorted({self._catalog.resolve(step.model) for each in known for step in each.spec.steps})

    def in_ensembles(self) -> set[str]:
        """Return the ensembles that were loaded once, and the models of their steps."""
        return {*self._ensembles, *(part for name in self._ensembles for part in self.parts(name))}

    def _serving(self, name: str) -> dict[int, ServingModel]:
        """Return the versions of a model that serve."""
        return {e.version: e.serving for e in self._catalog.entries(name) if e.serving is not None}

    def _entry(self, newest: ServingModel, current: ServingModel | None) -> Entry:
        """Return the line of a version. newest: the wanted one. current: the one that serves, which stays if the newest
        cannot.
        """
        name, version = newest.spec.name, newest.spec.version
        reason = needs = ""
        state = ModelState.READY
        if newest.spec.steps:
            state, reason, needs = self._bind(newest)
        if state is ModelState.READY:
            return Entry(name=name, version=version, state=state, serving=newest)
        if current is not None and current is not newest:
            if not current.spec.steps or self._bind(current)[0] is ModelState.READY:
                return _refused(name, version, reason, current)
        return Entry(name=name, version=version, state=state, reason=reason, needs=needs, config=newest.config)

    def _bind(self, ensemble: ServingModel) -> tuple[ModelState, str, str]:
        scheduler = ensemble.batcher
        assert isinstance(scheduler, Ensemble)
        verdict = judge(scheduler.spec, self._catalog, f"{ensemble.spec.name}/{CONFIG_FILE}")
        if verdict.state is ModelState.READY:
            scheduler.bind(verdict.models)
            ensemble.spec = labelled(scheduler.spec, [model.spec for model in verdict.models])
            if ensemble.spec.decoupled != ensemble.config.model_transaction_policy.decoupled:
                ensemble.config.model_transaction_policy.decoupled = ensemble.spec.decoupled
        return verdict.state, verdict.reason, verdict.needs

    def _set(self, name: str, entries: Sequence[Entry]) -> None:
        """Publish the lines of a model and check the ensembles that run on it again."""
        self._catalog.publish(name, entries)
        self._settle(name)

    def _settle(self, name: str) -> None:
        """Check the ensembles that run on `name`, directly or not, until none of them changes for requests.

        This includes ensembles above an unchanged one: whether ensembles nest too deep depends on all of them.
        """
        above: list[str] = []
        found = [name]
        while found:
            new = [user for user in self.users(found.pop()) if user not in above]
            above += new
            found += new
        for _ in range(len(above) + 1):
            changed = [self._judge_again(user) for user in above]
            if not any(changed):
                return

    def _judge_again(self, user: str) -> bool:
        """Check an ensemble again; return whether something changes for those above it."""

        def decoupled() -> list[bool]:
            return [each.spec.decoupled for each in self._serving(user).values()]

        was = decoupled()
        before = {entry.version: entry for entry in self._catalog.entries(user)}
        after = dict(before)
        for version, newest in self._ensembles[user].items():
            current = before[version].serving if version in before else None
            entry = self._entry(newest, current)
            if current is None or entry.serving is not current:
                after[version] = entry  # otherwise it continues with the text of its line
        if after == before:
            return decoupled() != was
        for version, entry in after.items():
            if entry != before.get(version):
                level = logging.ERROR if entry.state is ModelState.UNAVAILABLE else logging.INFO
                _log.log(level, "ensemble %s version %s is %s%s", user, version, entry.state.value, _why(entry))
        staying = [*(entry.serving for entry in after.values()), *self._ensembles[user].values()]
        gone = [each for each in self._serving(user).values() if each not in staying]
        self._catalog.publish(user, list(after.values()))
        self._leave(gone)
        return _seen(after) != _seen(before)

    def _want(self, name: str, newest: Mapping[int, ServingModel]) -> None:
        """Follow these versions from now on, if they are ensembles; others that waited leave."""
        old = self._ensembles.pop(name, {})
        if ensembles := {version: each for version, each in newest.items() if each.spec.steps}:
            self._ensembles[name] = ensembles
        staying = [*newest.values(), *self._serving(name).values()]
        self._leave(each for each in old.values() if each not in staying)

    # Unloading and closing --------------------------------------------------------------------------------------

    async def unload(self, name: str) -> bool:
        """Take a model out of service; its requests in flight finish afterwards. Returns False if it is unknown."""
        async with self._lock(name):
            return self.withdraw(name)

    def withdraw(self, name: str) -> bool:
        """Do the same at once, for a model that is not being loaded. One that a call may load is listed as available
        on demand.
        """
        entries = self._catalog.entries(name)
        self._want(name, {})
        if not entries:
            return False
        on_demand = name in self._catalog.on_demand
        gone = [
            Entry(
                name=name,
                version=each.version,
                state=ModelState.UNAVAILABLE,
                reason=ON_DEMAND if on_demand else UNLOADED,
                config=each.serving.config if each.serving is not None else each.config,
                on_demand=on_demand,
            )
            for each in entries
        ]
        self._set(name, gone)
        self._leave(entry.serving for entry in entries)
        _log.info("model %s is unloaded", name)
        return True

    def offer(self, name: str, config: pb.ModelConfig | None, why: str = "") -> None:
        """List a model that is not loaded as available on demand. why: reason of its latest failed load."""
        reason = f"{ON_DEMAND}; the last time it was refused: {why}" if why else ON_DEMAND
        entry = Entry(name=name, version=0, state=ModelState.UNAVAILABLE, reason=reason, config=config, on_demand=True)
        self._set(name, [entry])

    def is_loading(self, name: str) -> bool:
        """Return whether a model is being loaded or replaced."""
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    async def closed(self, servings: Iterable[ServingModel]) -> None:
        """Wait until these versions, which have left, are closed."""
        await asyncio.gather(*(self._closing[each] for each in servings if each in self._closing))

    async def remove(self, name: str) -> None:
        """Do the same for a model that has left its repository; nothing of it stays in the index."""
        async with self._lock(name):
            entries = self._catalog.entries(name)
            self._want(name, {})
            if entries:
                self._catalog.remove(name)
                self._settle(name)
            self._leave(entry.serving for entry in entries)
            _log.info("model %s was removed from its repository", name)

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:  # kept as long as a task holds it or waits for it
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _leave(self, servings: Iterable[ServingModel | None]) -> None:
        for serving in servings:
            if serving is not None:
                if serving.artefact is not None:
                    serving.artefact.become(ArtefactState.RETIRED)
                self._catalog.leaving.append(serving)
                self._closing[serving] = self.spawn(self._finish(serving))

    async def _finish(self, serving: ServingModel) -> None:
        """Close a version when its last request has ended. A batch that hangs keeps its session."""
        batcher = serving.batcher
        ends = time.monotonic() + self.tools.leave_s
        while batcher.pending or batcher.running or serving.holds:
            if time.monotonic() >= ends:
                break
            await asyncio.sleep(LEAVE_POLL_S)
        batcher.close()
        if not batcher.running or serving.takes_requests:
            # Ending processes takes a while.
            await asyncio.to_thread(serving.close)
        self._catalog.leaving.remove(serving)
        del self._closing[serving]
        _log.info("model %s version %s is closed", serving.spec.name, serving.version)


def _in_namespace(versions: _Versions, name: str, namespace: str) -> _Versions:
    """Return loaded versions under the name of the catalog; their ensembles prefer models of the same repository."""
    found = dict(versions)
    for version, each in versions.items() if namespace else ():
        if isinstance(each, LoadedVersion):
            steps = tuple([replace(step, model=f"{step.model}@{namespace}") for step in each.spec.steps])
            found[version] = replace(each, spec=replace(each.spec, name=name, steps=steps))
    return found


def _refused(
    name: str, version: int, reason: str, serving: ServingModel | None, config: pb.ModelConfig | None = None
) -> Entry:
    if serving is None:
        return Entry(name=name, version=version, state=ModelState.UNAVAILABLE, reason=reason, config=config)
    kept = f"the files it was loaded from still serve, newer ones were refused: {reason}"
    return Entry(name=name, version=version, state=ModelState.READY, reason=kept, serving=serving)


def _seen(entries: Mapping[int, Entry]) -> dict[int, tuple[ModelState, int]]:
    return {version: (entry.state, id(entry.serving)) for version, entry in entries.items()}


def _why(entry: Entry) -> str:
    return f": {entry.reason}" if entry.reason else ""


def _log_ready(serving: ServingModel) -> None:
    spec, bounds = serving.spec, serving.spec.bounds
    if spec.steps:
        _log.info(
            "ensemble %s version %s is ready, with the steps %s",
            spec.name,
            spec.version,
            ", ".join(s.model for s in spec.steps),
        )
        return
    _log.info(
        "model %s version %s is ready on %s: %d instance(s) of %d thread(s), %s",
        spec.name,
        serving.version,
        serving.provider,
        spec.instances,
        serving.batcher.units,
        f"batches of up to {bounds.max_rows} rows" if bounds else "no batching",
    )
