"""Header bombs on the gRPC ports, before any key is checked (R23)."""

import asyncio

import grpc
import pytest
from stacks import Stack, key

from oriel_wire.v2.proto import v2_pb2

from ..wire.http2_attacks import Outcome, header_bombs

METHOD = "/inference.GRPCInferenceService/ModelInfer"
SECONDS = 0.5
BYTES_PER_S = 4_700_000.0
MOST_BYTES = 256 * 1024  # the most that a server should read of it
# A busy server has seconds for each bomb: what is sent faster stays in buffers of the kernel and says nothing of it.
SLOWLY = {"seconds": 60.0, "bytes_per_s": MOST_BYTES / 20}
COMPRESSION_ERROR = 9  # RFC 9113, section 7
UNITS = pytest.mark.parametrize("unit", ["gateway", "inference"])


async def attacked(
    stack: Stack, unit: str, *, acknowledges: bool, seconds: float = SECONDS, bytes_per_s: float = BYTES_PER_S
) -> Outcome:
    host, _, port = stack.address(unit, "grpc").rpartition(":")
    return await header_bombs(
        host, int(port), METHOD.encode(), seconds=seconds, bytes_per_s=bytes_per_s, acknowledges=acknowledges
    )


async def served(stack: Stack, unit: str) -> None:
    """Wait until another client's call is answered: the server may still be reading what it received before."""
    request = v2_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="image", datatype="FP32", shape=[1, 64]).contents.fp32_contents.extend([0.0] * 64)
    gold = [("authorization", key("gold")["authorization"])]
    async with asyncio.timeout(240), grpc.aio.insecure_channel(stack.address(unit, "grpc")) as channel:
        infer = channel.unary_unary(METHOD)
        while True:
            try:
                assert await infer(request.SerializeToString(), metadata=gold)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise


@UNITS
async def test_a_client_that_knows_of_no_table_cannot_refer_to_it(stack: Stack, unit: str) -> None:
    """Once the server's settings are acknowledged, the second bomb is an error that ends the connection."""
    outcome = await attacked(stack, unit, acknowledges=True, **SLOWLY)
    assert outcome.closed and outcome.sent_bytes < MOST_BYTES, outcome
    await served(stack, unit)


@UNITS
async def test_other_calls_are_served_after_header_bombs(stack: Stack, unit: str) -> None:
    """The client never acknowledges the server's settings, and closes the connection itself."""
    await attacked(stack, unit, acknowledges=False)
    await served(stack, unit)


@UNITS
async def test_header_bombs_are_cut_before_they_cost_anything(stack: Stack, unit: str) -> None:
    """The client never acknowledges the server's settings; the server cuts it off before that is overdue."""
    outcome = await attacked(stack, unit, acknowledges=False, **SLOWLY)
    assert outcome.closed and outcome.sent_bytes < MOST_BYTES, outcome
    assert outcome.goaway == COMPRESSION_ERROR, outcome
