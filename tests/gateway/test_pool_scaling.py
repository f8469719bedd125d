"""What a gateway counts about a pool that scales, and the plan that results."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

from oriel_gateway.admin.queues import live_queues
from oriel_gateway.app import compiler_of, load
from oriel_gateway.core import Gateway
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.scaling import ScaledPools
from oriel_gateway.settings import Settings
from oriel_policies.documents import compile_documents
from oriel_policies.scaling.records import PoolRecord

from ..waiting import until
from .gate import INFER, Gate
from .scaled import SCALING, scaled
from .stack import BRONZE, GOLD, LIMITED, Client, Upstream, gateway, nobody, upstream


@asynccontextmanager
async def serving(up: Upstream, **more: int) -> AsyncIterator[tuple[int, Gateway]]:
    async with gateway(scaled(up.port, **more)) as (port, core):
        await until(lambda: core.pools["p"].endpoints.usable)
        yield port, core


def record(core: Gateway) -> PoolRecord:
    plan = core.scaled.plans["p"]
    plan.update(monotonic())
    return plan.demand.total


async def test_each_call_within_its_limits_is_counted_once_by_its_tier() -> None:
    async with upstream() as up, serving(up) as (port, core), Client(port) as client:
        for key in (GOLD, GOLD, BRONZE, LIMITED, LIMITED, LIMITED):
            await client.ask(INFER, b"x", key=key)
        total = record(core)
        assert {name: sum(tier.arrivals) for name, tier in total.tiers.items()} == {"gold": 4, "bronze": 1}
        assert not total.held and not total.in_flight and len(up.seen) == 5
        executions, seconds = total.curve[1]
        assert executions == 5 and seconds > 0.0


async def test_calls_that_wait_run_and_are_refused() -> None:
    async with upstream() as up, serving(up, max_inflight=1, max_queue=1) as (port, core):
        up.answer = server = Gate()
        async with Client(port) as first, Client(port) as second, Client(port) as third:
            first.send(INFER, b"x")
            await until(lambda: server.order)
            second.send(INFER, b"x")
            await until(lambda: core.pools["p"].admission.queue.items)
            assert (await third.ask(INFER, b"x")).status == 503
            total = record(core)
            assert (total.held, total.in_flight) == (1, 1) and sum(total.tiers["gold"].backlog) == 1
            assert sum(total.tiers["gold"].arrivals) == 3 and total.tiers["gold"].refused == 1
            server.go.release()
            server.go.release()
            assert (await first.reply()).status == (await second.reply()).status == 200
        total = record(core)
        assert (total.held, total.in_flight) == (0, 0) and sum(total.tiers["gold"].backlog) == 0


async def test_a_displaced_call_and_one_whose_client_leaves_are_waiting_no_more() -> None:
    async with upstream() as up, serving(up, max_inflight=1, max_queue=1) as (port, core):
        up.answer = server = Gate()
        queue = core.pools["p"].admission.queue
        async with Client(port) as first, Client(port) as loser:
            first.send(INFER, b"x")
            await until(lambda: server.order)
            loser.send(INFER, b"x", key=BRONZE)
            await until(lambda: queue.items)
            async with Client(port) as leaver:
                leaver.send(INFER, b"x")
                assert (await loser.reply()).status == 503
                assert record(core).held == 1 and not sum(record(core).tiers["bronze"].backlog)
            await until(lambda: not queue.items)
            assert record(core).held == 0 and not sum(record(core).tiers["gold"].backlog)
            server.go.release()
            await first.reply()


async def test_a_call_for_a_pool_without_a_server_is_planned_for_at_once() -> None:
    with nobody() as closed:
        async with gateway(scaled(closed)) as (port, core), Client(port) as client:
            gate, plan = core.pools["p"], core.scaled.plans["p"]
            await until(lambda: gate.endpoints.looked_up)
            gate.endpoints.assign([])  # like a discovery that finds no address
            listener = asyncio.Event()
            plan.listeners.add(listener.set)
            plan.update(monotonic())
            assert not plan.latest.active and not plan.value and not listener.is_set()
            client.send(INFER, b"x", headers="x-request-timeout-ms: 200000\r\n")
            await listener.wait()
            assert plan.latest.active and plan.latest.wanted == 1 and plan.value == 1.0 and plan.starved
            assert plan.demand.total.held == 1


async def test_while_ordered_replicas_start_no_call_is_judged_by_the_turns_of_those_that_are_there() -> None:
    async with upstream() as up, serving(up) as (_, core):
        gate, plan = core.pools["p"], core.scaled.plans["p"]
        plan.update(monotonic())
        assert not gate.grows_until_s
        plan.wake(3, 60.0)
        until_s = gate.grows_until_s
        assert 20.0 < until_s - monotonic() <= 35.0, "the period of the autoscaler, and a start"
        plan.update(monotonic())
        assert gate.grows_until_s == until_s, "no other was ordered"
        plan.wake(1, 60.0)
        plan._planner._wanted = 1
        plan.update(monotonic())
        assert not gate.grows_until_s


async def test_waiting_calls_are_counted_when_their_pool_begins_to_scale() -> None:
    async with upstream() as up, gateway(scaled(up.port, scaling="", max_inflight=1)) as (port, core):
        up.answer = server = Gate()
        await until(lambda: core.pools["p"].endpoints.usable)
        async with Client(port) as first, Client(port) as second:
            first.send(INFER, b"x")
            second.send(INFER, b"x")
            await until(lambda: core.pools["p"].admission.queue.items)
            assert not core.scaled.plans and live_queues(core)["p"]["scaling"] is None
            core.adopt(compile_documents(scaled(up.port, max_inflight=1)))
            assert record(core).held == 1 and live_queues(core)["p"]["scaling"]["held"] == 1
            server.go.release()
            server.go.release()
            await first.reply()
            await second.reply()
            assert record(core).held == 0
        core.adopt(compile_documents(scaled(up.port, scaling="")))
        assert core.pools["p"].demand is None and not core.scaled.plans


async def test_other_bounds_are_in_force_at_once_and_the_counts_stay() -> None:
    async with upstream() as up, serving(up) as (port, core), Client(port) as client:
        await client.ask(INFER, b"x")
        core.adopt(compile_documents(scaled(up.port, scaling=SCALING.replace("minimum = 0", "minimum = 4"))))
        assert sum(record(core).tiers["gold"].arrivals) == 1
        assert core.scaled.plans["p"].latest.wanted == 4


async def test_a_call_whose_body_is_on_its_way_keeps_the_pool_active() -> None:
    async with upstream() as up, serving(up) as (port, core), Client(port) as client:
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {GOLD}\r\ncontent-length: 9\r\n\r\n"
        client.writer.write(head.encode())
        await until(lambda: core.pools["p"].calls)
        assert record(core).in_flight == 1 and core.scaled.plans["p"].latest.active


async def test_fixed_addresses_count_as_replicas_when_something_listens_there() -> None:
    """Several processes of one machine have all their addresses listed in the documents, whether they run or not."""
    snapshot, pools = compile_documents(scaled(1)), ScaledPools()
    gate = PoolGate(replace(snapshot.pools["p"], discover=None, endpoints=(("127.0.0.1", 1), ("127.0.0.1", 2))))
    pools.adopt({"p": gate}, snapshot)
    assert (pools.plans["p"].latest.active, pools.plans["p"].latest.wanted) == (False, 0)

    def replicas() -> int:
        pools.plans["p"].update(monotonic())
        return pools.plans["p"].replicas

    assert not gate.endpoints.usable and not replicas()
    gate.endpoints.note_reach(gate.endpoints[0], Reach.READY)
    assert len(gate.endpoints.usable) == replicas() == 1
    gate.endpoints.note_reach(gate.endpoints[1], Reach.NOT_READY)
    assert len(gate.endpoints.usable) == 1 and replicas() == 2


async def test_addresses_of_the_command_line_replace_what_the_documents_would_discover(tmp_path: Path) -> None:
    (tmp_path / "all.toml").write_bytes(scaled(1)["all.toml"])
    settings = Settings(policies=tmp_path, endpoints={"p": (("127.0.0.1", 2),)})
    with compiler_of(settings, tmp_path) as compiler:
        pool = (await load(settings, compiler)).pools["p"]
    assert pool.endpoints == (("127.0.0.1", 2),) and pool.discover is None and pool.scaling is not None
