"""When the longer deadline and the reserved bytes of a call end that is held for the first server of its pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_gateway.call.call import GatewayCall
from oriel_gateway.call.late import deadline_passed
from oriel_gateway.core import Gateway
from oriel_gateway.identity.tickets import Tickets

from ..waiting import until
from .cold_pools import Names, cold, empty, names, parked, watched
from .gate import INFER
from .grpc_stack import Backend
from .stack import BRONZE, GOLD, Client, Seen, digest, documents, gateway, grpc_server, upstream

__all__ = ["names"]

GIVE_UP_S = 100.0
HOLD = "start_ms = 60000\nhold_ms = 300000"
TIER = f"target_ms = 1\ngive_up_ms = {GIVE_UP_S * 1e3:g}"
SILVER = "key-silver"
MODELS = 'model = "digits"\npool = "q"'


def head(model: str, key: str, size: int) -> bytes:
    line = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{line}content-length: {size}\r\n\r\n".encode()


async def never_answers(seen: Seen) -> bytes:
    await asyncio.Event().wait()
    return b""


async def test_a_server_that_comes_while_the_body_does(names: Names) -> None:
    async with empty(cold(HOLD, tier=TIER)) as (port, core), upstream() as up, Client(port) as client:
        up.answer = never_answers
        gate = core.pools["p"]
        client.writer.write(head("digits", GOLD, 10) + b"12345")
        await until(lambda: gate.held_bytes == 5)
        names.found = (("127.0.0.1", up.port),)
        await until(lambda: gate.endpoints.usable)
        client.writer.write(b"67890")
        await until(lambda: gate.admission.inflight == 1)
        assert watched(core).deadline < monotonic() + GIVE_UP_S


async def test_calls_that_share_an_answer(names: Names) -> None:
    files = cold(HOLD, tier=TIER)
    shared = files["all.toml"].replace(b'model = "*"\npool = "p"', b'model = "*"\npool = "p"\ndeterministic = true')
    assert shared != files["all.toml"]
    async with empty({"all.toml": shared}) as (port, core), upstream() as up, Client(port) as client:
        up.answer = never_answers
        client.send(INFER, b"x")
        await until(lambda: parked(core) == 1)
        assert all(call.deadline > monotonic() + GIVE_UP_S for call in core.clock if isinstance(call, GatewayCall))
        names.found = (("127.0.0.1", up.port),)
        await until(lambda: core.pools["p"].admission.inflight == 1)
        assert any(call.deadline < monotonic() + GIVE_UP_S for call in core.clock if isinstance(call, GatewayCall))


async def test_a_call_is_held_when_its_body_is_here(names: Names) -> None:
    """Until its body has arrived, it has only the time that a client has to send a body."""
    async with empty(cold(HOLD, tier=TIER)) as (port, core), Client(port) as client:
        client.writer.write(head("digits", BRONZE, 500_000) + bytes(1000))
        await until(lambda: core.pools["p"].held_bytes == 1000)
        call = watched(core)
        assert call.deadline == call.received_s + GIVE_UP_S
        client.writer.write(bytes(499_000))
        await until(lambda: parked(core) == 1)
        assert call.deadline == call.received_s + 300.0


async def test_a_call_that_waits_for_a_permit_while_ordered_replicas_start(names: Names) -> None:
    """It is held for them as it would be for a first one."""
    async with empty(cold(HOLD, tier=TIER, max_inflight=1)) as (port, core), upstream() as up:
        async with Client(port) as one, Client(port) as two:
            up.answer = never_answers
            gate = core.pools["p"]
            names.found = (("127.0.0.1", up.port),)
            await until(lambda: gate.endpoints.usable)
            one.send(INFER, b"x")
            await until(lambda: gate.admission.inflight == 1)
            core.scaled.plans["p"].wake(2, 60.0)
            two.send(INFER, b"x")
            await until(lambda: len(gate.admission.queue) == 1)
            (ticket,) = gate.admission.queue.waiting(0)
            assert ticket.payload.deadline == ticket.payload.received_s + 300.0


@pytest.mark.parametrize(
    ("empty_pool", "own", "key", "waits"),
    [
        (MODELS, "", BRONZE, True),
        ('model = "digits"\npool = "p"\nfallback = ["q"]', "", BRONZE, True),
        ('model = "digits"\nsplit = [{ pool = "p", weight = 9 }, { pool = "q", weight = 1 }]', "", BRONZE, True),
        ('service = "others"\npool = "q"', "", BRONZE, False),
        (MODELS, 'engine = "vllm"', GOLD, False),
    ],
)
async def test_a_request_waits_for_models_that_it_may_call(
    names: Names, empty_pool: str, own: str, key: str, waits: bool
) -> None:
    """Services call no services, and engines of others call nothing."""
    async with upstream() as up, beside(up.port, empty_pool, own) as (port, core), Client(port) as client:
        up.answer = never_answers
        client.send("/v1/services/digits", b"{}", key=key)
        await until(lambda: core.pools["p"].admission.inflight == 1)
        call = watched(core)
        assert call.deadline == call.received_s + (300.0 if waits else GIVE_UP_S)


@pytest.mark.parametrize(
    ("headers", "bound"),
    [
        ("", "it had 300 s, as servers were starting; tier 'bronze' gives 100 s"),
        ("x-request-timeout-ms: 200000\r\n", "it had 200 s, as servers were starting; tier 'bronze' gives 100 s"),
        ("x-request-timeout-ms: 50000\r\n", "its client asked for 50 s, tier 'bronze' gives 100 s"),
    ],
)
async def test_the_error_says_how_long_a_request_could_wait_for_its_models(
    names: Names, headers: str, bound: str
) -> None:
    async with upstream() as up, beside(up.port, MODELS) as (port, core), Client(port) as client:
        up.answer = never_answers
        client.send("/v1/services/digits", b"{}", key=BRONZE, headers=headers)
        await until(lambda: core.pools["p"].admission.inflight == 1)
        call = watched(core)
        assert str(deadline_passed(call, call.state)).endswith(f": {bound}")


async def test_requests_that_wait_for_models_leave_a_quarter_of_the_permits_to_others(names: Names) -> None:
    """All but the most urgent ones, which nothing would be kept from."""
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(upstream())
        port, core = await stack.enter_async_context(beside(up.port, MODELS))
        up.answer = never_answers
        for number, key in enumerate([BRONZE] * 7 + [GOLD], 1):
            client = await stack.enter_async_context(Client(port))
            client.send("/v1/services/digits", b"{}", key=key)
            await until(lambda number=number: core.pools["p"].admission.inflight == number)  # type: ignore[misc]
        calls = [each for each in core.clock if isinstance(each, GatewayCall)]
        long = [each.tenant.name for each in calls if each.deadline == each.received_s + 300.0]
        assert sorted(long) == ["b"] * 6 + ["g"]


def beside(port: int, route: str, own: str = "") -> AbstractAsyncContextManager[tuple[int, Gateway]]:
    """Return a gateway with ticket keys: pool `p` has a server, and a pool beside it that scales has none."""
    found = 'discover = "dns:pods:1"\ngrpc_discover = "dns:pods:1"'
    other = f'[pools.q]\n{found}\nprobe = ""\n[pools.q.scaling]\nminimum = 0\nmaximum = 9\n{HOLD}\n'
    extra = f"{other}[[routes]]\n{route}\n"
    text = documents([port], pool=f'probe = ""\nlearn_concurrency = false\n{own}', extra=extra)["all.toml"]
    return with_tickets({"all.toml": text.replace(b"target_ms = 2000", TIER.encode())})


@asynccontextmanager
async def with_tickets(files: dict[str, bytes]) -> AsyncIterator[tuple[int, Gateway]]:
    async with gateway(files) as (port, core):
        core.callers.tickets = Tickets([b"k" * 32])
        await until(lambda: core.pools["q"].endpoints.looked_up)
        yield port, core


class MoreUrgent:
    """A waiter that needs the place of another one."""

    tenant: Any = SimpleNamespace(tier=SimpleNamespace(band=0, name="gold"), name="g", weight=1.0)
    deadline = due_s = 1e6

    def unparked(self) -> None: ...
    def displaced(self) -> None: ...


async def test_a_displaced_call_has_the_time_of_its_tier_in_the_next_pool(names: Names) -> None:
    files = cold(HOLD, tier=TIER)["all.toml"].decode().replace('pool = "p"\n', 'pool = "p"\nfallback = ["q"]\n')
    async with upstream() as up:
        up.answer = never_answers
        address = f"127.0.0.1:{up.port}"
        files += f'[pools.q]\nprobe = ""\nendpoints = ["{address}"]\ngrpc_endpoints = ["{address}"]\n'
        async with empty({"all.toml": files.encode()}) as (port, core), Client(port) as client:
            q = core.pools["q"]
            q.endpoints.assign([])
            client.send(INFER, b"x", key=BRONZE)
            await until(lambda: parked(core) == 1)
            call = watched(core)
            q.endpoints.assign([("127.0.0.1", up.port)])
            endpoints = core.pools["p"].endpoints
            endpoints.slots.bound = 1
            endpoints.park(MoreUrgent())
            await until(lambda: q.admission.inflight == 1)
            assert call.deadline < monotonic() + GIVE_UP_S


def two_pools(a: int, b: int, grpc: int) -> dict[str, bytes]:
    """Documents of two pools that are each other's fallback."""
    keys = {"gold": GOLD, "silver": SILVER, "bronze": BRONZE}
    text = ""
    for band, (tier, key) in enumerate(keys.items()):
        text += f"[tiers.{tier}]\nband = {band}\ntarget_ms = 2000\ngive_up_ms = 60000\n"
        text += f'[tenants.{tier}]\ntier = "{tier}"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest(key)}" }}]\n'
    for name, port, bounds in (("a", a, (1000, 8, 9)), ("b", b, (4000, 1, 1))):
        text += f'[pools.{name}]\nprobe = ""\nendpoints = ["127.0.0.1:{port}"]\ngrpc_endpoints = ["127.0.0.1:{grpc}"]\n'
        text += "learn_concurrency = false\nmax_body_bytes = 1000\n"
        text += "max_queue_bytes = {}\nmax_inflight = {}\nmax_queue = {}\n".format(*bounds)
    text += '[[routes]]\nmodel = "x"\npool = "a"\nfallback = ["b"]\n'
    return {"all.toml": (text + '[[routes]]\nmodel = "y"\npool = "b"\nfallback = ["a"]\n').encode()}


@pytest.mark.timeout(60)
async def test_pools_that_displace_calls_into_each_other_do_not_stop_the_loop() -> None:
    """A displaced call goes to the other pool, where it may displace one that comes here. The bytes that the first one
    left are taken by then.
    """
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(upstream()) for _ in range(2)]
        one.answer = other.answer = never_answers
        grpc = await stack.enter_async_context(grpc_server(Backend()))
        port, core = await stack.enter_async_context(gateway(two_pools(one.port, other.port, grpc)))
        a, b = core.pools["a"], core.pools["b"]
        a.grpc.assign([])
        b.grpc.assign([])
        clients = [await stack.enter_async_context(Client(port)) for _ in range(4)]
        clients[0].send("/v2/models/y/infer", b"x", key=BRONZE)
        await until(lambda: b.admission.inflight == 1)
        clients[3].writer.write(head("x", GOLD, 300) + bytes(299))
        await until(lambda: a.held_bytes == 299)
        channel = await stack.enter_async_context(aio.insecure_channel(f"127.0.0.1:{port}"))
        message = service_pb2.ModelInferRequest(model_name="x", id="i" * 380).SerializeToString()
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        waiting = method(message, metadata=(("authorization", f"Bearer {SILVER}"),))
        await until(lambda: a.grpc.parked == 1)
        clients[1].writer.write(head("y", BRONZE, 400))
        await until(lambda: _begun(core, "bronze") == 2)
        clients[1].writer.write(bytes(400))
        await until(lambda: len(b.admission.queue) == 1)
        b.grpc.assign([("127.0.0.1", grpc)])
        clients[2].writer.write(head("x", GOLD, 500))
        await until(lambda: _begun(core, "gold") == 2)
        clients[2].writer.write(bytes(500))
        reply = await clients[1].reply()
        assert (reply.status, waiting.done()) == (503, False)
        await until(lambda: a.admission.inflight == 1)
        waiting.cancel()


def _begun(core: Gateway, tenant: str) -> int:
    return sum(call.tenant.name == tenant for call in core.clock if isinstance(call, GatewayCall))
