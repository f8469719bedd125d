"""Streams that wait for their clients keep no permit from other calls, and queue for one when they go on."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc import aio

from oriel_gateway.admin.queues import live_queues

from ..waiting import until
from .grpc_stack import Backend, idle
from .grpc_stream_calls import infer
from .lending_streams import (
    NEVER_S,
    Slowly,
    Twice,
    asks,
    lending_stack,
    one_permit,
    opened,
    waiting_stream,
    with_mute,
)
from .stack import BRONZE, GOLD


async def test_idle_streams_of_a_low_tier_keep_no_permit_from_a_higher_one() -> None:
    async with AsyncExitStack() as clients:
        async with lending_stack(Backend(), max_inflight=2) as (address, core):
            held = [await opened(clients, address, BRONZE) for _ in range(2)]
            await until(lambda: core.pools["p"].admission.inflight == 0)
            async with aio.insecure_channel(address) as channel:
                unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
                await unary(infer("digits"), metadata=(("x-api-key", GOLD),), timeout=60)
            for messages, call in held:  # afterwards the streams go on
                messages.send(infer("digits"))
                assert await call.read() is not aio.EOF
                messages.send(None)
                assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await until(lambda: idle(core))


@pytest.mark.parametrize("tier", ["bronze", "gold"])
async def test_streams_that_rest_shortly_leave_their_permits_to_waiting_calls_at_once(tier: str) -> None:
    """A stream that sends a small message every 0.4 s would otherwise keep its permit from calls of its own tenant and
    tier.
    """
    async with AsyncExitStack() as clients:
        async with lending_stack(Backend(), suspend_after_s=NEVER_S, files=with_mute(tier)) as (address, core):
            held = [await opened(clients, address, BRONZE) for _ in range(2)]
            for key in (BRONZE, GOLD, BRONZE, GOLD):
                await asks(address, key)
                for messages, call in held:
                    messages.send(infer("digits"))
                    assert await call.read() is not aio.EOF
            for messages, call in held:
                messages.send(None)
                assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await until(lambda: idle(core) and not core.pools["p"].lendable)


@pytest.mark.parametrize("key", [BRONZE, GOLD])
async def test_a_stream_that_sends_ahead_lets_other_calls_go_between(key: str) -> None:
    """A stream that always has two messages under way never pauses, and would otherwise keep its permit to its end."""
    backend = Slowly()
    backend.go.release()
    async with AsyncExitStack() as clients:
        async with lending_stack(backend, suspend_after_s=NEVER_S, files=lambda port: one_permit("gold", port)) as (
            address,
            core,
        ):
            messages, call = await opened(clients, address, BRONZE)
            queue = core.pools["p"].admission.queue
            for _ in range(2):
                messages.send(infer("digits"))
            await until(lambda: len(backend.seen) == 2)
            waiting = asks(address, key)
            await until(lambda: len(queue) == 1)
            backend.go.release()
            for _ in range(2):
                messages.send(infer("digits"))
            assert await call.read() is not aio.EOF
            backend.go.release()
            await waiting
            for _ in range(3):
                backend.go.release()
            for _ in range(3):
                assert await call.read() is not aio.EOF
            messages.send(None)
            assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await until(lambda: idle(core))


async def test_calls_of_the_same_tenant_wait_where_no_answer_is_marked_as_the_last() -> None:
    """A model that answers several times may still be at work, so its tenant must not start one stream after
    another.
    """
    backend = Twice()
    backend.more.set()
    async with AsyncExitStack() as clients:
        async with lending_stack(backend, suspend_after_s=NEVER_S, files=lambda port: one_permit("gold", port)) as (
            address,
            core,
        ):
            messages, call = await opened(clients, address, BRONZE)
            assert await call.read() is not aio.EOF
            queue = core.pools["p"].admission.queue
            own = asks(address, BRONZE)
            await until(lambda: len(queue) == 1)
            other = asks(address, GOLD)
            await until(lambda: len(queue) == 2)
            messages.send(infer("digits"))  # this ends the turn of the stream, and the next turn is another tenant's
            await other
            for _ in range(2):
                assert await call.read() is not aio.EOF
            messages.send(None)
            assert await call.read() is aio.EOF
            await own
            await until(lambda: idle(core))


async def test_a_stream_that_goes_on_queues_for_its_turn() -> None:
    async with waiting_stream(2) as (backend, _, messages, call, busy):
        assert backend.hold is not None
        backend.hold.set()
        assert await call.read() is not aio.EOF
        await asyncio.gather(*busy)
        assert [kind for kind, *_ in backend.seen] == [
            "ModelStreamInfer",
            "ModelInfer",
            "ModelInfer",
            "ModelStreamInfer",
        ]
        messages.send(None)
        assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK


async def test_a_stream_that_waits_for_its_turn_leaves_the_queue_with_its_client() -> None:
    async with waiting_stream(1) as (backend, core, _, call, busy):
        assert backend.hold is not None
        pool = live_queues(core)["p"]  # a stream in the queue can be listed, also for /metrics
        assert pool["waiting"]["bronze"] == 1 and [each["tenant"] for each in pool["tenants"]] == ["b"]
        call.cancel()
        await until(lambda: len(core.pools["p"].admission.queue) == 0)
        backend.hold.set()
        await asyncio.gather(*busy)
