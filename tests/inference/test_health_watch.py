"""`grpc.health.v1.Health/Watch`: the state now, its changes, and an end when the server stops."""

import asyncio
import dataclasses

import grpc
import grpc.aio
import pytest

from oriel_inference.app import Unit, open_unit
from oriel_inference.settings import Settings
from oriel_wire.engine import health
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import HEALTH_SERVICE, SERVICE
from oriel_wire.v2.proto import health_pb2

Status = health_pb2.HealthCheckResponse


def watch(channel: grpc.aio.Channel | grpc.Channel, service: str):  # type: ignore[no-untyped-def]
    return channel.unary_stream(
        f"/{HEALTH_SERVICE}/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=Status.FromString,
    )(health_pb2.HealthCheckRequest(service=service))


@pytest.mark.parametrize(
    ("service", "status"),
    [
        ("", Status.SERVING),
        (SERVICE, Status.SERVING),
        ("double", Status.SERVING),
        ("broken", Status.NOT_SERVING),
        ("absent", Status.SERVICE_UNKNOWN),
    ],
)
async def test_first_message_is_the_state_now(kept_unit: Unit, service: str, status: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{kept_unit.grpc_port}") as channel:
        call = watch(channel, service)
        async with asyncio.timeout(60):
            assert (await call.read()).status == status
        call.cancel()


async def test_changes_are_told(unit: Unit) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        call = watch(channel, "")
        async with asyncio.timeout(60):
            assert (await call.read()).status == Status.SERVING
            unit.catalog.loading = True
            assert (await call.read()).status == Status.NOT_SERVING
            unit.catalog.loading = False
            assert (await call.read()).status == Status.SERVING
        call.cancel()


async def test_stopping_server_tells_its_watchers_and_ends_at_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LAST_WORD_S", 2.0)  # on a busy machine the client reads late
    loop, first = asyncio.get_running_loop(), asyncio.Event()

    def watched(port: int) -> list[object]:
        """The states that a client in a thread of its own is told, and the status in the end."""
        told: list[object] = []
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                for each in watch(channel, ""):
                    told.append(each.status)
                    loop.call_soon_threadsafe(first.set)
            except grpc.RpcError as error:
                told.append(error.code())  # type: ignore[attr-defined]  # it is a call as well
        return told

    async with asyncio.timeout(60):
        async with open_unit(dataclasses.replace(settings, drain_s=60.0), sink=ListSink()) as unit:
            watching = asyncio.ensure_future(asyncio.to_thread(watched, unit.grpc_port))
            await first.wait()
        assert await watching == [Status.SERVING, Status.NOT_SERVING, grpc.StatusCode.UNAVAILABLE]


async def test_bytes_that_are_no_message(unit: Unit) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_stream(f"/{HEALTH_SERVICE}/Watch")(b"\xff\xff").read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
