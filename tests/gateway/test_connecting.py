"""Endpoints whose address drops all packets, as that of a machine that is gone: nothing accepts or refuses a
connection.
"""

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from time import monotonic

import pytest
from grpc import aio

from oriel_gateway.pools.endpoint_state import Reach
from oriel_wire.engine.upstream import Endpoint
from oriel_wire.errors import UpstreamError, UpstreamUnreachable

from ..waiting import until
from .gate import idle
from .grpc_endpoints import ANSWER, MESSAGE, house
from .grpc_streams import INFER
from .stack import GOLD, Client, documents, gateway, upstream


@pytest.fixture
def hole() -> Iterator[int]:
    """Yield a port whose backlog is full: further connections are neither accepted nor refused."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
        for one in waiting:
            one.close()


class Sink:
    """A call that waits for an answer, but never sends a request."""

    error: UpstreamError | None = None

    def failed(self, error: UpstreamError) -> None:
        self.error = error


@pytest.mark.parametrize("timeout_ms", [60_000, 100], ids=["time enough", "too short to tell"])
async def test_calls_go_to_the_other_server(hole: int, timeout_ms: int) -> None:
    """Attempts that a deadline ended count against the endpoint; otherwise each call of a single caller would be
    lost.
    """
    async with upstream() as up, gateway(documents([hole, up.port])) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        these.note_answer(
            these[1], monotonic(), 5.0
        )  # so that the first call goes to the endpoint that accepts nothing
        headers = f"x-request-timeout-ms: {timeout_ms}\r\n"
        first = (await client.ask("/v1/services/echo", b"x", headers=headers)).status
        assert first == (200 if timeout_ms == 60_000 else 504)
        await until(lambda: these[0].reach is Reach.UNREACHABLE)
        for _ in range(10):
            assert (await client.ask("/v1/services/echo", b"x")).status == 200
        assert idle(core) and not these[0].outstanding


async def test_the_last_server_has_its_whole_time(hole: int) -> None:
    files = documents([hole], pool='probe = ""\nconnect_timeout_ms = 60000')
    async with gateway(files) as (port, core), Client(port) as client:
        reply = await client.ask("/v1/services/echo", b"x", headers="x-request-timeout-ms: 400\r\n")
        assert reply.status == 504 and core.pools["p"].endpoints[0].reach is Reach.UNKNOWN


async def test_grpc_calls_go_to_the_other_server(hole: int) -> None:
    async with house() as it:
        core = it.core
        good = it.these[0]
        these = it.these
        these.assign((("127.0.0.1", hole), good.address))
        for timeout_s, codes in ((0.1, {"DEADLINE_EXCEEDED"}), (1.0, {"OK"})):
            these.note_reach(these[0], Reach.UNKNOWN)
            these.note_answer(these[1], monotonic(), 5.0)
            call = it.channel.unary_unary(INFER)(MESSAGE, metadata=(("x-api-key", GOLD),), timeout=timeout_s)
            try:
                assert await call == ANSWER
            except aio.AioRpcError as error:
                assert error.code().name in codes
            else:
                assert "OK" in codes
        assert these[0].reach is Reach.UNREACHABLE and [await it.infer() for _ in range(5)] == ["OK"] * 5
        await until(lambda: idle(core) and not any(one.outstanding for one in these))


async def test_an_attempt_outlives_who_asked_for_it_once() -> None:
    """A connection that comes too late for its call is kept for the next one; no more than one is made without a
    caller.
    """
    async with upstream() as up, AsyncExitStack() as stack:
        endpoint = Endpoint("127.0.0.1", up.port)
        stack.push_async_callback(endpoint.close)
        one, other = Sink(), Sink()
        for sink in (one, other):
            assert endpoint.begin(sink, 1.0) is None  # type: ignore[arg-type]
        assert endpoint.connecting_for_s(3.0) == 2.0 and endpoint.outstanding == 2
        endpoint.borrower_left(one)  # type: ignore[arg-type]
        endpoint.borrower_left(other)  # type: ignore[arg-type]
        assert endpoint.outstanding == 0
        await until(lambda: endpoint.idle)
        assert len(endpoint.idle) == 1 and endpoint.connecting_for_s(9.0) == 0.0 and endpoint.connect_s > 0.0
        kept = endpoint.begin(one, endpoint.idle[0].idle_since)  # type: ignore[arg-type]
        assert kept is not None
        kept.abandon()


async def test_attempts_that_are_given_up_fail(hole: int) -> None:
    endpoint = Endpoint("127.0.0.1", hole)
    sink, left = Sink(), Sink()
    endpoint.begin(sink, 1.0)  # type: ignore[arg-type]
    endpoint.begin(left, 1.0)  # type: ignore[arg-type]
    endpoint.borrower_left(left)  # type: ignore[arg-type]
    endpoint.give_up_connecting()
    assert isinstance(sink.error, UpstreamUnreachable) and left.error is None and endpoint.outstanding == 0
    await endpoint.close()
