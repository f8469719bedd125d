import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc

from oriel_inference.app import Unit, open_unit
from oriel_inference.settings import Settings
from oriel_tools.load import tally as load_tally
from oriel_tools.load.bodies import Prepared
from oriel_tools.load.senders import GrpcSender, Ticket
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.observe.recall import KEEP_METHOD, Recaller
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import HEALTH_SERVICE, SERVICE
from oriel_wire.v2.proto import health_pb2, v2_pb2

from .grpc_calls import infer, ones
from .grpc_port import port_of

METADATA = (
    ("x-request-id", "find-me"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
)


@pytest.fixture
async def channel(unit: Unit) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as opened:
        yield opened


@pytest.fixture
async def kept_channel(kept_unit: Unit) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{kept_unit.grpc_port}") as opened:
        yield opened


async def test_answer_is_raw_and_carries_identity_stages_and_cost(
    unit: Unit, channel: grpc.aio.Channel, sink: ListSink
) -> None:
    call = infer(channel)(ones(), metadata=METADATA, timeout=30)
    answer = await call
    assert (answer.id, answer.model_version, answer.outputs[0].shape) == ("seven", "1", [1, 4])
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2.0] * 4
    trailing = dict(await call.trailing_metadata())
    assert trailing["x-request-id"] == "find-me"
    assert trailing["traceresponse"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert trailing["server-timing"].startswith("queue;dur=") and "compute;dur=" in trailing["server-timing"]
    assert int(trailing["x-oriel-cost-us"]) >= 0
    assert [span.name for span in sink.spans] == ["inference.GRPCInferenceService/ModelInfer", "queue", "compute"]
    told = sink.spans[0].attributes
    assert (told["server.address"], told["server.port"]) == ("127.0.0.1", unit.grpc_port)


async def test_spans_are_sent_when_a_server_in_front_asks_for_them_over_grpc(
    unit: Unit, channel: grpc.aio.Channel, sink: ListSink
) -> None:
    trace = "a" * 32
    await infer(channel)(ones(), metadata=(("traceparent", f"00-{trace}-{'b' * 16}-00"),))
    assert not sink.spans
    recaller = Recaller()
    try:
        for wanted in (trace, "c" * 32):
            recaller.ask("127.0.0.1", unit.grpc_port, wanted, grpc=True)
        await recaller.flush()
        assert (recaller.found, recaller.gone) == (1, 1)
        (server, *_) = sink.spans
        assert (server.context.trace_id, server.parent_id) == (int(trace, 16), int("b" * 16, 16))
        keep = channel.unary_unary(KEEP_METHOD.decode())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await keep(b"no trace id")
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await recaller.close()


async def test_a_server_that_does_not_trust_the_sender_is_not_asked_again(unit: Unit) -> None:
    unit.surface.peers = TrustedPeers(["192.0.2.1"])
    port = await port_of(unit)
    recaller = Recaller()
    try:
        for _ in range(2):
            recaller.ask("127.0.0.1", port.server.port, "a" * 32, grpc=True)
            await recaller.flush()
        assert (recaller.found, recaller.gone) == (0, 0) and len(recaller._not_ours) == 1
    finally:
        await recaller.close()
        await port.server.drain(0.0)


@pytest.mark.parametrize(
    ("model", "code", "reason"),
    [
        ("absent", grpc.StatusCode.NOT_FOUND, "unknown_model"),
        ("broken", grpc.StatusCode.NOT_FOUND, "no_available_version"),
        ("echo", grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
    ],
)
async def test_refusals_have_their_status_and_reason(
    kept_channel: grpc.aio.Channel, model: str, code: grpc.StatusCode, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await infer(kept_channel)(ones(model), metadata=METADATA)
    assert refused.value.code() == code
    trailing = dict(refused.value.trailing_metadata())
    assert (trailing["x-request-id"], trailing["x-oriel-reason"]) == ("find-me", reason)


async def test_other_methods_say_the_reason_too(kept_channel: grpc.aio.Channel) -> None:
    for method, request, reason in (
        ("ModelMetadata", v2_pb2.ModelMetadataRequest(name="absent"), "unknown_model"),
        ("RepositoryModelLoad", v2_pb2.RepositoryModelLoadRequest(model_name="double"), "control_refused"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kept_channel.unary_unary(f"/{SERVICE}/{method}")(request.SerializeToString())
        assert dict(refused.value.trailing_metadata())["x-oriel-reason"] == reason


async def test_oriel_load_shows_the_reasons(kept_unit: Unit) -> None:
    """Refusals of one status are told apart."""
    prepared = Prepared(
        host="127.0.0.1",
        port=kept_unit.grpc_port,
        grpc=True,
        method="POST",
        path=f"/{SERVICE}/ModelInfer",
        fields=[],
        body=ones("broken").SerializeToString(),
    )
    sender = GrpcSender(prepared, 1, deadline_s=30.0)
    ended = asyncio.get_running_loop().create_future()
    sender.send(Ticket(0, 0.0, 0.0, lambda _, outcome: ended.set_result(outcome)))
    assert await ended == load_tally.Outcome("refused", "NOT_FOUND no_available_version")
    await sender.close()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_tritonclient_compresses(kept_unit: Unit, algorithm: str) -> None:
    rows = np.zeros((1, 50_000), np.float32)  # worth compressing

    def ask() -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{kept_unit.grpc_port}") as client:
            inputs = []
            for name in "ab":
                inputs.append(tritonclient.grpc.InferInput(name, [1, 50_000], "FP32"))
                inputs[-1].set_data_from_numpy(rows)
            result = client.infer("pair", inputs, compression_algorithm=algorithm)
            np.testing.assert_array_equal(result.as_numpy("sum"), rows)

    await asyncio.to_thread(ask)


async def test_compressed_message_decompresses_no_further_than_a_message_may_be_large(settings: Settings) -> None:
    small = dataclasses.replace(settings, max_body_bytes=1 << 20)
    async with open_unit(small, sink=ListSink()) as unit:
        address, options = f"127.0.0.1:{unit.grpc_port}", [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options, compression=grpc.Compression.Gzip) as channel:
            big = ones()
            big.id = "a" * (8 << 20)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await infer(channel)(big)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
                async for _ in stream(iter([big.SerializeToString()])):
                    pass
            assert refused.value.code() == ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await infer(channel)(ones())).id == "seven"


@pytest.mark.parametrize(
    ("service", "status"),
    [
        ("", health_pb2.HealthCheckResponse.SERVING),
        (SERVICE, health_pb2.HealthCheckResponse.SERVING),
        ("double", health_pb2.HealthCheckResponse.SERVING),
        ("broken", health_pb2.HealthCheckResponse.NOT_SERVING),
    ],
)
async def test_health_checks(kept_channel: grpc.aio.Channel, service: str, status: int) -> None:
    check = kept_channel.unary_unary(
        f"/{HEALTH_SERVICE}/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    assert (await check(health_pb2.HealthCheckRequest(service=service))).status == status


async def test_bytes_that_are_no_message_are_an_invalid_argument(kept_channel: grpc.aio.Channel) -> None:
    for method in ("ModelInfer", "ModelMetadata"):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kept_channel.unary_unary(f"/{SERVICE}/{method}")(b"\xff\xff\xff")
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "message" in (refused.value.details() or "")
