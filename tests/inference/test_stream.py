"""ModelStreamInfer with unmodified clients and by hand: order, errors, decoupled models, departures, bounds."""

import asyncio
import queue
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from fake_backend import AHEAD

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_inference.app import Unit
from oriel_inference.errors import Outcome
from oriel_inference.servers.stream import MAX_IN_FLIGHT
from oriel_policies.documents import compile_documents
from oriel_wire.context import read_headers
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import SERVICE, encode_infer_request
from oriel_wire.v2.messages import InferRequest, tensor
from oriel_wire.v2.proto import v2_pb2

from ..gateway.stack import GOLD, documents
from ..waiting import until
from .gated import batcher_of
from .streams import Fakes, said, stream, streaming


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
async def unit(tmp_path: Path, fakes: Fakes) -> AsyncIterator[Unit]:
    async with streaming(tmp_path, fakes) as running:
        yield running


@pytest.fixture
async def channel(unit: Unit) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as opened:
        yield opened


def double(value: float = 1.0, **more: Any) -> v2_pb2.ModelInferRequest:
    given = tensor("x", np.full((1, 4), value, np.float32))
    return encode_infer_request(InferRequest(model_name="double", inputs=[given], **more))


def count(number: int, **parameters: Any) -> v2_pb2.ModelInferRequest:
    given = tensor("n", np.array([number], np.int32))
    return encode_infer_request(InferRequest(model_name="count", id="c", inputs=[given], parameters=parameters))


# --- unmodified clients -------------------------------------------------------------------------------------------


def with_tritonclient(address: str, headers: dict[str, str] | None = None) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)), headers=headers)
        for number in range(40):
            given = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.full((1, 4), number, np.float32))
            client.async_stream_infer("double", [given], request_id=str(number))
        for number in range(40):
            result, error = answers.get(timeout=60)
            assert error is None and result.get_response().id == str(number)
            assert float(result.as_numpy("y")[0, 0]) == 2.0 * number
            assert result.get_response().parameters["triton_final_response"].bool_param
        given.set_shape([4, 1])
        client.async_stream_infer("double", [given])
        result, error = answers.get(timeout=60)
        assert result is None and "Expected [-1,4]" in error.message()
        repeat = tritonclient.grpc.InferInput("n", [1], "INT32")
        repeat.set_data_from_numpy(np.array([3], np.int32))
        client.async_stream_infer("count", [repeat], enable_empty_final_response=True)
        for number in range(3):
            result, error = answers.get(timeout=60)
            assert error is None and result.as_numpy("i").tolist() == [number]
            assert not result.get_response().parameters["triton_final_response"].bool_param
        result, _ = answers.get(timeout=60)
        assert result.get_response().parameters["triton_final_response"].bool_param
        assert not result.get_response().outputs and result.get_response().model_version == "1"
        client.stop_stream()
        assert answers.empty()


async def test_tritonclient_streams(unit: Unit) -> None:
    await asyncio.to_thread(with_tritonclient, f"127.0.0.1:{unit.grpc_port}")


async def test_tritonclient_streams_through_the_gateway(unit: Unit) -> None:
    core = Gateway(compile_documents(documents([unit.grpc_port])), limiter=EmbeddedLimiter(), sink=ListSink())
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    ingress = await serve_public(core, sock)
    try:
        await asyncio.to_thread(with_tritonclient, f"127.0.0.1:{ingress.port}", {"authorization": f"Bearer {GOLD}"})
    finally:
        await ingress.drain(0.0)
        await core.close()


async def test_tritonclient_aio_streams(unit: Unit) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in (1, 2, 3):
            given = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.full((1, 4), number, np.float32))
            yield {"model_name": "double", "inputs": [given], "request_id": str(number)}

    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
        found = [
            (r.get_response().id, float(r.as_numpy("y")[0, 0]), e) async for r, e in client.stream_infer(requests())
        ]
    assert found == [("1", 2.0, None), ("2", 4.0, None), ("3", 6.0, None)]


# --- order and errors ---------------------------------------------------------------------------------------------


async def test_responses_keep_the_order_of_requests_errors_included(channel: grpc.aio.Channel) -> None:
    bad = double(9)
    bad.inputs[0].name = "z"
    found = await said(stream(channel, request_iterator=[double(1), bad, double(3), double(4, model_version="7")]))
    assert (
        found[0] == 2.0
        and "unexpected inference input 'z'" in found[1]
        and found[2] == 6.0
        and "version 7 is not found" in found[3]
    )


async def test_decoupled_responses_do_not_wait_for_others(channel: grpc.aio.Channel, fakes: Fakes) -> None:
    gate = fakes.by_name["fake-count"].gate
    gate.close()
    call = stream(channel)
    await call.write(count(2, triton_enable_empty_final_response=True))
    await call.write(double(5))
    first = await call.read()
    assert first.infer_response.model_name == "double"
    gate.open()
    await call.done_writing()
    assert await said(call) == [0, 1, "final"]


async def test_no_responses_at_all_end_with_the_final_one_if_asked(channel: grpc.aio.Channel) -> None:
    assert await said(stream(channel, request_iterator=[count(0)])) == []
    assert await said(stream(channel, request_iterator=[count(0, triton_enable_empty_final_response=True)])) == [
        "final"
    ]


async def test_failure_after_responses_is_one_more_message(channel: grpc.aio.Channel, fakes: Fakes) -> None:
    fakes.session("fake-count").fail = True
    found = await said(stream(channel, request_iterator=[count(2, triton_enable_empty_final_response=True), double()]))
    assert sorted(map(str, found)) == ["0", "1", "2.0", "the fake backend is set to fail"]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (double(model_version="7"), grpc.StatusCode.NOT_FOUND),
        (count(-1, triton_enable_empty_final_response=3), grpc.StatusCode.INVALID_ARGUMENT),
        (double(parameters={"timeout": -1}), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_error_as_status_closes_the_stream(
    channel: grpc.aio.Channel, request_: v2_pb2.ModelInferRequest, code: grpc.StatusCode
) -> None:
    call = stream(channel, metadata=(("triton_grpc_error", "true"), ("x-request-id", "find-me")))
    await call.write(double(2))
    assert (await call.read()).infer_response.model_name == "double"
    await call.write(request_)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await said(call)
    assert refused.value.code() == code
    assert dict(refused.value.trailing_metadata())["x-request-id"] == "find-me"


async def test_bytes_that_are_no_message_are_an_error_of_that_message(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", None, v2_pb2.ModelStreamInferResponse.FromString)
    found = [response async for response in call(iter([b"\xff\xff", double().SerializeToString()]))]
    assert "message" in found[0].error_message and found[1].infer_response.model_name == "double"


async def test_decoupled_model_through_unary_infer_is_unimplemented(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer", v2_pb2.ModelInferRequest.SerializeToString)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(count(1))
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


# --- deadlines, departures, bounds --------------------------------------------------------------------------------


async def test_each_message_has_its_own_deadline(unit: Unit, channel: grpc.aio.Channel) -> None:
    cores = batcher_of(unit)._cores
    held, cores.free = cores.free, 0  # nothing can run
    call = stream(channel)
    await call.write(double(1, parameters={"timeout": 20_000}))
    await call.write(double(2))
    assert "deadline passed" in (await call.read()).error_message
    cores.release(held)
    await call.done_writing()
    assert await said(call) == [4.0]


async def test_cancelled_stream_frees_every_place(unit: Unit, channel: grpc.aio.Channel) -> None:
    batcher = batcher_of(unit)
    held, batcher._cores.free = batcher._cores.free, 0  # nothing can run
    call = stream(channel)
    for number in range(10):
        await call.write(double(number))
    await until(lambda: batcher.pending == 10)
    call.cancel()
    await until(lambda: not batcher.pending)
    batcher._cores.release(held)
    assert batcher.statistics.failures[Outcome.CALLER_LEFT] == 10


async def test_stream_holds_no_more_than_its_bound(unit: Unit, channel: grpc.aio.Channel) -> None:
    batcher = batcher_of(unit)
    held, batcher._cores.free = batcher._cores.free, 0
    call = stream(channel, request_iterator=[double(number) for number in range(MAX_IN_FLIGHT + 40)])
    await until(lambda: batcher.pending == MAX_IN_FLIGHT)
    for _ in range(3):  # time in which the server would have read more
        await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"")
    assert batcher.pending == MAX_IN_FLIGHT
    batcher._cores.release(held)
    assert await said(call) == [2.0 * number for number in range(MAX_IN_FLIGHT + 40)]


async def test_caller_that_leaves_a_decoupled_model_ends_its_run(
    unit: Unit, channel: grpc.aio.Channel, fakes: Fakes
) -> None:
    call = stream(channel)
    await call.write(count(1_000_000_000))
    await call.read()
    call.cancel()
    await until(lambda: fakes.session("fake-count").abandoned == 1)
    batcher = unit.catalog.get("count").batcher
    await until(lambda: not batcher.running)
    assert batcher.statistics.failures[Outcome.CALLER_LEFT] == 1
    assert await said(stream(channel, request_iterator=[count(2)])) == [0, 1]


async def test_decoupled_model_waits_for_its_reader_and_others_do_not(
    unit: Unit, fakes: Fakes, channel: grpc.aio.Channel
) -> None:
    gate = fakes.by_name["fake-count"].gate
    taken: list[Any] = []
    request = InferRequest(model_name="count", inputs=[tensor("n", np.array([1000], np.int32))])
    consumed: list[Any] = []
    ended: list[Any] = []

    def emit(response: Any, written: Any, last: bool) -> None:
        taken.append(response)
        consumed.append(written)

    ctx = read_headers({}.get, trusted=False).at(unit.surface.dataplane.now(), 30)
    unit.surface.dataplane.infer(request, ctx, size_bytes=4, reply=ended.append, on_caller_left=ended.append, emit=emit)
    await until(lambda: len(taken) == AHEAD)
    assert await said(stream(channel, request_iterator=[double(3)])) == [6.0]
    assert len(taken) == AHEAD and not gate._waiting
    while not ended:
        while consumed:
            consumed.pop()()
        await asyncio.sleep(0)
    assert len(taken) == 1000 and ended[0].error is None and ended[0].answer is not None


async def test_server_that_stops_ends_idle_streams_at_once(tmp_path: Path, fakes: Fakes) -> None:
    async with asyncio.timeout(60):
        async with streaming(tmp_path, fakes, drain_s=30.0) as unit:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}")
            call = stream(channel)
            await call.write(double(1))
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await said(call)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        await channel.close()


async def test_many_streams_at_once_each_get_their_own(unit: Unit, channel: grpc.aio.Channel) -> None:
    async def one(base: int) -> None:
        numbers = range(base, base + 20)
        assert await said(stream(channel, request_iterator=[double(n) for n in numbers])) == [2.0 * n for n in numbers]

    async with asyncio.TaskGroup() as group:
        for base in range(0, 400, 20):
            group.create_task(one(base))
