"""The queue on the whole path: what is refused as infeasible, what the pool holds, how long a stream may last."""

import asyncio
import json
from collections.abc import AsyncIterator
from time import monotonic

import grpc
import pytest
from tritonclient.grpc import service_pb2

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome
from oriel_gateway.pools.demand import PoolDemand
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import resolve
from oriel_policies.documents import compile_documents
from oriel_policies.promise.routing import RouteTable
from oriel_policies.waiting.backlog import Backlog

from ..waiting import until
from .documents import TIER, written
from .gate import INFER, Gate, idle
from .grpc_stack import Backend, headers, stack
from .stack import BRONZE, GOLD, Client, Seen, Upstream, documents, gateway, upstream

WORK = "model:/v2/models/digits/infer"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def seen_before(core: Gateway, work: str, seconds: float, *, fastest_s: float = 0.0) -> None:
    """Feed the service-time statistics with many small calls that took so long."""
    gate = core.pools["p"]
    for size in (1, 4):
        for _ in range(60):
            gate._time(work, size, seconds)
    if fastest_s:
        gate._times[work].fastest_s = fastest_s


async def test_a_deadline_that_no_call_ever_met_is_refused_before_the_body(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        seen_before(core, WORK, 0.5)
        assert (await client.ask(INFER, b"body", headers="x-request-timeout-ms: 1900\r\n")).status == 200
        core.pools["p"]._times[WORK].fastest_s = 0.5  # without the call above, this would be the fastest one
        core.pools["p"].count_demand(demand := PoolDemand(monotonic(), lambda: None))
        client.writer.write(
            b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-gold\r\n"
            b"x-request-timeout-ms: 100\r\ncontent-length: 5000\r\n\r\n"
        )
        reply = await client.reply()
        assert reply.status == 504 and json.loads(reply.body)["reason"] == "deadline_too_short"
        assert "retry-after" not in reply.headers and len(up.seen) == 1
        assert not demand.record(0, monotonic()).tiers, "no replica could answer it in time"
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        seen_before(core, WORK, 0.5, fastest_s=0.05)
        core.pools["p"].count_demand(demand := PoolDemand(monotonic(), lambda: None))
        reply = await client.ask(INFER, b"body", headers="x-request-timeout-ms: 100\r\n")
        assert reply.status == 503 and json.loads(reply.body)["reason"] == "infeasible"
        assert 1 <= int(reply.headers["retry-after"]) <= 60 and len(up.seen) == 1
        assert core.records.stats.refusals[Outcome.INFEASIBLE] == 1 and idle(core)
        tier = demand.record(0, monotonic()).tiers["gold"]
        assert sum(tier.arrivals) == tier.refused == 1, "its servers may be slow because there are too few of them"


async def test_a_call_that_would_wait_past_its_deadline_is_refused_at_once(up: Upstream) -> None:
    gate = Gate()
    up.answer = gate
    async with gateway(documents([up.port], max_inflight=1)) as (port, core):
        queue = core.pools["p"].admission.queue
        async with Client(port) as a, Client(port) as b, Client(port) as c, Client(port) as d:
            a.send(INFER, b"x")
            await until(lambda: len(gate.order) == 1)
            b.send(INFER, b"x")
            await until(lambda: len(queue) == 1)
            slow = Backlog()
            slow.turn_s, slow.turns = 20.0, 100
            queue._bands[0].flows["g"].backlog = slow
            reply = await c.ask(INFER, b"x")
            assert reply.status == 503 and json.loads(reply.body)["reason"] == "infeasible"
            assert reply.headers["retry-after"] == "20" and len(queue) == 1
            d.send(INFER, b"x", key=BRONZE)  # nothing is known of how long this tenant's turns take
            await until(lambda: len(queue) == 2)
            for _ in range(3):
                gate.go.release()
            assert [(await each.reply()).status for each in (a, b, d)] == [200] * 3
        assert idle(core)


async def test_bytes_that_wait_are_bounded_and_a_higher_tier_displaces(up: Upstream) -> None:
    gate = Gate()
    up.answer = gate
    files = written(documents([up.port], max_inflight=1), "max_queue = 100", "max_queue = 100\nmax_queue_bytes = 1000")
    async with gateway(files) as (port, core):
        async with Client(port) as a, Client(port) as b, Client(port) as c, Client(port) as d:
            a.send(INFER, b"x")
            await until(lambda: len(gate.order) == 1)
            b.send(INFER, bytes(700), key=BRONZE)
            await until(lambda: len(core.pools["p"].admission.queue) == 1)
            full = await c.ask(INFER, bytes(700), key=BRONZE)
            assert full.status == 503 and json.loads(full.body)["reason"] == "queue_full"
            d.send(INFER, bytes(700), key=GOLD)
            lost = await b.reply()
            assert lost.status == 503 and json.loads(lost.body)["reason"] == "displaced"
            gate.go.release()
            gate.go.release()
            assert (await a.reply()).status == (await d.reply()).status == 200
        assert idle(core)


async def test_load_reports_pass_in_neither_direction(up: Upstream) -> None:
    async def answer(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\nendpoint-load-metrics: TEXT cpu_utilization=0.2\r\ncontent-length: 0\r\n\r\n"

    up.answer = answer
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        found = await client.ask(INFER, b"x", headers="endpoint-load-metrics-format: text\r\n")
        assert "endpoint-load-metrics" not in found.headers and up.seen[0].get("endpoint-load-metrics-format") is None


@pytest.mark.parametrize("learn", [True, False])
def test_what_waits_in_the_pool_is_unlearned(learn: bool) -> None:
    """A server answers one call every 10 ms, however many it has: two permits are enough."""
    text = documents([1], max_inflight=16)
    snapshot = compile_documents(written(text, "max_queue", f"learn_concurrency = {str(learn).lower()}\nmax_queue"))
    tenant = snapshot.tenants["g"]
    target = resolve("POST", INFER, "", tenant, RouteTable(snapshot.routes))
    now = 1000.0
    gate = PoolGate(snapshot.pools["p"], clock=lambda: now)
    running: list[float] = []

    class Waiting:
        def admitted(self) -> None:
            running.append(now)

        def displaced(self) -> None:
            raise AssertionError("there is room")

    for _ in range(50):
        gate.join_queue(Waiting(), tenant, target, received_s=now, deadline=now + 60.0, size_bytes=1)
    gate.pump()
    for _ in range(4000):
        now += 0.01
        began = running.pop(0)
        gate.join_queue(Waiting(), tenant, target, received_s=now, deadline=now + 60.0, size_bytes=1)
        gate.release_permit(target.counted, now - began, True)
    assert gate.admission.limit == gate.admission.inflight == len(running)
    if learn:
        assert gate.learned is not None and gate.learned.base <= 3
    else:
        assert gate.admission.limit == 16


@pytest.mark.parametrize("rule", ["stream_idle_ms = 40", "stream_idle_ms = 30\nstream_max_ms = 60"])
async def test_a_stream_ends_as_its_tier_says(up: Upstream, rule: str) -> None:
    """The first stream falls silent; the second one keeps sending."""
    talks = "stream_max_ms" in rule
    stop, stopped = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        while talks and not stop.is_set():
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.01)
        await stop.wait()
        writer.close()
        stopped.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with gateway(written(documents([port]), TIER, f"{TIER}\n{rule}")) as (gateway_port, core):
        async with Client(gateway_port) as client:
            client.send(INFER, b"")
            async with asyncio.timeout(60):
                await client.reader.readuntil(b"first")
                try:
                    await client.reader.read(-1)  # blocks until the gateway closes the connection
                except ConnectionError:
                    pass
        assert idle(core)
        assert [outcome for _, _, _, outcome, _ in core.records.stats.series] == [Outcome.DEADLINE_EXCEEDED]
        stop.set()
        await stopped.wait()
    server.close()


class Silent(Backend):
    """A stream that sends one piece and then nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.silence = asyncio.Event()

    async def stream(self, messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for message in super().stream(messages, context):
            yield message
            await self.silence.wait()


async def test_a_silent_grpc_stream_ends_as_its_tier_says(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Silent()
    async with stack(backend) as (address, core):
        tier = core.snapshot.tiers["gold"]
        object.__setattr__(tier, "stream_idle_s", 0.05)
        request = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)(
                metadata=tuple(headers(GOLD).items())
            )
            await call.write(request)
            assert await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: core.pools["p"].admission.inflight == 0 and not len(core.clock))


async def test_grpc_is_judged_by_the_same_rules() -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        seen_before(core, "model:digits/ModelInfer", 1.9)
        request = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        async with grpc.aio.insecure_channel(address) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
            metadata = tuple(headers(GOLD).items())
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await infer(request, timeout=1.8, metadata=metadata)
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not backend.seen
            assert ("x-oriel-reason", "deadline_too_short") in tuple(raised.value.trailing_metadata() or ())


def test_a_pool_that_is_not_full_gets_its_permits_back_after_an_incident() -> None:
    snapshot = compile_documents(documents([1, 2, 3], max_inflight=16))
    tenant = snapshot.tenants["g"]
    target = resolve("POST", INFER, "", tenant, RouteTable(snapshot.routes))
    now = 1000.0
    gate = PoolGate(snapshot.pools["p"], clock=lambda: now)
    assert gate.learned is not None
    for _ in range(2000):
        now += 0.1
        gate.learned.note_finished(0.05, now, good=False, late=True)
    gate.admission.limit = gate.learned.limit
    assert gate.admission.limit == 3, "one for each server"
    for _ in range(100):
        now += 0.1
        assert gate.admission.acquire()
        gate.release_permit(target.counted, 0.05, True)
    assert gate.admission.limit == 8
