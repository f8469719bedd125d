"""A gateway with worker processes, its clients, and its admin port."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx

from .documents import changed
from .process import Process
from .stack import Client, documents

INFER = "/v2/models/digits/infer"
CLIENTS = 24  # that the kernel gives all to one of two workers is as likely as 1 in 8 million
BURST = 40


def files(port: int, more: str = "") -> dict[str, bytes]:
    limit = f"limit = {{ requests_per_s = 0.001, burst = {BURST} }}"
    return changed(documents([port], extra=more), "limit = { requests_per_s = 0.5, burst = 2 }", limit)


def workers_of(process: Process) -> list[int]:
    """Return the process ids of the workers that run."""
    found = []
    for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # it has ended
            if b"ORIEL_WORKER=" in Path(f"/proc/{each}/environ").read_bytes():
                found.append(int(each))
    return found


@asynccontextmanager
async def clients(port: int, count: int = CLIENTS) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Client(port)) for _ in range(count)]


async def admin(process: Process, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{process.admin_port}{path}")


async def metrics(process: Process) -> dict[str, float]:
    text = (await admin(process, "/metrics")).text
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in rows}
