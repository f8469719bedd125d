"""Puts a logic server together and runs it: the only place that knows all its parts."""

import asyncio
import gc
import logging
import socket
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from oriel_logic.envelope import Envelope
from oriel_logic.ingress import Dispatch
from oriel_logic.loading import load, one_line
from oriel_logic.metrics import Metrics
from oriel_logic.pipeline import Pipeline
from oriel_logic.registry import Registry
from oriel_logic.server import open_server
from oriel_logic.settings import Settings
from oriel_logic.sources import handler_files
from oriel_logic.upstreams import Upstreams
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import PoolLimits, WorkerPool
from oriel_logic.workers.references import Services
from oriel_wire.engine.control import health_routes, serve_control
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.engine.process import listen
from oriel_wire.engine.spans import open_sink
from oriel_wire.trace import SpanSink

if TYPE_CHECKING:
    from oriel_logic.dev.fakes import FakeServers
    from oriel_logic.dev.session import Session

__all__ = ["Unit", "serve_unit"]

_log = logging.getLogger(__name__)


async def serve_unit(settings: Settings, server: ForkServer, stop: asyncio.Event, dev: "Session | None" = None) -> None:
    """Run until `stop` is set, then drain. Raises StartFailed (a port is taken). dev: of `oriel logic dev`."""
    http = listen(settings.host, settings.http_port, "logic HTTP")
    admin = listen(settings.host, settings.admin_port, "logic admin")
    sink = open_sink("logic")
    unit = Unit(settings, server, sink, dev.models if dev is not None else None)
    admin_stop = asyncio.Event()
    beside = AsyncExitStack()
    try:
        if dev is not None:
            await beside.enter_async_context(dev.running())
        await unit.start()
        # What exists now lives as long as the process: keep it out of every later collection.
        gc.collect()
        gc.freeze()
        async with asyncio.TaskGroup() as group:
            control = group.create_task(serve_control(unit.admin(stop), admin, admin_stop))
            _log.info("services on http://%s:%d/v1/services", *http.getsockname()[:2])
            front = await unit.open(http)
            if dev is not None:
                await unit.pool.wait_ready()
                await dev.greet(unit.registry, "http://{}:{}".format(*http.getsockname()[:2]))
            await stop.wait()
            await front.drain(settings.drain_s)
            admin_stop.set()  # health answers until the last request is done
            await control
    finally:
        await unit.close()
        await beside.aclose()
        await asyncio.to_thread(sink.close)


class Unit:
    """A logic server without its sockets: `open` gives it one. `envelope` answers requests, with or without.

    models: stand in for inference servers.
    """

    def __init__(
        self, settings: Settings, server: ForkServer, sink: SpanSink, models: "FakeServers | None" = None
    ) -> None:
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
        self._upstreams = models or Upstreams(settings.inference, settings.inference_grpc)
        servers = self._upstreams.servers
        self._settings = settings
        self._peers = TrustedPeers(settings.trusted_peers)
        self.dispatch = Dispatch(
            self.registry,
            Pipeline(self._services, self.pool, servers),
            max_body_bytes=settings.max_body_bytes,
        )
        if "oriel_logic.openai" in sys.modules:  # a handler file asked for it
            from oriel_logic.openai.dispatch import OpenAI, served_in

            OpenAI(self.dispatch.routes, self.pool, servers).serve(served_in(files))
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
        await self._upstreams.start()
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
        await self._upstreams.close()

    def admin(self, stop: asyncio.Event) -> Starlette:
        def ready() -> tuple[bool, str]:
            if stop.is_set():
                return False, "the server is stopping"
            return self.pool.is_ready, "" if self.pool.is_ready else "the services are being set up"

        return Starlette(routes=health_routes(ready, self.metrics.registry))

    def _report(self, problems: dict[str, str]) -> None:
        for name, problem in problems.items():
            self.registry.mark_broken(name, problem)
