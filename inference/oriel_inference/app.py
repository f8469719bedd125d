"""Puts the inference unit together: the only module that knows every room.

Start: the sockets are opened first, so that a busy port is reported at once; then the servers run, not ready yet; then
the models are loaded. The unit is ready when every model is loaded or known to be unavailable.
Stop: the unit reports that it is not ready and accepts no new connections; requests in flight finish within the drain
time; what still waits is refused; threads end and sessions close.
"""

import asyncio
import gc
import logging
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore
from oriel_inference.artefacts.process import BuildBounds
from oriel_inference.artefacts.records import ArtefactSettings
from oriel_inference.backends import Backend, find_backend, takes_requests
from oriel_inference.backends.cuda import gpu_used_bytes, list_gpus
from oriel_inference.backends.distributions import check_distributions
from oriel_inference.backends.nvml import GpuLoads
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.backends.python.process import resident_bytes
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.device import Devices
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.batching.statistics import FIRST_RESPONSE_MS, Ledger
from oriel_inference.batching.usage_lines import UNIT, UsageLines
from oriel_inference.batching.workers import JobThreads, WorkerThreads
from oriel_inference.catalog import Catalog
from oriel_inference.clock import Clock, LoopClock
from oriel_inference.dataplane.dataplane import Dataplane
from oriel_inference.dataplane.scripting import Scripting
from oriel_inference.ensembles.scheduler import Ensemble
from oriel_inference.errors import LoadFailed
from oriel_inference.log_settings import LogSettings
from oriel_inference.models.control import ModelControl
from oriel_inference.models.rollout import LoadTools
from oriel_inference.models.start_report import models_table, ports_table
from oriel_inference.quality.sampler import Quality
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.load import LoadedVersion
from oriel_inference.repository.metrics_config import first_response_buckets
from oriel_inference.repository.outline import HOST, gpu_name
from oriel_inference.servers.access_log import AccessLog
from oriel_inference.servers.control import control_app
from oriel_inference.servers.encoding import Encodings
from oriel_inference.servers.grpc import GrpcFrontend, serve_grpc
from oriel_inference.servers.http import HttpFrontend
from oriel_inference.servers.large_json import LargeJson
from oriel_inference.servers.meter import Meter
from oriel_inference.servers.surface import Surface
from oriel_inference.settings import Settings
from oriel_inference.stores import ModelStore
from oriel_inference.stores.opening import open_stores
from oriel_inference.stores.remote import RemoteStore
from oriel_policies.upstreams.model_memory import ModelMemory
from oriel_wire.engine.buffered import serve as serve_http
from oriel_wire.engine.large_messages import return_memory
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer, served_at
from oriel_wire.engine.loopback import is_loopback
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.errors import StartFailed
from oriel_wire.objects.client import location_of
from oriel_wire.objects.errors import ObjectStoreError
from oriel_wire.objects.opening import open_client, open_writer
from oriel_wire.observe.spans import open_sink
from oriel_wire.observe.trace import SpanSink
from oriel_wire.process.control import serve_control
from oriel_wire.process.process import PLAIN, listen
from oriel_wire.process.shared_settings import cache_folder
from oriel_wire.usage.ledger import UsageLedger, open_ledger

_log = logging.getLogger(__name__)

WORKER_END_S = 5.0
POLL_S = 0.05
BUILD_NICENESS = 10  # where builds get no idle time: a tenth of a busy core; with less, one ends at its bound of time
# Young objects before a collection, and collections before the middle and the old generation are collected too. One of
# the middle generation takes 10 ms at most.
COLLECTOR_THRESHOLDS = (20_000, 5, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A running inference server and the ports it listens on; 0 for a port that is not open."""

    http_port: int
    grpc_port: int
    metrics_port: int
    catalog: Catalog
    surface: Surface
    large_json: LargeJson


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises StartFailed."""
    async with open_unit(settings, stop=stop) as unit:
        if stop.is_set():
            return
        # What exists now lives as long as the process. Walking it in every full collection stalled the loop for some 40
        # ms.
        calm_collector()
        _report(settings, unit)
        await stop.wait()


def _report(settings: Settings, unit: Unit) -> None:
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    _log.info(models_table(unit.catalog.index(), width), extra=PLAIN)
    ports = (
        ("HTTP", "http://{}", settings.http_host, unit.http_port),
        ("gRPC", "{}", settings.grpc_host, unit.grpc_port),
        ("metrics", "http://{}/metrics", settings.metrics_host, unit.metrics_port),
    )
    open_ports = [
        (what, form.format(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
        for what, form, host, port in ports
        if port
    ]
    _log.info(ports_table(open_ports), extra=PLAIN)
    if settings.without_effect:
        _log.warning("accepted without effect: %s", "; ".join(settings.without_effect))
    ready, why = unit.surface.readiness()
    _log.info(
        "%s: HTTP %d, gRPC %d, metrics %d, %d model version(s) serve",
        "ready" if ready else f"serving, but not ready ({why})",
        unit.http_port,
        unit.grpc_port,
        unit.metrics_port,
        sum(1 for _ in unit.catalog.serving()),
    )


@asynccontextmanager
async def open_unit(
    settings: Settings,
    *,
    backends: Callable[[str], Backend] = find_backend,
    sink: SpanSink | None = None,
    stop: asyncio.Event | None = None,
) -> AsyncIterator[Unit]:
    """Start everything and yield when the models are loaded or `stop` is set; drain and stop on leaving.

    Raises StartFailed.
    """
    if wrong := check_distributions():
        raise StartFailed(wrong)
    spans = sink if sink is not None else open_sink("inference")
    models = await _open_models(settings, backends, spans)
    log = LogSettings(settings.log_file)  # nothing may fail from here until `cleanup` owns it
    surface = Surface(
        catalog=models.catalog,
        control=models.control,
        dataplane=models.dataplane,
        peers=TrustedPeers(settings.trusted_peers),
        sink=spans,
        log=log,
        meter=Meter(models.catalog, AccessLog(settings.access_log) if settings.access_log else None),
        devices=models.machine.devices,
        quality=models.quality,
        default_timeout_s=settings.default_timeout_s,
        strict_readiness=settings.strict_readiness,
        server_id=settings.server_id,
    )
    with ExitStack() as cleanup:
        for store in models.remote:
            cleanup.callback(store.close)
        cleanup.callback(log.close)
        cleanup.callback(surface.meter.close)
        log.change(settings.log)
        ports = await _open_ports(settings, surface, models.machine.clock, cleanup)
        usage = _usage_ledger(settings, models.machine.devices)
        if usage is not None:
            surface.usage = usage.counts
        end_control = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            if ports.metrics is not None:
                gpus = GpuLoads() if settings.gpu_metrics else None
                group.create_task(serve_control(control_app(surface, gpus), ports.metrics, end_control))
            recording = None if usage is None else group.create_task(usage.run())
            loading = asyncio.create_task(models.control.start(settings.load_models))
            try:
                if await _done(loading, stop) and settings.exit_on_error:
                    _refuse_failures(models.catalog, models.control)
                yield Unit(
                    http_port=ports.http.port if ports.http is not None else 0,
                    grpc_port=ports.grpc.port if ports.grpc is not None else 0,
                    metrics_port=ports.metrics.getsockname()[1] if ports.metrics is not None else 0,
                    catalog=models.catalog,
                    surface=surface,
                    large_json=ports.large_json,
                )
            finally:
                surface.stopping = True
                await models.stop_loading()
                await ports.drain(surface, settings.drain_s)
                await models.close(loading)
                if usage is not None and recording is not None:
                    await usage.close()
                    recording.cancel()
                end_control.set()
                for part in (models.quality.thread, ports.encodings, ports.large_json, surface.sink, surface.meter):
                    await asyncio.to_thread(part.close)
                _log.info("stopped")


@dataclass(slots=True, kw_only=True)
class _Models:
    """The parts of the unit that load and run models. streams: the threads of jobs that wait for others."""

    machine: Machine
    workers: WorkerThreads
    streams: JobThreads
    catalog: Catalog
    quality: Quality
    python: PythonBackend
    remote: Sequence[RemoteStore | GroupStore]
    control: ModelControl
    dataplane: Dataplane

    async def stop_loading(self) -> None:
        """End the loads in progress and what they fetch: they count as requests, and must not delay the others."""
        self.python.stop()
        await asyncio.gather(*(asyncio.to_thread(store.close) for store in self.remote))

    async def close(self, loading: asyncio.Task[None]) -> None:
        """Cut off what still runs, and close all models. loading: the task that loads the models of the start."""
        if cut := _under_way(self.catalog):
            _log.warning("stopping: %d request(s) did not end in time and are cut off", cut)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await self.control.close()
        await _end_models(self.catalog, self.workers, self.streams)
        await self.python.close()


async def _open_models(settings: Settings, backends: Callable[[str], Backend], spans: SpanSink) -> _Models:
    """Make what loads and runs models; nothing is loaded yet. Raises StartFailed."""
    workers, streams, catalog = WorkerThreads(settings.cores), JobThreads(), Catalog()
    machine = Machine(
        clock=LoopClock(asyncio.get_running_loop()),
        cores=Cores(settings.cores),
        workers=workers,
        devices=Devices(dict(settings.device_classes)),
        max_items=settings.max_queue_items,
        max_bytes=settings.max_queue_bytes,
        max_batch_bytes=settings.max_batch_bytes,
    )
    quality = Quality(catalog.serves)
    group_store = _group_store(settings)
    stores = _model_stores(settings, catalog)
    remote: list[RemoteStore | GroupStore] = [store for store in stores if isinstance(store, RemoteStore)]
    if group_store is not None:
        remote.append(group_store)
    scripting = Scripting(machine.clock.now)
    python = PythonBackend(scripting, environment=settings.load_defaults.python_environment)
    budgets = {HOST: settings.model_memory_bytes} if settings.model_memory_bytes else {}
    if settings.gpu_memory_bytes:
        budgets |= {gpu_name(gpu.number): settings.gpu_memory_bytes for gpu in await asyncio.to_thread(list_gpus)}
    tools = LoadTools(
        find_backend=lambda name: python if name == python.name else backends(name),
        make_scheduler=_Schedulers(machine, streams, Ledger(catalog.serves), quality).make,
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
    return _Models(
        machine=machine,
        workers=workers,
        streams=streams,
        catalog=catalog,
        quality=quality,
        python=python,
        remote=remote,
        control=control,
        dataplane=dataplane,
    )


def _model_stores(settings: Settings, catalog: Catalog) -> Sequence[ModelStore]:
    try:
        return open_stores(
            settings.repositories,
            settings.model_cache,
            max_cache_bytes=settings.max_cache_bytes,
            in_use=catalog.identities,
        )
    except LoadFailed as failure:
        missing = any(isinstance(each, Path) and not each.is_dir() for each in settings.repositories)
        raise StartFailed(failure.reason + (": pass --model-repository DIR" if missing else "")) from failure


@dataclass(frozen=True, slots=True)
class _Schedulers:
    """Makes the scheduler of each version. streams: the threads of jobs that wait for others."""

    machine: Machine
    streams: JobThreads
    ledger: Ledger
    quality: Quality

    def make(self, loaded: LoadedVersion) -> Scheduler:
        """Make the batcher or the ensemble of a version that is loaded."""
        machine = self.machine
        statistics = self.ledger.open(loaded.spec.name, loaded.spec.version)
        statistics.first_response_buckets(first_response_buckets(loaded.config) or FIRST_RESPONSE_MS)
        if loaded.spec.steps:
            return Ensemble(loaded.spec, machine, statistics)
        # Jobs that wait for their reader or for another model run in threads of their own, so that they take no cores
        # from the other models.
        apart = loaded.spec.decoupled or takes_requests(loaded.sessions[0])
        if apart:
            machine = replace(machine, cores=Cores(loaded.spec.instances), workers=self.streams)
        batcher = Batcher(
            loaded.spec,
            loaded.slots,
            machine,
            units=1 if apart else loaded.units,
            statistics=statistics,
            placed=loaded.placed,
        )
        self.quality.open(loaded.spec, statistics, loaded.reference)
        if loaded.run_s is not None:
            batcher.curve.observe(1, loaded.run_s)
        return batcher


@dataclass(slots=True, kw_only=True)
class _Ports:
    """The servers of the unit. metrics: the socket of the metrics port. None for a port that is not open."""

    http: HttpServer | None
    grpc: HttpServer | None
    metrics: socket.socket | None
    calls: GrpcFrontend
    encodings: Encodings
    large_json: LargeJson

    def servers(self) -> Sequence[HttpServer]:
        return [server for server in (self.http, self.grpc) if server is not None]

    async def drain(self, surface: Surface, drain_s: float) -> None:
        """Let the requests in progress end; wait at most `drain_s` seconds."""
        _log.info("stopping: %d request(s) in progress have at most %g s", surface.under_way(), drain_s)
        self.calls.stop(drain_s)
        await _drain(self.servers(), drain_s)


async def _open_ports(settings: Settings, surface: Surface, clock: Clock, cleanup: ExitStack) -> _Ports:
    """Open all ports, then answer on those for models. cleanup: closes the sockets. Raises StartFailed."""

    def bind(host: str, port: int | None, what: str) -> socket.socket | None:
        return None if port is None else cleanup.enter_context(listen(host, port, f"inference {what}"))

    http_socket = bind(settings.http_host, settings.http_port, "HTTP")
    grpc_socket = bind(settings.grpc_host, settings.grpc_port, "gRPC")
    metrics_socket = bind(settings.metrics_host, settings.metrics_port, "metrics")
    if grpc_socket is not None:
        surface.grpc_address = served_at(grpc_socket)
    encodings, large_json = Encodings(settings.max_body_bytes), LargeJson(clock, settings.max_body_bytes)
    calls = GrpcFrontend(surface)
    http_server = grpc_server = None
    if http_socket is not None:
        frontend = HttpFrontend(surface, encodings, large_json, local=is_loopback(settings.http_host))
        http_server = await serve_http(
            frontend.handle,
            http_socket,
            # A refused body is still read to its end: a gateway that is sending would otherwise see a reset and no
            # reason.
            limits=HttpLimits(max_body_bytes=settings.max_body_bytes, drain_bytes=settings.max_body_bytes),
            refuse=frontend.refuse,
            explain=frontend.explain,
            views=frontend.views,
        )
    if grpc_socket is not None:
        grpc_server = await serve_grpc(
            calls,
            grpc_socket,
            surface,
            encodings,
            max_message_bytes=settings.max_body_bytes,
            max_age_s=inf if settings.grpc_max_age_ms is None else settings.grpc_max_age_ms / 1e3,
        )
    ports = _Ports(
        http=http_server,
        grpc=grpc_server,
        metrics=metrics_socket,
        calls=calls,
        encodings=encodings,
        large_json=large_json,
    )
    surface.under_way = lambda: sum(server.under_way for server in ports.servers())
    return ports


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
            idle=True,
        ),
        sink=sink,
        store=store,
    )


def _usage_ledger(settings: Settings, devices: Devices) -> UsageLedger | None:
    """Return the ledger of what tenants use. Raises StartFailed if there can be no client for its store."""
    if settings.usage_folder is None:
        return None
    return open_ledger(settings.usage_folder, UNIT, UsageLines(devices).added, store=settings.usage_store)


async def _done(work: asyncio.Task[None], stop: asyncio.Event | None) -> bool:
    """Wait for `work`, at most until `stop` is set; return whether it is done. Raises what `work` raises."""
    stopped = asyncio.create_task(stop.wait() if stop is not None else asyncio.Event().wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    if work.done():
        try:
            work.result()
        except LoadFailed as failure:
            raise StartFailed(failure.reason) from failure
    return work.done()


async def _drain(servers: Sequence[HttpServer], drain_s: float) -> None:
    """End the servers together: while one of them still finishes earlier calls, the other one answers too."""
    for server in servers:
        server.finishing = True
    async with asyncio.TaskGroup() as drains:
        earlier = drains.create_task(_finished(servers))
        for server in servers:
            drains.create_task(server.drain(drain_s, earlier))


async def _finished(servers: Sequence[HttpServer]) -> None:
    """Wait for the requests that were under way when the drain began."""
    while True:
        if not any(server.finishing for server in servers):
            return
        await asyncio.sleep(POLL_S)


def _under_way(catalog: Catalog) -> int:
    """Count the requests that wait and the batches that run."""
    return sum(model.batcher.pending + model.batcher.running for model in (*catalog.serving(), *catalog.leaving))


def _used_bytes(devices: Iterable[str]) -> dict[str, int]:
    """Return the memory of this process, without what is free and not returned, and the memory in use on each GPU among
    the devices.
    """
    return_memory()
    used = {HOST: resident_bytes(os.getpid())}
    if any(device != HOST for device in devices):
        used |= {gpu_name(number): size for number, size in gpu_used_bytes().items()}
    return used


def _refuse_failures(catalog: Catalog, control: ModelControl) -> None:
    if unread := control.unread:
        raise StartFailed(f"--exit-on-error: a model repository cannot be read: {unread}")
    failed = [entry for entry in catalog.index() if entry.serving is None and not entry.on_demand]
    if failed:
        names = ", ".join(sorted({entry.name for entry in failed})[:8])
        raise StartFailed(f"--exit-on-error: {len(failed)} of the models cannot serve: {names}; {failed[0].reason}")


async def _end_models(catalog: Catalog, workers: WorkerThreads, streams: JobThreads) -> None:
    models = [*catalog.serving(), *catalog.leaving]
    for model in models:
        model.batcher.close()
    apart = [model for model in models if model.takes_requests]
    await asyncio.gather(*(asyncio.to_thread(model.close) for model in apart))
    # A batch that hangs keeps its session: closing it under the runtime would crash the process.
    ended = [await asyncio.to_thread(each.close, WORKER_END_S) for each in (workers, streams)]
    if all(ended):
        for model in models:
            if not model.takes_requests:
                model.close()


def calm_collector() -> None:
    """Makes the garbage collector walk live objects less often. Called once, when everything is loaded.

    What lives as long as the process is not walked again, and young objects are walked less often. A request that has
    ended leaves nothing that only the collector could free (a test keeps this), but every request that waits is walked
    several times: with 10,000 requests in the queue that was a third of what a request costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
