"""Whose turn it is to send a message: so many at once, tenant after tenant, and nobody for ever."""

import asyncio

import pytest

from oriel_gateway.grpc_reads import Reads


async def ready(*tasks: "asyncio.Task[object]") -> list[bool]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_only_so_many_messages_are_received_at_once() -> None:
    reads = Reads(turns=2, turn_s=60.0)
    one, two = await reads.take("a"), await reads.take("a")
    third = asyncio.create_task(reads.take("a"))
    assert await ready(third) == [False]
    reads.over(one)
    assert await ready(third) == [True]
    reads.over(two)
    reads.over(third.result())
    reads.over(await reads.take("a"))


async def test_a_tenant_with_many_calls_does_not_hold_up_another() -> None:
    reads = Reads(turns=1, turn_s=60.0)
    turn = await reads.take("many")
    many = [asyncio.create_task(reads.take("many")) for _ in range(100)]
    await ready()
    other = asyncio.create_task(reads.take("other"))
    await ready()
    reads.over(turn)
    assert await ready(many[0], other) == [True, False]
    reads.over(many[0].result())
    assert await ready(other, many[1]) == [True, False]
    for task in many:
        task.cancel()


async def test_a_message_that_takes_long_makes_way_for_those_who_wait() -> None:
    reads = Reads(turns=1, turn_s=0.0)
    slow = await reads.take("slow")
    async with asyncio.timeout(60):
        turn = await reads.take("quick")
    reads.over(slow)  # it had none any more: this frees nobody else's
    reads.over(turn)


async def test_who_leaves_while_waiting_or_at_its_turn_holds_none() -> None:
    reads = Reads(turns=1, turn_s=60.0)
    turn = await reads.take("a")
    waiting, given, last = (asyncio.create_task(reads.take("a")) for _ in range(3))
    await ready()
    waiting.cancel()
    await ready()
    reads.over(turn)  # to `given`, which is cancelled before it sees it
    given.cancel()
    assert await ready(last) == [True]
    for task in (waiting, given):
        with pytest.raises(asyncio.CancelledError):
            await task
