"""What operators read of a gateway in this process: its admin pages and the decisions about requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from oriel_gateway.admin.app import admin_app
from oriel_gateway.core import Gateway

from .stack import Seen, Upstream


@asynccontextmanager
async def admin(
    core: Gateway, token: str | None = None, *, peer: str | None = "127.0.0.1"
) -> AsyncIterator[httpx.AsyncClient]:
    came_from: Any = (peer, 50000) if peer else None
    transport = httpx.ASGITransport(admin_app(core, token=token), client=came_from)  # type: ignore[arg-type]  # ASGI
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8082") as client:
        yield client


async def decision(core: Gateway, request_id: str) -> dict[str, Any]:
    async with admin(core) as client:
        answer = await client.get(f"/decisions/{request_id}")
    (said,) = answer.json()["decisions"]
    return dict(said)


@asynccontextmanager
async def held(up: Upstream) -> AsyncIterator[asyncio.Event]:
    """Keep the upstream from answering until the event is set."""
    go = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        await go.wait()
        return await up.ok(seen)

    up.answer = answer
    yield go
    go.set()
