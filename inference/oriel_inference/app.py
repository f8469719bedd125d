"""Puts the inference unit together: the only module that knows every room.

Start: the sockets are opened first, so that a busy port is reported at once; then the servers run, not ready yet; then
the models are loaded. The unit is ready when every model is loaded or known to be unavailable.
Stop: the unit reports that it is not ready and accepts no new connections; requests in flight finish within the drain
time, those of higher tiers first; shortly before its end, what still waits is refused; threads end and sessions close.
"""

import asyncio
import gc
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from math import inf

from oriel_inference.assembly import open_models
from oriel_inference.backends import Backend, find_backend
from oriel_inference.backends.distributions import check_distributions
from oriel_inference.backends.nvml import GpuLoads
from oriel_inference.batching.device import UNIT, Devices, UsageLines
from oriel_inference.catalog import Catalog
from oriel_inference.clock import Clock
from oriel_inference.errors import LoadFailed
from oriel_inference.log_settings import LogSettings
from oriel_inference.models.control import ModelControl
from oriel_inference.models.start_report import models_table, ports_table
from oriel_inference.servers.access_log import AccessLog
from oriel_inference.servers.cloud import CloudPaths, sagemaker_paths, vertex_paths
from oriel_inference.servers.control import control_app
from oriel_inference.servers.encoding import Encodings
from oriel_inference.servers.forwarded_headers import ForwardedHeaders
from oriel_inference.servers.grpc import GrpcFrontend, serve_grpc
from oriel_inference.servers.http import HttpFrontend
from oriel_inference.servers.large_json import LargeJson
from oriel_inference.servers.meter import Meter
from oriel_inference.servers.regions import Regions
from oriel_inference.servers.repository_api import ModelsRepository
from oriel_inference.servers.restrictions import by_name
from oriel_inference.servers.surface import Surface
from oriel_inference.servers.traces import TraceSettings
from oriel_inference.settings import Settings
from oriel_wire.engine.buffered import serve as serve_http
from oriel_wire.engine.large_messages import return_memory
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer, served_at
from oriel_wire.engine.peers import TrustedPeers, is_loopback
from oriel_wire.engine.tls import Certificates
from oriel_wire.errors import StartFailed
from oriel_wire.observe.spans import open_sink
from oriel_wire.observe.trace import SpanSink
from oriel_wire.process.control import serve_control
from oriel_wire.process.logs import PLAIN
from oriel_wire.process.process import listen
from oriel_wire.usage.ledger import UsageLedger, open_ledger

_log = logging.getLogger(__name__)

POLL_S = 0.05
REFUSE_S = 2.0  # this long before the end of the drain, calls that still wait are refused
# Triton's names of the ports, in the log lines that tell scripts that it has started.
TRITON_PORTS = {"HTTP": "HTTPService", "gRPC": "GRPCInferenceService", "metrics": "Metrics Service"}
TRITON_PORTS |= {"SageMaker": "Sagemaker HTTPService", "Vertex-AI": "Vertex AI HTTPService"}
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
    cloud_ports: Mapping[str, int]


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises StartFailed."""
    async with open_unit(settings, stop=stop) as unit:
        if stop.is_set():
            return
        # What exists now lives as long as the process. Walking it in every full collection stalled the loop for some 40
        # ms.
        calm_collector()
        return_memory()  # loading leaves 10 MB free in the heap
        _report(settings, unit)
        await stop.wait()


def _report(settings: Settings, unit: Unit) -> None:
    _log.info(models_table(unit.catalog.index()), extra=PLAIN)
    ports = (
        ("HTTP", "http://{}", settings.http_host, unit.http_port),
        ("gRPC", "{}", settings.grpc_host, unit.grpc_port),
        *((name, "http://{}", settings.http_host, port) for name, port in unit.cloud_ports.items()),
        ("metrics", "http://{}/metrics", settings.metrics_host, unit.metrics_port),
    )
    addresses = {
        what: (form, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        for what, form, host, port in ports
        if port
    }
    _log.info(ports_table([(what, form.format(at)) for what, (form, at) in addresses.items()]), extra=PLAIN)
    for what, (_, at) in addresses.items() if settings.as_triton else ():
        _log.info("Started %s at %s", TRITON_PORTS[what], at)
    if settings.without_effect:
        _log.warning("these settings have no effect: %s", "; ".join(settings.without_effect))
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
    models = await open_models(settings, backends, spans)
    peers = TrustedPeers(settings.trusted_peers)
    meter = Meter(models.catalog, AccessLog(settings.access_log) if settings.access_log else None)
    log = LogSettings(settings.log_file)  # nothing may fail from here until `cleanup` owns it
    surface = Surface(
        catalog=models.catalog,
        control=models.control,
        dataplane=models.dataplane,
        peers=peers,
        sink=spans,
        log=log,
        traces=TraceSettings(settings.traces, models.catalog, meter),
        meter=meter,
        devices=models.machine.devices,
        answers=models.machine.answers,
        quality=models.quality,
        model_metrics=models.python.metrics,
        default_timeout_s=settings.default_timeout_s,
        strict_readiness=settings.strict_readiness,
        server_id=settings.server_id,
        regions=Regions(settings.max_body_bytes) if settings.client_shm else None,
        metrics=settings.metrics,
        http_headers=_forwarded(settings, settings.http_header_pattern),
        grpc_headers=_forwarded(settings, settings.grpc_header_pattern),
    )
    models.scripting.manage = ModelsRepository(surface)
    with ExitStack() as cleanup:
        for store in models.remote:
            cleanup.callback(store.close)
        cleanup.callback(log.close)
        if surface.regions is not None:
            cleanup.callback(surface.regions.unregister, "")
        cleanup.callback(surface.meter.close)
        cleanup.callback(surface.traces.close)
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
                    http_port=ports.http["HTTP"].port if "HTTP" in ports.http else 0,
                    cloud_ports={name: server.port for name, server in ports.http.items() if name != "HTTP"},
                    grpc_port=ports.grpc.port if ports.grpc is not None else 0,
                    metrics_port=ports.metrics.getsockname()[1] if ports.metrics is not None else 0,
                    catalog=models.catalog,
                    surface=surface,
                    large_json=ports.large_json,
                )
            finally:
                surface.stopping = True
                await models.stop_loading()
                await ports.drain(surface, settings.drain_s, models.refuse_waiting)
                await models.close(loading)
                if usage is not None and recording is not None:
                    await usage.close()
                    recording.cancel()
                end_control.set()
                for part in (models.quality.thread, ports.encodings, ports.large_json, surface.sink, surface.meter):
                    await asyncio.to_thread(part.close)
                _log.info("stopped")


def _forwarded(settings: Settings, pattern: re.Pattern[str] | None) -> ForwardedHeaders | None:
    secrets = (*settings.http_restrictions, *settings.grpc_restrictions)
    return None if pattern is None else ForwardedHeaders(pattern, secrets)


@dataclass(slots=True, kw_only=True)
class _Ports:
    """The servers of the unit. http: "HTTP", and the front ends of clouds by name. metrics: the socket of the metrics
    port. None for a port that is not open.
    """

    http: Mapping[str, HttpServer]
    grpc: HttpServer | None
    metrics: socket.socket | None
    calls: GrpcFrontend
    encodings: Encodings
    large_json: LargeJson

    def servers(self) -> Sequence[HttpServer]:
        return [*self.http.values(), *([self.grpc] if self.grpc is not None else ())]

    async def drain(self, surface: Surface, drain_s: float, refuse_waiting: Callable[[], None]) -> None:
        """Let the requests in progress end; wait at most `drain_s` seconds, and refuse before what has not begun."""
        _log.info("stopping: %d request(s) in progress have at most %g s", surface.under_way(), drain_s)
        self.calls.stop(drain_s)
        refusing = asyncio.get_running_loop().call_later(drain_s - min(REFUSE_S, drain_s / 2), refuse_waiting)
        await _drain(self.servers(), drain_s)
        refusing.cancel()


async def _open_ports(settings: Settings, surface: Surface, clock: Clock, cleanup: ExitStack) -> _Ports:
    """Open all ports, then answer on those for models. cleanup: closes the sockets. Raises StartFailed."""

    shared = [settings.reuse_http and "HTTP", settings.reuse_grpc and "gRPC"]

    def bind(host: str, port: int | None, what: str) -> socket.socket | None:
        if port is None:
            return None
        return cleanup.enter_context(listen(host, port, f"inference {what}", shared=what in shared))

    certificates = _certificates(settings)
    http_restricted = by_name(settings.http_restrictions, "api")
    grpc_restricted = by_name(settings.grpc_restrictions, "protocol")
    fronts = _fronts(settings, surface)
    http_sockets = {name: bind(settings.http_host, port, name) for name, (port, _) in fronts.items()}
    grpc_socket = bind(settings.grpc_host, settings.grpc_port, "gRPC")
    metrics_socket = bind(settings.metrics_host, settings.metrics_port, "metrics")
    if grpc_socket is not None:
        surface.grpc_address = served_at(grpc_socket)
    encodings = Encodings(settings.max_body_bytes)
    large_json = LargeJson(clock, settings.max_body_bytes, cores=settings.cores)
    calls = GrpcFrontend(surface, grpc_restricted)
    grpc_server, http_servers = None, {}
    for name, sock in http_sockets.items():
        if sock is None:
            continue
        frontend = HttpFrontend(
            surface,
            encodings,
            large_json,
            local=is_loopback(settings.http_host),
            restricted=http_restricted,
            cloud=fronts[name][1],
        )
        http_servers[name] = await serve_http(
            frontend.handle,
            sock,
            # A refused body is still read to its end: a gateway that is sending would otherwise see a reset and no
            # reason.
            limits=HttpLimits(max_body_bytes=settings.max_body_bytes, drain_bytes=settings.max_body_bytes),
            refuse=frontend.refuse,
            explain=frontend.explain,
            views=frontend.views,
        )
    if certificates is not None:
        surface.control.spawn(certificates.watch())
    if grpc_socket is not None:
        grpc_server = await serve_grpc(
            calls,
            grpc_socket,
            surface,
            encodings,
            max_message_bytes=settings.max_body_bytes,
            max_age_s=inf if settings.grpc_max_age_ms is None else settings.grpc_max_age_ms / 1e3,
            tls=None if certificates is None else certificates.context,
        )
    ports = _Ports(
        http=http_servers,
        grpc=grpc_server,
        metrics=metrics_socket,
        calls=calls,
        encodings=encodings,
        large_json=large_json,
    )
    surface.under_way = lambda: sum(server.under_way for server in ports.servers())
    return ports


def _fronts(settings: Settings, surface: Surface) -> dict[str, tuple[int | None, CloudPaths | None]]:
    """Return the port and the paths of each front end that speaks HTTP. Raises StartFailed."""

    def default_model() -> str:
        names = surface.catalog.names()
        return settings.vertex_model or (names[0] if len(names) == 1 else "unspecified_vertex_ai_default_model")

    vertex = None if settings.vertex_port is None else vertex_paths(os.environ, default_model)
    return {
        "HTTP": (settings.http_port, None),
        "SageMaker": (settings.sagemaker_port, sagemaker_paths(os.environ, surface.control)),
        "Vertex-AI": (settings.vertex_port, vertex),
    }


def _certificates(settings: Settings) -> Certificates | None:
    """Return the certificates of the gRPC port; None for plain text. Raises StartFailed."""
    chain, key, authority = settings.grpc_cert, settings.grpc_key, settings.grpc_authority
    flags = "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"
    if not settings.grpc_tls and not settings.grpc_mutual_tls:
        if chain or key or authority:
            raise StartFailed(f"{', '.join(flags)} need --grpc-use-ssl or --grpc-use-ssl-mutual")
        return None
    if chain is None or key is None:
        raise StartFailed("--grpc-use-ssl needs a certificate: pass --grpc-server-cert and --grpc-server-key")
    if settings.grpc_mutual_tls and authority is None:
        raise StartFailed("--grpc-use-ssl-mutual needs the authority of clients: pass --grpc-root-cert")
    required = authority if settings.grpc_mutual_tls else None
    return Certificates(chain, key, http2=True, authority=required, flags=flags)


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


def _refuse_failures(catalog: Catalog, control: ModelControl) -> None:
    for each in control.repositories.unseen():
        raise StartFailed(f"--exit-on-error: a model repository cannot be read: {each.failure}")
    failed = [entry for entry in catalog.index() if entry.serving is None and not entry.on_demand]
    if failed:
        names = ", ".join(sorted({entry.name for entry in failed})[:8])
        raise StartFailed(f"--exit-on-error: {len(failed)} of the models cannot serve: {names}; {failed[0].reason}")


def calm_collector() -> None:
    """Makes the garbage collector walk live objects less often. Called once, when everything is loaded.

    Objects that live as long as the process are not walked again, and young objects are walked less often. A request
    that has ended leaves nothing that only the collector could free (a test keeps this), but every request that waits
    is walked several times: with 10,000 requests in the queue that was a third of what a request costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
