"""Documents of a pool that scales, and gateways that exchange what they count of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from time import monotonic

from oriel_gateway.core import Gateway

from ..conformance.memory_ledger import MemoryLedger
from .stack import documents, gateway

SCALING = "\n[pools.p.scaling]\nminimum = 0\nmaximum = 9\nstart_ms = 20000\n"


def scaled(port: int, *, scaling: str = SCALING, **more: int) -> dict[str, bytes]:
    """Documents of one pool whose only server, if it runs, listens on this port."""
    text = documents([port], pool="", extra=scaling, **more)["all.toml"].decode()
    lines = [line for line in text.split("\n") if not line.startswith(("endpoints", "grpc_endpoints"))]
    pool = f'[pools.p]\nprobe = ""\ndiscover = "dns:127.0.0.1:{port}"'
    return {"all.toml": "\n".join(lines).replace("[pools.p]", pool, 1).encode()}


@contextmanager
def running(core: Gateway, ledger: MemoryLedger, name: str) -> Iterator[None]:
    task = asyncio.ensure_future(core.scaled.run(ledger.seat(name)))
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def gateways(count: int, files: dict[str, bytes]) -> AsyncIterator[list[tuple[int, Gateway]]]:
    ledger = MemoryLedger(lambda: monotonic() * 1e6)
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            port, core = await stack.enter_async_context(gateway(files))
            stack.enter_context(running(core, ledger, f"g{number}"))
            found.append((port, core))
        yield found
