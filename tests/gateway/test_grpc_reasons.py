"""Over gRPC, too, quotas are charged with the cost that a server reports, and every refusal has a reason."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from ..waiting import until
from .grpc_stack import Backend, Telling, idle, stack
from .stack import GOLD, digest, documents

SERVICE = "/inference.GRPCInferenceService/"
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
MESSAGE = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
KEY = (("x-api-key", "key-t"),)


def paying(limits: str) -> str:
    return f'[tenants.t]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest("key-t")}" }}]\n{limits}\n'


def left_ms(metadata: Any) -> int:
    return int(dict(metadata)["ratelimit"].split(";r=")[1].split(";")[0])


@pytest.mark.parametrize("shape", ["unary", "stream", "error", "special"])
async def test_the_charge_a_server_reports_is_what_the_quota_pays(shape: str) -> None:
    """The time with a permit is not charged; here it is about a thousandth of the reported cost."""
    error = (grpc.StatusCode.INTERNAL, "no") if shape == "error" else None
    backend = Telling(("x-oriel-cost-us", "400000"), error=error)
    kept = "deterministic = true\ncache_s = 0\n" if shape == "special" else ""

    def files(port: int) -> dict[str, bytes]:
        text = documents([port], extra=paying("limit = { compute_ms_per_day = 1000 }"))["all.toml"]
        return {"all.toml": text.replace(b'model = "*"\n', b'model = "*"\n' + kept.encode(), 1)}

    async with stack(backend, files=files) as (address, core), aio.insecure_channel(address) as channel:
        for _ in range(2):
            if shape == "stream":
                stream = channel.stream_stream(STREAM)(iter((MESSAGE,)), metadata=KEY)
                assert len([answer async for answer in stream]) == 1
            else:
                assert await channel.unary_unary(INFER)(MESSAGE, metadata=KEY).code() in (
                    grpc.StatusCode.OK,
                    grpc.StatusCode.INTERNAL,
                )
        refused = channel.unary_unary(INFER)(MESSAGE, metadata=KEY)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(await refused.trailing_metadata())["x-oriel-reason"] == "quota_exceeded"
        assert idle(core) and len(backend.seen) in (0, 2)


@pytest.mark.parametrize("reported", ["", "-1", "1e6", "9" * 16, "\u0663"])
async def test_a_charge_that_is_no_number_is_not_believed(reported: str) -> None:
    backend = Telling(("x-oriel-cost-us", reported.encode("ascii", "replace").decode()))
    async with stack(backend, extra=paying("limit = { compute_ms_per_day = 1000 }")) as (address, _):
        async with aio.insecure_channel(address) as channel:
            call = channel.unary_unary(INFER)(MESSAGE, metadata=KEY)
            await call
            assert left_ms(await call.trailing_metadata()) >= 980


async def ended(address: str, method: str, *more: tuple[str, str], key: str = GOLD) -> tuple[grpc.StatusCode, Any]:
    async with aio.insecure_channel(address) as channel:
        call = channel.unary_unary(method)(MESSAGE, metadata=(("x-api-key", key), *more))
        code = await call.code()
        metadata = dict(await call.trailing_metadata())
        assert {"x-oriel-reason", "server-timing", "x-request-id", "traceresponse"} <= set(metadata), metadata
        return code, metadata["x-oriel-reason"]


async def test_every_refusal_says_why_when_and_under_which_id() -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        unimplemented, exhausted = grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ended(address, SERVICE + "Nope") == (unimplemented, "not_found")
        assert await ended(address, "/x.Y/Z") == (unimplemented, "not_found")
        assert await ended(address, SERVICE + "RepositoryIndex") == (unimplemented, "method_not_allowed")
        assert await ended(address, INFER, ("x-a", "b" * 20_000)) == (exhausted, "too_large")
        assert not backend.seen
        backend.hold = asyncio.Event()
        late = await ended(address, INFER, ("x-request-timeout-ms", "100"))
        assert late == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded") and len(backend.seen) == 1
        async with asyncio.timeout(60):
            await until(lambda: idle(core))


@pytest.mark.parametrize(
    ("code", "own", "reason"),
    [
        (grpc.StatusCode.INTERNAL, None, "upstream_error"),
        (grpc.StatusCode.UNAVAILABLE, None, "upstream_error"),
        (grpc.StatusCode.INVALID_ARGUMENT, "Not a word", "upstream_error"),
        (grpc.StatusCode.NOT_FOUND, "unknown_model", "unknown_model"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, None, "deadline_exceeded"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "queue_timeout", "queue_timeout"),
    ],
)
async def test_an_upstreams_error_has_its_reason_or_says_whose_it_is(
    code: grpc.StatusCode, own: str | None, reason: str
) -> None:
    backend = Telling(*((("x-oriel-reason", own),) if own else ()), error=(code, "in the server's own words"))
    async with stack(backend) as (address, _):
        assert await ended(address, INFER) == (code, reason)


async def test_a_spent_budget_refuses_grpc_calls_with_its_reason() -> None:
    extra = paying('budgets = [{ amount = 1, unit = "device_seconds", period = "day" }]')
    backend = Telling(("x-oriel-cost", "dev=2000000000;cpu=0;class=gpu"))
    async with stack(backend, extra=extra) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER)(MESSAGE, metadata=KEY)
        assert await call.code() is grpc.StatusCode.OK
        core.records.stats.count()
        for method in ("unary", "stream"):
            if method == "unary":
                refused: Any = channel.unary_unary(INFER)(MESSAGE, metadata=KEY)
            else:
                refused = channel.stream_stream(STREAM)(iter((MESSAGE,)), metadata=KEY)
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailing = dict(await refused.trailing_metadata())
            assert trailing["x-oriel-reason"] == "budget_spent" and int(trailing["retry-after"]) >= 1
