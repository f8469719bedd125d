"""The byte budget with equal calls and shadow copies, and answers whose end does not show whether they are whole."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise

import pytest

from oriel_gateway.call.contracts import JOINED
from oriel_gateway.shared import single_flight

from ..waiting import until
from .special_routes import CACHED, FLOWN, INFER, SHADOWED, Held, answering, house, ok
from .stack import Client


async def test_a_flight_that_queued_gives_its_bytes_back() -> None:
    """Otherwise the pool's byte budget would stay charged with its body, until the pool refused all calls."""
    async with house(FLOWN, inflight=1) as it:
        held = it.ups[0].answer = Held()
        async with Client(it.port) as one, Client(it.port) as two, Client(it.port) as three:
            for client, body in ((one, b"x"), (two, b"y" * 1000), (three, b"y" * 1000)):
                client.send(INFER, body)
            await until(lambda: it.members() == 3 and len(it.core.pools["p0"].admission.queue) == 1)
            for _ in range(2):
                held.go.release()
            assert [(await client.reply()).status for client in (one, two, three)] == [200] * 3
        assert len(it.ups[0].seen) == 2 and it.core.pools["p0"].held_bytes == 0
        await until(it.idle)


async def test_an_answer_that_ends_with_its_connection_is_not_kept() -> None:
    """The answer may be half of what a server that died wanted to send; the two cannot be told apart."""
    async with house(CACHED) as it:
        for number in (1, 2):
            it.ups[0].answer = answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhalf of i")
            async with Client(it.port) as client:
                client.send(INFER, b"x")
                await client.reader.readuntil(b"half of i")
            assert len(it.ups[0].seen) == number
        assert not len(it.core.routing.cache)


async def test_a_shadow_takes_no_room_from_calls() -> None:
    """If its copy of a body counted like a call, a pool would refuse calls at half of what may wait."""
    async with house(SHADOWED, inflight=1) as it:
        gate = it.core.pools["p0"]
        gate.pool = replace(gate.pool, max_queue_bytes=130_000)
        held = it.ups[0].answer = Held()
        async with Client(it.port) as one, Client(it.port) as two, Client(it.port) as three:
            for client in (one, two, three):
                client.send(INFER, b"x" * 60_000)
            await until(lambda: len(gate.admission.queue) == 2 and gate.held_bytes >= 120_000)
            for _ in range(3):
                held.go.release()
            assert [(await client.reply()).status for client in (one, two, three)] == [200] * 3
        await until(it.idle)


@pytest.mark.parametrize("status", ["200 OK", "500 No"])
async def test_many_callers_of_one_flight_are_told_some_at_a_time(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To answer 300 callers with a megabyte each in one turn would hold the loop for 0.1 s."""
    monkeypatch.setattr(single_flight, "_TURN_BYTES", 2 * 70_600)
    monkeypatch.setattr(single_flight, "_TURN", 2)
    async with house(FLOWN, inflight=64) as it, AsyncExitStack() as stack:
        held = it.ups[0].answer = Held(ok(b"x" * 70_000, status=status))
        clients = [await stack.enter_async_context(Client(it.port)) for _ in range(8)]
        for client in clients:
            client.send(INFER, b"x")
        await until(lambda: it.members() == 8 and len(it.ups[0].seen) == 1)
        (flight,) = it.core.routing.flights.values()
        # The caller that leads gets the answer itself. If that is an error, one of the others leads again.
        told = list(flight.members)[1 if status == "200 OK" else 2 :]
        waiting: list[int] = []  # how many callers still wait, in each turn of the loop

        def tick() -> None:
            waiting.append(sum(member.call.state == JOINED for member in told))
            if waiting[-1]:
                asyncio.get_running_loop().call_soon(tick)

        tick()
        for _ in clients:
            held.go.release()
        replies = [await client.reply() for client in clients]
        assert max(before - after for before, after in pairwise(waiting)) == 2
        assert waiting[0] == (7 if status == "200 OK" else 6) and waiting[-1] == 0
        assert {reply.status for reply in replies} == {int(status[:3])}
        assert {reply.body for reply in replies} == {b"x" * 70_000}
    await until(it.idle)
