"""Calls that are sent to a second server: after a refusal or a break, and when the first one is late."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from oriel_gateway.call.trouble import Hedge
from oriel_policies.upstreams.ejection import Cause

from ..waiting import until
from .endpoint_pools import FULL, HEDGED, IDEMPOTENT, first_route, not_ready, still
from .gate import INFER, idle
from .stack import Client, Seen, Upstream, documents, gateway, upstream


@pytest.fixture
async def two() -> AsyncIterator[tuple[Upstream, Upstream]]:
    async with upstream() as a, upstream() as b:
        yield a, b


async def ask_both(client: Client, two: tuple[Upstream, Upstream], times: int = 20) -> list[int]:
    return [(await client.ask(INFER, b"body")).status for _ in range(times)]


async def test_what_a_full_server_did_not_execute_goes_to_another(two: tuple[Upstream, Upstream]) -> None:
    asked, fulls = 0, 1

    async def answer(seen: Seen) -> bytes:
        nonlocal asked
        asked += 1
        if asked > fulls:
            return await two[0].ok(seen)
        return b"HTTP/1.1 503 No\r\ncontent-length: %d\r\n\r\n" % len(FULL) + FULL

    two[0].answer = two[1].answer = answer
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        still(core)
        assert await ask_both(client, two, 1) == [200]
        assert [up.seen[0].body for up in two] == [b"body", b"body"] and core.pools["p"].retries.spent == 1
        fulls = 1000
        assert await ask_both(client, two, 49) == [503] * 49  # both servers are full: of all calls a tenth is repeated
        assert core.pools["p"].retries.spent == 5 and asked == 55 and idle(core)


async def test_a_503_that_says_nothing_of_execution_is_passed_on(two: tuple[Upstream, Upstream]) -> None:
    async def broken(seen: Seen) -> bytes:
        return not_ready()

    two[0].answer = two[1].answer = broken
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        assert set(await ask_both(client, two)) == {503}
        assert len(two[0].seen) + len(two[1].seen) == 20 and core.pools["p"].retries.spent == 0


async def test_only_a_route_that_says_so_is_sent_again_after_it_broke(two: tuple[Upstream, Upstream]) -> None:
    broken = 0

    async def once(seen: Seen) -> bytes:
        nonlocal broken
        broken += 1
        return b"" if broken == 1 else await two[0].ok(seen)

    two[0].answer = two[1].answer = once
    files = documents([up.port for up in two])
    async with gateway(files) as (port, core), Client(port) as client:
        assert await ask_both(client, two, 3) == [502, 200, 200]
        assert core.pools["p"].retries.spent == 0 and idle(core)
    for up in two:
        up.seen.clear()
    broken = 0
    async with gateway(first_route(files, IDEMPOTENT)) as (port, core), Client(port) as client:
        assert await ask_both(client, two, 3) == [200] * 3
        assert core.pools["p"].retries.spent == 1 and idle(core)
        assert sum(len(up.seen) for up in two) == 4
        assert [up.seen[0].body for up in two] == [b"body", b"body"]  # the second request went to the other server


@pytest.mark.parametrize("size_bytes", [4, 100_000])
async def test_an_endpoint_that_breaks_is_ejected_whatever_the_size_of_the_body(
    two: tuple[Upstream, Upstream], size_bytes: int
) -> None:
    """A body of more than 64 KiB is not kept to be sent again, but a failure of its call counts like any other."""

    async def nothing(_: Seen) -> bytes:
        return b""

    two[0].answer = two[1].answer = nothing
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        while not these.ejections:
            assert (await client.ask(INFER, bytes(size_bytes))).status == 502
            assert len(two[0].seen) + len(two[1].seen) <= 20
        assert these.ejections == {Cause.BROKEN: 1} and idle(core)


async def test_no_call_is_sent_more_than_twice(two: tuple[Upstream, Upstream]) -> None:
    async def nothing(_: Seen) -> bytes:
        return b""

    two[0].answer = two[1].answer = nothing
    async with gateway(first_route(documents([up.port for up in two]), IDEMPOTENT)) as (port, core):
        async with Client(port) as client:
            assert (await client.ask(INFER, b"body")).status == 502
            assert len(two[0].seen) + len(two[1].seen) == 2 and idle(core)


async def test_a_late_call_gets_a_second_copy_and_the_first_answer_wins(two: tuple[Upstream, Upstream]) -> None:
    slow: list[Upstream] = []

    def late(up: Upstream) -> None:
        async def answer(seen: Seen) -> bytes:
            if not slow or slow[0] is up:  # the server that is called first never answers
                slow[:] = [up]
                await asyncio.Event().wait()
            return b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond"

        up.answer = answer

    late(two[0])
    late(two[1])
    async with gateway(first_route(documents([up.port for up in two]), HEDGED)) as (port, core), Client(port) as client:
        reply = await client.ask(INFER, b"body")
        assert (reply.status, reply.body) == (200, b"second")
        assert [up.seen[0].body for up in two] == [b"body", b"body"] and core.pools["p"].retries.spent == 1
        await until(lambda: slow[0].departures == 1)  # the slower server has seen its caller leave
        assert idle(core)


async def test_a_call_that_is_answered_in_time_has_no_second_copy(
    two: tuple[Upstream, Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def recorded(delay_s: float, callback: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
        timer = call_later(delay_s, callback, *args, **more)
        if isinstance(getattr(callback, "__self__", None), Hedge):
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", recorded)
    files = first_route(documents([up.port for up in two]), HEDGED.replace("30", "60000"))
    async with gateway(files) as (port, core), Client(port) as client:
        assert set(await ask_both(client, two)) == {200}
        assert len(timers) == 20 and all(timer.cancelled() for timer in timers)
        assert len(two[0].seen) + len(two[1].seen) == 20 and core.pools["p"].retries.spent == 0 and idle(core)


async def test_a_second_copy_saves_a_call_whose_first_one_breaks(two: tuple[Upstream, Upstream]) -> None:
    asked = 0

    async def answer(seen: Seen) -> bytes:
        nonlocal asked
        asked += 1
        if asked == 1:
            await until(lambda: asked == 2)
            return b""
        await until(lambda: sum(endpoint.outstanding for endpoint in core.pools["p"].endpoints) == 1)
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    two[0].answer = two[1].answer = answer
    async with gateway(first_route(documents([up.port for up in two]), HEDGED)) as (port, core), Client(port) as client:
        assert (await client.ask(INFER, b"body")).status == 200 and asked == 2 and idle(core)


async def test_a_post_meets_a_kept_connection_that_is_being_closed(two: tuple[Upstream, Upstream]) -> None:
    """The kernel has received the FIN and the loop has not read it when the request is written: the call is sent
    again.
    """
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(5)
    seen = []

    def serve_one(close: bool) -> socket.socket:
        connection, _ = listener.accept()
        connection.settimeout(5)
        seen.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return connection

    loop = asyncio.get_running_loop()
    async with gateway(documents([listener.getsockname()[1]])) as (port, core), Client(port) as client:
        client.send(INFER, b"one")
        kept = await loop.run_in_executor(None, serve_one, False)
        assert (await client.reply()).status == 200
        (connection,) = core.pools["p"].endpoints[0].idle
        kept.close()  # the loop gets no turn before the next request begins
        client.send(INFER, b"two")
        answer = loop.run_in_executor(None, serve_one, True)
        assert not connection.transport.is_closing()
        assert (await client.reply()).status == 200
        (await answer).close()
        assert [each.rpartition(b"\r\n\r\n")[2] for each in seen] == [b"one", b"two"] and idle(core)
    listener.close()
