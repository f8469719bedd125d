"""The gateway's composition root."""

import asyncio
import gc
import logging
from dataclasses import replace

from oriel_gateway.admin import admin_app
from oriel_gateway.core import Gateway
from oriel_gateway.ingress_grpc import serve_grpc
from oriel_gateway.ingress_http import ClientConnection
from oriel_gateway.limiter import EmbeddedLimiter
from oriel_gateway.settings import Settings
from oriel_gateway.sources import FolderSource
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.errors import BadDocument
from oriel_wire.engine.control import serve_control
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.process import listen
from oriel_wire.engine.spans import open_sink
from oriel_wire.errors import StartFailed

__all__ = ["load", "serve"]

_log = logging.getLogger(__name__)
DRAIN_S = 25.0
# Young objects before a walk, and walks before the older are walked: a call that waits is walked each time, and one
# that has ended leaves nothing that only the collector could free.
COLLECTOR = (20_000, 5, 20)


def load(settings: Settings) -> Snapshot:
    """The documents of `settings.policies` with the addresses of the command line. Raises StartFailed."""
    try:
        snapshot = compile_documents(FolderSource(settings.policies).read())
    except BadDocument as error:
        raise StartFailed(f"the policies are not usable: {error}") from error
    pools = dict(snapshot.pools)
    for name in {*settings.endpoints, *settings.grpc_endpoints}:
        if name not in pools:
            known = ", ".join(sorted(pools))
            raise StartFailed(f"no pool is named {name!r}, only {known}: add [pools.{name}] to the policies")
        pools[name] = replace(
            pools[name],
            endpoints=settings.endpoints.get(name, pools[name].endpoints),
            grpc_endpoints=settings.grpc_endpoints.get(name, pools[name].grpc_endpoints),
        )
    return replace(snapshot, pools=pools)


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain. Raises StartFailed before anything is served."""
    snapshot = load(settings)
    http_socket = listen(settings.host, settings.http_port, "gateway HTTP")
    grpc_socket = listen(settings.host, settings.grpc_port, "gateway gRPC")
    admin_socket = listen(settings.admin_host, settings.admin_port, "gateway admin")
    sink = open_sink("oriel-gateway")
    gateway = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=sink, sample_ratio=settings.trace_sample_ratio)
    try:
        http: HttpServer = HttpServer(HttpLimits())
        await http.open(lambda: ClientConnection(http, gateway), http_socket)
        grpc = await serve_grpc(gateway, grpc_socket)
        # What exists now lives as long as the process: keep it out of every later collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECTOR)
        _log.info(
            "serving %d tenants on HTTP %s:%d and gRPC %s:%d",
            len(snapshot.tenants),
            settings.host,
            http.port,
            settings.host,
            grpc.port,
        )
        control_stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(serve_control(admin_app(gateway), admin_socket, control_stop))
            await stop.wait()
            gateway.draining = True
            await asyncio.gather(http.drain(DRAIN_S), grpc.drain(DRAIN_S))
            control_stop.set()
    finally:
        await gateway.close()
        sink.close()
