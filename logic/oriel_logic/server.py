"""uvicorn for the service port. Not public: the gateway is its only client, so there are no slow-client defences."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

__all__ = ["serve"]

MAX_HEAD_BYTES = 32 * 1024
KEEP_ALIVE_S = 75


async def serve(app: ASGIApp, sock: socket.socket, stop: asyncio.Event, *, drain_s: float) -> None:
    """Serve until `stop` is set; then take no new connections and finish what runs, at most `drain_s`."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s),
    )
    server = Server(config)

    async def leave() -> None:
        await stop.wait()
        server.should_exit = True

    try:
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(leave())
            await server.serve(sockets=[sock])
            leaving.cancel()
    finally:
        sock.close()


class Server(uvicorn.Server):
    """Signals stay with `run_unit`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
