import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from oriel_wire.process.control import ControlLimits, health_routes, make_room, serve_control
from oriel_wire.process.process import listen


@asynccontextmanager
async def serving(
    routes: list[Route], limits: ControlLimits | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Event]]:
    sock = listen("127.0.0.1", 0, "sample admin")
    stop = asyncio.Event()
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_control(Starlette(routes=routes), sock, stop, limits=limits))
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


async def test_stopping_waits_for_no_further_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn looked ten times a second for the end, in each server of `oriel up` one after the other."""
    ticks, loop = 0, asyncio.get_running_loop()
    on_tick = uvicorn.Server.on_tick

    async def counted(server: uvicorn.Server, counter: int) -> bool:
        nonlocal ticks
        ticks += asyncio.get_running_loop() is loop  # servers that other tests keep have loops of their own
        return await on_tick(server, counter)

    monkeypatch.setattr(uvicorn.Server, "on_tick", counted)
    async with serving(ready()) as (client, stop):
        assert (await client.get("/health/live")).headers["date"]
        before = ticks
        stop.set()
    assert ticks == before


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


def ready() -> list[Route]:
    return health_routes(lambda: (True, ""), CollectorRegistry())


async def open_many(
    port: int, count: int, data: bytes = b""
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in made:
        writer.write(data)
    return made


@pytest.mark.parametrize("data", [b"", b"GET /health/live HTTP/1.1\r\nhost: x\r\n"])
async def test_silent_connections_keep_no_probe_out(data: bytes) -> None:
    """More than there are places for, silent or in the middle of a head: every probe is answered."""
    async with serving(ready()) as (client, _):
        assert client.base_url.port is not None
        silent = await open_many(client.base_url.port, 200, data)
        for path in ("/health/live", "/health/ready", "/metrics") * 3:
            assert (await client.get(path, headers={"connection": "close"})).status_code == 200
        assert await silent[0][0].read() == b""  # closed
        for _, writer in silent:
            writer.close()


async def test_a_head_and_a_request_have_limited_time() -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    routes = [*ready(), Route("/never", never)]  # type: ignore[arg-type]
    async with serving(routes, ControlLimits(head_s=0.2, request_s=0.4)) as (client, _):
        port = client.base_url.port
        assert port is not None
        for data in (b"", b"GET /health/live HT", b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n"):
            ((reader, writer),) = await open_many(port, 1, data)
            async with asyncio.timeout(60):
                try:
                    assert await reader.read() == b""
                except ConnectionResetError:
                    pass
            writer.close()


async def test_health_is_answered_while_all_other_requests_are_under_way() -> None:
    go, running = asyncio.Event(), 0

    async def slow(_: Request) -> Response:
        nonlocal running
        running += 1
        await go.wait()
        return Response("done")

    limits = ControlLimits(requests=2, loopback=1)
    async with serving([*ready(), Route("/slow", slow)], limits) as (client, _):
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(client.get("/slow")) for _ in range(3)]
            async with asyncio.timeout(60):
                while running < 3:
                    await asyncio.sleep(0)
            refused = await client.get("/slow")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await client.get("/metrics")).status_code == 503
            for path in ("/health/live", "/health/ready"):
                assert (await client.get(path)).status_code == 200
            go.set()
        assert {(await each).status_code for each in waiting} == {200}
        assert (await client.get("/metrics")).status_code == 200


@dataclass
class Place:
    near: bool
    busy: bool
    since: float


def test_the_longest_silent_makes_room_and_nobody_from_elsewhere_takes_this_machines_places() -> None:
    limits = ControlLimits(connections=3, loopback=1)
    near, old, young = Place(True, False, 1.0), Place(False, False, 2.0), Place(False, False, 3.0)
    new, here = Place(False, False, 4.0), Place(True, False, 4.0)
    assert make_room(new, [near, old, new], limits) is None
    assert make_room(new, [near, old, young, new], limits) is old
    assert make_room(here, [near, old, young, here], limits) is near
    old.busy = young.busy = True
    assert make_room(new, [near, old, young, new], limits) is new
    near.busy = True
    assert make_room(here, [near, old, young, here], limits) is None
    assert make_room(here, [near, old, young, Place(True, True, 5.0), here], limits) is here


async def test_a_stream_lasts_longer_than_a_request_may() -> None:
    cut = asyncio.Event()

    async def never(_: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def stream(_: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await cut.wait()
            yield b"second"

        return StreamingResponse(parts())

    limits = ControlLimits(request_s=0.05, streams=frozenset({"/stream"}))
    async with serving([Route("/never", never), Route("/stream", stream)], limits) as (client, _):
        async with client.stream("GET", "/stream") as answer:
            parts = answer.aiter_raw()
            assert await anext(parts) == b"first"
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/never")
            cut.set()
            assert await anext(parts) == b"second", "its connection outlived the time of a request"
