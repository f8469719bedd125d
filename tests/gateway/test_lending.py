"""Streams that wait for their clients keep no permit from others, and queue for it when they go on."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from oriel_gateway.admin.queues import live_queues
from oriel_gateway.core import Gateway
from oriel_gateway.pools import lending as lending_module
from oriel_gateway.pools.lending import PermitLending
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target, resolve_grpc
from oriel_policies.documents import Tenant, compile_documents
from oriel_policies.exchanges import Exchange, Habits
from oriel_policies.queue import Ticket
from oriel_policies.routing import RouteTable

from ..waiting import until
from .gate import INFER
from .grpc_stack import Backend, idle, stack
from .grpc_stream_calls import STREAM, infer
from .stack import BRONZE, GOLD, Client, Seen, documents, gateway, upstream


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_module, "SUSPEND_AFTER_S", 0.02)


async def test_a_permit_is_suspended_once_and_resumed_once() -> None:
    snapshot = compile_documents(documents([1], max_inflight=1))
    gate = PoolGate(snapshot.pools["p"])
    assert gate.admission.enter()
    lending = PermitLending(gate, snapshot.tenants["limited"], Exchange(Habits(), "t"))
    lending.resume()
    assert gate.admission.inflight == 1
    for _ in range(2):
        lending.wait_for_client()
        lending.wait_for_client()
        await until(lambda: lending.suspended)
        assert gate.admission.inflight == 0
        lending.resume()
        lending.resume()
        assert gate.admission.inflight == 1 and not lending.suspended
    lending.wait_for_client()
    lending.resume()  # too short a pause to suspend anything
    await asyncio.sleep(0.05)
    assert gate.admission.inflight == 1
    lending.wait_for_client()
    await until(lambda: lending.suspended)
    assert lending.finish() > 0.0 and gate.admission.inflight == 1
    lending.wait_for_client()
    assert lending.finish() > 0.0 and gate.admission.inflight == 1
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
            await until(lambda: core.pools["p"].admission.inflight == 0)
            async with aio.insecure_channel(address) as channel:
                unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
                await unary(infer("digits"), metadata=(("x-api-key", GOLD),), timeout=60)
            for messages, call in held:  # and they go on
                messages.send(infer("digits"))
                assert await call.read() is not aio.EOF
                messages.send(None)
                assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await until(lambda: idle(core))


@pytest.mark.parametrize("tier", ["bronze", "gold"])
async def test_streams_that_rest_shortly_leave_their_permits_to_waiting_calls_at_once(
    monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """A small message every 0.4 s kept a permit for ever from calls of its own tenant and tier."""
    monkeypatch.setattr(lending_module, "SUSPEND_AFTER_S", 1000.0)
    async with AsyncExitStack() as clients:
        async with stack(Backend(), files=with_mute(tier)) as (address, core):
            held = [await opened(clients, address, BRONZE) for _ in range(2)]
            for key in (BRONZE, GOLD, BRONZE, GOLD):
                await asks(address, key)
                for messages, call in held:
                    messages.send(infer("digits"))
                    assert await call.read() is not aio.EOF
            for messages, call in held:
                messages.send(None)
                assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await until(lambda: idle(core) and not core.pools["p"].lendable)


class Slowly(Backend):
    """It answers the next message of each stream on a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Semaphore(0)

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            async for answer in super().stream(_one(message), context):
                await self.go.acquire()
                yield answer


@pytest.mark.parametrize("key", [BRONZE, GOLD])
async def test_a_stream_that_sends_ahead_lets_other_calls_go_between(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """A stream that always has two messages under way never rested: it kept its permit for its whole life."""
    monkeypatch.setattr(lending_module, "SUSPEND_AFTER_S", 1000.0)
    backend = Slowly()
    backend.go.release()
    async with AsyncExitStack() as clients:
        async with stack(backend, files=lambda port: one_permit("gold", port)) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            queue = core.pools["p"].admission.queue
            for _ in range(2):
                messages.send(infer("digits"))
            await until(lambda: len(backend.seen) == 2)
            waiting = asks(address, key)
            await until(lambda: len(queue) == 1)
            backend.go.release()
            for _ in range(2):
                messages.send(infer("digits"))
            assert await call.read() is not aio.EOF
            backend.go.release()
            await waiting
            for _ in range(3):
                backend.go.release()
            for _ in range(3):
                assert await call.read() is not aio.EOF
            messages.send(None)
            assert await call.read() is aio.EOF and await call.code() is grpc.StatusCode.OK
            await until(lambda: idle(core))


def one_permit(tier: str, port: int) -> dict[str, bytes]:
    text = documents([port], max_inflight=1)["all.toml"]
    return {"all.toml": text.replace(b'tier = "bronze"', f'tier = "{tier}"'.encode())}


async def test_calls_of_the_same_tenant_wait_where_no_answer_is_marked_as_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that answers more than once may still be at work: its tenant could start stream after stream."""
    monkeypatch.setattr(lending_module, "SUSPEND_AFTER_S", 1000.0)
    backend = Twice()
    backend.more.set()
    async with AsyncExitStack() as clients:
        async with stack(backend, files=lambda port: one_permit("gold", port)) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            assert await call.read() is not aio.EOF
            queue = core.pools["p"].admission.queue
            own = asks(address, BRONZE)
            await until(lambda: len(queue) == 1)
            other = asks(address, GOLD)
            await until(lambda: len(queue) == 2)
            messages.send(infer("digits"))  # now it is the turn of another tenant
            await other
            for _ in range(2):
                assert await call.read() is not aio.EOF
            messages.send(None)
            assert await call.read() is aio.EOF
            await own
            await until(lambda: idle(core))


@asynccontextmanager
async def waiting_stream(
    callers: int,
) -> AsyncIterator[tuple[Backend, Gateway, Messages, Any, list[asyncio.Task[bytes]]]]:
    """A stream with a suspended permit and a further message, behind so many unary calls; the first one runs."""
    backend = Backend()
    async with AsyncExitStack() as clients:
        async with stack(backend, max_inflight=1) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            admission = core.pools["p"].admission
            await until(lambda: admission.inflight == 0)
            backend.hold = asyncio.Event()
            async with aio.insecure_channel(address) as channel:
                unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)

                async def one() -> bytes:
                    answer: bytes = await unary(infer("digits"), metadata=(("x-api-key", GOLD),), timeout=60)
                    return answer

                busy = [asyncio.create_task(one()) for _ in range(callers)]
                await until(lambda: len(backend.seen) == 2 and len(admission.queue) == callers - 1)
                messages.send(infer("digits"))
                await until(lambda: len(admission.queue) == callers)
                yield backend, core, messages, call, busy
            await until(lambda: idle(core) and admission.inflight == 0)


async def test_a_stream_that_goes_on_queues_for_its_turn() -> None:
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
        pool = live_queues(core)["p"]  # which it had made a failure, and /metrics too
        assert pool["waiting"]["bronze"] == 1 and [each["tenant"] for each in pool["tenants"]] == ["b"]
        call.cancel()
        await until(lambda: len(core.pools["p"].admission.queue) == 0)
        backend.hold.set()
        await asyncio.gather(*busy)


class Mute(Backend):
    """A backend whose model `mute` answers nothing, as a decoupled one may, or answers when `late` is set."""

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
    """Both permits belong to streams whose latest message stays unanswered."""
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
            await until(lambda: len(gate.lendable) == 2)
            assert gate.admission.inflight == 2, "nobody waits: they keep their permits"
            yield address, core, held
        await until(lambda: idle(core) and not gate.lendable and not gate.to_resume)


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
            await until(lambda: gate.admission.inflight == 2 and not gate.to_resume)
        same = asks(address, BRONZE)  # but their own tenant has had its permits
        await until(lambda: len(gate.admission.queue) == 1)
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
    """Their permits are suspended while they are at work; a free one is theirs again, not the next call's."""
    backend = Mute()
    backend.late = asyncio.Event()
    async with mute_streams(backend, "bronze", "digits") as (address, core, held):
        gate = core.pools["p"]
        more = [asks(address, BRONZE) for _ in range(2)]
        await until(lambda: len(gate.admission.queue) == 2)
        backend.hold = asyncio.Event()
        urgent = [asks(address, GOLD) for _ in range(2)]
        await until(lambda: len(backend.seen) == 6 and gate.admission.inflight == 2 and len(gate.to_resume) == 2)
        assert [metadata["x-oriel-tier"] for _, _, metadata, _ in backend.seen[4:]] == ["gold", "gold"]
        backend.hold.set()
        await asyncio.gather(*urgent)
        await until(lambda: not gate.to_resume)
        assert len(backend.seen) == 6 and gate.admission.inflight == 2 and len(gate.admission.queue) == 2
        backend.late.set()
        for messages, call in held:
            assert await call.read() is not aio.EOF
            messages.send(None)
        await asyncio.gather(*more)


class Twice(Backend):
    """It answers a message once more on a signal."""

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
    """A stream that queues for its permit gets an earlier answer: it waited for itself, or had two permits."""
    backend = Twice()
    async with AsyncExitStack() as clients:
        async with stack(backend, max_inflight=1) as (address, core):
            messages, call = await opened(clients, address, BRONZE)
            admission = core.pools["p"].admission
            await until(lambda: admission.inflight == 0)
            backend.hold = asyncio.Event()
            urgent = asks(address, GOLD)
            await until(lambda: len(backend.seen) == 2)
            messages.send(infer("digits"))
            await until(lambda: len(admission.queue) == 1)
            backend.more.set()
            for _ in range(3):  # while the other call still has the only permit
                assert await call.read() is not aio.EOF
            assert not urgent.done()
            messages.send(None)
            assert await call.read() is aio.EOF
            backend.hold.set()
            await urgent
            await until(lambda: idle(core))


SIZE = 8 << 20


@asynccontextmanager
async def reader(port: int, key: str) -> AsyncIterator[socket.socket]:
    """A client that requests 8 MiB and reads nothing of it."""
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
            await until(lambda: len(up.seen) == 1 and admission.inflight == 0)
            async with Client(port) as client:
                assert (await client.ask(INFER, b"x", key=GOLD)).status == 200
            loop, got = asyncio.get_running_loop(), 0
            while got < SIZE:
                got += len(await loop.sock_recv(raw, 1 << 20))
        await until(lambda: idle(core) and admission.inflight == 0)


@pytest.mark.parametrize("asks_before", [False, True])
@pytest.mark.parametrize("tier", ["bronze", "gold"])
async def test_another_tenant_has_the_permit_of_a_client_that_does_not_read_at_once(
    monkeypatch: pytest.MonkeyPatch, tier: str, asks_before: bool
) -> None:
    """It waited as long as a stream may pause, 48 times as long as alone; the reader's own tenant still does."""
    monkeypatch.setattr(lending_module, "SUSPEND_AFTER_S", 1000.0)
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
                await until(lambda: len(up.seen) == 1)
                same.send(INFER, b"own", key=BRONZE)
                await until(lambda: len(gate.admission.queue) == 1)
                if asks_before:
                    other.send(INFER, b"x", key=GOLD)
                    await until(lambda: len(gate.admission.queue) == 2)
                go.set()
                if not asks_before:
                    await until(lambda: len(gate.lendable) == 1)
                    assert len(up.seen) == 1 and len(gate.admission.queue) == 1
                    other.send(INFER, b"x", key=GOLD)
                replies = asyncio.gather(other.reply(), same.reply())
                assert [reply.status for reply in await replies] == [200, 200]
                assert not gate.lendable
            await until(lambda: idle(core) and gate.admission.inflight == 0)


def test_the_time_of_a_suspended_permit_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that a client did not read are neither charged nor a sample of how long calls take."""
    gate = SimpleNamespace(admission=SimpleNamespace(inflight=1), pump=lambda: None, lendable={}, to_resume={})
    now = 100.0
    monkeypatch.setattr(lending_module, "monotonic", lambda: now)
    lending = PermitLending(cast(PoolGate, gate), cast(Tenant, None), Exchange(Habits(), "t"))
    lending._since_s = now
    now += 1.0
    lending._poll()
    assert lending.suspended and gate.admission.inflight == 0
    now += 5.0
    assert lending.finish() == 5.0 and gate.admission.inflight == 1


class _Call:
    """A stream or a short call at a pool."""

    def __init__(self, gate: PoolGate, tenant: Tenant, target: Target, stream: bool) -> None:
        self.gate, self.tenant, self.target = gate, tenant, target
        self.ticket: Ticket | None = None
        self.exchange = Exchange(gate.habits, tenant.name)
        self.lending = PermitLending(gate, tenant, self.exchange) if stream else None
        self.asking: asyncio.Task[None] | None = None
        self.has = False
        if gate.admission.enter():
            self.admitted()
        else:
            self.ticket = gate.join_queue(self, tenant, target, received_s=0.0, deadline=1e12, size_bytes=0)
            gate.pump()

    def admitted(self) -> None:
        self.has = True
        if self.lending is not None:
            self.exchange.sent("m")
            self.lending.message_sent()

    def displaced(self) -> None:
        raise AssertionError

    @property
    def waits(self) -> bool:
        """For a permit."""
        return not self.has or (self.asking is not None and not self.asking.done())

    def silent(self) -> None:
        """What its timer would find."""
        if self.has and self.lending is not None and not self.lending.suspended:
            if self.exchange.unanswered:
                self.lending._moved_s = 1e-9
            else:
                self.lending._since_s = 1e-9
            self.lending._poll()

    def answered(self) -> None:
        """All messages are, and the client has read it."""
        if self.has and self.lending is not None and self.exchange.unanswered:
            self.exchange.answered("m", True, 0.0)
            self.lending.resume()
            self.lending.wait_for_client()
            if self.exchange.unanswered:
                self.lending.answer_arrived()
            else:
                self.lending.client_took_answer()

    def asks(self) -> None:
        if self.has and self.lending is not None and (self.asking is None or self.asking.done()):
            self.asking = asyncio.create_task(self._ask(self.lending))

    async def _ask(self, lending: PermitLending) -> None:
        await lending.admit_message(self.tenant, self.target, 1)
        self.exchange.sent("m")
        lending.message_sent()

    async def end(self) -> None:
        if self.asking is not None:
            self.asking.cancel()
            with suppress(asyncio.CancelledError):
                await self.asking
        if self.has:
            if self.lending is not None:
                self.lending.finish()
            self.gate.release_permit(self.target, self.tenant, self.ticket, 0.01, -1, -1, True)
        else:
            assert self.ticket is not None and self.gate.leave_queue(self.ticket)


LIMIT = 3
WHAT = ["stream", "stream", "streams", "call", "hush", "silent", "answered", "answered", "asks", "asks", "end", "end"]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 3), st.integers(0, 30)), max_size=120))
def test_permits_are_consistent_whatever_streams_do(operations: list[tuple[str, int, int]]) -> None:
    """Every permit has one holder, and while calls wait neither resting nor only silent streams keep permits."""
    lending_module.SUSPEND_AFTER_S = 30.0  # no timer but `silent`
    asyncio.run(_do(operations))


@pytest.mark.parametrize("cost_us, charged_s", [(-1, 3.0), (5_000_000, 5.0), (100_000, 1.2)])
async def test_each_turn_of_a_stream_is_charged_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, cost_us: int, charged_s: float
) -> None:
    """It was charged at the stream's end: until then its messages went before those of other tenants for free."""
    gate, tenants, target = _gate()
    gate.admission.limit, gate.learned = 1, None
    now = 100.0
    monkeypatch.setattr(lending_module, "monotonic", lambda: now)
    other = _Call(gate, tenants[1], target, False)
    stream = _Call(gate, tenants[0], target, True)
    assert stream.lending is not None and stream.ticket is not None
    await other.end()
    lending = stream.lending
    lending.ticket, stream.ticket = stream.ticket, None
    flow = lending.ticket._flow
    assert flow is not None and stream.has
    waiting = [_Call(gate, tenants[1], target, False) for _ in range(2)]
    now += 1.0
    stream.answered()
    assert lending.suspended_at_rest and waiting[0].has and flow.virtual == 1.0
    now += 7.0  # for which it has no permit
    stream.asks()
    await asyncio.sleep(0)
    for call in waiting:
        await call.end()
    await asyncio.sleep(0)
    assert not lending.suspended and flow.virtual == 1.0 + 0.01, "an estimate"
    now += 2.0
    lending.finish(cost_us)
    assert flow.virtual == pytest.approx(charged_s) and lending._total_s == 7.0
    assert stream.asking is not None
    await stream.asking
    gate.release_permit(target, stream.tenant, None, 3.0, cost_us, -1, True)
    assert gate.admission.inflight == 0


async def test_tenants_of_silent_streams_leave_a_third_one_a_permit_at_a_time() -> None:
    """Two streams that gave each other their permits had all of them until `stream_idle_ms`."""
    gate, tenants, target = _gate()
    mute = [_Call(gate, tenant, target, True) for tenant in tenants[:2] for _ in range(LIMIT)]
    for call in (*mute, *mute):
        call.silent()
    third = [_Call(gate, tenants[2], target, False) for _ in range(4)]
    more = _Call(gate, tenants[0], target, False)
    for number in range(4):
        assert len(gate.to_resume) == LIMIT + 1 and gate.admission.inflight == LIMIT
        (served,) = [call for call in third if call.has]
        third.remove(served)
        await served.end()
        assert len(third) == 3 - number and not more.has
    assert len(gate.to_resume) == LIMIT, "one set more than the pool has, as before"
    for call in (*mute, more):
        await call.end()
    assert gate.admission.inflight == 0 and not gate.to_resume and not gate.lendable


def _gate() -> tuple[PoolGate, list[Tenant], Target]:
    more = f'[tenants.h]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{"0" * 64}" }}]\n'
    snapshot = compile_documents(documents([1], max_inflight=LIMIT, extra=more))
    tenants = sorted(snapshot.tenants.values(), key=lambda each: each.tier.band)
    assert [each.tier.name for each in tenants] == ["gold", "gold", "gold", "bronze"]
    target = resolve_grpc("model", "digits", "", "ModelStreamInfer", tenants[0], RouteTable(snapshot.routes))
    return PoolGate(snapshot.pools["p"]), tenants, target


async def _do(operations: list[tuple[str, int, int]]) -> None:
    gate, tenants, target = _gate()
    calls: list[_Call] = []
    for what, whose, number in operations:
        if what in ("stream", "streams", "call"):
            count = LIMIT if what == "streams" else 1
            calls.extend([_Call(gate, tenants[whose], target, what != "call") for _ in range(count)])
        elif what == "hush":
            for call in calls:
                call.silent()
        elif calls:
            call = calls[number % len(calls)]
            if what == "end":
                calls.remove(call)
                await call.end()
            else:
                getattr(call, what)()
        for _ in range(4):
            await asyncio.sleep(0)
        _check(gate, calls, tenants)
    for call in calls:
        await call.end()
    assert not gate.to_resume and not gate.lendable and gate.admission.inflight == 0 and gate.held_bytes == 0


def _check(gate: PoolGate, calls: list[_Call], tenants: list[Tenant]) -> None:
    streams = [(call, call.lending) for call in calls if call.lending is not None]
    suspended = [lending for _, lending in streams if lending.suspended]
    inflight, queue = gate.admission.inflight, gate.admission.queue
    assert inflight == sum([call.has for call in calls]) - len(suspended)
    assert set(gate.to_resume) == {lending for lending in suspended if not lending.suspended_at_rest}
    at_work = [call for call in calls if call.has and not (call.lending is not None and call.lending.suspended_at_rest)]
    assert sum([call.tenant is tenants[-1] for call in at_work]) <= LIMIT
    waiting = [
        call
        for call in calls
        if call.waits and not (call.lending is not None and call.has and not call.lending.suspended_at_rest)
    ]
    assert len(waiting) == len(queue)
    if waiting:
        assert not [lending for _, lending in streams if lending.rests], (
            "a resting stream keeps no permit from a waiting call"
        )
    if waiting or gate.to_resume:
        assert inflight >= LIMIT
    urgent = min([call.tenant.tier.band for call in waiting], default=9)
    assert not [each for each in gate.lendable if each.tenant.tier.band > urgent], "it would be suspended"
    silent = [lending for lending in gate.lendable if lending.silent]
    if len(silent) == inflight and any(lending.tenant.tier.band >= urgent for lending in silent):
        mute = {lending.tenant.name for lending in (*silent, *gate.to_resume)}
        first = [call for call in waiting if call.tenant.tier.band == urgent]
        assert not [call for call in first if call.tenant.name not in mute], "the silent keep all from who is not"
