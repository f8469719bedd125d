"""The gRPC pass-through with an unmodified tritonclient in front and a scripted gRPC server behind."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.grpc import aio as triton
from tritonclient.utils import InferenceServerException

from oriel_gateway.core import Gateway
from oriel_gateway.ingress_grpc import serve_grpc
from oriel_gateway.limiter import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.trace import ListSink

from .stack import BRONZE, GOLD, LIMITED, documents

Metadata = dict[str, str]


class Backend(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Answers every infer with the model's name; keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, Metadata, float]] = []
        self.hold: asyncio.Event | None = None
        self.left = 0

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
            if request.model_name == "broken":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape")
            return service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id).SerializeToString()
        if method == "ServerMetadata":
            return service_pb2.ServerMetadataResponse(name="backend").SerializeToString()
        return b""

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            request = service_pb2.ModelInferRequest.FromString(message)
            self.seen.append(("ModelStreamInfer", request, dict(context.invocation_metadata()), 0.0))
            answer = service_pb2.ModelInferResponse(model_name=request.model_name)
            yield service_pb2.ModelStreamInferResponse(infer_response=answer).SerializeToString()


@asynccontextmanager
async def stack(backend: Backend, **more: int) -> AsyncIterator[tuple[str, Gateway]]:
    server = aio.server()
    server.add_generic_rpc_handlers((backend,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    core = Gateway(compile_documents(documents([port], **more)), limiter=EmbeddedLimiter(), sink=ListSink())
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    ingress = await serve_grpc(core, sock)
    try:
        yield f"127.0.0.1:{ingress.port}", core
    finally:
        await ingress.drain(0.0)
        await core.close()
        await server.stop(0.0)


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


async def test_tritonclient_infers_through_the_gateway() -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        result = await infer(
            address,
            "digits",
            GOLD,
            request_id="7",
            extra={
                "traceparent": "00-000000000000000000000000000000aa-00000000000000bb-01",
                "x-request-id": "abc",
                "x-mine": "1",
                "x-oriel-tier": "forged",
                "endpoint-load-metrics-format": "text",
            },
        )
        assert result.get_response().model_name == "digits" and result.get_response().id == "7"
        _, request, metadata, remaining_s = backend.seen[0]
        assert request.raw_input_contents == [np.array([1, 2], np.float32).tobytes()]
        assert "endpoint-load-metrics-format" not in metadata
        assert "authorization" not in metadata and metadata["x-mine"] == "1" and metadata["x-request-id"] == "abc"
        assert metadata["x-oriel-tier"] == "gold" and metadata["x-oriel-priority"] == "0"
        assert metadata["x-oriel-tenant"] == "g"
        assert metadata["traceparent"].startswith("00-000000000000000000000000000000aa-")
        assert 7.0 < remaining_s <= 8.1  # gRPC rounds a timeout up
        assert idle(core) and isinstance(core.sink, ListSink)
        assert sorted(s.name for s in core.sink.spans) == ["gateway.forward", "gateway.queue", "gateway.request"]


async def test_health_and_metadata() -> None:
    async with stack(Backend()) as (address, _), triton.InferenceServerClient(address) as client:
        assert await client.is_server_live() and await client.is_server_ready()
        assert (await client.get_server_metadata(headers=headers(GOLD))).name == "backend"


@pytest.mark.parametrize(
    ("model", "key", "extra", "code", "reason"),
    [
        ("digits", None, {}, "UNAUTHENTICATED", "unauthenticated"),
        ("digits", "wrong", {}, "UNAUTHENTICATED", "unauthenticated"),
        ("digits", GOLD, {"x-api-key": GOLD}, "INVALID_ARGUMENT", "ambiguous_credentials"),
        ("mlp", BRONZE, {}, "NOT_FOUND", "not_found"),
        ("", BRONZE, {}, "NOT_FOUND", "not_found"),
        ("../digits", GOLD, {}, "NOT_FOUND", "not_found"),
    ],
)
async def test_refusals(model: str, key: str | None, extra: Metadata, code: str, reason: str) -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, model, key, extra=extra)
        assert caught.value.status() == f"StatusCode.{code}", caught.value
        cause = caught.value.__context__
        assert isinstance(cause, aio.AioRpcError)
        assert ("x-oriel-reason", reason) in list(cause.trailing_metadata() or ())
        assert not backend.seen and idle(core)


async def test_too_many_requests_are_resource_exhausted_with_the_wait() -> None:
    async with stack(Backend()) as (address, _):
        for _ in range(2):
            await infer(address, "digits", LIMITED)
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "digits", LIMITED)
        assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        cause = caught.value.__context__
        assert isinstance(cause, aio.AioRpcError)
        assert dict(cause.trailing_metadata() or ())["retry-after"] == "2"


async def test_an_upstreams_own_error_passes_through() -> None:
    async with stack(Backend()) as (address, core):
        with pytest.raises(InferenceServerException, match="unexpected shape") as caught:
            await infer(address, "broken", GOLD)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT" and idle(core)


async def test_the_deadline_ends_a_wait_in_the_queue_and_cancels_the_upstream() -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with stack(backend, max_inflight=1) as (address, core):
        first = asyncio.ensure_future(infer(address, "digits", GOLD))
        while not backend.seen:
            await asyncio.sleep(0.001)
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "digits", GOLD, extra={"x-request-timeout-ms": "50"})
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED" and "waiting for a permit" in str(caught.value)
        assert len(backend.seen) == 1
        first.cancel()
        while not (backend.left and idle(core)):
            await asyncio.sleep(0.001)


async def test_every_message_of_a_stream_is_judged() -> None:
    backend = Backend()
    async with stack(backend) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
        allowed = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        secret = service_pb2.ModelInferRequest(model_name="mlp").SerializeToString()

        async def send(messages: Sequence[bytes]) -> list[str]:
            stream = call(iter(messages), metadata=(("x-api-key", BRONZE),))
            return [service_pb2.ModelStreamInferResponse.FromString(m).infer_response.model_name async for m in stream]

        assert await send([allowed, allowed]) == ["digits", "digits"]
        with pytest.raises(aio.AioRpcError) as caught:
            await send([allowed, secret])
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(aio.AioRpcError):
            await send([allowed + secret[:2] + b"\x03mlp"[:1]])
        assert {request.model_name for _, request, _, _ in backend.seen} == {"digits"}
        assert idle(core)


async def test_repository_methods_look_absent() -> None:
    async with stack(Backend()) as (address, _), triton.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException) as caught:
            await client.get_model_repository_index(headers=headers(GOLD))
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


async def test_a_compressed_message_is_refused() -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "digits", GOLD, compression_algorithm="gzip")
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
        assert not backend.seen and idle(core)


async def test_a_stranger_is_refused_before_it_has_sent_a_message() -> None:
    """Calls without a message used to hold a place for as long as they liked."""
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer", None, None)()
        async with asyncio.timeout(30):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = dict(await call.trailing_metadata())
        assert {"x-request-id", "traceresponse", "server-timing"} <= set(metadata)
        assert idle(core)


async def test_a_caller_that_sends_no_message_is_given_up_at_its_deadline() -> None:
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel:
        metadata = (("x-api-key", GOLD), ("x-request-timeout-ms", "50"))
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer", None, None)(metadata=metadata)
        async with asyncio.timeout(30):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert idle(core)
