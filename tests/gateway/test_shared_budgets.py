"""A tenant without limits of its own cannot take what a pool shares: bytes of bodies and messages, and queue places."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tritonclient.grpc import service_pb2

from oriel_wire.h2.frames import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame

from ..waiting import until
from ..wire.h2.blocks import literal
from ..wire.http2_attacks import request_head
from .cold_pools import Names, cold, empty, names, parked
from .gate import INFER, Gate
from .grpc_stack import Backend, stack
from .raw_grpc import framed, raw_call
from .stack import BRONZE, LIMITED, Client, digest, documents, gateway, upstream

__all__ = ["names"]

QUIET = "key-quiet"
TENANT = f'[tenants.quiet]\ntier = "bronze"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest(QUIET)}" }}]\n'
MIB = 1 << 20


@asynccontextmanager
async def announcing(address: str, key: str, size: int) -> AsyncIterator[asyncio.StreamReader]:
    """Begin a call of gRPC that announces a message of `size` bytes, and send the model's name of it."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = request_head(b"/inference.GRPCInferenceService/ModelInfer") + literal(b"x-api-key", key.encode())
    start = b"\x00" + size.to_bytes(4, "big") + b"\x0a\x06digits"
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, 0, 1, start))
    try:
        yield reader
    finally:
        writer.close()


async def test_a_message_that_is_only_announced_takes_no_bytes_from_others() -> None:
    """Each of these took as many bytes of the pool as it announced, not what has come and one window."""
    files = lambda port: documents([port], pool=f'probe = ""\nmax_queue_bytes = {4 * MIB}', extra=TENANT)  # noqa: E731
    async with stack(Backend(), files=files) as (address, core), AsyncExitStack() as clients:
        gate = core.pools["p"]
        for count in (1, 2, 3):
            await clients.enter_async_context(announcing(address, BRONZE, 1_000_000))
            await until(lambda count=count: gate.held_bytes == count * (8 + 64 * 1024))  # type: ignore[misc]
        message = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(200_000)])
        path = "/inference.GRPCInferenceService/ModelInfer"
        answer = await raw_call(address, path, {"x-api-key": QUIET}, framed(message.SerializeToString()))
        assert answer.status == 0, answer


async def test_the_limits_of_a_tenant_are_asked_before_its_message_is_here() -> None:
    async with stack(Backend()) as (address, core), AsyncExitStack() as clients:
        readers = [await clients.enter_async_context(announcing(address, LIMITED, 1_000_000)) for _ in range(3)]
        await until(lambda: core.pools["p"].held_bytes > 2 * 64 * 1024)  # the limit is two at once
        found = b""
        async with asyncio.timeout(30):
            while b"rate_limited" not in found:
                found += await readers[2].read(65536)


async def test_bodies_that_are_only_announced_take_no_bytes_of_a_pool_without_a_server(names: Names) -> None:
    files = cold("start_ms = 60000\nhold_ms = 300000", pool="max_queue_bytes = 2000000")
    files = {"all.toml": files["all.toml"] + TENANT.encode()}
    async with empty(files) as (port, core), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(port)) for _ in range(4)]
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BRONZE}\r\ncontent-length: 900000\r\n\r\n"
        for client in clients[:3]:
            client.writer.write(head.encode())
        await until(lambda: core.pools["p"].calls == 3)
        clients[3].send(INFER, b"xx", key=QUIET)
        await until(lambda: parked(core) == 1)
        assert core.pools["p"].held_bytes == 2


async def test_parked_calls_make_room_for_a_tenant_with_fewer(names: Names) -> None:
    files = {"all.toml": cold("start_ms = 60000\nhold_ms = 300000")["all.toml"].replace(b"= 100\n", b"= 5\n")}
    files = {"all.toml": files["all.toml"] + TENANT.encode()}
    async with empty(files) as (port, core), AsyncExitStack() as stack:
        hog = [await stack.enter_async_context(Client(port)) for _ in range(5)]
        for index, client in enumerate(hog):
            client.send(INFER, b"x", key=BRONZE)
            await until(lambda index=index: parked(core) == index + 1)  # type: ignore[misc]
        quiet = await stack.enter_async_context(Client(port))
        quiet.send(INFER, b"x", key=QUIET)
        reply = await hog[-1].reply()
        assert reply.status == 503 and json.loads(reply.body)["reason"] == "displaced" and parked(core) == 5
        assert 1 <= int(reply.headers["retry-after"]) <= 60


async def test_a_tenant_that_uploads_slowly_makes_room_for_one_with_less() -> None:
    async with upstream() as up, AsyncExitStack() as stack:
        files = documents([up.port], pool='probe = ""\nmax_queue_bytes = 400000', extra=TENANT)
        port, core = await stack.enter_async_context(gateway(files))
        clients = [await stack.enter_async_context(Client(port)) for _ in range(3)]
        head = "POST {} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-length: 300000\r\n\r\n"
        for count, client in enumerate(clients[:2], 1):
            client.writer.write(head.format(INFER, BRONZE).encode() + bytes(140_000))
            await until(lambda count=count: core.pools["p"].held_bytes == 140_000 * count)  # type: ignore[misc]
        clients[2].send(INFER, bytes(150_000), key=QUIET)
        reply = await clients[1].reply()
        assert reply.status == 503 and json.loads(reply.body)["reason"] == "displaced"
        assert (await clients[2].reply()).status == 200
        assert core.pools["p"].held_bytes == 140_000, "the older one goes on"


async def test_a_quiet_tenant_finds_room_in_a_queue_that_another_one_has_filled() -> None:
    """It was refused whenever it came: the queue belonged to whoever had filled it."""
    gate, seen = Gate(), Counter[str]()
    async with upstream() as up, AsyncExitStack() as stack:
        up.answer = gate
        files = documents([up.port], max_inflight=1, max_queue=1024, extra=TENANT)
        files["all.toml"] = files["all.toml"].replace(b"[pools.p]", b"[pools.p]\nlearn_concurrency = false")
        files["all.toml"] = files["all.toml"].replace(b"target_ms = 2000", b"target_ms = 600000")
        port, core = await stack.enter_async_context(gateway(files))
        queue = core.pools["p"].admission.queue

        async def floods(client: Client) -> None:
            while True:
                client.send(INFER, b"x", key=BRONZE, headers="x-tag: hog\r\n")
                reply = await client.reply()
                seen[json.loads(reply.body)["reason"] if reply.status != 200 else "answered"] += 1
                if reply.status != 200:
                    await refilled.wait()  # it comes again when there is room

        refilled = asyncio.Event()
        hogs = [await stack.enter_async_context(Client(port)) for _ in range(1250)]
        tasks = [asyncio.ensure_future(floods(each)) for each in hogs]
        stack.callback(lambda: [task.cancel() for task in tasks])
        await until(lambda: len(queue) == 1024 and seen["queue_full"] == 225)
        answered, turns = 0, 0
        quiet = await stack.enter_async_context(Client(port))
        for _ in range(25):
            assert len(queue) == 1024
            quiet.send(INFER, b"x", key=QUIET, headers="x-tag: quiet\r\n")
            reply = asyncio.ensure_future(quiet.reply())
            await until(lambda: "quiet" in queue._bands[2].flows and queue._bands[2].flows["quiet"].waiting == 1)
            while not reply.done():
                before = len(gate.order)
                gate.go.release()
                turns += 1
                await until(lambda before=before, reply=reply: len(gate.order) > before or reply.done())  # type: ignore[misc]
                if gate.order[-1] == "quiet":
                    gate.go.release()
                    await reply
            answered += reply.result().status == 200
            refilled.set()
            await until(lambda: len(queue) == 1024)
            refilled.clear()
        assert answered == 25 and turns <= 3 * 25 and seen["displaced"] == 25
