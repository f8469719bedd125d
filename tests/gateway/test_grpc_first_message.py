"""Whose turn it is to send a message: so many at once, tenant after tenant, and nobody for ever."""

import asyncio

import pytest

from oriel_gateway.ingress.grpc_first_message import ReceiveTurns


async def ready(*tasks: "asyncio.Task[object]") -> list[bool]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_only_so_many_messages_are_received_at_once() -> None:
    turns = ReceiveTurns(turns=2, turn_s=60.0)
    one, two = await turns.acquire("a"), await turns.acquire("a")
    third = asyncio.create_task(turns.acquire("a"))
    assert await ready(third) == [False]
    turns.release(one)
    assert await ready(third) == [True]
    turns.release(two)
    turns.release(third.result())
    turns.release(await turns.acquire("a"))


async def test_a_tenant_with_many_calls_does_not_hold_up_another() -> None:
    turns = ReceiveTurns(turns=1, turn_s=60.0)
    turn = await turns.acquire("many")
    many = [asyncio.create_task(turns.acquire("many")) for _ in range(100)]
    await ready()
    other = asyncio.create_task(turns.acquire("other"))
    await ready()
    turns.release(turn)
    assert await ready(many[0], other) == [True, False]
    turns.release(many[0].result())
    assert await ready(other, many[1]) == [True, False]
    for task in many:
        task.cancel()


async def test_a_message_that_takes_long_makes_way_for_those_who_wait() -> None:
    turns = ReceiveTurns(turns=1, turn_s=0.0)
    slow = await turns.acquire("slow")
    async with asyncio.timeout(60):
        turn = await turns.acquire("quick")
    turns.release(slow)  # it had none any more: this frees nobody else's
    turns.release(turn)


async def test_who_leaves_while_waiting_or_at_its_turn_holds_none() -> None:
    turns = ReceiveTurns(turns=1, turn_s=60.0)
    turn = await turns.acquire("a")
    waiting, given, last = (asyncio.create_task(turns.acquire("a")) for _ in range(3))
    await ready()
    waiting.cancel()
    await ready()
    turns.release(turn)  # to `given`, which is cancelled before it sees it
    given.cancel()
    assert await ready(last) == [True]
    for task in (waiting, given):
        with pytest.raises(asyncio.CancelledError):
            await task
