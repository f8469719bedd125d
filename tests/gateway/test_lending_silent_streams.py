"""Streams whose servers answer late or never keep no permit from other calls."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc import aio

from ..waiting import until
from .grpc_stack import idle
from .grpc_stream_calls import infer
from .lending_streams import (
    Mute,
    Twice,
    asks,
    lending_stack,
    mute_streams,
    opened,
)
from .stack import BRONZE, GOLD


@pytest.mark.parametrize("first", ["digits", "mute"])
@pytest.mark.parametrize("tier", ["bronze", "gold"])
async def test_streams_whose_messages_are_never_answered_keep_no_permit_from_others(tier: str, first: str) -> None:
    async with mute_streams(Mute(), tier, first) as (address, core, held):
        gate = core.pools["p"]
        for _ in range(3):
            await asks(address, GOLD)
            await until(lambda: gate.admission.inflight == 2 and not gate.to_resume)
        same = asks(address, BRONZE)  # its own tenant has had its permits, so this call waits
        await until(lambda: len(gate.admission.queue) == 1)
        for messages, _ in held:
            messages.send(infer("mute"))  # another message is no sign that the server is at work
        await asks(address, GOLD)
        assert not same.done() and gate.admission.inflight == 2
        for messages, call in held:
            messages.send(infer("digits"))  # the streams go on
            assert await call.read() is not aio.EOF
            messages.send(None)
            assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
        await same


async def test_slow_messages_get_their_tenant_no_more_of_the_pool() -> None:
    """A busy stream whose permit was suspended is the next to get a free one, before the calls that wait."""
    backend = Mute()
    backend.late = asyncio.Event()
    async with mute_streams(backend, "bronze", "digits") as (address, core, held):
        gate = core.pools["p"]
        more = [asks(address, BRONZE) for _ in range(2)]
        await until(lambda: len(gate.admission.queue) == 2)
        backend.hold = asyncio.Event()
        urgent = [asks(address, GOLD) for _ in range(2)]
        await until(lambda: len(backend.seen) == 6 and gate.admission.inflight == 2 and len(gate.to_resume) == 2)
        assert [metadata["x-oriel-tier"] for _, _, metadata, _ in backend.seen[4:]] == ["gold", "gold"]
        backend.hold.set()
        await asyncio.gather(*urgent)
        await until(lambda: not gate.to_resume)
        assert len(backend.seen) == 6 and gate.admission.inflight == 2 and len(gate.admission.queue) == 2
        backend.late.set()
        for messages, call in held:
            assert await call.read() is not aio.EOF
            messages.send(None)
        await asyncio.gather(*more)


async def test_an_answer_that_overtakes_a_streams_turn_takes_one_permit() -> None:
    """While a stream queues for its permit, answers to its earlier messages arrive. It must not take a second
    permit.
    """
    backend = Twice()
    async with AsyncExitStack() as clients:
        async with lending_stack(backend, max_inflight=1) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            admission = core.pools["p"].admission
            await until(lambda: admission.inflight == 0)
            backend.hold = asyncio.Event()
            urgent = asks(address, GOLD)
            await until(lambda: len(backend.seen) == 2)
            messages.send(infer("digits"))
            await until(lambda: len(admission.queue) == 1)
            backend.more.set()
            for _ in range(3):  # meanwhile the other call has the only permit
                assert await call.read() is not aio.EOF
            assert not urgent.done()
            messages.send(None)
            assert await call.read() is aio.EOF
            backend.hold.set()
            await urgent
            await until(lambda: idle(core))
