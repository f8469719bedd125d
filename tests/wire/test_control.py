import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.routing import Route

from oriel_wire.engine.control import health_routes, serve_control
from oriel_wire.engine.process import listen


@asynccontextmanager
async def serving(routes: list[Route]) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Event]]:
    sock = listen("127.0.0.1", 0, "sample admin")
    stop = asyncio.Event()
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_control(Starlette(routes=routes), sock, stop))
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
            yield client, stop
        stop.set()


async def test_health_and_metrics_answer_and_readiness_says_why_not() -> None:
    registry = CollectorRegistry()
    Counter("sample", "a sample", registry=registry).inc(3)
    state = (False, "model digits is loading")
    async with serving(health_routes(lambda: state, registry)) as (client, _):
        assert (await client.get("/health/live")).json() == {"live": True}
        unready = await client.get("/health/ready")
        assert (unready.status_code, unready.json()) == (503, {"ready": False, "reason": "model digits is loading"})
        state = (True, "")
        assert (await client.get("/health/ready")).status_code == 200
        metrics = await client.get("/metrics")
    assert "sample_total 3.0" in metrics.text and metrics.headers["content-type"].startswith("text/plain")


async def test_stopping_closes_the_socket() -> None:
    async with serving(health_routes(lambda: (True, ""), CollectorRegistry())) as (client, _):
        port = client.base_url.port
        assert port is not None
        await client.get("/health/live")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


async def test_cancelling_closes_the_socket() -> None:
    sock = listen("127.0.0.1", 0, "sample admin")
    port = sock.getsockname()[1]
    task = asyncio.create_task(
        serve_control(Starlette(routes=health_routes(lambda: (True, ""))), sock, asyncio.Event())
    )
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        await client.get(f"http://127.0.0.1:{port}/health/live")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sock.fileno() == -1
