"""A unit's control plane: a Starlette application on uvicorn inside the unit's own loop.

Not for the data path: these ports bind to loopback, or to the pod address for probes and scrapes.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

__all__ = ["health_routes", "serve_control"]

MAX_CONCURRENCY = 64
MAX_HEAD_BYTES = 32 * 1024
KEEP_ALIVE_S = 5
DRAIN_S = 1


async def serve_control(app: ASGIApp, sock: socket.socket, stop: asyncio.Event) -> None:
    """Serve `app` on `sock` until `stop` is set, then finish what runs (at most `DRAIN_S`) and close `sock`.

    Cancelled: connections are cut and `sock` is closed. Signals stay with `run_unit`.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONCURRENCY,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = _Server(config)
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_exit_on(stop, server))
            await server.serve(sockets=[sock])
            watcher.cancel()
    finally:
        server.cut()
        sock.close()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, and with an end that does not wait."""

    servers: list[asyncio.Server] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """Close what is still open: nothing after an orderly end, everything when `serve` was cancelled."""
        for server in self.servers:
            server.close()
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        for task in tuple(self.server_state.tasks):
            task.cancel()


async def _exit_on(stop: asyncio.Event, server: uvicorn.Server) -> None:
    await stop.wait()
    server.should_exit = True


def health_routes(ready: Callable[[], tuple[bool, str]], registry: CollectorRegistry | None = REGISTRY) -> list[Route]:
    """`/health/live`, `/health/ready` (503 with the reason while not ready), `/metrics` of `registry` if there is one.

    ready() -> (is ready, reason); it is called per probe on the loop and must not wait.
    """

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def readiness(_: Request) -> Response:
        is_ready, reason = ready()
        if is_ready:
            return JSONResponse({"ready": True})
        return JSONResponse({"ready": False, "reason": reason}, status_code=503)

    async def metrics(_: Request) -> Response:
        assert registry is not None
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/health/live", live), Route("/health/ready", readiness)]
    return routes if registry is None else [*routes, Route("/metrics", metrics)]
