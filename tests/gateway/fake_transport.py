"""Client and upstream connections of the gateway without sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.upstream import UpstreamConnection
from oriel_wire.observe.trace import ListSink

from .stack import GOLD, documents

HEAD = b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"


def core_connections(core: Gateway) -> list[Any]:
    """Return the clients' connections that are open now."""
    return [connection for front in core.fronts for connection in front.connections]


class FakeTransport:
    """A transport that records its calls. full: while True, each write crosses the high-water mark."""

    def __init__(self) -> None:
        self.protocol: Any = None
        self.full = False
        self.unsent = 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: self.calls.append(name)

    def write(self, data: bytes) -> None:
        self.calls.append("write")
        if self.full:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1)

    def is_closing(self) -> bool:
        return False


@asynccontextmanager
async def wired() -> AsyncIterator[tuple[ClientConnection, FakeTransport, UpstreamConnection, FakeTransport]]:
    """Return one client connection and one upstream connection on fake transports."""
    core = Gateway(compile_documents(documents([1])), limiter=EmbeddedLimiter(), sink=ListSink())
    endpoint = core.pools["p"].endpoints[0]
    client, upstream = ClientConnection(HttpServer(HttpLimits()), core), UpstreamConnection(endpoint)
    towards_client, towards_upstream = FakeTransport(), FakeTransport()
    for connection, transport in ((client, towards_client), (upstream, towards_upstream)):
        transport.protocol = connection
        connection.connection_made(transport)  # type: ignore[arg-type]
    upstream.idle_since = monotonic()
    endpoint.idle.append(upstream)
    yield client, towards_client, upstream, towards_upstream
    await core.close()


ASKED = HEAD % GOLD.encode() + b"content-length: 1\r\n\r\nx"
