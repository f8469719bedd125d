"""Requests over gRPC whose head is known are answered like those whose head is not."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from oriel_inference.app import Unit, open_unit
from oriel_inference.errors import Outcome
from oriel_inference.servers.grpc_infer import _Known
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import SERVICE, encode_infer_request
from oriel_wire.v2.messages import InferRequest, RequestedOutput, tensor
from oriel_wire.v2.proto import v2_pb2

from ..waiting import until
from . import models
from .gated import batcher_of


@pytest.fixture
async def channel(unit: Unit) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as opened:
        yield opened


def wire(number: float, rows: int = 1, **members: Any) -> bytes:
    x = tensor("x", np.full((rows, 4), number, np.float32))
    return encode_infer_request(InferRequest(model_name="double", inputs=[x], **members)).SerializeToString()


async def ask(channel: grpc.aio.Channel, data: bytes, **call: Any) -> v2_pb2.ModelInferResponse:
    infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    return v2_pb2.ModelInferResponse.FromString(await infer(data, **call))


def first(answer: v2_pb2.ModelInferResponse) -> float:
    return float(np.frombuffer(answer.raw_output_contents[0], np.float32)[0])


async def test_tensors_change_and_nothing_else(channel: grpc.aio.Channel) -> None:
    answers = [await ask(channel, wire(number)) for number in range(4)]
    assert [first(answer) for answer in answers] == [0.0, 2.0, 4.0, 6.0]
    for answer in answers:
        answer.raw_output_contents[0] = b""
        assert answer == answers[0]
    assert answers[0].model_version == "1" and answers[0].outputs[0].shape == [1, 4]


async def test_many_at_once_get_their_own_rows(channel: grpc.aio.Channel) -> None:
    for _ in range(3):
        answers = await asyncio.gather(*(ask(channel, wire(number, 1 + number % 3)) for number in range(64)))
        assert [first(answer) for answer in answers] == [2.0 * number for number in range(64)]
        assert [answer.outputs[0].shape[0] for answer in answers] == [1 + number % 3 for number in range(64)]


async def test_one_of_two_outputs(channel: grpc.aio.Channel) -> None:
    for number in range(4):
        a = np.full((2, 3), number, np.float32)
        request = InferRequest(
            model_name="pair",
            inputs=[tensor("a", a), tensor("b", np.ones((2, 3), np.float32))],
            outputs=[RequestedOutput("difference")],
        )
        answer = await ask(channel, encode_infer_request(request).SerializeToString())
        assert [output.name for output in answer.outputs] == ["difference"]
        assert first(answer) == number - 1


async def test_top_classes_take_the_long_way(channel: grpc.aio.Channel) -> None:
    index = tensor("index", np.array([[1]], np.int64))
    request = InferRequest(model_name="lookup", inputs=[index], outputs=[RequestedOutput("row", classification=1)])
    for _ in range(3):
        answer = await ask(channel, encode_infer_request(request).SerializeToString())
        assert answer.outputs[0].datatype == "BYTES"
        assert answer.raw_output_contents[0].endswith(b":right")


async def test_every_request_has_its_own_id_trace_and_deadline(channel: grpc.aio.Channel, sink: ListSink) -> None:
    for _ in range(2):
        await ask(channel, wire(1))
    assert (await ask(channel, wire(1, id="mine"))).id == "mine"
    ids = set()
    for _ in range(3):
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")(wire(1))
        await call
        ids.add(dict(await call.trailing_metadata())["x-request-id"])
    assert len(ids) == 3
    traced = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    for _ in range(2):
        await ask(channel, wire(1), metadata=traced)
    parents = [span.parent_id for span in sink.spans if span.kind == "server" and span.parent_id]
    assert parents == [0xB7AD6B7169203331] * 2
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(channel, wire(1), metadata=(("x-oriel-timeout-ms", "0"),))
        assert refused.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_contents_that_do_not_fill_the_shape_are_refused(channel: grpc.aio.Channel) -> None:
    for _ in range(2):
        await ask(channel, wire(1))
    short = wire(1)
    short = short[:-17] + b"\x0f" + short[-15:]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(channel, short)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "input byte size mismatch for input 'x' for model 'double'. Expected 16, got 15"
    assert first(await ask(channel, wire(3))) == 6.0


async def test_caller_that_leaves_frees_its_place(unit: Unit, channel: grpc.aio.Channel) -> None:
    for _ in range(2):
        await ask(channel, wire(1))
    batcher = batcher_of(unit)
    cores = batcher._cores
    held, cores.free = cores.free, 0  # nothing can run
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer")(wire(1))
    await until(lambda: batcher.pending)
    call.cancel()
    await until(lambda: not batcher.pending)
    cores.release(held)
    assert batcher.statistics.failures[Outcome.CALLER_LEFT] == 1
    assert first(await ask(channel, wire(2))) == 4.0


async def test_heads_hold_no_message_and_stop_counting_when_the_model_changes(
    settings: Settings, tmp_path: Path
) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    explicit = replace(settings, repositories=(tmp_path,), control_mode="explicit", load_models=("double",))
    async with (
        open_unit(explicit) as unit,
        grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel,
    ):
        for _ in range(3):
            assert first(await ask(channel, wire(3))) == 6.0
        held = [each.fitted.inputs for each in gc.get_objects() if isinstance(each, _Known)]
        assert held and not any(held)
        models.put(tmp_path, "double", models.double(), models.DOUBLE, version=2)
        await unit.surface.control.load("double")
        for _ in range(3):
            answer = await ask(channel, wire(3))
            assert (answer.model_version, first(answer)) == ("2", 6.0)
        await unit.surface.control.unload("double")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(channel, wire(3))
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)
