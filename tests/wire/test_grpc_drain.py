"""What a gRPC server's drain is made of; whole drains under load are in tests/path."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from math import inf

import grpc
import pytest
from grpc import aio

from oriel_wire.engine import grpc_drain, listener
from oriel_wire.engine.grpc_drain import ENDLESS_MS, MAX_AGE, Arrivals, UnderWay, close_listeners, drain, max_age_ms

from ..waiting import until

METHOD = "/a.Service/Method"


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    def __init__(self) -> None:
        self.hold: asyncio.Event | None = None

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        return grpc.unary_unary_rpc_method_handler(self.unary)

    async def unary(self, message: bytes, context: "aio.ServicerContext[bytes, bytes]") -> bytes:
        if self.hold is not None:
            await self.hold.wait()
        return message


class Counted(Arrivals):
    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        super().service(handler_call_details)
        self.begun += 1


class Served:
    """A server of `Echo` and a client of it."""

    def __init__(self, host: str = "127.0.0.1", age_ms: int = ENDLESS_MS) -> None:
        self.arrivals, self.echo = Counted(), Echo()
        self.server = aio.server(handlers=[self.arrivals, self.echo], options=[(MAX_AGE, age_ms)])
        self.port = self.server.add_insecure_port(f"{host}:0")
        self.channel = aio.insecure_channel(f"127.0.0.1:{self.port}")

    async def call(self) -> bytes:
        answer: bytes = await self.channel.unary_unary(METHOD)(b"a", timeout=60)
        return answer

    def connects(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=60).close()
        except ConnectionError:  # reset, if it was in the queue
            return False
        return True

    async def drain(self, grace_s: float, age_ms: int = ENDLESS_MS) -> None:
        await drain(self.server, self.port, self.arrivals, grace_s=grace_s, age_ms=age_ms)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    one = Served()
    await one.server.start()
    yield one
    await one.channel.close()
    await one.server.stop(0.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]"])
async def test_a_server_that_no_longer_listens_serves_on(host: str) -> None:
    served, other = Served(host), Served(host)
    await served.server.start()
    await other.server.start()
    assert await served.call() == b"a" and served.arrivals.begun == 1
    assert close_listeners(served.port) >= 1
    assert not served.connects() and other.connects()
    assert await served.call() == b"a" and served.arrivals.begun == 2
    assert close_listeners(served.port) == 0
    await served.server.stop(0.0)
    with pytest.raises(aio.AioRpcError):
        await served.call()
    assert await other.call() == b"a"
    await other.server.stop(0.0)
    for each in (served, other):
        await each.channel.close()


async def test_who_is_idle_is_not_waited_for(served: Served) -> None:
    """Connected, and without a call: it ends long before its time."""
    assert await served.call() == b"a"
    async with asyncio.timeout(60):
        await served.drain(3600.0)


async def test_who_was_asked_by_probes_only_is_idle(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call some time ago, and probes up to the end: it waited until all its connections were old."""
    monkeypatch.setattr(grpc_drain, "SELDOM_S", 3600.0)
    assert await served.call() == b"a"
    draining = asyncio.ensure_future(served.drain(7200.0))
    probe = served.channel.unary_unary("/grpc.health.v1.Health/Check")
    async with asyncio.timeout(60):
        while not draining.done():
            with suppress(aio.AioRpcError):
                await probe(b"a", timeout=60)
    await draining


def test_clients_that_still_call_or_call_seldom_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_drain, "QUIET_S", 0.5)
    monkeypatch.setattr(grpc_drain, "SELDOM_S", 5.0)
    arrivals = Arrivals()
    assert arrivals.quiet_from_s(100.0) < 100.0
    for before_s, latest_s, quiet_s in (
        (-inf, 98.0, 98.5),
        (97.99, 98.0, 98.5),
        (97.0, 98.0, 100.0),
        (90.0, 98.0, 98.5),
    ):
        arrivals.before_s, arrivals.latest_s = before_s, latest_s
        assert arrivals.quiet_from_s(100.0) == pytest.approx(quiet_s)
    arrivals.before_s, arrivals.latest_s = 98.0, 100.2
    assert arrivals.quiet_from_s(100.0) == pytest.approx(105.2)


async def test_connections_are_accepted_while_calls_from_before_run(served: Served) -> None:
    under_way = UnderWay()
    begun = under_way.begin()
    under_way.mark()
    later = under_way.begin()
    assert (under_way.all, under_way.old) == (2, 1)
    work = drain(
        served.server,
        served.port,
        served.arrivals,
        grace_s=3600.0,
        age_ms=ENDLESS_MS,
        finishing=lambda: under_way.old > 0,
    )
    draining = asyncio.ensure_future(work)
    for _ in range(20):
        await asyncio.sleep(2 * listener.LAME_DUCK_S)
        assert served.connects()
    under_way.end(begun)
    async with asyncio.timeout(60):
        await draining
    assert not served.connects()
    under_way.end(later)
    assert under_way.all == 0


async def test_what_runs_is_waited_for(served: Served) -> None:
    served.echo.hold = asyncio.Event()
    calls = [asyncio.ensure_future(served.call()) for _ in range(3)]
    await until(lambda: served.arrivals.begun >= 3)
    draining = asyncio.ensure_future(served.drain(3600.0))
    await until(lambda: not served.connects())
    served.echo.hold.set()
    assert await asyncio.gather(*calls) == [b"a"] * 3
    await draining


async def test_what_does_not_end_is_cut_when_the_grace_is_over(served: Served) -> None:
    served.echo.hold = asyncio.Event()
    call = asyncio.ensure_future(served.call())
    await until(lambda: served.arrivals.begun)
    await served.drain(0.3)
    with pytest.raises(aio.AioRpcError):
        await call


async def test_a_second_signal_cuts_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LAME_DUCK_S", 3600.0)
    served.echo.hold = asyncio.Event()
    call = asyncio.ensure_future(served.call())
    await until(lambda: served.arrivals.begun)
    draining = asyncio.ensure_future(served.drain(7200.0))
    await asyncio.sleep(0)
    draining.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await draining
        with pytest.raises(aio.AioRpcError):
            await call


def test_connections_age_so_that_all_are_gone_in_time() -> None:
    for grace_s in (2.0, 5.0, 25.0, 600.0):
        aged_s = max_age_ms(grace_s) / 1e3 * grpc_drain._JITTER
        assert grace_s / 3 < aged_s < grace_s * grpc_drain._LATEST_SHARE
    assert max_age_ms(0.0) == max_age_ms(1.0) == max_age_ms(1e9) == ENDLESS_MS
