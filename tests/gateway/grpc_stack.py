"""A gateway and a scripted gRPC upstream."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

import grpc
import numpy as np
from memory_ledger import MemoryLedger
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.grpc import aio as triton

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.observe.trace import ListSink

from .stack import documents, grpc_server

Metadata = dict[str, str]


class Backend(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Answers every inference with the model's name, and keeps the requests."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, Metadata, float]] = []
        self.hold: asyncio.Event | None = None
        self.left = 0
        self.cost_us = ""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(partial(self.unary, method))

    async def unary(self, method: str, message: bytes, context: Any) -> bytes:
        kind = service_pb2.ModelInferRequest if method == "ModelInfer" else getattr(service_pb2, f"{method}Request")
        request = kind.FromString(message)
        self.seen.append((method, request, dict(context.invocation_metadata()), context.time_remaining()))
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.left += 1
                raise
        if method == "ModelInfer":
            if self.cost_us:
                context.set_trailing_metadata((("x-oriel-cost-us", self.cost_us),))
            if request.model_name == "broken":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape")
            return service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id).SerializeToString()
        if method == "ModelReady":
            return service_pb2.ModelReadyResponse(ready=True).SerializeToString()
        if method == "ServerMetadata":
            return service_pb2.ServerMetadataResponse(name="backend").SerializeToString()
        return b""

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            request = service_pb2.ModelInferRequest.FromString(message)
            self.seen.append(("ModelStreamInfer", request, dict(context.invocation_metadata()), 0.0))
            answer = service_pb2.ModelInferResponse(model_name=request.model_name)
            yield service_pb2.ModelStreamInferResponse(infer_response=answer).SerializeToString()


class Telling(Backend):
    """Ends every call with this trailing metadata, and with this error if there is one."""

    def __init__(self, *trailing: tuple[str, str], error: tuple[grpc.StatusCode, str] | None = None) -> None:
        super().__init__()
        self.trailing = trailing
        self.error = error

    async def unary(self, method: str, message: bytes, context: Any) -> bytes:
        context.set_trailing_metadata(self.trailing)
        if self.error is not None:
            await context.abort(*self.error)
        return await super().unary(method, message, context)

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for answer in super().stream(messages, context):
            yield answer
        context.set_trailing_metadata(self.trailing)


@asynccontextmanager
async def stack(
    backend: Backend,
    *,
    files: Callable[[int], dict[str, bytes]] | None = None,
    shared: bool = False,
    limits: HttpLimits | None = None,
    **more: Any,
) -> AsyncIterator[tuple[str, Gateway]]:
    async with grpc_server(backend) as port:
        ledger = MemoryLedger(lambda: monotonic() * 1e6).seat("one")
        limiter = SharedLimiter(ledger, budget_s=2.0) if shared else EmbeddedLimiter()
        set_of = files(port) if files else documents([port], **more)
        core = Gateway(compile_documents(set_of), limiter=limiter, sink=ListSink())
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        ingress = await serve_public(core, sock, limits=limits)
        try:
            yield f"127.0.0.1:{ingress.port}", core
        finally:
            await ingress.drain(0.0)
            await core.close()


def headers(key: str | None, **more: str) -> Metadata:
    return {**({"authorization": f"Bearer {key}"} if key else {}), **more}


def tensor() -> list[InferInput]:
    tensor = InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
    return [tensor]


async def infer(address: str, model: str, key: str | None, **more: Any) -> Any:
    async with triton.InferenceServerClient(address) as client:
        return await client.infer(model, tensor(), headers=headers(key, **more.pop("extra", {})), **more)


def idle(core: Gateway) -> bool:
    return core.pools["p"].admission.inflight == 0 and not len(core.pools["p"].admission.queue)
