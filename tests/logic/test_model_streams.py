"""`models.stream` against a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from msgspec import structs

from oriel_logic.client import model_streams
from oriel_logic.client.endpoints import Endpoints
from oriel_logic.client.inference import BoundModels, InferenceServers
from oriel_logic.client.model_streams import MAX_ANSWER_BYTES, MAX_S, StreamServers, stream_client
from oriel_logic.client.upstreams import http_client
from oriel_logic.errors import (
    DeadlineExceeded,
    LogicError,
    ModelBusy,
    ModelFailed,
    ModelInputWrong,
    ModelUnavailable,
    ModelUnreachable,
)
from oriel_logic.observe.stages import Ledger
from oriel_logic.server.visit import stage_span
from oriel_wire.context import CallContext
from oriel_wire.engine.client import HttpClient
from oriel_wire.observe.trace import parse_traceparent
from oriel_wire.v2.grpc import SERVICE, decode_infer, encode_infer
from oriel_wire.v2.messages import InferResponse, tensor
from oriel_wire.v2.proto import v2_pb2

from ..waiting import until

ROW = np.array([[3, 4]], np.float32)


class FakeStreams:
    """A decoupled `double`: `answers` of them, then the end; `status` instead of it; `hold` before the `hold_at`th."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str]] = []
        self.peers: set[str] = set()
        self.left_s: float | None = None
        self.answers = 3
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.reason = ""
        self.error = ""
        self.hold_at = -1
        self.left = asyncio.Event()
        self.port = 0

    async def serve(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.metadata.append(dict(context.invocation_metadata()))
        self.peers.add(context.peer())
        self.left_s = context.time_remaining()
        ended = False
        try:
            async for message in messages:
                request = decode_infer(message)
                for index in range(self.answers):
                    if index == self.hold_at:
                        await asyncio.Event().wait()
                    array = request.inputs[0].array * (index + 1)
                    outputs = [tensor("y", array)]
                    answer = InferResponse(model_name=request.model_name, model_version="2", outputs=outputs)
                    yield v2_pb2.ModelStreamInferResponse(infer_response=encode_infer(answer))
            if self.error:
                yield v2_pb2.ModelStreamInferResponse(error_message=self.error)
            if self.status is not None:
                if self.reason:
                    context.set_trailing_metadata((("x-oriel-reason", self.reason),))
                await context.abort(*self.status)
            ended = True
        finally:  # a client that leaves while an answer is written only closes this generator
            if not ended:
                self.left.set()

    async def start(self, **options: int) -> grpc.aio.Server:
        server = grpc.aio.server(options=[(f"grpc.{name}", value) for name, value in options.items()])
        method = grpc.stream_stream_rpc_method_handler(
            self.serve,
            request_deserializer=v2_pb2.ModelInferRequest.FromString,
            response_serializer=v2_pb2.ModelStreamInferResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"ModelStreamInfer": method})
        server.add_generic_rpc_handlers((handler,))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server


@pytest.fixture
async def fake() -> AsyncIterator[FakeStreams]:
    made = FakeStreams()
    server = await made.start()
    yield made
    await server.stop(0)


Connect = Callable[..., BoundModels]


@pytest.fixture
async def connect(inference: Any, call: Any) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as opened:

        def connected(
            *ports: int, context: CallContext | None = None, max_answer_bytes: int = MAX_ANSWER_BYTES, **bounds: float
        ) -> BoundModels:
            http: Endpoints[HttpClient] = Endpoints(http_client)
            http.replace([("127.0.0.1", inference.port)])
            streams = Endpoints(partial(stream_client, max_answer_bytes=max_answer_bytes))
            streams.replace(("127.0.0.1", port) for port in ports)
            servers = InferenceServers(http, StreamServers(streams, **bounds))
            opened.push_async_callback(servers.close)
            context = context or call()
            return servers.bind(context, Ledger(context.trace))

        yield connected


async def everything(models: BoundModels, inputs: Any = None) -> list[Any]:
    return [outputs["y"].tolist() async for outputs in models.stream("double", inputs or {"x": ROW})]


async def test_every_answer_comes(connect: Connect, fake: FakeStreams) -> None:
    models = connect(fake.port)
    found = [outputs async for outputs in models.stream("double", {"x": ROW})]
    assert [outputs["y"].tolist() for outputs in found] == [[[3, 4]], [[6, 8]], [[9, 12]]]
    assert {(outputs.model, outputs.model_version) for outputs in found} == {("double", "2")}
    fake.answers = 0
    assert await everything(models) == []


async def test_what_the_request_carries_goes_along(connect: Connect, fake: FakeStreams, call: Any) -> None:
    context = call(deadline=monotonic() + 5, band=1, sampled=True)
    models = connect(fake.port, context=context)
    await everything(models)
    (said,) = fake.metadata[:1]
    assert [said[f"x-oriel-{name}"] for name in ("tier", "priority", "tenant")] == ["gold", "1", "acme"]
    assert 4000 < int(said["x-oriel-timeout-ms"]) <= 5000 and said["x-request-id"] == "req-1"
    assert fake.left_s is not None and MAX_S / 2 < fake.left_s <= MAX_S
    await everything(connect(fake.port, context=structs.replace(context, stream_s=4000.0)))
    assert 3000 < fake.left_s <= 4000, "a tier may let streams last longer"
    parent = parse_traceparent(said["traceparent"])
    (span,) = [stage_span(each, models._ledger.root, 0.0) for each in models._ledger.stages]
    assert parent is not None and (parent.trace_id, parent.span_id) == (context.trace.trace_id, span.context.span_id)
    assert span.name == "inference.GRPCInferenceService/ModelStreamInfer"
    hop = {name: span.attributes[name] for name in ("server.address", "server.port", "rpc.status_code")}
    assert hop == {"server.address": "127.0.0.1", "server.port": fake.port, "rpc.status_code": "OK"}


async def test_wrong_inputs_never_leave(connect: Connect, fake: FakeStreams) -> None:
    with pytest.raises(ModelInputWrong, match="input 'x' of model 'double' takes FP32"):
        await everything(connect(fake.port), {"x": ROW.astype(int)})
    assert fake.metadata == []


async def test_one_who_leaves_early_is_noticed(connect: Connect, fake: FakeStreams) -> None:
    fake.hold_at = 1
    answers = connect(fake.port).stream("double", {"x": ROW})
    async with aclosing(answers):
        async for outputs in answers:
            assert outputs["y"].tolist() == [[3, 4]]
            break
    await asyncio.wait_for(fake.left.wait(), 120)


@pytest.mark.parametrize(("hold_at", "left_s", "max_s"), [(0, 0.2, 30.0), (1, 30.0, 0.3)])
async def test_the_first_answer_is_bounded_by_the_deadline_and_all_by_the_end(
    connect: Connect, fake: FakeStreams, call: Any, hold_at: int, left_s: float, max_s: float
) -> None:
    fake.hold_at = hold_at
    models = connect(fake.port, context=call(deadline=monotonic() + left_s), max_s=max_s)
    got = 0
    with pytest.raises(DeadlineExceeded) as late:
        async for _ in models.stream("double", {"x": ROW}):
            got += 1
    assert got == hold_at and late.value.stage == "stream"
    await asyncio.wait_for(fake.left.wait(), 120)


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "", ModelInputWrong),
        (grpc.StatusCode.NOT_FOUND, "", ModelUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, "", ModelUnavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", ModelBusy),
        (grpc.StatusCode.UNAVAILABLE, "queue_full", ModelBusy),
        (grpc.StatusCode.UNAVAILABLE, "", ModelFailed),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", DeadlineExceeded),
        (grpc.StatusCode.INTERNAL, "", ModelFailed),
    ],
)
async def test_statuses_keep_their_meaning(
    connect: Connect, fake: FakeStreams, code: grpc.StatusCode, reason: str, error: type[LogicError]
) -> None:
    fake.answers, fake.status, fake.reason = 0, (code, "because"), reason
    with pytest.raises(error) as caught:
        await everything(connect(fake.port))
    assert type(caught.value) is error and "500" not in caught.value.message


async def test_an_error_within_the_stream_is_the_models(connect: Connect, fake: FakeStreams) -> None:
    fake.error = "out of words"
    with pytest.raises(ModelFailed, match="model 'double' failed: out of words"):
        await everything(connect(fake.port))


async def test_who_cannot_be_reached_is_passed_over(connect: Connect, fake: FakeStreams) -> None:
    other = FakeStreams()
    server = await other.start()
    await server.stop(0)  # its port refuses now
    models = connect(other.port, fake.port)
    for _ in range(4):
        assert len(await everything(models)) == 3
    with pytest.raises(ModelUnreachable):
        await everything(connect(other.port))
    with pytest.raises(ModelUnreachable, match="--inference-grpc"):
        await everything(connect())


async def test_one_that_has_not_the_model_is_passed_over(connect: Connect, fake: FakeStreams) -> None:
    other = FakeStreams()
    server = await other.start()
    other.answers, other.status = 0, (grpc.StatusCode.NOT_FOUND, "unknown model")
    models = connect(other.port, fake.port)
    for _ in range(4):
        assert len(await everything(models)) == 3
    assert len(other.metadata) <= 1
    await server.stop(0)


async def test_a_stream_waits_for_a_model_that_is_loaded_at_a_restart(
    connect: Connect, fake: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_streams, "RETRY_S", 0.0)
    models = connect(fake.port)
    await everything(models)
    fake.answers, fake.status, fake.reason = 0, (grpc.StatusCode.UNAVAILABLE, "it is loaded"), "model_not_ready"
    models._servers.streams._endpoints.replace([])  # its pods are all away at first
    waiting = asyncio.ensure_future(everything(models))
    await asyncio.sleep(0)
    models._servers.streams._endpoints.replace([("127.0.0.1", fake.port)])
    await until(lambda: len(fake.metadata) > 2)
    fake.answers, fake.status = 3, None
    assert len(await waiting) == 3
    before, fake.status, fake.reason = len(fake.metadata), (grpc.StatusCode.UNAVAILABLE, "it stops"), "server_stopping"
    with pytest.raises(ModelUnavailable, match="it stops"):
        await everything(models)
    assert len(fake.metadata) == before + 1, "R9: after the first answer it is not asked for again"


async def test_a_server_that_is_lost_in_the_middle_ends_the_stream(connect: Connect) -> None:
    other = FakeStreams()
    server = await other.start()
    other.hold_at = 1
    got = 0
    with pytest.raises(ModelFailed):
        async for _ in connect(other.port).stream("double", {"x": ROW}):
            got += 1
            stopping = asyncio.create_task(server.stop(0))
    await stopping
    assert got == 1


async def test_no_stream_is_lost_when_the_server_ends_connections_for_their_age(connect: Connect) -> None:
    """It answers streams that have begun, and no new ones on that connection."""
    other = FakeStreams()
    server = await other.start(max_connection_age_ms=50)
    models = connect(other.port)

    async def ask() -> None:
        while len(other.peers) < 4:
            assert len(await everything(models)) == 3

    await asyncio.gather(*(ask() for _ in range(4)))
    await server.stop(0)


async def test_an_answer_past_the_bound_fails(connect: Connect, fake: FakeStreams) -> None:
    with pytest.raises(ModelFailed, match="larger than 1024 bytes"):
        await everything(connect(fake.port, max_answer_bytes=1024), {"x": np.zeros((1000, 2), np.float32)})
