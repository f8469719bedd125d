"""Builds a logic server from its parts and runs it."""

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from starlette.applications import Starlette

from oriel_logic.client.upstreams import Upstreams
from oriel_logic.deploy.deploying import Deployer, SetUpFailed, is_on_loop, pool_limits
from oriel_logic.deploy.samples import with_shown_sample
from oriel_logic.deploy.scratch import loadable_together
from oriel_logic.deploy.updates import Updates
from oriel_logic.loading.folder_config import BadConfig
from oriel_logic.loading.handlers import load, setup_problem
from oriel_logic.loading.listing import Listing
from oriel_logic.observe.metrics import Metrics, Totals
from oriel_logic.observe.usage import UNIT, Usage
from oriel_logic.observe.watchdog import Watchdog
from oriel_logic.server.connection import open_server
from oriel_logic.server.envelope import Envelope
from oriel_logic.server.failures import contained
from oriel_logic.server.ingress import Dispatch, Keeping
from oriel_logic.server.openapi import Description
from oriel_logic.server.pipeline import Pipeline
from oriel_logic.server.registry import Registry
from oriel_logic.server.releases import Deployment, Release
from oriel_logic.services.context import Workers
from oriel_logic.services.serving import Services
from oriel_logic.settings import Settings
from oriel_logic.workers.launch import ALSO, ForkServer
from oriel_logic.workers.pool import WorkerPool
from oriel_policies.metering.usage import by_label, unbilled_ns
from oriel_wire.engine.families import counter, gauge
from oriel_wire.engine.listener import LAME_DUCK_VARIABLE, HttpServer
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.observe.recall import KEEP, Recaller
from oriel_wire.observe.span_metrics import span_metrics
from oriel_wire.observe.spans import open_sink
from oriel_wire.observe.trace import SpanSink
from oriel_wire.process.api_page import DOCS, OPENAPI
from oriel_wire.process.control import health_routes, serve_control
from oriel_wire.process.environment import STORES, forget_others
from oriel_wire.process.process import listen
from oriel_wire.usage.ledger import UsageLedger, open_ledger
from oriel_wire.usage.lines import LedgerCounts
from oriel_wire.usage.metrics import ledger_metrics

if TYPE_CHECKING:
    from oriel_logic.dev.fakes import FakeServers
    from oriel_logic.dev.session import Session
    from oriel_logic.openai.dispatch import OpenAI


_log = logging.getLogger(__name__)
_SETTING_UP = "the services are being set up"


async def serve_unit(
    settings: Settings,
    server: ForkServer,
    scratch: ForkServer,
    listing: Listing,
    stop: asyncio.Event,
    dev: "Session | None" = None,
) -> None:
    """Run until `stop` is set, then drain. Raises StartFailed (a port is taken).

    server, scratch: launched with the services that share the first worker processes.
    listing: the folders as they were before that.
    dev: set by `oriel logic dev`.
    """
    asyncio.get_running_loop().set_task_factory(contained)
    open_port = listen if dev is None else dev.listen
    http = open_port(settings.host, settings.http_port, "logic HTTP")
    admin = listen(settings.host, settings.admin_port, "logic admin")
    sink = open_sink("logic")
    metrics = Metrics()
    units: list[Unit] = []
    admin_stop = asyncio.Event()
    beside = AsyncExitStack()

    async def serve() -> None:
        files = await loadable_together(server.files, listing, scratch, max_frame_bytes=settings.max_frame_bytes)
        first = server
        if len(files) < len(server.files):
            await asyncio.to_thread(server.close)
            first = ForkServer.launch(files, max_frame_bytes=settings.max_frame_bytes)
        unit = Unit(settings, first, listing, sink, dev.models if dev is not None else None, metrics, stop)
        units.append(unit)
        kept = (ALSO, LAME_DUCK_VARIABLE, *STORES)
        forget_others((*os.environ.get(ALSO, "").split(","), *kept))  # before services are imported here
        await unit.start()
        # Objects that exist now live as long as the process: exclude them from later garbage collections.
        gc.collect()
        gc.freeze()
        ports = (*http.getsockname()[:2], *admin.getsockname()[:2])
        _log.info("services on http://%s:%d/v1/services (health and metrics on http://%s:%d)", *ports)
        recalling = asyncio.create_task(unit.recaller.run(), name="recall of traces")
        front = await unit.open(http)
        if dev is not None:
            await unit.pool.wait_ready()
            await unit.updates.settled()  # services with their own environments
            await dev.print_addresses(unit.registry, unit.updates, "http://{}:{}".format(*http.getsockname()[:2]))
            trying = asyncio.create_task(dev.try_samples(unit.try_sample), name="samples at the start")
        await stop.wait()
        if dev is not None:
            trying.cancel()
            await asyncio.wait([trying])
        await front.drain(settings.drain_s)
        recalling.cancel()
        await asyncio.wait([recalling])

    try:
        if dev is not None:
            await beside.enter_async_context(dev.running())
        health = Starlette(
            routes=health_routes(lambda: units[0].ready() if units else (False, _SETTING_UP), metrics.registry)
        )
        async with asyncio.TaskGroup() as group:
            control = group.create_task(serve_control(health, admin, admin_stop))
            serving = group.create_task(serve())
            stopping = group.create_task(stop.wait())
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not units or not units[0].has_started:
                serving.cancel()  # no request is served yet
            await asyncio.wait([serving])
            stopping.cancel()
            admin_stop.set()  # health answers until the last request is done
            await control
    finally:
        for unit in units:
            await unit.close()
        if not units:
            await asyncio.to_thread(server.close)
        await beside.aclose()
        await asyncio.to_thread(sink.close)


class Unit:
    """A logic server without its sockets: `open` adds one. `envelope` answers requests, with or without a socket.

    server: the fork server for the services that share the first worker processes.
    listing: the folders of all services, from before the fork server was launched.
    models: replaces the inference servers.
    stop: set when the server begins to stop.
    """

    def __init__(
        self,
        settings: Settings,
        server: ForkServer,
        listing: Listing,
        sink: SpanSink,
        models: "FakeServers | None" = None,
        metrics: Metrics | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self.has_started = False
        self._stop = stop or asyncio.Event()
        self._front: HttpServer | None = None
        self.registry = Registry()
        self._settings = settings
        self._files = server.files
        self._listing = listing
        self._services = Services()
        self.pool = WorkerPool(
            server,
            pool_limits(settings),
            launch=lambda: ForkServer.launch(self._files, max_frame_bytes=settings.max_frame_bytes),
        )
        self._upstreams = models or upstreams(settings)
        self._peers = TrustedPeers(settings.trusted_peers)
        self.dispatch = Dispatch(self.registry, max_body_bytes=settings.max_body_bytes)
        described = Description(
            self.registry.definitions, lambda: self._openai.models() if self._openai is not None else {}
        )
        self.dispatch.routes |= {("GET", OPENAPI): described.openapi, ("GET", DOCS): described.docs}
        self._together = Deployment(self._files, self.pool, self._pipeline(self._services, self.pool))
        self._deployer = Deployer(
            settings, make_pipeline=self._pipeline, serve=self.dispatch.serve, report=self._report
        )
        self.updates = Updates(
            self.registry,
            self._deployer,
            settings,
            count=self.metrics.count_update,
            changed=self._serve_openai,
            closed=lambda pool: self._totals.keep(pool.tally),
        )
        self._watch: asyncio.Task[None] | None = None
        self.usage = Usage()
        self._usage_ledger: UsageLedger | None = None
        self._recording: asyncio.Task[None] | None = None
        if settings.usage_folder is not None:
            self._usage_ledger = open_ledger(settings.usage_folder, UNIT, self.usage.added, store=settings.usage_store)
        self._watchdog = Watchdog(
            lambda: [(each.name, each.target) for each in self.registry.definitions()],
            on_lag=self.metrics.loop_lag.observe,
            on_block=self.metrics.count_block,
        )
        self._openai: OpenAI | None = None
        self.envelope = Envelope(
            self.dispatch,
            sink=sink,
            metrics=self.metrics,
            default_timeout_s=settings.default_timeout_s,
            max_in_flight=settings.max_in_flight,
            stream_idle_s=settings.stream_idle_s,
            usage=self.usage,
        )
        self.envelope.ready = self.ready
        self.recaller = Recaller()
        self.dispatch.routes["POST", KEEP] = Keeping(sink, self.recaller)
        self.metrics.watch(lambda: span_metrics("logic", sink, self.envelope.kept, self.recaller))
        self._totals = Totals()
        self.metrics.watch(self._numbers)

    async def start(self) -> None:
        """Set services up and begin to start workers; requests that arrive before they are ready wait."""
        await self._upstreams.start()
        if self._usage_ledger is not None:
            self._recording = asyncio.create_task(self._usage_ledger.run(), name="usage ledger")
        self._watchdog.start()
        await self.pool.start()
        # In threads: importing and setting up may take a while, and health is asked for meanwhile.
        loaded_files = await asyncio.to_thread(load, self._files)
        for file, services in groupby(loaded_files, lambda each: each.file):
            failed = []
            releases = []
            for loaded in services:
                problem = loaded.problem
                if loaded.definition is not None and is_on_loop(loaded.definition):
                    problem = await asyncio.to_thread(setup_problem, self._services, loaded.definition)
                if problem:
                    failed.append((loaded.name, problem))
                elif loaded.definition is not None:
                    definition, source = loaded.definition, self._listing.sources.get(file.origin)
                    if source is not None:
                        applied = source.config.applied(definition)
                        definition = await asyncio.to_thread(with_shown_sample, source, applied)
                    releases.append(Release(definition, file, self._together))
            self.registry.publish(file.origin, releases)
            for name, problem in failed:
                self.registry.fail(file, name, problem)
        self._report(self._together, self.pool.problems)
        self.pool.on_problems = partial(self._report, self._together)
        self.updates.begin(self._listing, self._together)
        self._serve_openai()
        if self._settings.watch:
            self._watch = asyncio.create_task(self.updates.run(), name="watch over the services folders")
        self.has_started = True

    async def try_sample(self, release: Release) -> tuple[str, str]:
        """Return (the sample that a release of the start has answered, "" without one; the error of the answer)."""
        source = self._listing.sources.get(release.file.origin)
        if source is None:
            return "", ""
        try:
            return await self._deployer.try_sample(source, release), ""
        except (SetUpFailed, BadConfig, OSError) as error:
            return "", str(error)

    def _serve_openai(self) -> None:
        """Serve the models that imported handler files define for clients of the OpenAI API."""
        if "oriel_logic.openai" not in sys.modules:
            return
        from oriel_logic.openai.dispatch import OpenAI
        from oriel_logic.openai.served import served_in

        if self._openai is None:
            self._openai = OpenAI(self.dispatch.routes, self.pool, self._upstreams.bind)
        for each, problem in self._openai.serve(served_in(self.updates.files.values())):
            self.registry.fail(each.file, each.served_as, problem)

    async def open(self, sock: socket.socket) -> HttpServer:
        """Serve on `sock`; call the result's `drain` before `close`."""
        held = self._settings.max_held_bytes
        self._front = await open_server(self.envelope, sock, peers=self._peers, max_held_bytes=held)
        return self._front

    def ready(self) -> tuple[bool, str]:
        """Return whether the server is ready, and why not, for probes on the service port and on the admin port."""
        if self._stop.is_set():
            return False, f"the server is stopping, {self._front.under_way if self._front else 0} call(s) under way"
        return (True, "") if self.is_ready else (False, _SETTING_UP)

    async def close(self) -> None:
        self._watchdog.stop()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self.updates.close()
        await self.pool.close()
        await self._upstreams.close()
        if self._usage_ledger is not None and self._recording is not None:
            await self._usage_ledger.close()
            self._recording.cancel()
            await asyncio.wait([self._recording])

    @property
    def is_ready(self) -> bool:
        """Return whether everything that existed at start has been set up or has failed."""
        # A deployment that hung at start and was replaced does not count.
        is_up = self.pool.is_ready or self._together not in self.updates.deployments
        return is_up and self.updates.has_begun

    def _pipeline(self, services: Services, pool: WorkerPool) -> Pipeline:
        return Pipeline(services, pool, self._upstreams.bind)

    def _numbers(self) -> Iterator[Metric]:
        pools: list[Workers] = [each.pool for each in self.updates.deployments]
        yield gauge("oriel_logic_in_flight", "Requests in flight", "", self.envelope.in_flight)
        waiting = sum(each.waiting for each in pools)
        yield gauge("oriel_logic_jobs_waiting", "Jobs waiting for a worker", "", waiting)
        yield gauge("oriel_logic_workers_busy", "Workers running a job", "", sum(each.busy for each in pools))
        ready = sum(len(each.pids) for each in pools)
        yield gauge("oriel_logic_workers_ready", "Workers that are ready", "", ready)
        yield gauge("oriel_logic_releases", "Releases of services, by state", "state", self.updates.states().items())
        text = "Processor time of workers that tenants are charged for"
        charged = [
            ((row.key.tenant, row.key.tier, row.key.target, row.key.device_class), row.cpu_ns / 1e9)
            for row in by_label(self.usage.book.rows())
        ]
        yield counter("oriel_usage_cpu_seconds", text, "tenant tier target class", charged)
        text = "Processor time of workers that nobody is charged for, by reason"
        unbilled = [(why, ns / 1e9) for why, ns in unbilled_ns(self.usage.book.rows(), "cpu_ns").items()]
        yield counter("oriel_usage_unbilled_cpu_seconds", text, "why", unbilled)
        usage = self._usage_ledger
        yield from ledger_metrics(LedgerCounts() if usage is None else usage.counts)
        yield from self._totals.collect(each.tally for each in pools)

    def _report(self, deployment: Deployment, problems: Mapping[str, str]) -> None:
        """Take the releases out of service that a worker could not set up. problems: {service or file: reason}."""
        for release in deployment.releases:
            problem = problems.get(release.name) or problems.get(release.file.name)
            if problem:
                self.registry.break_down(release, problem)


def upstreams(settings: Settings) -> Upstreams:
    """Return what models are called at."""
    if settings.gateway:
        return Upstreams(settings.gateway, settings.gateway, through_gateway=True)
    return Upstreams(settings.inference, settings.inference_grpc)
