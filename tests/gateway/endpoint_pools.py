"""Pools of several scripted endpoints, and servers for raw connections."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from oriel_gateway.core import Gateway
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_policies.documents import Pool, compile_documents

from .stack import documents

PROBED = 'probe = "/v2/health/ready"\nprobe_interval_ms = 50'


def pool(count: int, **more: int) -> Pool:
    return compile_documents(documents(list(range(1, count + 1)), **more)).pools["p"]


def endpoints(count: int, *, max_parked: int = 10) -> EndpointSet[HttpEndpoint]:
    made = pool(count)
    return EndpointSet(
        lambda a: HttpEndpoint(a, made), made.endpoints, max_parked=max_parked, random=random.Random(5).random
    )


def with_probe(ports: list[int]) -> dict[str, bytes]:
    """Documents of one pool over HTTP whose endpoints are probed."""
    text = documents(ports, pool=PROBED)["all.toml"]
    return {"all.toml": b"\n".join(line for line in text.split(b"\n") if not line.startswith(b"grpc_endpoints"))}


def still(core: Gateway) -> None:
    """Stop the clock of the retry budgets, whose windows would otherwise move on while a slow machine works."""
    for gate in core.pools.values():
        gate.retries._until = 1 << 40


@asynccontextmanager
async def served(handler: Any, sock: socket.socket | None = None) -> AsyncIterator[int]:
    """Yield the port of a server for raw connections; it listens at `sock` if that is given."""
    where = {"host": "127.0.0.1", "port": 0} if sock is None else {"sock": sock}
    server = await asyncio.start_server(handler, **where)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


IDEMPOTENT = '[[routes]]\nmodel = "*"\npool = "p"\nidempotent = true\n'


def first_route(files: dict[str, bytes], lines: str) -> dict[str, bytes]:
    return {"all.toml": files["all.toml"].replace(b'[[routes]]\nmodel = "*"\npool = "p"\n', lines.encode(), 1)}


FULL = b'{"error":"the queue is full","reason":"queue_full"}'

HEDGED = '[[routes]]\nmodel = "*"\npool = "p"\nidempotent = true\nhedge_ms = 30\n'


def not_ready(status: int = 503) -> bytes:
    return b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status
