"""No kind of request leaves objects that only the garbage collector can free, for which it would stop all requests."""

import asyncio
from functools import partial
from typing import Any

import httpx

from ..uncollected import left_by
from ..waiting import until

SERVICES = """
    import asyncio
    from collections.abc import AsyncIterator, Iterator

    from oriel_logic import Refused, Request, batched, service

    def backwards(text):
        return text[::-1]

    @service
    async def beside(request: Request, ctx) -> dict:
        with ctx.stage("rank"):
            return {"length": len(request.body)}

    @service
    def inside(request: Request) -> dict:
        return {"length": len(request.body)}

    @service
    async def runs(request: Request, ctx) -> dict:
        return {"text": await ctx.run(backwards, request.text())}

    @batched(max_rows=1)
    def doubled(rows: list[int]) -> list[int]:
        return [2 * row for row in rows]

    @service
    async def batches(request: Request, ctx) -> dict:
        return {"rows": await ctx.run(doubled, [1])}

    @service
    async def asks(request: Request, models) -> dict:
        return {"y": (await models.infer("double", {"x": [[1.0, 2.0]]}))["y"].tolist()}

    @service
    def asks_inside(request: Request, models) -> dict:
        return {"y": models.infer("double", {"x": [[1.0, 2.0]]})["y"].tolist()}

    @service
    async def counts(upto: int) -> AsyncIterator[int]:
        for each in range(upto):
            yield each

    @service
    async def stays(upto: int) -> AsyncIterator[int]:
        yield upto
        await asyncio.sleep(3600)  # unlike an event, known to the loop

    @service
    async def waits(request: Request) -> dict:
        await asyncio.sleep(3600)

    @service
    def counts_inside(upto: int) -> Iterator[int]:
        yield from range(upto)

    @service
    async def breaks_off(upto: int) -> AsyncIterator[int]:
        yield upto
        raise Refused("no more")

    @service
    async def refuses(request: Request) -> dict:
        raise Refused("not this one")

    @service
    def refuses_inside(request: Request) -> dict:
        raise Refused("not this one")

    @service
    async def fails(request: Request) -> dict:
        raise ZeroDivisionError

    @service
    def fails_inside(request: Request) -> dict:
        raise ZeroDivisionError
"""
KINDS: dict[str, tuple[bytes, dict[str, str], int]] = {
    "beside": (b"{}", {}, 200),
    "inside": (b"{}", {}, 200),
    "runs": (b"abc", {}, 200),
    "batches": (b"", {}, 200),
    "asks": (b"", {}, 200),
    "asks_inside": (b"", {}, 200),
    "counts": (b'{"upto": 3}', {"content-type": "application/json"}, 200),
    "counts_inside": (b'{"upto": 3}', {"content-type": "application/json"}, 200),
    "breaks_off": (b'{"upto": 3}', {"content-type": "application/json"}, 200),
    "refuses": (b"{}", {}, 422),
    "refuses_inside": (b"{}", {}, 422),
    "fails": (b"{}", {}, 500),
    "fails_inside": (b"{}", {}, 500),
    "missing": (b"{}", {}, 404),
    "beside?large": (bytes(300_000), {}, 200),
    "beside?encoded": (b"{}", {"content-encoding": "gzip"}, 415),
    "beside?late": (b"{}", {"x-oriel-timeout-ms": "0"}, 504),
    "counts?wrong": (b"{", {"content-type": "application/json"}, 422),
}


async def test_a_request_leaves_nothing_in_cycles(stack: Any, services: Any) -> None:
    logic = await stack(services(kinds=SERVICES))

    async def ask(kind: str) -> None:
        body, headers, status = KINDS[kind]
        answer = await logic.client.post(f"/v1/services/{kind}", content=body, headers=headers)
        assert answer.status_code == status, answer.text

    assert {kind: left for kind in KINDS if (left := await left_by(partial(ask, kind)))} == {}


async def test_a_caller_who_leaves_leaves_nothing_in_cycles(stack: Any, services: Any, inference: Any) -> None:
    logic = await stack(services(kinds=SERVICES))
    inference.hold = True
    envelope, base = logic.unit.envelope, logic.client.base_url

    async def leave(kind: str) -> None:
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
            asked = asyncio.ensure_future(first_of(client, kind))
            if kind == "stays":
                await asked
            await until(lambda: envelope.in_flight)
            asked.cancel()
        await until(lambda: not envelope.in_flight)

    kinds = ("stays", "waits", "asks", "asks_inside")
    assert {kind: left for kind in kinds if (left := await left_by(partial(leave, kind)))} == {}


async def first_of(client: httpx.AsyncClient, kind: str) -> None:
    async with client.stream("POST", f"/v1/services/{kind}", json={"upto": 1}) as answer:
        await anext(answer.aiter_bytes())
