"""Calls for a pool that scales and has no server yet: which are held, in which order, and what is said about it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic

import httpx
import pytest
from grpc import aio
from prometheus_client.core import CollectorRegistry
from tritonclient.grpc import service_pb2

from oriel_gateway.admin.metrics import GatewayCollector
from oriel_gateway.admin.queues import live_queues
from oriel_gateway.core import Gateway
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.health import Watch
from oriel_policies.scaling.records import PoolRecord
from oriel_wire.discovery.endpoint_slices import EndpointSlices
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from ..wire.kubernetes_api import endpoint, kubernetes, piece
from .cold_pools import Names, cold, empty, names, parked, watched
from .gate import INFER, idle
from .grpc_stack import Backend
from .stack import BRONZE, GOLD, Client, Reply, Seen, gateway, grpc_server, upstream

__all__ = ["names"]

KINDS = ["http1", "http2", "grpc"]


def record(core: Gateway) -> PoolRecord:
    plan = core.scaled.plans["p"]
    plan.update(monotonic())
    return plan.demand.total


async def ask(kind: str, port: int, *, key: str = GOLD, timeout_ms: int = 0) -> tuple[bool, dict[str, str]]:
    """Make a call. Returns whether it was answered, and those header lines or trailers, with the reason under
    `reason`.
    """
    asked = {"x-request-timeout-ms": str(timeout_ms)} if timeout_ms else {}
    if kind == "http1":
        async with Client(port) as client:
            lines = "".join(f"{name}: {value}\r\n" for name, value in asked.items())
            reply = await client.ask(INFER, b"x", key=key, headers=lines)
            reason = "" if reply.status == 200 else json.loads(reply.body)["reason"]
            return reply.status == 200, {**reply.headers, "reason": reason}
    headers = {"authorization": f"Bearer {key}", **asked}
    if kind == "http2":
        async with httpx.AsyncClient(http1=False, http2=True, timeout=None) as http:
            found = await http.post(f"http://127.0.0.1:{port}{INFER}", content=b"x", headers=headers)
            assert found.status_code in (200, 503)
            return found.status_code == 200, {**found.headers, **({} if found.is_success else found.json())}
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
            service_pb2.ModelInferRequest(model_name="digits").SerializeToString(), metadata=tuple(headers.items())
        )
        code = await call.code()
        trailers = {str(name): str(value) for name, value in await call.trailing_metadata()}
        return code.value[0] == 0, {**trailers, "reason": trailers.get("x-oriel-reason", "")}


@asynccontextmanager
async def server(kind: str) -> AsyncIterator[int]:
    if kind == "grpc":
        async with grpc_server(Backend()) as port:
            yield port
    else:
        async with upstream() as up:
            yield up.port


def reason(reply: Reply) -> str:
    return str(json.loads(reply.body)["reason"])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_is_held_beyond_the_give_up_time_of_its_tier(names: Names, kind: str) -> None:
    """When there is a server it has the rest of its hold, or the give-up time of its tier if that is longer."""
    files = cold("start_ms = 60000\nhold_ms = 300000", tier="target_ms = 1\ngive_up_ms = 200000")
    async with empty(files) as (port, core), server(kind) as at, asyncio.TaskGroup() as group:
        held = group.create_task(ask(kind, port))
        await until(lambda: parked(core) == 1)
        call = watched(core)
        assert call.deadline == call.received_s + 300.0
        names.found = (("127.0.0.1", at),)
        answered, about = await held
        assert answered and call.permit_s + 200.0 < call.deadline == call.received_s + 300.0
        timing = about["server-timing"]
        assert "gateway-cold-start;dur=" in timing and "desc=no_address" in timing and "gateway-upstream" in timing
        await until(lambda: idle(core) and not core.pools["p"].calls and not core.pools["p"].held_bytes)


async def test_tenants_see_for_how_long_their_calls_are_held() -> None:
    """They read that 200 s was the most, and were held for 300 s."""
    files = cold("start_ms = 60000\nhold_ms = 300000", tier="target_ms = 1\ngive_up_ms = 200000")
    async with empty(files) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        page = (await client.get("/v1/limits", headers={"authorization": f"Bearer {GOLD}"})).json()
        assert (page["deadline"]["most_ms"], page["deadline"]["held_ms"]) == (200_000, 300_000)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_is_not_held_beyond_the_deadline_of_its_caller(names: Names, kind: str) -> None:
    async with empty(cold("start_ms = 60000\nhold_ms = 300000")) as (port, core), asyncio.TaskGroup() as group:
        held = group.create_task(ask(kind, port, timeout_ms=100_000))
        await until(lambda: parked(core) == 1)
        call = watched(core)
        assert call.deadline == call.received_s + 100.0
        held.cancel()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_cannot_be_in_time_is_refused_and_counts_as_demand(names: Names, kind: str) -> None:
    async with empty(cold("start_ms = 60000\nhold_ms = 300000")) as (port, core):
        answered, about = await ask(kind, port, timeout_ms=50_000)
        assert not answered and about["reason"] == "infeasible"
        assert int(about["retry-after"]) == 60
        assert "gateway-cold-start;dur=0.000;desc=no_address" in about["server-timing"]
        total = record(core)
        assert sum(total.tiers["gold"].arrivals) == 1 and total.tiers["gold"].refused == 1
        latest = core.scaled.plans["p"].latest
        assert latest.active and latest.wanted == 1
        assert not core.pools["p"].calls and not core.pools["p"].held_bytes


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_a_cold_pool_cannot_serve_in_time_goes_on_to_a_fallback_first(
    names: Names, kind: str
) -> None:
    files = cold("start_ms = 60000\nhold_ms = 300000")
    async with server(kind) as there:
        address = f'endpoints = ["127.0.0.1:{there}"]\n'
        text = files["all.toml"].decode().replace('pool = "p"\n', 'pool = "p"\nfallback = ["q"]\n')
        files["all.toml"] = f'{text}[pools.q]\nprobe = ""\n{address}grpc_{address}'.encode()
        async with empty(files) as (port, core):
            answered, _ = await ask(kind, port, timeout_ms=50_000)
            assert answered and core.records.stats.spills == {("model:*", "p", "q", "upstream_unreachable"): 1}
            total = record(core)
            assert sum(total.tiers["gold"].arrivals) == 1 and total.tiers["gold"].refused == 1
            assert core.scaled.plans["p"].latest.wanted == 1  # a replica of its first pool is wanted nevertheless
            core.pools["q"].endpoints.assign([])
            core.pools["q"].grpc.assign([])
            answered, about = await ask(kind, port, timeout_ms=50_000)
            assert not answered and about["reason"] == "infeasible" and int(about["retry-after"]) >= 1
            assert all(not gate.calls and not gate.held_bytes for gate in core.pools.values())


async def test_a_refusal_does_not_wait_for_the_body(names: Names) -> None:
    files = cold("start_ms = 60000\nhold_ms = 300000\ntier_hold_ms = { gold = 0 }")
    async with empty(files) as (port, core), Client(port) as client, Client(port) as other:
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {GOLD}\r\ncontent-length: 900000\r\n\r\n"
        client.writer.write(head.encode())
        reply = await client.reply()
        assert reply.status == 503 and reason(reply) == "infeasible" and reply.headers["retry-after"] == "60"
        other.send(INFER, b"x", key=BRONZE)  # its tier is held for longer than a start takes
        await until(lambda: parked(core) == 1)


async def test_a_tier_without_a_budget_waits_until_its_deadline(names: Names) -> None:
    files = cold("start_ms = 60000\ntier_hold_ms = { gold = 300000 }", tier="target_ms = 1\ngive_up_ms = 50")
    async with empty(files) as (port, core), Client(port) as client, Client(port) as other:
        client.send(INFER, b"x")
        await until(lambda: parked(core) == 1)
        reply = await other.ask(INFER, b"x", key=BRONZE)
        assert (reply.status, reason(reply)) == (502, "upstream_unreachable")
        assert 1 < int(reply.headers["retry-after"]) <= 60
        assert "gateway-cold-start;dur=" in reply.headers["server-timing"] and parked(core) == 1


async def test_starts_that_were_seen_replace_the_guess(names: Names) -> None:
    files = cold("start_ms = 60000\nhold_ms = 300000")
    async with empty(files) as (port, core), upstream() as up, Client(port) as client:
        cold_start, these = core.pools["p"].cold_start, core.pools["p"].endpoints
        assert cold_start is not None
        assert (await client.ask(INFER, b"x", headers="x-request-timeout-ms: 50000\r\n")).status == 503
        names.found = (("127.0.0.1", up.port),)
        await until(lambda: these.usable)
        took_s = cold_start.starts.quantile_s(0.5)
        assert cold_start.starts.count == 1 and took_s < 60.0
        names.found = ()
        await until(lambda: not these.usable)
        client.send(INFER, b"x", headers="x-request-timeout-ms: 280000\r\n")
        await until(lambda: parked(core) == 1)
        rest_s = cold_start.starts.rest_s(watched(core).queued_s)
        assert rest_s is not None and 0.0 < rest_s <= took_s + 1.0
        names.found = (("127.0.0.1", up.port),)
        assert (await client.reply()).status == 200
        await until(lambda: cold_start.starts.count == 2)


async def test_a_server_that_has_an_address_and_does_not_answer_is_waited_for(names: Names) -> None:
    """Such a server may come back at any moment, so no call is refused because a start would take too long."""
    files = cold("start_ms = 60000\nhold_ms = 300000", pool='probe = "/v2/health/ready"')
    async with upstream() as up, gateway(files) as (port, core), Client(port) as client:
        names.found = (("127.0.0.1", up.port),)
        these = core.pools["p"].endpoints
        await until(lambda: these.usable)
        these.note_reach(these[0], Reach.UNREACHABLE)
        these[0].probing = True  # a probe seems to be under way, so none finds the server
        client.send(INFER, b"x", headers="x-request-timeout-ms: 30000\r\n")
        await until(lambda: parked(core) == 1)
        these[0].probing = False
        assert (await client.reply()).status == 200


async def test_bodies_of_held_calls_are_bounded_as_they_come_in_the_order_of_tiers(names: Names) -> None:
    files = cold("start_ms = 60000\nhold_ms = 300000", pool="max_queue_bytes = 1000")
    async with empty(files) as (port, core), AsyncExitStack() as stack:
        gate = core.pools["p"]
        low, low2, high, high2, late = [await stack.enter_async_context(Client(port)) for _ in range(5)]
        low.send(INFER, bytes(400), key=BRONZE)
        await until(lambda: parked(core) == 1)
        low2.send(INFER, bytes(300), key=BRONZE)
        await until(lambda: parked(core) == 2)
        head = "POST {} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n\r\n"
        # too much: its tier may use three quarters of the byte budget
        late.writer.write(head.format(INFER, BRONZE, 100).encode() + bytes(99))
        reply = await late.reply()
        assert (reply.status, reason(reply)) == (503, "queue_full") and 1 < int(reply.headers["retry-after"]) <= 60
        high.writer.write(head.format(INFER, GOLD, 500).encode() + bytes(400))
        reply = await low2.reply()
        assert (reply.status, reason(reply)) == (503, "displaced") and gate.held_bytes == 800
        high2.send(INFER, bytes(700), key=GOLD)  # needs more bytes than all less urgent calls hold
        assert reason(await high2.reply()) == "queue_full" and parked(core) == 1
        high.writer.write(bytes(100))
        await until(lambda: parked(core) == 2)
        assert gate.held_bytes == 900
    await until(lambda: not gate.held_bytes)


async def test_held_calls_go_on_in_the_order_in_which_they_came(names: Names) -> None:
    """All of them are past their target, and waiting calls that are late are otherwise served newest first."""
    files = cold("start_ms = 60000\nhold_ms = 300000", tier="target_ms = 1\ngive_up_ms = 200000", max_inflight=1)
    async with empty(files) as (port, core), upstream() as up, AsyncExitStack() as stack:
        order: list[str] = []

        async def note(seen: Seen) -> bytes:
            order.append(seen.body.decode())
            return await up.ok(seen)

        up.answer = note
        clients = [await stack.enter_async_context(Client(port)) for _ in range(30)]
        for n, client in enumerate(clients):
            client.send(INFER, f"{n % 2}{n:03}".encode(), key=BRONZE if n % 2 else GOLD)
            await until(lambda n=n: parked(core) == n + 1)  # type: ignore[misc]
        names.found = (("127.0.0.1", up.port),)
        for client in clients:
            assert (await client.reply()).status == 200
        assert len(order) == 30
        for tier in "01":  # every twentieth turn is the lower tier's, so the order is checked for each tier
            mine = [body for body in order if body[0] == tier]
            assert mine == sorted(mine)


async def test_a_call_that_comes_after_the_first_server_goes_before_those_that_were_held(names: Names) -> None:
    """They have the rest of their hold; it has the time of its tier, also when its target has passed."""
    files = cold("start_ms = 60000\nhold_ms = 300000", tier="target_ms = 1\ngive_up_ms = 200000", max_inflight=1)
    async with empty(files) as (port, core), upstream() as up, AsyncExitStack() as stack:
        order: list[bytes] = []
        may = asyncio.Event()

        async def note(seen: Seen) -> bytes:
            order.append(seen.body)
            await may.wait()
            return await up.ok(seen)

        up.answer = note
        gate = core.pools["p"]
        clients = [await stack.enter_async_context(Client(port)) for _ in range(3)]
        for count, client in enumerate(clients[:2], 1):
            client.send(INFER, b"held", key=GOLD)
            await until(lambda count=count: parked(core) == count)  # type: ignore[misc]
        names.found = (("127.0.0.1", up.port),)
        await until(lambda: gate.admission.inflight == 1 and len(gate.admission.queue) == 1)
        clients[2].send(INFER, b"new", key=GOLD)
        await until(lambda: len(gate.admission.queue) == 2)
        late_s = min(each.late_s for each in gate.admission.queue.waiting(0))
        await until(lambda: monotonic() > late_s)
        may.set()
        for client in clients:
            assert (await client.reply()).status == 200
        assert order == [b"held", b"new", b"held"]


async def test_the_phase_of_a_start_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        api, where = await stack.enter_async_context(kubernetes(tmp_path))
        watch = partial(EndpointSlices, api=lambda: where, wait_s=0.001)
        monkeypatch.setattr(Watch, "watch_service", staticmethod(lambda name, changed: watch(name, changed=changed)))
        up = await stack.enter_async_context(upstream())
        ready = asyncio.Event()

        async def start(seen: Seen) -> bytes:
            loading = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
            return await up.ok(seen) if ready.is_set() else loading

        up.answer = start
        text = cold("start_ms = 60000\nhold_ms = 300000", pool='probe = "/v2/health/ready"')["all.toml"]
        text = text.replace(b'grpc_discover = "dns:pods:1"', b"")
        files = {"all.toml": text.replace(b"dns:pods:1", b"kubernetes:pods:%d" % up.port)}
        port, core = await stack.enter_async_context(gateway(files))
        client = await stack.enter_async_context(Client(port))
        registry = CollectorRegistry()
        registry.register(GatewayCollector(core))

        def phase() -> str:
            shown = str(live_queues(core)["p"]["cold_start"]["phase"])
            name = "oriel_gateway_cold_start_phase"
            for each in ("no_address", "starting", "loading", "ready"):
                assert registry.get_sample_value(name, {"pool": "p", "phase": each}) == (each == shown)
            return shown

        await until(lambda: core.pools["p"].endpoints.looked_up)
        client.send(INFER, b"x")
        await until(lambda: parked(core) == 1)
        queue = live_queues(core)["p"]["cold_start"]
        assert phase() == "no_address" and 0 < queue["expected_ms"] <= 60_000 and queue["starts"] == 0
        api.put(piece("a", endpoint("127.0.0.2", ready=False, pod="1")))  # nothing listens there
        await until(lambda: phase() == "starting")
        api.put(piece("a", endpoint("127.0.0.1", ready=False, pod="2")))
        await until(lambda: phase() == "loading")
        ready.set()
        assert (await client.reply()).status == 200 and phase() == "ready"
        queue = live_queues(core)["p"]["cold_start"]
        assert queue["elapsed_ms"] is None and queue["starts"] == 1 and queue["p50_ms"] < 60_000
        assert registry.get_sample_value("oriel_gateway_cold_starts_total", {"pool": "p"}) == 1.0
        assert isinstance(core.sink, ListSink)
        span = next(span for span in core.sink.spans if span.name == "queue")
        assert span.attributes["oriel.cold_start.phase"] == "no_address"
        held_ms = span.attributes["oriel.cold_start.held_ms"]
        assert isinstance(held_ms, float) and held_ms > 0.0


async def test_a_pool_without_grpc_servers_judges_no_http_head_for_it(names: Names) -> None:
    """Judging each HTTP head would cost a quarter of a small request. Calls over gRPC are judged when they have to
    wait.
    """
    async with upstream() as up, empty(cold("start_ms = 60000\nhold_ms = 1000")) as (port, core):
        gate = core.pools["p"]
        assert gate.slow_s == inf
        gate.endpoints.look_up_s = inf  # no look-up of the name takes the address away
        gate.endpoints.assign([("127.0.0.1", up.port)])
        assert gate.endpoints.usable and not gate.grpc.usable and gate.slow_s == 0.0
        answered, about = await ask("grpc", port)
        assert not answered and about["reason"] == "upstream_unreachable"


@pytest.mark.parametrize("status", [503, 404])
async def test_a_service_is_called_when_its_server_can_answer(names: Names, status: int) -> None:
    """Pools of services are probed as well: a logic server accepts connections before its workers are ready.

    A server of another make that does not know the path of the probe is used as soon as it answers.
    """
    text = cold("start_ms = 60000\nhold_ms = 300000")["all.toml"].replace(b'probe = ""\n', b"")
    text = text.replace(b'[[routes]]\nmodel = "*"', b'[[routes]]\nservice = "*"', 1)
    gate, probed = asyncio.Event(), asyncio.Event()

    async def start(seen: Seen) -> bytes:
        if not seen.head.startswith("GET /health/ready "):
            return await up.ok(seen)
        probed.set()
        refused = b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status
        return await up.ok(seen) if gate.is_set() else refused

    async with empty({"all.toml": text}) as (port, core), upstream() as up, Client(port) as client:
        up.answer = start
        client.send("/v1/services/mine", b"x")
        await until(lambda: parked(core) == 1)
        names.found = (("127.0.0.1", up.port),)
        if status == 503:
            await probed.wait()
            await until(lambda: core.pools["p"].endpoints[0].reach is Reach.NOT_READY)
            assert parked(core) == 1
            gate.set()
        assert (await client.reply()).status == 200


async def test_an_address_that_was_never_probed_ends_no_hold(names: Names) -> None:
    files = cold("start_ms = 60000\nhold_ms = 300000", pool='probe = "/v2/health/ready"')
    async with empty(files) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        client.send(INFER, b"x")
        await until(lambda: parked(core) == 1)
        these.assign([("127.0.0.1", 9)])
        assert not these.usable and parked(core) == 1
