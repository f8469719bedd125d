"""Clients of gRPC streams that send and read one message at a time, and of unary calls beside them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from grpc import aio

from .grpc_stream_calls import STREAM, infer


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


async def asks(address: str, key: str) -> Any:
    """Make one unary call."""
    async with aio.insecure_channel(address) as channel:
        unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
        return await unary(infer("digits"), metadata=(("x-api-key", key),), timeout=60)
