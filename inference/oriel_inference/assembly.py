"""Puts the parts together that load and run models: stores, threads, cores, devices, and who uses them."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore
from oriel_inference.artefacts.process import BuildBounds
from oriel_inference.artefacts.records import ArtefactSettings
from oriel_inference.backends import Backend, RequestSession, find_backend
from oriel_inference.backends.cuda import gpu_used_bytes, list_gpus
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.backends.python.process import resident_bytes
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.device import Devices
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.rate_limiter import RateLimiter
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.batching.statistics import FIRST_RESPONSE_MS, Ledger
from oriel_inference.batching.workers import WorkerThreads
from oriel_inference.catalog import Catalog
from oriel_inference.clock import LoopClock
from oriel_inference.dataplane.dataplane import Dataplane
from oriel_inference.dataplane.scripting import Scripting
from oriel_inference.ensembles.scheduler import Ensemble
from oriel_inference.errors import LoadFailed
from oriel_inference.language.backend import Language, LanguageSession
from oriel_inference.language.scheduler import LanguageScheduler
from oriel_inference.models.control import ModelControl
from oriel_inference.models.rollout import LoadTools
from oriel_inference.quality.sampler import Quality
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.load import LoadedVersion
from oriel_inference.repository.metrics_config import first_response_buckets
from oriel_inference.repository.outline import HOST, gpu_name
from oriel_inference.sequences.controls import engine_spec
from oriel_inference.sequences.scan import in_slots
from oriel_inference.sequences.scheduler import SequenceScheduler
from oriel_inference.settings import Settings
from oriel_inference.stores import ModelStore
from oriel_inference.stores.opening import open_stores
from oriel_inference.stores.remote import RemoteStore
from oriel_policies.upstreams.answer_cache import AnswerCache
from oriel_policies.upstreams.model_memory import ModelMemory
from oriel_wire.engine.large_messages import return_memory
from oriel_wire.errors import StartFailed
from oriel_wire.objects.client import location_of
from oriel_wire.objects.errors import ObjectStoreError
from oriel_wire.objects.opening import open_client, open_writer
from oriel_wire.observe.trace import SpanSink
from oriel_wire.process.shared_settings import cache_folder

_log = logging.getLogger(__name__)

WORKER_END_S = 5.0
BUILD_NICENESS = 10  # serving goes first; beside a thread that serves, a build gets a tenth of a core


@dataclass(slots=True, kw_only=True)
class Models:
    """The parts of the unit that load and run models."""

    machine: Machine
    workers: WorkerThreads
    catalog: Catalog
    quality: Quality
    python: PythonBackend
    language: Language
    scripting: Scripting
    remote: Sequence[RemoteStore | GroupStore]
    control: ModelControl
    dataplane: Dataplane

    async def stop_loading(self) -> None:
        """End the loads in progress and what they fetch: they count as requests, and must not delay the others."""
        self.python.stop()
        self.language.stop()
        await asyncio.gather(*(asyncio.to_thread(store.close) for store in self.remote))

    def refuse_waiting(self) -> None:
        """Fail the calls that have not begun, and later ones. Batches that run end on their own."""
        for model in (*self.catalog.serving(), *self.catalog.leaving):
            model.batcher.close()

    async def close(self, loading: asyncio.Task[None]) -> None:
        """Cut off what still runs, and close all models. loading: the task that loads the models of the start."""
        if cut := _under_way(self.catalog):
            _log.warning("stopping: %d request(s) did not end in time and are cut off", cut)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await self.control.close()
        await _end_models(self.catalog, self.workers)
        await self.python.close()
        await self.language.close()


async def open_models(settings: Settings, backends: Callable[[str], Backend], spans: SpanSink) -> Models:
    """Build the parts that load and run models; nothing is loaded yet. Raises StartFailed."""
    workers, catalog = WorkerThreads(settings.cores), Catalog()
    machine = Machine(
        clock=LoopClock(asyncio.get_running_loop()),
        cores=Cores(settings.cores),
        limiter=RateLimiter(settings.cores, dict(settings.rate_limit_resources)) if settings.rate_limited else None,
        workers=workers,
        devices=Devices(dict(settings.device_classes)),
        max_items=settings.max_queue_items,
        max_bytes=settings.max_queue_bytes,
        max_batch_bytes=settings.max_batch_bytes,
        answers=AnswerCache(max_bytes=settings.cache_bytes, owner_share=1.0) if settings.cache_bytes else None,
    )
    quality = Quality(catalog.serves)
    group_store = _group_store(settings)
    stores = _model_stores(settings, catalog)
    remote: list[RemoteStore | GroupStore] = [store for store in stores if isinstance(store, RemoteStore)]
    if group_store is not None:
        remote.append(group_store)
    scripting = Scripting(machine.clock.now)
    python = PythonBackend(scripting, environment=settings.load_defaults.python_environment)
    language = Language(asyncio.get_running_loop())
    own: dict[str, Backend] = {python.name: python, language.name: language}
    budgets = {HOST: settings.model_memory_bytes} if settings.model_memory_bytes else {}
    if settings.gpu_memory_bytes:
        budgets |= {gpu_name(gpu.number): settings.gpu_memory_bytes for gpu in await asyncio.to_thread(list_gpus)}
    ledger = Ledger(catalog.serves, summarises=bool(settings.metrics.quantiles))
    tools = LoadTools(
        find_backend=lambda name: own.get(name) or backends(name),
        make_scheduler=_schedulers(machine, ledger, quality),
        machine=machine,
        leave_s=settings.default_timeout_s,
        # Test doubles open no files.
        check=CheckPool(settings.check_timeout_s) if backends is find_backend else None,
        defaults=settings.load_defaults,
        load_threads=settings.load_threads,
    )
    control = ModelControl(
        catalog,
        stores,
        tools,
        mode=settings.control_mode,
        poll_s=settings.poll_s,
        memory=ModelMemory(budgets, young_s=settings.young_s, young_loads=settings.young_loads),
        used_bytes=lambda: _used_bytes(budgets),
        artefacts=_artefacts(settings, spans, group_store),
    )
    scripting.wait = control.demand.wait
    dataplane = scripting.dataplane = Dataplane(catalog, machine.clock.now)
    return Models(
        machine=machine,
        workers=workers,
        catalog=catalog,
        quality=quality,
        python=python,
        language=language,
        scripting=scripting,
        remote=remote,
        control=control,
        dataplane=dataplane,
    )


def _model_stores(settings: Settings, catalog: Catalog) -> Sequence[ModelStore]:
    try:
        stores = open_stores(
            settings.repositories,
            settings.model_cache,
            max_cache_bytes=settings.max_cache_bytes,
            in_use=catalog.identities,
            links_to=settings.links_to,
        )
        for number, store in enumerate(stores if settings.namespacing else (), 1):
            store.namespace = str(number)
        return stores
    except LoadFailed as failure:
        missing = any(isinstance(each, Path) and not each.is_dir() for each in settings.repositories)
        raise StartFailed(failure.reason + (": pass --model-repository DIR" if missing else "")) from failure


def _schedulers(machine: Machine, ledger: Ledger, quality: Quality) -> Callable[[LoadedVersion], Scheduler]:
    """Return the function that makes the batcher or the ensemble of a version that is loaded."""

    def make(loaded: LoadedVersion) -> Scheduler:
        statistics = ledger.open(loaded.spec.name, loaded.spec.version)
        statistics.first_response_buckets(first_response_buckets(loaded.config) or FIRST_RESPONSE_MS)
        if loaded.spec.steps:
            return Ensemble(loaded.spec, machine, statistics)
        first = loaded.sessions[0]
        if isinstance(first, LanguageSession):
            return LanguageScheduler(loaded.spec, first.decoder, first.options, machine, statistics)
        # Sessions that take requests compute elsewhere, or wait for their reader: they take no cores from the others.
        apart = isinstance(first, RequestSession)
        of_model = replace(machine, cores=Cores(loaded.spec.instances)) if apart else machine
        units = 1 if apart else loaded.units
        if loaded.spec.cached and machine.answers is None:
            _log.warning("model %s: response_cache has no effect: pass --cache-config local,size=N", loaded.spec.name)
        quality.open(loaded.spec, statistics, loaded.reference)
        rules = loaded.spec.sequences
        if rules is not None:
            inner = engine_spec(loaded.spec, rules)
            batchers = [
                Batcher(
                    replace(inner, limits=inner.limits[number : number + 1]),
                    [each],
                    of_model,
                    units=units,
                    statistics=statistics,
                    placed=[loaded.placed[number]],
                )
                for number, each in enumerate(in_slots(loaded.sessions, loaded.spec, machine.clock.now))
            ]
        else:
            batchers = [
                Batcher(loaded.spec, loaded.slots, of_model, units=units, statistics=statistics, placed=loaded.placed)
            ]
        for batcher in batchers:
            if loaded.run_s is not None:
                batcher.curve.observe(1, loaded.run_s)
        if rules is None:
            return batchers[0]
        scheduler = SequenceScheduler(loaded.spec, rules, batchers, machine, statistics, exclusive=apart)
        for number, session in enumerate(loaded.sessions):
            if isinstance(session, RequestSession):
                session.on_death = partial(scheduler.instance_died, number)
        return scheduler

    return make


def _group_store(settings: Settings) -> GroupStore | None:
    """Return the store through which servers share artefacts. Raises StartFailed if it cannot be used."""
    location = settings.artefact_store
    if location is None:
        return None
    try:
        for url in settings.repositories:
            if isinstance(url, str) and location.is_below(location_of(url)):
                raise StartFailed(f"--artefact-store {location} is part of the model repository {url}: move it beside")
        client, writer = open_client(location), open_writer(location)
    except ObjectStoreError as error:
        raise StartFailed(str(error)) from error
    return GroupStore(client, writer, prefix=location.prefix, shown=str(location))


def _artefacts(settings: Settings, sink: SpanSink, store: GroupStore | None) -> ArtefactSettings:
    return ArtefactSettings(
        folder=ArtefactFolder(
            settings.artefact_folder or cache_folder("artefacts"), max_bytes=settings.max_artefact_bytes
        ),
        bounds=BuildBounds(
            seconds=settings.artefact_build_s,
            memory_bytes=settings.artefact_build_bytes,
            niceness=BUILD_NICENESS,
        ),
        sink=sink,
        store=store,
    )


def _used_bytes(devices: Iterable[str]) -> dict[str, int]:
    """Return the memory of this process, without what is free and not returned, and the memory in use on each GPU among
    the devices.
    """
    return_memory()
    used = {HOST: resident_bytes(os.getpid())}
    if any(device != HOST for device in devices):
        used |= {gpu_name(number): size for number, size in gpu_used_bytes().items()}
    return used


def _under_way(catalog: Catalog) -> int:
    """Count the requests that wait and the batches that run."""
    return sum(model.batcher.pending + model.batcher.running for model in (*catalog.serving(), *catalog.leaving))


async def _end_models(catalog: Catalog, workers: WorkerThreads) -> None:
    models = [*catalog.serving(), *catalog.leaving]
    for model in models:
        model.batcher.close()
    apart = [model for model in models if model.takes_requests]
    await asyncio.gather(*(asyncio.to_thread(model.close) for model in apart))
    # A batch that hangs keeps its session: closing it under the runtime would crash the process.
    if await asyncio.to_thread(workers.close, WORKER_END_S):
        for model in models:
            if not model.takes_requests:
                model.close()
