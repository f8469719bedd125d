"""Puts a logic server together and runs it: the only place that knows all its parts."""

import asyncio
import gc
import logging
import socket

from starlette.applications import Starlette

from oriel_logic.endpoints import Endpoint, Endpoints
from oriel_logic.envelope import Envelope
from oriel_logic.inference import InferenceServers
from oriel_logic.ingress import Dispatch
from oriel_logic.loading import load, one_line
from oriel_logic.metrics import Metrics
from oriel_logic.pipeline import Pipeline
from oriel_logic.registry import Registry
from oriel_logic.server import open_server
from oriel_logic.settings import Settings
from oriel_logic.sources import handler_files
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import PoolLimits, WorkerPool
from oriel_logic.workers.references import Services
from oriel_wire.engine.client import HttpClient
from oriel_wire.engine.control import health_routes, serve_control
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.engine.process import listen
from oriel_wire.engine.spans import open_sink
from oriel_wire.trace import SpanSink

__all__ = ["Unit", "serve_unit"]

_log = logging.getLogger(__name__)


async def serve_unit(settings: Settings, server: ForkServer, stop: asyncio.Event) -> None:
    """Run until `stop` is set, then drain. Raises StartFailed (a port is taken)."""
    http = listen(settings.host, settings.http_port, "logic HTTP")
    admin = listen(settings.host, settings.admin_port, "logic admin")
    sink = open_sink("logic")
    unit = Unit(settings, server, sink)
    admin_stop = asyncio.Event()
    try:
        await unit.start()
        # What exists now lives as long as the process: keep it out of every later collection.
        gc.collect()
        gc.freeze()
        async with asyncio.TaskGroup() as group:
            control = group.create_task(serve_control(unit.admin(stop), admin, admin_stop))
            _log.info("services on http://%s:%d/v1/services", *http.getsockname()[:2])
            front = await unit.open(http)
            await stop.wait()
            await front.drain(settings.drain_s)
            admin_stop.set()  # health answers until the last request is done
            await control
    finally:
        await unit.close()
        await asyncio.to_thread(sink.close)


class Unit:
    """A logic server without its sockets: `open` gives it one. `envelope` answers requests, with or without."""

    def __init__(self, settings: Settings, server: ForkServer, sink: SpanSink) -> None:
        self.metrics = Metrics()
        files = handler_files(settings.services)
        self.registry = Registry(load(files))
        self._services = Services()
        self.pool = WorkerPool(
            server,
            PoolLimits(
                workers=settings.workers,
                max_waiting=settings.max_waiting,
                max_waiting_bytes=settings.max_waiting_bytes,
                max_frame_bytes=settings.max_frame_bytes,
                overrun_s=settings.overrun_s,
            ),
            launch=lambda: ForkServer.launch(files, max_frame_bytes=settings.max_frame_bytes),
            on_problems=self._report,
        )
        clients = [Endpoint(f"{host}:{port}", HttpClient(host=host, port=port)) for host, port in settings.inference]
        self._inference = InferenceServers(Endpoints(clients))
        self._settings = settings
        self._peers = TrustedPeers(settings.trusted_peers)
        self.dispatch = Dispatch(
            self.registry,
            Pipeline(self._services, self.pool, self._inference),
            max_body_bytes=settings.max_body_bytes,
        )
        self.envelope = Envelope(
            self.dispatch,
            sink=sink,
            metrics=self.metrics,
            default_timeout_s=settings.default_timeout_s,
            max_in_flight=settings.max_in_flight,
            stream_idle_s=settings.stream_idle_s,
        )
        self.metrics.watch("oriel_logic_in_flight", "Requests under way", lambda: self.envelope.in_flight)
        self.metrics.watch("oriel_logic_jobs_waiting", "Jobs that wait for a worker", lambda: self.pool.waiting)
        self.metrics.watch("oriel_logic_workers_busy", "Workers that work on a job", lambda: self.pool.busy)
        self.metrics.watch("oriel_logic_workers_ready", "Workers that are up", lambda: len(self.pool.pids))

    async def start(self) -> None:
        """Set services up and begin to start workers; requests that come before they are ready wait for them."""
        await self.pool.start()
        for definition in self.registry.definitions():
            if all(definition.runs_in_worker(each) for each in definition.stages()):
                continue
            try:
                self._services.set_up(definition)
            except (Exception, SystemExit) as error:  # user code: it concerns this service only
                self.registry.mark_broken(definition.name, f"its setup failed: {one_line(error)}")

    async def open(self, sock: socket.socket) -> HttpServer:
        """Serve on `sock`; end it with `drain` before `close`."""
        settings = self._settings
        return await open_server(
            self.envelope,
            sock,
            peers=self._peers,
            max_body_bytes=settings.max_body_bytes,
            max_held_bytes=settings.max_held_bytes,
        )

    async def close(self) -> None:
        await self.pool.close()
        await self._inference.close()

    def admin(self, stop: asyncio.Event) -> Starlette:
        def ready() -> tuple[bool, str]:
            if stop.is_set():
                return False, "the server is stopping"
            return self.pool.is_ready, "" if self.pool.is_ready else "the services are being set up"

        return Starlette(routes=health_routes(ready, self.metrics.registry))

    def _report(self, problems: dict[str, str]) -> None:
        for name, problem in problems.items():
            self.registry.mark_broken(name, problem)
