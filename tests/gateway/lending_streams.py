"""gRPC streams that pause, fall silent or send several messages at once, at a pool that lends such streams' permits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_gateway.core import Gateway

from ..waiting import until
from .grpc_stack import Backend, idle, stack
from .grpc_stream_calls import STREAM, infer
from .stack import BRONZE, GOLD, documents

SOON_S, NEVER_S = 0.02, 1000.0  # values of `suspend_after_s`


@asynccontextmanager
async def lending_stack(
    backend: Backend, *, suspend_after_s: float = SOON_S, **more: Any
) -> AsyncIterator[tuple[str, Gateway]]:
    """A `stack` whose pool lends permits after `suspend_after_s`."""
    async with stack(backend, **more) as (address, core):
        core.pools["p"].suspend_after_s = suspend_after_s
        yield address, core


class Messages:
    """The client's side of a stream."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message = await self._queue.get()
        if message is None:
            raise StopAsyncIteration
        return message

    def send(self, message: bytes | None) -> None:
        self._queue.put_nowait(message)


async def opened(stack: AsyncExitStack, address: str, key: str) -> tuple[Messages, Any]:
    """Open a stream, send one message and wait for its answer."""
    channel = await stack.enter_async_context(
        aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    )
    messages = Messages()
    call = channel.stream_stream(STREAM, None, None)(messages, metadata=(("x-api-key", key),))
    messages.send(infer("digits"))
    assert await call.read() is not aio.EOF
    return messages, call


class Slowly(Backend):
    """A backend that answers the next message of each stream when the test releases `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Semaphore(0)

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            async for answer in super().stream(_one(message), context):
                await self.go.acquire()
                yield answer


def one_permit(tier: str, port: int) -> dict[str, bytes]:
    text = documents([port], max_inflight=1)["all.toml"]
    return {"all.toml": text.replace(b'tier = "bronze"', f'tier = "{tier}"'.encode())}


@asynccontextmanager
async def waiting_stream(
    callers: int,
) -> AsyncIterator[tuple[Backend, Gateway, Messages, Any, list[asyncio.Task[bytes]]]]:
    """A stream whose permit is suspended and whose next message waits behind `callers` unary calls, of which the first
    runs.
    """
    backend = Backend()
    async with AsyncExitStack() as clients:
        async with lending_stack(backend, max_inflight=1) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            admission = core.pools["p"].admission
            await until(lambda: admission.inflight == 0)
            backend.hold = asyncio.Event()
            async with aio.insecure_channel(address) as channel:
                unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)

                async def one() -> bytes:
                    answer: bytes = await unary(infer("digits"), metadata=(("x-api-key", GOLD),), timeout=60)
                    return answer

                busy = [asyncio.create_task(one()) for _ in range(callers)]
                await until(lambda: len(backend.seen) == 2 and len(admission.queue) == callers - 1)
                messages.send(infer("digits"))
                await until(lambda: len(admission.queue) == callers)
                yield backend, core, messages, call, busy
            await until(lambda: idle(core) and admission.inflight == 0)


class Mute(Backend):
    """A backend whose model `mute` leaves messages unanswered, as a decoupled model may, until `late` is set."""

    late: asyncio.Event | None = None

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            request = service_pb2.ModelInferRequest.FromString(message)
            self.seen.append(("ModelStreamInfer", request, {}, 0.0))
            if request.model_name == "mute":
                if self.late is None:
                    continue
                await self.late.wait()
            answer = service_pb2.ModelInferResponse(model_name=request.model_name)
            yield service_pb2.ModelStreamInferResponse(infer_response=answer).SerializeToString()


def with_mute(tier: str = "bronze") -> Any:
    def files(port: int) -> dict[str, bytes]:
        text = documents([port], max_inflight=2)["all.toml"]
        text = text.replace(b'models = ["digits"]', b'models = ["digits", "mute"]')
        return {"all.toml": text.replace(b'tier = "bronze"', f'tier = "{tier}"'.encode())}

    return files


@asynccontextmanager
async def mute_streams(
    backend: Backend, tier: str, first: str
) -> AsyncIterator[tuple[str, Gateway, list[tuple[Messages, Any]]]]:
    """Two streams that hold both permits, while their last messages stay unanswered."""
    async with AsyncExitStack() as clients:
        async with lending_stack(backend, files=with_mute(tier)) as (address, core):
            held = []
            for _ in range(2):
                channel = await clients.enter_async_context(
                    aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
                )
                messages = Messages()
                call = channel.stream_stream(STREAM, None, None)(messages, metadata=(("x-api-key", BRONZE),))
                messages.send(infer(first))
                if first == "digits":
                    assert await call.read() is not aio.EOF
                    messages.send(infer("mute"))
                held.append((messages, call))
            gate = core.pools["p"]
            await until(lambda: len(gate.lendable) == 2)
            assert gate.admission.inflight == 2, "no call waits, so the streams keep their permits"
            yield address, core, held
        await until(lambda: idle(core) and not gate.lendable and not gate.to_resume)


def asks(address: str, key: str) -> asyncio.Task[Any]:
    async def one() -> Any:
        async with aio.insecure_channel(address) as channel:
            unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
            return await unary(infer("digits"), metadata=(("x-api-key", key),), timeout=60)

    return asyncio.create_task(one())


class Twice(Backend):
    """A backend that answers each message twice, the second time when the test sets `more`."""

    def __init__(self) -> None:
        super().__init__()
        self.more = asyncio.Event()

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            async for answer in super().stream(_one(message), context):
                yield answer
                await self.more.wait()
                yield answer


async def _one(message: bytes) -> AsyncIterator[bytes]:
    yield message
