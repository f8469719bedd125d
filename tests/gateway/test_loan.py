"""Streams that wait for their clients keep no permit from others, and queue for it when they go on."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from oriel_gateway import loan as loan_module
from oriel_gateway.core import Gateway
from oriel_gateway.loan import Loan
from oriel_gateway.pools import PoolGate
from oriel_gateway.targets import Target, resolve_grpc
from oriel_policies.documents import Tenant, compile_documents
from oriel_policies.queue import Ticket
from oriel_policies.routing import RouteTable

from .stack import BRONZE, GOLD, Client, Seen, documents, gateway, upstream
from .test_ingress_grpc import Backend, idle, stack
from .test_ingress_http import INFER, settle
from .test_stream_limits import STREAM, infer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan_module, "LENT_AFTER_S", 0.02)


async def test_a_permit_is_lent_once_and_taken_back_once() -> None:
    snapshot = compile_documents(documents([1], max_inflight=1))
    gate = PoolGate(snapshot.pools["p"])
    assert gate.admission.enter()
    loan = Loan(gate, snapshot.tenants["limited"], stream=True)
    loan.busy()
    assert gate.admission.inflight == 1
    for _ in range(2):
        loan.idle()
        loan.idle()
        await settle(lambda: loan.lent)
        assert gate.admission.inflight == 0
        loan.busy()
        loan.busy()
        assert gate.admission.inflight == 1 and not loan.lent
    loan.idle()
    loan.busy()  # too short a pause to lend anything
    await asyncio.sleep(0.05)
    assert gate.admission.inflight == 1
    loan.idle()
    await settle(lambda: loan.lent)
    assert loan.end() > 0.0 and gate.admission.inflight == 1
    loan.idle()
    assert loan.end() > 0.0 and gate.admission.inflight == 1
    await asyncio.sleep(0.05)
    assert gate.admission.inflight == 1, "an ended call lends nothing"
    await gate.close()


class Messages:
    """The client's half of a stream."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message = await self._queue.get()
        if message is None:
            raise StopAsyncIteration
        return message

    def send(self, message: bytes | None) -> None:
        self._queue.put_nowait(message)


async def opened(stack: AsyncExitStack, address: str, key: str) -> tuple[Messages, Any]:
    """A stream with one message and its answer behind it."""
    channel = await stack.enter_async_context(
        aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    )
    messages = Messages()
    call = channel.stream_stream(STREAM, None, None)(messages, metadata=(("x-api-key", key),))
    messages.send(infer("digits"))
    assert await call.read() is not aio.EOF
    return messages, call


async def test_idle_streams_of_a_low_tier_keep_no_permit_from_a_higher_one() -> None:
    async with AsyncExitStack() as clients:
        async with stack(Backend(), max_inflight=2) as (address, core):
            held = [await opened(clients, address, BRONZE) for _ in range(2)]
            await settle(lambda: core.pools["p"].admission.inflight == 0)
            async with aio.insecure_channel(address) as channel:
                unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
                await unary(infer("digits"), metadata=(("x-api-key", GOLD),), timeout=60)
            for messages, call in held:  # and they go on
                messages.send(infer("digits"))
                assert await call.read() is not aio.EOF
                messages.send(None)
                assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await settle(lambda: idle(core))


async def test_streams_that_rest_but_shortly_lend_to_a_higher_tier_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small message every 0.4 s kept a permit for ever. Their own tier waits as before: more answers may come."""
    monkeypatch.setattr(loan_module, "LENT_AFTER_S", 1000.0)
    async with AsyncExitStack() as clients:
        async with stack(Backend(), max_inflight=2) as (address, core):
            held = [await opened(clients, address, BRONZE) for _ in range(2)]
            admission = core.pools["p"].admission
            channel = await clients.enter_async_context(aio.insecure_channel(address))
            unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
            own = asyncio.ensure_future(unary(infer("digits"), metadata=(("x-api-key", BRONZE),), timeout=60))
            await settle(lambda: len(admission.queue) == 1)
            for _ in range(3):
                await unary(infer("digits"), metadata=(("x-api-key", GOLD),), timeout=60)
                for messages, call in held:
                    messages.send(infer("digits"))
                    assert await call.read() is not aio.EOF
            for messages, call in held:
                messages.send(None)
                assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await own
            await settle(lambda: idle(core))


@asynccontextmanager
async def waiting_stream(
    callers: int,
) -> AsyncIterator[tuple[Backend, Gateway, Messages, Any, list[asyncio.Task[bytes]]]]:
    """A stream that lent the only permit and wants to go on, behind so many unary calls; the first is at the server."""
    backend = Backend()
    async with AsyncExitStack() as clients:
        async with stack(backend, max_inflight=1) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            admission = core.pools["p"].admission
            await settle(lambda: admission.inflight == 0)
            backend.hold = asyncio.Event()
            async with aio.insecure_channel(address) as channel:
                unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)

                async def one() -> bytes:
                    answer: bytes = await unary(infer("digits"), metadata=(("x-api-key", GOLD),), timeout=60)
                    return answer

                busy = [asyncio.create_task(one()) for _ in range(callers)]
                await settle(lambda: len(backend.seen) == 2 and len(admission.queue) == callers - 1)
                messages.send(infer("digits"))
                await settle(lambda: len(admission.queue) == callers)
                yield backend, core, messages, call, busy
            await settle(lambda: idle(core) and admission.inflight == 0)


async def test_a_stream_that_goes_on_waits_for_its_turn() -> None:
    async with waiting_stream(2) as (backend, _, messages, call, busy):
        assert backend.hold is not None
        backend.hold.set()
        assert await call.read() is not aio.EOF
        await asyncio.gather(*busy)
        assert [kind for kind, *_ in backend.seen] == [
            "ModelStreamInfer",
            "ModelInfer",
            "ModelInfer",
            "ModelStreamInfer",
        ]
        messages.send(None)
        assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK


async def test_a_stream_that_waits_for_its_turn_leaves_the_queue_with_its_client() -> None:
    async with waiting_stream(1) as (backend, core, _, call, busy):
        assert backend.hold is not None
        call.cancel()
        await settle(lambda: len(core.pools["p"].admission.queue) == 0)
        backend.hold.set()
        await asyncio.gather(*busy)


class Mute(Backend):
    """Its model `mute` answers nothing, as a decoupled one may; or slowly: when `late` is set."""

    late: asyncio.Event | None = None

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            request = service_pb2.ModelInferRequest.FromString(message)
            self.seen.append(("ModelStreamInfer", request, {}, 0.0))
            if request.model_name == "mute":
                if self.late is None:
                    continue
                await self.late.wait()
            answer = service_pb2.ModelInferResponse(model_name=request.model_name)
            yield service_pb2.ModelStreamInferResponse(infer_response=answer).SerializeToString()


def with_mute(tier: str = "bronze") -> Any:
    def files(port: int) -> dict[str, bytes]:
        text = documents([port], max_inflight=2)["all.toml"]
        text = text.replace(b'models = ["digits"]', b'models = ["digits", "mute"]')
        return {"all.toml": text.replace(b'tier = "bronze"', f'tier = "{tier}"'.encode())}

    return files


@asynccontextmanager
async def mute_streams(
    backend: Backend, tier: str, first: str
) -> AsyncIterator[tuple[str, Gateway, list[tuple[Messages, Any]]]]:
    """Both permits are those of streams whose latest message stays unanswered."""
    async with AsyncExitStack() as clients:
        async with stack(backend, files=with_mute(tier)) as (address, core):
            held = []
            for _ in range(2):
                channel = await clients.enter_async_context(
                    aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
                )
                messages = Messages()
                call = channel.stream_stream(STREAM, None, None)(messages, metadata=(("x-api-key", BRONZE),))
                messages.send(infer(first))
                if first == "digits":
                    assert await call.read() is not aio.EOF
                    messages.send(infer("mute"))
                held.append((messages, call))
            gate = core.pools["p"]
            await settle(lambda: len(gate.lendable) == 2)
            assert gate.admission.inflight == 2, "nobody waits: they keep their permits"
            yield address, core, held
        await settle(lambda: idle(core) and not gate.lendable and not gate.owed)


def asks(address: str, key: str) -> asyncio.Task[Any]:
    async def one() -> Any:
        async with aio.insecure_channel(address) as channel:
            unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
            return await unary(infer("digits"), metadata=(("x-api-key", key),), timeout=60)

    return asyncio.create_task(one())


@pytest.mark.parametrize("first", ["digits", "mute"])
@pytest.mark.parametrize("tier", ["bronze", "gold"])
async def test_streams_whose_messages_are_never_answered_keep_no_permit_from_others(tier: str, first: str) -> None:
    async with mute_streams(Mute(), tier, first) as (address, core, held):
        gate = core.pools["p"]
        for _ in range(3):
            await asks(address, GOLD)
            await settle(lambda: gate.admission.inflight == 2 and not gate.owed)
        same = asks(address, BRONZE)  # but their own tenant has had its permits
        await settle(lambda: len(gate.admission.queue) == 1)
        for messages, _ in held:
            messages.send(infer("mute"))  # which is no sign of work
        await asks(address, GOLD)
        assert not same.done() and gate.admission.inflight == 2
        for messages, call in held:
            messages.send(infer("digits"))  # and they go on
            assert await call.read() is not aio.EOF
            messages.send(None)
            assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
        await same


async def test_slow_messages_get_their_tenant_no_more_of_the_pool() -> None:
    """Their permits are lent while they are at work; what comes back is theirs again, not the next one's."""
    backend = Mute()
    backend.late = asyncio.Event()
    async with mute_streams(backend, "bronze", "digits") as (address, core, held):
        gate = core.pools["p"]
        more = [asks(address, BRONZE) for _ in range(2)]
        await settle(lambda: len(gate.admission.queue) == 2)
        backend.hold = asyncio.Event()
        urgent = [asks(address, GOLD) for _ in range(2)]
        await settle(lambda: len(backend.seen) == 6 and gate.admission.inflight == 2 and len(gate.owed) == 2)
        assert [metadata["x-oriel-tier"] for _, _, metadata, _ in backend.seen[4:]] == ["gold", "gold"]
        backend.hold.set()
        await asyncio.gather(*urgent)
        await settle(lambda: not gate.owed)
        assert len(backend.seen) == 6 and gate.admission.inflight == 2 and len(gate.admission.queue) == 2
        backend.late.set()
        for messages, call in held:
            assert await call.read() is not aio.EOF
            messages.send(None)
        await asyncio.gather(*more)


class Twice(Backend):
    """It answers a message once more when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.more = asyncio.Event()

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            async for answer in super().stream(_one(message), context):
                yield answer
                await self.more.wait()
                yield answer


async def _one(message: bytes) -> AsyncIterator[bytes]:
    yield message


async def test_an_answer_that_overtakes_a_streams_turn_takes_one_permit() -> None:
    """A stream that queues for the permit it lent hears of an earlier message: it waited for itself, or had two."""
    backend = Twice()
    async with AsyncExitStack() as clients:
        async with stack(backend, max_inflight=1) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            admission = core.pools["p"].admission
            await settle(lambda: admission.inflight == 0)
            backend.hold = asyncio.Event()
            urgent = asks(address, GOLD)
            await settle(lambda: len(backend.seen) == 2)
            messages.send(infer("digits"))
            await settle(lambda: len(admission.queue) == 1)
            backend.more.set()
            for _ in range(3):  # while the other call still has the only permit
                assert await call.read() is not aio.EOF
            assert not urgent.done()
            messages.send(None)
            assert await call.read() is aio.EOF
            backend.hold.set()
            await urgent
            await settle(lambda: idle(core))


SIZE = 8 << 20


@asynccontextmanager
async def reader(port: int, key: str) -> AsyncIterator[socket.socket]:
    """Who asks for 8 MiB and reads nothing of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", port))
    raw.sendall(f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 3\r\n\r\nbig".encode())
    raw.setblocking(False)
    try:
        yield raw
    finally:
        raw.close()


async def big_or_small(seen: Seen) -> bytes:
    data = bytes(SIZE) if seen.body == b"big" else b"ok"
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


async def test_a_client_that_does_not_read_keeps_no_permit_from_others() -> None:
    async with upstream() as up, gateway(documents([up.port], max_inflight=1)) as (port, core):
        up.answer = big_or_small
        admission = core.pools["p"].admission
        async with reader(port, BRONZE) as raw:
            await settle(lambda: len(up.seen) == 1 and admission.inflight == 0)
            async with Client(port) as client:
                assert (await client.ask(INFER, b"x", key=GOLD)).status == 200
            loop, got = asyncio.get_running_loop(), 0
            while got < SIZE:
                got += len(await loop.sock_recv(raw, 1 << 20))
        await settle(lambda: idle(core) and admission.inflight == 0)


@pytest.mark.parametrize("asks_before", [False, True])
@pytest.mark.parametrize("tier", ["bronze", "gold"])
async def test_another_tenant_has_the_permit_of_who_does_not_read_at_once(
    monkeypatch: pytest.MonkeyPatch, tier: str, asks_before: bool
) -> None:
    """It waited as long as a stream may pause, 48 times as long as alone; the reader's own tenant still does."""
    monkeypatch.setattr(loan_module, "LENT_AFTER_S", 1000.0)
    async with upstream() as up:
        text = documents([up.port], max_inflight=1)["all.toml"]
        text = text.replace(b'tier = "bronze"', f'tier = "{tier}"'.encode())
        async with gateway({"all.toml": text}) as (port, core):
            gate = core.pools["p"]
            go = asyncio.Event()

            async def answer(seen: Seen) -> bytes:
                if seen.body == b"big":
                    await go.wait()
                return await big_or_small(seen)

            up.answer = answer
            async with reader(port, BRONZE), Client(port) as same, Client(port) as other:
                await settle(lambda: len(up.seen) == 1)
                same.send(INFER, b"own", key=BRONZE)
                await settle(lambda: len(gate.admission.queue) == 1)
                if asks_before:
                    other.send(INFER, b"x", key=GOLD)
                    await settle(lambda: len(gate.admission.queue) == 2)
                go.set()
                if not asks_before:
                    await settle(lambda: len(gate.lendable) == 1)
                    assert len(up.seen) == 1 and len(gate.admission.queue) == 1
                    other.send(INFER, b"x", key=GOLD)
                replies = asyncio.gather(other.reply(), same.reply())
                assert [reply.status for reply in await replies] == [200, 200]
                assert not gate.lendable
            await settle(lambda: idle(core) and gate.admission.inflight == 0)


def test_what_was_lent_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that a client did not read are neither in the charge nor in how long calls are thought to take."""
    gate = SimpleNamespace(admission=SimpleNamespace(inflight=1), pump=lambda: None, lendable={}, owed={})
    now = 100.0
    monkeypatch.setattr(loan_module, "monotonic", lambda: now)
    loan = Loan(cast(PoolGate, gate), cast(Tenant, None), stream=True)
    loan._since_s = now
    now += 1.0
    loan._look()
    assert loan.lent and gate.admission.inflight == 0
    now += 5.0
    assert loan.end() == 5.0 and gate.admission.inflight == 1


class _Call:
    """One at a gate: a stream or a short call."""

    def __init__(self, gate: PoolGate, tenant: Tenant, target: Target, stream: bool) -> None:
        self.gate, self.tenant, self.target = gate, tenant, target
        self.ticket: Ticket | None = None
        self.loan = Loan(gate, tenant, stream=True) if stream else None
        self.has = gate.admission.enter()
        if not self.has:
            self.ticket = gate.wait(self, tenant, target, received_s=0.0, deadline=1e12, size_bytes=0)
            gate.pump()

    def admitted(self) -> None:
        self.has = True

    def displaced(self) -> None:
        raise AssertionError

    def silent(self) -> None:
        """What its timer would find."""
        if self.has and self.loan is not None and not self.loan.lent:
            self.loan._moved_s, self.loan._since_s = 1e-9, 0.0
            self.loan._look()

    def answered(self) -> None:
        if self.has and self.loan is not None:
            self.loan.busy()

    def end(self) -> None:
        if self.has:
            if self.loan is not None:
                self.loan.end()
            self.gate.leave(self.target, self.tenant, self.ticket, 0.01, -1, -1, True)
        else:
            assert self.ticket is not None and self.gate.forget(self.ticket)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stream", "stream", "call", "silent", "silent", "answered", "end", "end"]),
            st.integers(0, 2),
            st.integers(0, 30),
        ),
        max_size=120,
    )
)
def test_whoever_is_silent_the_permits_are_right(operations: list[tuple[str, int, int]]) -> None:
    """Every permit is somebody's, none is free while anybody waits, and the lowest tier has only the pool's."""
    text = documents([1], max_inflight=3)["all.toml"]
    snapshot = compile_documents({"all.toml": text})
    gate = PoolGate(snapshot.pools["p"])
    tenants = sorted(snapshot.tenants.values(), key=lambda each: each.tier.band)
    assert {each.tier.name for each in tenants} == {"gold", "bronze"}
    target = resolve_grpc("model", "digits", "", "ModelStreamInfer", tenants[0], RouteTable(snapshot.routes))
    calls: list[_Call] = []
    for what, whose, number in operations:
        if what in ("stream", "call"):
            calls.append(_Call(gate, tenants[whose % len(tenants)], target, what == "stream"))
        elif calls:
            call = calls[number % len(calls)]
            if what == "end":
                calls.remove(call)
                call.end()
            else:
                getattr(call, what)()
        lent = [call for call in calls if call.loan is not None and call.loan.lent]
        assert gate.admission.inflight == sum([call.has for call in calls]) - len(lent)
        assert set(gate.owed) == {call.loan for call in lent}
        assert sum([call.has for call in calls if call.tenant is tenants[-1]]) <= 3
        waiting = [call for call in calls if not call.has]
        assert len(waiting) == len(gate.admission.queue)
        if waiting or gate.owed:
            assert gate.admission.inflight >= 3
        urgent = min([call.tenant.tier.band for call in waiting], default=9)
        assert not [each for each in gate.lendable if each.tenant.tier.band > urgent], "it would be lent"
    for call in calls:
        call.end()
    assert not gate.owed and not gate.lendable and gate.admission.inflight == 0
