"""A canary behind the gateway, with an inference server on each side: late, failing, or of another opinion."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import httpx
from fake_backend import FakeBackend

from oriel_inference.model import TensorInfo

from ..gateway.special_routes import metric
from ..gateway.stack import GOLD, digest, gateway
from ..inference.gated import INFER, ROW, gated
from ..waiting import until

TARGET_S = 2.0
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = {target_ms}
give_up_ms = 120000
[pools.stable]
endpoints = ["127.0.0.1:{stable}"]
learn_concurrency = false
[pools.canary]
endpoints = ["127.0.0.1:{canary}"]
learn_concurrency = false
[[routes]]
name = "double"
model = "*"
split = [{{ pool = "stable", weight = 50 }}, {{ pool = "canary", weight = 50 }}]
split_by = "request"
rollback = {{ canary = "canary", min_calls = 20, compare_percent = 100.0 }}
[tenants.g]
tier = "gold"
models = ["*"]
keys = [{{ sha256 = "{key}" }}]
"""


def backend() -> FakeBackend:
    x, y = (TensorInfo(name=name, datatype="FP32", shape=(-1, 4)) for name in ("x", "y"))
    return FakeBackend((x,), (y,))


@asynccontextmanager
async def split(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    """Yield the gateway, a client of it, and the backends of the two servers behind it."""
    stable, canary = backend(), backend()
    async with AsyncExitStack() as stack:
        ports = {}
        for name, fake in (("stable", stable), ("canary", canary)):
            unit, _ = await stack.enter_async_context(gated(tmp_path / name, fake))
            fake.gate.open()
            ports[name] = unit.http_port
        text = DOCUMENTS.format(target_ms=round(TARGET_S * 1e3), key=digest(GOLD), **ports)
        port, core = await stack.enter_async_context(gateway({"all.toml": text.encode()}))
        headers = {"authorization": f"Bearer {GOLD}"}
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=120)
        )
        yield SimpleNamespace(core=core, client=client, stable=stable, canary=canary)


async def call(it: SimpleNamespace, number: int) -> int:
    answer = await it.client.post(INFER, json=ROW, headers={"x-request-id": f"r{number}"})
    return int(answer.status_code)


def reasons(it: SimpleNamespace) -> set[str]:
    return {labels[2] for labels in metric(it.core, "oriel_gateway_canary_rolled_back")}


async def is_left(it: SimpleNamespace) -> None:
    """Check that the canary gets no more calls."""
    before = sum(it.canary.sessions[0].batches)
    assert [await call(it, number) for number in range(40)] == [200] * 40
    assert sum(it.canary.sessions[0].batches) == before


async def test_a_canary_that_fails(tmp_path: Path) -> None:
    async with split(tmp_path) as it:
        it.canary.sessions[0].fail = True
        statuses = [await call(it, number) for number in range(120)]
        assert reasons(it) == {"errors"} and 20 <= sum(status >= 500 for status in statuses) < 60
        await is_left(it)


async def test_a_canary_that_is_late(tmp_path: Path) -> None:
    async with split(tmp_path) as it:
        it.canary.gate.close()
        calls = [asyncio.ensure_future(call(it, number)) for number in range(120)]
        pools = it.core.pools
        await until(lambda: pools["canary"].calls >= 40 and not pools["stable"].calls)
        began = monotonic()
        await until(lambda: monotonic() - began > TARGET_S)
        it.canary.gate.open()
        assert set(await asyncio.gather(*calls)) == {200}
        assert reasons(it) == {"attainment"}
        await is_left(it)


async def test_a_canary_that_disagrees(tmp_path: Path) -> None:
    async with split(tmp_path) as it:
        clock = iter(range(1_000_000))
        it.core.routing.agreement._clock = lambda: float(next(clock))  # a second for each pair
        session = it.canary.sessions[0]
        usual = session.run

        def negated(*given: Any) -> Any:
            return [-output for output in usual(*given)]

        session.run = negated
        number = 0

        async def judged() -> bool:
            nonlocal number
            number += 10
            assert {await call(it, each) for each in range(number, number + 10)} == {200}
            return bool(reasons(it))

        await until(judged)
        assert reasons(it) == {"agreement"}
        assert metric(it.core, "oriel_model_agreement_ratio") == {("double", "stable"): 0.0}
        assert metric(it.core, "oriel_model_largest_error") == {("double", "stable"): 16.0}
        await is_left(it)


async def test_a_canary_that_equals_the_other_side_stays(tmp_path: Path) -> None:
    async with split(tmp_path) as it:
        assert {await call(it, number) for number in range(200)} == {200}
        assert reasons(it) == set() and sum(it.canary.sessions[0].batches) > 50
