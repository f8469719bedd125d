"""A late call is blamed on the place in which it was really delayed, for each place that the gateway itself measures.

`test_objectives` does the same for the places that the servers behind report, `tests/policies/test_objectives.py` for
the rule alone.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from oriel_gateway.core import Gateway
from oriel_gateway.pools.endpoint_state import Reach

from ..waiting import until
from .operators import decision, held
from .stack import GOLD, Client, documents, gateway, upstream

INFER = "/v2/models/digits/infer"
# How long the call is kept in a place. The first hold may be short for what a busy machine does meanwhile.
HOLDS_S = (0.05, 0.2, 0.8, 3.2, 12.8)
Delayed = Callable[[Client, str, float], Awaitable[None]]


def tight(port: int, **options: Any) -> dict[str, bytes]:
    """Documents whose target no call of these tests can meet, and deadlines that none passes."""
    return {
        name: text.replace(b"target_ms = 2000", b"target_ms = 1\ngive_up_ms = 600000")
        for name, text in documents([port], **options).items()
    }


async def pass_time(seconds: float) -> None:
    ends = monotonic() + seconds
    await until(lambda: monotonic() >= ends)


@asynccontextmanager
async def in_the_body() -> AsyncIterator[tuple[Gateway, int, Delayed]]:
    async with upstream() as up, gateway(tight(up.port)) as (port, core):

        async def ask(client: Client, request_id: str, hold_s: float) -> None:
            head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {GOLD}\r\ncontent-length: 2\r\n"
            client.writer.write(f"{head}x-request-id: {request_id}\r\n\r\nx".encode())
            await pass_time(hold_s)
            client.writer.write(b"y")
            assert (await client.reply()).status == 200

        yield core, port, ask


@asynccontextmanager
async def in_the_queue() -> AsyncIterator[tuple[Gateway, int, Delayed]]:
    async with upstream() as up, gateway(tight(up.port, max_inflight=1)) as (port, core), Client(port) as other:
        admission = core.pools["p"].admission

        async def ask(client: Client, request_id: str, hold_s: float) -> None:
            async with held(up):
                before = asyncio.ensure_future(other.ask(INFER, b"x"))
                await until(lambda: admission.inflight == 1)
                delayed = asyncio.ensure_future(client.ask(INFER, b"x", headers=f"x-request-id: {request_id}\r\n"))
                await until(lambda: admission.queue.items == 1)
                await pass_time(hold_s)
            up.answer = up.ok
            assert (await before).status == (await delayed).status == 200

        yield core, port, ask


@asynccontextmanager
async def without_an_endpoint() -> AsyncIterator[tuple[Gateway, int, Delayed]]:
    async with upstream() as up, gateway(tight(up.port)) as (port, core):
        endpoints = core.pools["p"].endpoints

        async def ask(client: Client, request_id: str, hold_s: float) -> None:
            server = next(iter(endpoints))
            endpoints.note_reach(server, Reach.NOT_READY)
            delayed = asyncio.ensure_future(client.ask(INFER, b"x", headers=f"x-request-id: {request_id}\r\n"))
            await until(lambda: endpoints.parked == 1)
            await pass_time(hold_s)
            endpoints.note_reach(server, Reach.READY)
            assert (await delayed).status == 200

        yield core, port, ask


@asynccontextmanager
async def in_the_answer() -> AsyncIterator[tuple[Gateway, int, Delayed]]:
    holds = [0.0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):  # a request comes in one piece
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
            await pass_time(holds[0])
            writer.write(b"k")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, gateway(tight(server.sockets[0].getsockname()[1])) as (port, core):

        async def ask(client: Client, request_id: str, hold_s: float) -> None:
            holds[0] = hold_s
            assert (await client.ask(INFER, b"x", headers=f"x-request-id: {request_id}\r\n")).status == 200

        yield core, port, ask


@pytest.mark.parametrize(
    ("place", "delayed"),
    [("body", in_the_body), ("queue", in_the_queue), ("endpoint", without_an_endpoint), ("answer", in_the_answer)],
)
async def test_a_late_call_is_blamed_on_the_place_that_held_it(place: str, delayed: Any) -> None:
    async with delayed() as (core, port, ask), Client(port) as client:
        for hold_s in HOLDS_S:
            request_id = f"held-for-{hold_s}"
            await ask(client, request_id, hold_s)
            promise = (await decision(core, request_id))["promise"]
            assert promise["result"] == "late" and promise["places_ms"][place] >= 0.9 * hold_s * 1e3
            if promise["cause"] == place:
                break
        assert promise["cause"] == place and promise["passed_in"]
