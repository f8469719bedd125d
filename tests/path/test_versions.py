"""Versions of a service and its updates, through the gateway: whoever may use the service may ask for any of them."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection
from oriel_gateway.limits import EmbeddedLimiter
from oriel_logic.app import Unit
from oriel_logic.loading.listing import read_listing, together
from oriel_logic.settings import Settings
from oriel_logic.workers.launch import ForkServer
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.observe.trace import ListSink

HANDLER = """
from oriel_logic import service

@service(sample=1)
async def ranker(request, models, ctx):
    return {0}
"""
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 60000
[pools.logic]
endpoints = ["127.0.0.1:{port}"]
[[routes]]
service = "*"
pool = "logic"
[tenants.may]
tier = "gold"
services = ["ranker"]
keys = [{{ sha256 = "{may}" }}]
[tenants.other]
tier = "gold"
services = ["else"]
keys = [{{ sha256 = "{other}" }}]
"""


def bound() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


@contextlib.asynccontextmanager
async def path(folder: Path) -> AsyncIterator[tuple[Unit, httpx.AsyncClient]]:
    async with contextlib.AsyncExitStack() as opened:
        settings = Settings(services=(folder,), inference=(("127.0.0.1", 1),), workers=1, watch=False)
        listing = read_listing(settings.services)
        server = ForkServer.launch(together(listing), max_frame_bytes=settings.max_frame_bytes)
        unit = Unit(settings, server, listing, ListSink())
        opened.push_async_callback(unit.close)
        await unit.start()
        await unit.updates.settled()
        front = await unit.open(bound())
        opened.push_async_callback(front.drain, 0.0)
        keys = {name: sha256(name.encode()).hexdigest() for name in ("may", "other")}
        files = {"all.toml": DOCUMENTS.format(port=front.port, **keys).encode()}
        core = Gateway(compile_documents(files), limiter=EmbeddedLimiter(), sink=ListSink())
        opened.push_async_callback(core.close)
        http: HttpServer = HttpServer(HttpLimits())
        await http.open(lambda: ClientConnection(http, core), bound())
        opened.push_async_callback(http.drain, 0.0)
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{http.port}", timeout=60)
        opened.push_async_callback(client.aclose)
        yield unit, client


async def ask(client: httpx.AsyncClient, path: str = "", *, key: str = "may", request_id: str = "r") -> Any:
    answer = await client.post(
        f"/v1/services/ranker{path}", content=b"1", headers={"x-api-key": key, "x-request-id": request_id}
    )
    return answer.status_code, answer.headers.get("x-oriel-service-version")


async def test_versions_and_updates_through_the_gateway(tmp_path: Path) -> None:
    folder = tmp_path / "services"
    for version in ("1", "2"):
        (folder / "ranker" / version).mkdir(parents=True)
        (folder / "ranker" / version / "handler.py").write_text(HANDLER.format(version))
    (folder / "ranker/pyproject.toml").write_text('[tool.oriel]\nweights = { "1" = 50, "2" = 50 }\n')
    async with path(folder) as (unit, client):
        assert [await ask(client, f"/versions/{version}") for version in "12"] == [(200, "1"), (200, "2")]
        assert (await ask(client, "/versions/3"))[0] == 404
        assert (await ask(client, "/versions/2", key="other"))[0] == (await ask(client, key="other"))[0] == 404
        ids = [f"request-{number}" for number in range(40)]
        first = [await ask(client, request_id=each) for each in ids]
        assert [await ask(client, request_id=each) for each in ids] == first, "a retry goes the same way"
        assert set(Counter(first)) == {(200, "1"), (200, "2")}
        stop = asyncio.Event()
        seen: Counter[Any] = Counter()

        async def keep_asking() -> None:
            while not stop.is_set():
                seen[await ask(client, "/versions/2")] += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(keep_asking())
            for source in (HANDLER.format(3), "broken (", HANDLER.format(4)):
                (folder / "ranker/2/handler.py").write_text(source)
                for _ in range(2):
                    await unit.updates.poll()
                await unit.updates.settled()
            stop.set()
        assert set(seen) == {(200, "2")}
        answer = await client.post("/v1/services/ranker/versions/2", content=b"1", headers={"x-api-key": "may"})
        assert answer.json() == 4
