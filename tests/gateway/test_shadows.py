"""Copies of calls to a shadow pool: compared, bounded, and seen by nobody."""

import asyncio

import pytest

from ..waiting import until
from .special_routes import (
    INFER,
    SHADOWED,
    Held,
    answering,
    ask,
    copies,
    house,
    ok,
)
from .stack import Client


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (ok(b"ok"), "same"),
        (ok(b"no"), "body_differs"),
        (ok(b"ok!"), "body_differs"),
        (ok(b"ok", status="400 Bad"), "status_differs"),
        (b"", "failed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", "same"),
    ],
)
async def test_a_copy_is_compared_and_seen_by_nobody(answer: bytes, result: str) -> None:
    async with house(SHADOWED) as it:
        it.ups[0].answer = answering(ok())
        it.ups[1].answer = answering(answer)
        reply = await ask(it.port, body=b"body", headers="x-mine: 1\r\n")
        assert (reply.status, reply.body) == (200, b"ok")
        await until(lambda: copies(it.core) == {result: 1.0})
        (original,), (copy,) = (up.seen for up in it.ups)
        assert copy.body == b"body" and copy.get("x-mine") == "1" and copy.get("x-oriel-tenant") == "g"
        assert (original.get("x-oriel-priority"), copy.get("x-oriel-priority")) == ("0", "255")
        assert original.get("x-request-id") == copy.get("x-request-id")
        assert (original.get("x-oriel-unbilled"), copy.get("x-oriel-unbilled")) == (None, "shadow")
        assert sum(s.count for s in it.core.records.stats.series.values()) == 1  # a copy is no request
        await until(it.idle)


async def test_a_shadow_that_hangs_delays_and_fails_nobody_and_is_bounded() -> None:
    async with house(SHADOWED, inflight=4) as it:
        it.ups[1].answer = Held()
        async with Client(it.port) as client:
            for _ in range(10):
                assert (await client.ask(INFER, b"x")).status == 200
        await until(lambda: copies(it.core) == {"dropped": 9.0} and it.core.pools["p1"].shadows == 1)
    assert it.core.routing.shadows == 0 and copies(it.core) == {"dropped": 9.0, "failed": 1.0}


async def test_nothing_is_copied_past_its_bounds() -> None:
    async with house(SHADOWED) as it:
        await ask(it.port, body=b"x" * (64 * 1024 + 1))
        await ask(it.port, "/v2/models/digits/ready", b"", method="GET")
        it.core.pools["p1"].bytes.bound = 0
        await ask(it.port)
        await until(lambda: copies(it.core) == {"dropped": 1.0})
        it.core.pools["p1"].bytes.bound = 1 << 20
        assert not it.ups[1].seen


async def test_a_refused_call_is_not_copied() -> None:
    async with house(SHADOWED) as it:
        it.ups[0].answer = answering(b"")
        assert (await ask(it.port)).status == 502
        assert copies(it.core) == {} and it.idle()


async def test_a_call_that_was_cut_short_is_not_copied() -> None:
    async with house(SHADOWED) as it:
        it.ups[0].answer = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        async with Client(it.port) as client:
            client.send(INFER, b"x")
            await client.reader.readuntil(b"half")
        await until(it.idle)
        assert copies(it.core) == {} and not it.ups[1].seen


async def test_a_copy_does_not_queue_behind_others() -> None:
    routes = '[[routes]]\nmodel = "*"\nheaders = { x-pool = "1" }\npool = "p1"\n'
    async with house(routes + SHADOWED, inflight=1) as it:
        held = it.ups[1].answer = Held()
        asking = [asyncio.ensure_future(ask(it.port, headers="x-pool: 1\r\n")) for _ in range(2)]
        await until(lambda: len(it.core.pools["p1"].admission.queue) == 1)
        assert (await ask(it.port)).status == 200
        await until(lambda: copies(it.core) == {"dropped": 1.0})
        held.go.release()
        held.go.release()
        assert [(await reply).status for reply in asking] == [200, 200]


async def test_a_share_of_the_calls_is_copied_whatever_ids_they_send() -> None:
    async with house(SHADOWED.replace('"p1" }', '"p1", percent = 30.0 }'), inflight=400) as it:
        async with Client(it.port) as client:
            for _ in range(120):
                await client.ask(INFER, b"x", headers="x-request-id: mine\r\n")
        await until(it.idle)
        assert 8 <= len(it.ups[1].seen) <= 80
