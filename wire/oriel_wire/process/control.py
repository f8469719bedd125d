"""A unit's control plane: a Starlette application on uvicorn inside the unit's own loop.

It serves health, metrics and admin pages, not the data path: its port binds to loopback, or to the pod's address for
probes and scrapes.

A client that can reach the port must not be able to block probes, or healthy pods would be restarted. So a
connection has `head_s` for each request head, and `request_s` until its request is answered and read. If the maximum
number of connections is open, the one that has been silent for longest is closed. Health is answered regardless of the
number of requests under way, and some connections are reserved for clients on this machine.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from oriel_wire.engine.peers import is_loopback
from oriel_wire.observe.exposition import exposition
from oriel_wire.observe.telemetry import END, OPENMETRICS, TEXT, wants_openmetrics

MAX_HEAD_BYTES = 32 * 1024
KEEP_ALIVE_S = 5
DRAIN_S = 1
HEALTH = ("/health/live", "/health/ready")
_BUSY = b'{"error":{"message":"too many requests are under way on this port","reason":"queue_full"}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """Bounds of one control plane.

    loopback: additional connections and requests for this machine.
    streams: the paths whose answers go on for as long as their clients stay: `request_s` is not for them.
    """

    connections: int = 128
    requests: int = 64
    loopback: int = 16
    head_s: float = 10.0
    request_s: float = 30.0
    streams: frozenset[str] = frozenset()


async def serve_control(
    app: ASGIApp, sock: socket.socket, stop: asyncio.Event, *, limits: ControlLimits | None = None
) -> None:
    """Serve `app` on `sock` until `stop` is set, then finish running requests (at most `DRAIN_S`) and close `sock`.

    If cancelled, it aborts connections and closes `sock`. `run_unit` handles signals.
    """
    bounds = limits or ControlLimits()

    def connection(**given: Any) -> "_Connection":
        return _Connection(bounds, **given)

    config = uvicorn.Config(
        _bounded(app, bounds),
        http=connection,  # type: ignore[arg-type]  # it is only ever called
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = _Server(config, stop)
    try:
        await server.serve(sockets=[sock])
    finally:
        server.cut()
        sock.close()


def _bounded(app: ASGIApp, limits: ControlLimits) -> ASGIApp:
    """`app` with a bounded number of requests at a time; health requests are not bounded."""
    running = 0

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running
        if scope["type"] != "http" or scope["path"] in HEALTH:
            await app(scope, receive, send)
        elif running >= limits.requests + (limits.loopback if is_near(scope.get("client")) else 0):
            headers = {"retry-after": "1", "connection": "close"}
            await Response(_BUSY, 503, headers, "application/json")(scope, receive, send)
        else:
            running += 1
            try:
                await app(scope, receive, send)
            finally:
                running -= 1

    return bounded


def is_near(client: tuple[str, int] | None) -> bool:
    """Return whether a client's address belongs to this machine."""
    return client is not None and is_loopback(client[0])


def make_room(new: "_Connection", connections: Iterable["_Connection"], limits: ControlLimits) -> "_Connection | None":
    """The connection of `connections`, which include `new`, to close: a silent one, else `new`; None if there is room.

    A client from another machine takes no place reserved for this one.
    """
    others = [each for each in connections if each is not new]
    if len(others) < limits.connections:
        return None
    silent = [each for each in others if not each.busy and (new.near or not each.near)]
    if silent:
        return min(silent, key=lambda each: each.since)
    return None if new.near and len(others) < limits.connections + limits.loopback else new


class _Connection(H11Protocol):
    """uvicorn's connection with limits of time and number.

    near: True for a client on this machine. since: the time when its latest request began or ended.
    """

    def __init__(self, limits: ControlLimits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self.near = False
        self.since = 0.0

    @property
    def busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.near = is_near(self.client)
        self._watch()
        evicted = make_room(self, self.connections, self._limits)  # type: ignore[arg-type]
        if evicted is not None:
            self.connections.discard(evicted)
            evicted.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        busy = self.busy
        super().data_received(data)
        if self.busy and not busy:
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Restart the timer for the next head, or for the request under way."""
        if self._timer is not None:
            self._timer.cancel()
        self.since = self.loop.time()
        streaming = self.busy and self.cycle.scope["path"] in self._limits.streams
        if not self.transport.is_closing() and not streaming:
            seconds = self._limits.request_s if self.busy else self._limits.head_s
            self._timer = self.loop.call_later(seconds, self.transport.abort)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own and with a shutdown that does not wait."""

    servers: list[asyncio.Server] = []

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    async def main_loop(self) -> None:
        """Serve until `stop` is set. uvicorn's own looks ten times a second; its `on_tick(0)` renews the date."""
        while not self._stop.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut(self) -> None:
        """Close what is still open: nothing after a normal end, everything if `serve` was cancelled."""
        for server in self.servers:
            server.close()
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        for task in tuple(self.server_state.tasks):
            task.cancel()


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

    async def metrics(request: Request) -> Response:
        assert registry is not None
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        return await metrics_response(exposition(registry, openmetrics=openmetrics), openmetrics=openmetrics)

    routes = [Route("/health/live", live), Route("/health/ready", readiness)]
    return routes if registry is None else [*routes, Route("/metrics", metrics)]


async def metrics_response(pieces: Iterator[str], *, openmetrics: bool) -> Response:
    """Return an answer of `/metrics`; between two pieces of it the loop goes on."""
    text: list[str] = []
    for piece in pieces:
        text.append(piece)
        await asyncio.sleep(0)
    if openmetrics:
        text.append(END)
    return Response("".join(text), headers={"content-type": OPENMETRICS if openmetrics else TEXT})
