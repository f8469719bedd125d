"""Compressed gRPC messages: unmodified clients may send them, and their decompressed size is bounded before it costs
memory.
"""

import gzip
import zlib
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import pytest
from grpc import aio
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.grpc import aio as triton
from tritonclient.utils import InferenceServerException

from oriel_gateway.pools.demand import PoolDemand
from oriel_wire.h2.grpc import CODES

from .grpc_stack import Backend, headers, idle, stack
from .raw_grpc import framed, raw_call
from .stack import BRONZE, GOLD, documents

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
MIB = 1 << 20


def bounded(port: int, *, max_body_bytes: int = 4 * MIB, max_queue_bytes: int = 64 * MIB) -> dict[str, bytes]:
    """Documents with one route, for all models."""
    text = documents([port], pool=f'probe = ""\nmax_queue_bytes = {max_queue_bytes}')["all.toml"]
    return {"all.toml": text.replace(b"max_body_bytes = 1000000", b"max_body_bytes = %d" % max_body_bytes)}


async def infer(address: str, model: str, key: str, how: str, version: str = "") -> Any:
    tensor = InferInput("x", [1000], "FP32")  # too small for the client to compress it
    tensor.set_data_from_numpy(np.zeros(1000, np.float32))
    async with triton.InferenceServerClient(address) as client:
        return await client.infer(
            model, [tensor], model_version=version, headers=headers(key), compression_algorithm=how
        )


def message(model: str = "digits", version: str = "", tensor: bytes = b"") -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=[tensor])
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("how", ["gzip", "deflate"])
async def test_a_compressed_message_reaches_the_model_that_it_names(how: str) -> None:
    backend = Backend()
    async with stack(backend, files=bounded) as (address, core):
        result = await infer(address, "digits", BRONZE, how)
        assert result.get_response().model_name == "digits"
        assert backend.seen[0][1].raw_input_contents == [bytes(4000)]
        assert idle(core) and not core.pools["p"].held_bytes


async def test_a_model_that_the_tenant_may_not_use_looks_absent_compressed_or_not() -> None:
    backend = Backend()
    async with stack(backend, files=bounded) as (address, core):
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "mlp", BRONZE, "gzip")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        cause = caught.value.__context__
        assert isinstance(cause, aio.AioRpcError)
        assert ("x-oriel-reason", "not_found") in list(cause.trailing_metadata() or ())
        await infer(address, "mlp", GOLD, "gzip", version="3")
        assert len(backend.seen) == 1 and idle(core)


async def refused(address: str, sent: bytes, method: str = INFER) -> tuple[str, str]:
    answer = await raw_call(address, method, {"x-api-key": BRONZE}, framed(sent, compressed=True))
    return CODES[answer.status], answer.trailers["x-oriel-reason"]


def _then(tail: bytes) -> Callable[[bytes], bytes]:
    return lambda plain: gzip.compress(plain + tail)


def _nothings(plain: bytes) -> bytes:
    """Megabytes of empty blocks, and no end."""
    deflate = zlib.compressobj(wbits=31)
    return deflate.compress(plain) + deflate.flush(zlib.Z_FULL_FLUSH) + b"\x00\x00\x00\xff\xff" * (3 * MIB // 5)


SECOND_NAME = b"\x0a\x03mlp"


@pytest.mark.parametrize(
    ("fold", "reason"),
    [
        (lambda plain: gzip.compress(plain)[:-9], "bad_request"),
        (lambda plain: gzip.compress(plain) + b"x", "bad_request"),
        (lambda plain: gzip.compress(plain) + gzip.compress(SECOND_NAME), "bad_request"),
        (lambda plain: gzip.compress(gzip.compress(plain)), "bad_request"),
        (lambda plain: b"\x1f\x8b" + bytes(100), "bad_request"),
        (lambda plain: b"\x78\x9c" + bytes(100), "bad_request"),
        (_nothings, "bad_request"),
        (_then(b"\x0a\x7f"), "bad_request"),  # ends within a field
        (lambda plain: gzip.compress(b"\x3a\xe8\x07" + bytes(1000) + plain[8:]), "bad_request"),  # no model name
        (lambda plain: gzip.compress(b"\x3a\xc0\x84\x3d" + bytes(10**6) + plain), "bad_request"),  # too late
        (lambda plain: gzip.compress(plain + b"\x3a\x80\x80\x80\x08" + bytes(16 * MIB)), "too_large"),
    ],
)
async def test_what_does_not_decompress_into_one_bounded_message_is_refused(
    fold: Callable[[bytes], bytes], reason: str
) -> None:
    backend = Backend()
    async with stack(backend, files=bounded) as (address, core):
        sent = fold(message())
        assert (await refused(address, sent))[1] == reason
        assert not backend.seen and idle(core) and not core.pools["p"].held_bytes


async def test_few_bytes_are_decompressed_into_no_more_than_is_little_work() -> None:
    backend = Backend()
    async with stack(backend, files=lambda port: bounded(port, max_body_bytes=64 * MIB)) as (address, core):
        assert await refused(address, gzip.compress(message(tensor=bytes(5 * MIB)))) == (
            "RESOURCE_EXHAUSTED",
            "too_large",
        )
        assert not backend.seen and idle(core) and not core.pools["p"].held_bytes


async def test_a_second_name_inside_does_not_run() -> None:
    backend = Backend()
    async with stack(backend, files=bounded) as (address, _):
        sent = framed(gzip.compress(message() + SECOND_NAME), compressed=True)
        assert (await raw_call(address, INFER, {"x-api-key": BRONZE}, sent)).status == 0
        assert [request.model_name for _, request, _, _ in backend.seen] == ["digits"]


async def test_what_is_decompressed_is_on_the_byte_budget_of_its_pool() -> None:
    backend = Backend()
    async with stack(backend, files=lambda port: bounded(port, max_queue_bytes=2 * MIB)) as (address, core):
        sent = gzip.compress(message(tensor=bytes(3 * MIB)))
        core.pools["p"].count_demand(demand := PoolDemand(monotonic(), lambda: None))
        assert await refused(address, sent) == ("UNAVAILABLE", "queue_full")
        assert not core.pools["p"].held_bytes
        answer = await raw_call(address, INFER, {"x-api-key": BRONZE}, framed(message(tensor=bytes(3 * MIB))))
        assert CODES[answer.status] == "UNAVAILABLE" and not core.pools["p"].held_bytes
        (tier,) = demand.record(0, monotonic()).tiers.values()
        assert sum(tier.arrivals) == tier.refused == 2, "a refused call counts as demand"


async def test_each_message_of_a_stream_is_judged_so() -> None:
    backend = Backend()
    async with stack(backend, files=bounded) as (address, core):
        compressed, other = (framed(gzip.compress(message(model)), compressed=True) for model in ("digits", "mlp"))
        answer = await raw_call(address, STREAM, {"x-api-key": BRONZE}, compressed + framed(message()) + compressed)
        assert answer.status == 0 and len(backend.seen) == 3
        answer = await raw_call(address, STREAM, {"x-api-key": BRONZE}, compressed + other)
        assert CODES[answer.status] == "NOT_FOUND" and idle(core)
        assert {request.model_name for _, request, _, _ in backend.seen} == {"digits"}
