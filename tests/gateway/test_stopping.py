"""Calls that wait for a server or a permit while the gateway shuts down are refused in time, over HTTP and gRPC."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
from tritonclient.grpc import aio as triton
from tritonclient.utils import InferenceServerException

from ..waiting import until
from .gate import INFER, idle
from .grpc_stack import Backend, headers, infer, stack, tensor
from .process import gateway_process
from .raw_grpc import framed, raw_call
from .stack import BRONZE, GOLD, Client, Reply, Seen, documents, gateway, nobody, upstream

HALF = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: {BRONZE}\r\ncontent-length: 100\r\n\r\nx".encode()
GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"


async def ask(port: int, key: str = BRONZE) -> Reply:
    async with Client(port) as client:
        return await client.ask(INFER, b"x", key=key)


def refused(reply: Reply) -> bool:
    return (reply.status, reply.headers.get("retry-after"), b'"server_stopping"' in reply.body) == (503, "1", True)


async def test_calls_without_a_server_are_refused_when_the_gateway_is_about_to_end() -> None:
    with nobody() as port:
        async with gateway(documents([port])) as (front, core), asyncio.TaskGroup() as group:
            waiting = [group.create_task(ask(front)) for _ in range(4)]
            await until(lambda: core.pools["p"].endpoints.parked == 4)
            core.refuse_waiting()
            assert all([refused(await each) for each in waiting])
            assert refused(await ask(front))  # a call that comes later is refused at once
            await until(lambda: idle(core) and not core.pools["p"].calls)


async def test_calls_without_a_permit_are_refused_and_those_that_were_sent_are_answered() -> None:
    go = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        await go.wait()
        return await up.ok(seen)

    async with upstream() as up, gateway(documents([up.port], max_inflight=1)) as (front, core):
        up.answer = answer
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(ask(front, GOLD))
            await until(lambda: len(up.seen) == 1)
            waiting = [group.create_task(ask(front)) for _ in range(3)]
            await until(lambda: len(core.pools["p"].admission.queue) == 3)
            core.refuse_waiting()
            assert all([refused(await each) for each in waiting])
            go.set()
            assert (await sent).status == 200
            assert (await ask(front)).status == 200  # there is still time for a call that need not wait
        assert len(up.seen) == 2


async def test_grpc_calls_without_a_permit_are_refused_and_those_that_were_sent_are_answered() -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with stack(backend, max_inflight=1) as (address, core), asyncio.TaskGroup() as group:
        sent = group.create_task(infer(address, "digits", GOLD))
        await until(lambda: len(backend.seen) == 1)
        waiting = [group.create_task(_refusal(address)) for _ in range(3)]
        await until(lambda: len(core.pools["p"].admission.queue) == 3)
        core.refuse_waiting()
        for each in waiting:
            assert "shutting down" in await each
        backend.hold.set()
        assert await sent


async def test_sigterm_answers_calls_that_wait_for_a_server(tmp_path: Path) -> None:
    """SIGTERM leaves 25 s in all, of which 5 s have passed here: waiting calls are answered before they are cut off."""
    prelude = "from oriel_gateway import app; app.DRAIN_S = 1.0 + app.REFUSE_S"
    with nobody() as port:
        async with (
            gateway_process(tmp_path, documents([port]), prelude=prelude) as process,
            asyncio.TaskGroup() as group,
        ):
            over_http = [group.create_task(ask(process.port)) for _ in range(2)]
            over_grpc = [group.create_task(_refusal(f"127.0.0.1:{process.grpc_port}")) for _ in range(2)]
            await _parked(process.admin_port, 4)
            os.kill(process.pid, signal.SIGTERM)
            for each in over_http:
                reply = await each
                assert refused(reply) and reply.headers["connection"] == "close"
            for call in over_grpc:
                assert "shutting down" in await call


async def test_requests_that_are_still_received_are_refused_and_those_that_were_sent_are_answered() -> None:
    go = asyncio.Event()

    async def answer(seen: Seen) -> bytes:
        await go.wait()
        return await up.ok(seen)

    async with upstream() as up, gateway(documents([up.port])) as (front, core), Client(front) as half:
        up.answer = answer
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(ask(front, GOLD))
            half.writer.write(HALF)
            await until(lambda: len(up.seen) == 1 and sum(each.collecting for each in core.clock) == 1)
            core.refuse_incomplete()
            reply = await half.reply()
            assert refused(reply) and reply.headers["connection"] == "close"
            go.set()
            assert (await sent).status == 200
        await until(lambda: idle(core) and not core.pools["p"].held_bytes)


async def test_half_a_grpc_message_is_refused_as_the_gateway_stops() -> None:
    async with stack(Backend()) as (address, core), asyncio.TaskGroup() as group:
        call = raw_call(address, GRPC_INFER, {"x-api-key": BRONZE}, framed(bytes(1000))[:500], end=False)
        half = group.create_task(call)
        await until(lambda: sum(each.collecting for each in core.clock) == 1)
        core.refuse_incomplete()
        assert (await half).trailers["x-oriel-reason"] == "server_stopping"


async def test_sigterm_refuses_requests_that_are_still_received(tmp_path: Path) -> None:
    prelude = "from oriel_gateway import app, core; app.INCOMPLETE_S = core.INCOMPLETE_S = 0.05"
    with nobody() as port:
        async with gateway_process(tmp_path, documents([port]), prelude=prelude) as process:
            async with Client(process.port) as begun, Client(process.port) as half:
                for client, sent in ((begun, HALF[:20]), (half, HALF)):
                    assert (await client.ask("/v2/health/live", method="GET", key=None)).status == 200
                    client.writer.write(sent)
                os.kill(process.pid, signal.SIGTERM)
                assert refused(await half.reply())
                assert (await begun.reply()).status == 408


async def _parked(admin_port: int, count: int) -> None:
    """Wait until so many calls wait for a server."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client, asyncio.timeout(60):
        while True:
            answer = await client.get(f"http://127.0.0.1:{admin_port}/queues")
            if answer.json()["p"]["waiting_for_endpoints"] == count:
                return


async def _refusal(address: str) -> str:
    """Return the message with which a gRPC call is refused as UNAVAILABLE."""
    async with triton.InferenceServerClient(address) as client:
        try:
            await client.infer("digits", tensor(), headers=headers(BRONZE))
        except InferenceServerException as error:
            assert error.status() == "StatusCode.UNAVAILABLE"
            return str(error.message())
    raise AssertionError("it was answered")
