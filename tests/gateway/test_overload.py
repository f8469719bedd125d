"""A loop with too much to read: it reads the most urgent tier first, lets the others wait, and in the end refuses
them.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from oriel_gateway.core import Gateway
from oriel_gateway.overload import Overload

from ..waiting import until
from .gate import INFER
from .grpc_stack import Backend
from .grpc_stack import stack as grpc_stack
from .stack import BRONZE, GOLD, Client, Reply, Upstream, digest, documents, gateway, upstream

LATE_S = 0.5
MESSAGE = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()


def fall_behind(core: Gateway) -> Overload:
    """Make the gateway believe that its loop was half a second late while very many requests ended."""
    core.records.stats._counted += 100_000
    core.overload.beat(LATE_S)
    assert core.overload.behind
    return core.overload


def wait_too_long(overload: Overload) -> None:
    """Make the gateway believe that the less urgent tiers have waited for too long."""
    overload._rule.went_on(1, 1, 1.0)


def all_refused(core: Gateway) -> bool:
    return all(gate.admission.inflight == 0 for gate in core.pools.values())


@asynccontextmanager
async def served() -> AsyncIterator[tuple[int, Gateway, Upstream]]:
    async with upstream() as up, gateway(documents([up.port])) as (port, core):
        yield port, core, up


async def ask(client: Client, key: str) -> Reply:
    client.send(INFER, b"{}", key=key)
    return await client.reply()


async def test_while_the_loop_keeps_up_nothing_waits_or_is_refused() -> None:
    async with served() as (port, core, _), Client(port) as client:
        for _ in range(3):
            assert (await ask(client, BRONZE)).status == 200
        assert not core.overload.behind and not core.overload.waiting
        assert all(front.gate is None for front in core.fronts)


async def test_turns_as_long_as_a_beat_are_noticed_although_the_timer_is_never_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as (_, core, _):
        overload, clock = core.overload, itertools.count(step=0.06)
        monkeypatch.setattr("oriel_gateway.overload.monotonic", lambda: next(clock))
        for _ in range(3):
            assert not overload.behind
            core.records.stats._counted += 100_000
            overload.beat(0.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert overload.behind and overload.lag_s >= 0.06


async def test_connections_of_less_urgent_tiers_wait_for_their_turn_and_are_served() -> None:
    async with served() as (port, core, _), Client(port) as bronze, Client(port) as gold:
        await ask(bronze, BRONZE)
        overload = fall_behind(core)
        joined: list[int] = []
        join = overload.join
        for front in core.fronts:
            front.gate = lambda rank, go_on: (joined.append(rank), join(rank, go_on))  # type: ignore[func-returns-value]
        for _ in range(3):
            assert (await ask(bronze, BRONZE)).status == 200
            assert (await ask(gold, GOLD)).status == 200
        assert len(joined) == 3 and min(joined) > 0, "gold is read at once"
        await until(lambda: not overload.waiting)


async def test_pipelined_requests_wait_for_their_turn_as_well() -> None:
    async with served() as (port, core, _), Client(port) as bronze:
        await ask(bronze, BRONZE)
        fall_behind(core)
        for _ in range(20):
            bronze.send(INFER, b"{}", key=BRONZE)
        assert [(await bronze.reply()).status for _ in range(20)] == [200] * 20


async def test_what_waits_for_too_long_is_refused_at_its_head_and_the_most_urgent_tier_is_not() -> None:
    async with served() as (port, core, up), Client(port) as bronze, Client(port) as gold:
        await ask(bronze, BRONZE)
        wait_too_long(fall_behind(core))
        before = len(up.seen)
        refused = await ask(bronze, BRONZE)
        assert (refused.status, json.loads(refused.body)["reason"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1" and refused.headers["x-request-id"]
        assert len(up.seen) == before
        assert (await ask(gold, GOLD)).status == 200
        (decided,) = core.records.decisions.where(reason="queue_full")
        assert decided.tenant is not None and decided.tenant.tier.name == "bronze"


FLOOD = f"""
[tenants.flood]
tier = "bronze"
models = ["*"]
services = ["*"]
limit = {{ requests_per_s = 0.001, burst = 2 }}
keys = [{{ sha256 = "{digest("key-flood")}" }}]
"""


async def test_a_flood_over_its_limits_is_its_senders_own_doing_also_while_the_loop_is_behind() -> None:
    async with upstream() as up, gateway(documents([up.port], extra=FLOOD)) as (port, core):
        async with Client(port) as client:
            await ask(client, "key-flood")
            wait_too_long(fall_behind(core))
            refused = [await ask(client, "key-flood") for _ in range(4)]
        assert [json.loads(each.body)["reason"] for each in refused] == ["queue_full", *["rate_limited"] * 3]
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", http1=False, http2=True, trust_env=False, timeout=60
        ) as client_2:
            answer = await client_2.post(INFER, headers={"x-api-key": "key-flood"}, content=b"{}")
        assert answer.json()["reason"] == "rate_limited"
        attained = core.records.stats.objectives.attainment
        assert attained["bronze", "missed"] == 1 and attained["bronze", "excused"] == 4


async def test_a_connection_that_ends_while_it_waits_is_forgotten() -> None:
    async with served() as (port, core, _):
        async with Client(port) as bronze:
            overload = fall_behind(core)
            assert (await ask(bronze, BRONZE)).status == 200
        await until(lambda: not overload.waiting and not any(front.connections for front in core.fronts))


async def test_a_gateway_that_drains_reads_everything() -> None:
    async with served() as (port, core, _), Client(port) as bronze:
        overload = fall_behind(core)
        assert (await ask(bronze, BRONZE)).status == 200
        overload.stop()
        core.records.stats._counted += 100_000
        overload.beat(LATE_S)
        assert not overload.behind and all(front.gate is None for front in core.fronts)
        assert (await ask(bronze, BRONZE)).status == 200
        await until(lambda: not overload.waiting)


async def test_http_2_requests_of_one_connection_are_served_and_refused_by_their_tier() -> None:
    async with served() as (port, core, up):
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", http1=False, http2=True, trust_env=False, timeout=60
        ) as client:
            await client.get("/v2/health/live")
            wait_too_long(fall_behind(core))
            keys = [GOLD, BRONZE] * 5
            answers = await asyncio.gather(
                *(client.post(INFER, headers={"x-api-key": key}, content=b"{}") for key in keys)
            )
        assert [answer.status_code for answer in answers] == [200, 503] * 5
        assert answers[1].json()["reason"] == "queue_full" and answers[1].headers["retry-after"] == "1"
        assert len(up.seen) == 5 and all_refused(core)
        await until(lambda: not core.overload.waiting)


async def test_http_2_connections_of_less_urgent_tiers_wait_for_their_turn_and_are_served() -> None:
    async with served() as (port, core, _):
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", http1=False, http2=True, trust_env=False, timeout=60
        ) as client:
            await client.get("/v2/health/live")
            fall_behind(core)
            for _ in range(5):
                answer = await client.post(INFER, headers={"x-api-key": BRONZE}, content=b"{}")
                assert answer.status_code == 200


async def test_grpc_calls_of_one_connection_are_served_and_refused_by_their_tier() -> None:
    backend = Backend()
    async with grpc_stack(backend) as (address, core), grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await infer(MESSAGE, metadata=(("authorization", f"Bearer {GOLD}"),))
        wait_too_long(fall_behind(core))
        for _ in range(3):
            await infer(MESSAGE, metadata=(("authorization", f"Bearer {GOLD}"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await infer(MESSAGE, metadata=(("authorization", f"Bearer {BRONZE}"),))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(refused.value.trailing_metadata() or ())["x-oriel-reason"] == "queue_full"
        assert len(backend.seen) == 4 and all_refused(core)


async def test_a_call_whose_client_leaves_before_it_is_refused_is_forgotten() -> None:
    async with grpc_stack(Backend()) as (address, core), grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await infer(MESSAGE, metadata=(("authorization", f"Bearer {GOLD}"),))
        overload = fall_behind(core)
        await infer(MESSAGE, metadata=(("authorization", f"Bearer {GOLD}"),))  # so that this connection is read
        wait_too_long(overload)
        overload._turning = True  # so that no turn comes
        call = infer(MESSAGE, metadata=(("authorization", f"Bearer {BRONZE}"),))
        waiting = asyncio.ensure_future(call.code())
        await until(lambda: overload.waiting == 1 or waiting.done())
        call.cancel()
        await until(lambda: not any(connection.under_way for front in core.fronts for connection in front.connections))
        overload._turn()
        assert not overload.waiting
        assert not core.records.decisions.where(reason="queue_full")


async def test_times_in_which_the_loop_stood_still_are_kept() -> None:
    overload = Overload((), lambda: 0)
    assert overload.stood_still_s(0.0, monotonic()) == 0.0
    overload.beat(0.3)
    ended_s = monotonic()
    assert overload.stood_still_s(ended_s - 1.0, ended_s) == pytest.approx(0.3, abs=0.02)
    assert overload.stood_still_s(ended_s - 0.1, ended_s) == pytest.approx(0.1, abs=0.02)
    # the next beat is overdue: what was held up with it is judged before it comes
    assert overload.stood_still_s(ended_s, ended_s + 1.0) == pytest.approx(0.95, abs=0.02)
