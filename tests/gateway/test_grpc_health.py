"""`grpc.health.v1.Health` of the gateway: without a key, about the gateway itself and nothing else."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc import aio

from oriel_gateway.core import Gateway
from oriel_gateway.ingress import grpc_health
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse

from ..waiting import until
from .grpc_stack import Backend, stack

Status = HealthCheckResponse


def asked(service: str) -> bytes:
    return HealthCheckRequest(service=service).SerializeToString()


async def check(channel: aio.Channel, message: bytes) -> int:
    return Status.FromString(await channel.unary_unary("/grpc.health.v1.Health/Check")(message)).status


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_the_gateway_and_its_service_are_serving_or_not(service: str) -> None:
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel:
        await until(lambda: core.ready)
        assert await check(channel, asked(service)) == Status.SERVING
        core.draining = True
        assert await check(channel, asked(service)) == Status.NOT_SERVING


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (asked("digits"), grpc.StatusCode.NOT_FOUND),
        (asked("x" * 2000), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\x0a\x05a", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_other_services_are_not_found_and_other_messages_refused(message: bytes, code: grpc.StatusCode) -> None:
    async with stack(Backend()) as (address, _), aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")(message)
        assert await call.code() is code, "whether there is such a model is not told without a key"
        assert "x-request-id" in dict(await call.trailing_metadata())


async def test_a_watcher_gets_the_state_its_changes_and_the_end_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = [True]
    monkeypatch.setattr(Gateway, "ready", property(lambda core: ready[0] and not core.draining))
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel, asyncio.timeout(60):
        call = channel.unary_stream("/grpc.health.v1.Health/Watch")(asked(""))
        assert Status.FromString(await call.read()).status == Status.SERVING
        ready[0] = False
        assert Status.FromString(await call.read()).status == Status.NOT_SERVING
        ready[0] = True
        assert Status.FromString(await call.read()).status == Status.SERVING
        core.draining = True
        assert Status.FromString(await call.read()).status == Status.NOT_SERVING
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert not core.health_watches.open


async def test_a_watcher_of_an_unknown_service_is_told_so_and_stays() -> None:
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel, asyncio.timeout(60):
        call = channel.unary_stream("/grpc.health.v1.Health/Watch")(asked("digits"))
        assert Status.FromString(await call.read()).status == Status.SERVICE_UNKNOWN
        assert len(core.health_watches.open) == 1
        call.cancel()
        await until(lambda: not core.health_watches.open)


async def nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_health_check_whose_message_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Nobody needs a key for one: calls without a message must not fill the gateway's places."""
    monkeypatch.setattr(grpc_health, "MESSAGE_S", 0.05)
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel, asyncio.timeout(60):
        call = channel.stream_unary(f"/grpc.health.v1.Health/{method}")(nothing())
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not any(front.requests_open for front in core.fronts))


async def test_a_connection_has_few_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "MAX_OF_A_CONNECTION", 1)
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel, asyncio.timeout(60):
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        for _ in range(2):  # the place is free again once its stream has ended
            call = watch(asked(""))
            await call.read()
            assert await watch(asked("")).code() is grpc.StatusCode.UNAVAILABLE
            call.cancel()
            await until(lambda: not core.health_watches.open)


async def test_watchers_without_a_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "MAX_WATCHES", 2)
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel, asyncio.timeout(60):
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        calls = [watch(asked("")) for _ in range(2)]
        for call in calls:
            await call.read()
        assert await watch(asked("")).code() is grpc.StatusCode.UNAVAILABLE
        for call in calls:
            call.cancel()
        await until(lambda: not core.health_watches.open)
