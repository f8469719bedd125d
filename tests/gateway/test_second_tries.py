"""Second tries and second copies: at most two requests for a call, at most a tenth in all, and no fewer than
allowed.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from oriel_gateway.call.attempts import Attempts, Because, Send, note_failure
from oriel_gateway.core import Gateway
from oriel_gateway.identity.callers import Callers
from oriel_gateway.pools.endpoint_state import HttpEndpoint, Reach
from oriel_gateway.pools.pool import PoolGate
from oriel_policies.documents import ApiKey
from oriel_policies.upstreams.ejection import Cause
from oriel_wire.errors import UpstreamUnreachable
from oriel_wire.h1.request import Field, LineMemo

from ..waiting import TIMEOUT_S, until
from .endpoint_pools import FULL, HEDGED, IDEMPOTENT, first_route, pool, served, still, with_probe
from .fake_transport import core_connections
from .gate import INFER, idle
from .special_routes import CACHED, SHADOWED, copies, house, ok
from .stack import Client, Seen, Upstream, documents, gateway, upstream

Answer = Callable[[Seen], Awaitable[bytes]]


class Late:
    """An answer that is given when the test says so."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.go = asyncio.Event()


REFUSED = ok(FULL, status="503 No")
ABSENT = ok(b'{"error":"Request for unknown model"}', status="404 Not Found")
HANG = b"hang"


@pytest.fixture
async def ups() -> AsyncIterator[list[Upstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(upstream()) for _ in range(3)]


def in_turn(ups: list[Upstream], *answers: bytes | Late) -> list[Upstream]:
    """Let the servers give these answers in turn, whichever is called, and then 200.

    Returns a list to which each server is added when it is called.
    """
    asked: list[Upstream] = []
    without: set[Upstream] = set()

    def of(up: Upstream) -> Answer:
        async def answer(seen: Seen) -> bytes:
            if seen.head.startswith("GET /v2/models/"):
                return ABSENT if up in without else ok()
            asked.append(up)
            found = answers[len(asked) - 1] if len(asked) <= len(answers) else ok()
            if found is ABSENT:
                without.add(up)
            if found is HANG:
                await asyncio.Event().wait()
            if isinstance(found, Late):
                await found.go.wait()
                return found.data
            return found

        return answer

    for up in ups:
        up.answer = of(up)
    return asked


def ports(ups: list[Upstream]) -> list[int]:
    return [up.port for up in ups]


def outstanding(core: Gateway) -> int:
    """Return how many requests the servers have not answered yet."""
    return sum(endpoint.outstanding for endpoint in core.pools["p"].endpoints)


async def test_a_reason_that_comes_after_its_head_counts_as_well() -> None:
    """An error counts also if its body comes in another packet than its head."""
    asked = connected = 0
    asking: list[HttpEndpoint] = []

    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked, connected
        connected += 1
        try:
            while await reader.readuntil(b"body"):
                asked += 1
                head, body = (REFUSED if asked == 1 else ok()).split(b"\r\n\r\n")
                writer.write(head + b"\r\n\r\n")
                await until(lambda: any(each.heard for each in asking))
                writer.write(body)
        except asyncio.IncompleteReadError:
            writer.close()
            connected -= 1

    async with served(twice) as one, served(twice) as other:
        async with gateway(documents([one, other])) as (port, core), Client(port) as client:
            asking += core.pools["p"].endpoints
            assert (await client.ask(INFER, b"body")).status == 200 and asked == 2 and idle(core)
        await until(lambda: not connected)


async def test_a_hedged_route_goes_elsewhere_at_once_when_it_is_refused(ups: list[Upstream]) -> None:
    """A refused call is tried again at once, although its second copy is not due for a long time."""
    asked = in_turn(ups, REFUSED)
    files = first_route(documents(ports(ups)), HEDGED.replace("30", "60000"))
    async with gateway(files) as (port, core), Client(port) as client:
        assert (await client.ask(INFER, b"x")).status == 200
        assert len(asked) == 2 and asked[0] is not asked[1] and idle(core)


@pytest.mark.parametrize("refusal", [ABSENT, REFUSED], ids=["absent", "full"])
async def test_a_second_copy_that_is_refused_is_not_sent_a_third_time(ups: list[Upstream], refusal: bytes) -> None:
    """The second copy's refusal must not be tried again: there would be three requests for one call."""
    first = Late(ok(b"first"))
    asked = in_turn(ups, first, refusal)
    async with gateway(first_route(documents(ports(ups)), HEDGED)) as (port, core), Client(port) as client:
        for _ in range(20):
            core.pools["p"].retries.requested(monotonic())
        client.send(INFER, b"x")
        await until(lambda: len(asked) == 2 and outstanding(core) == 1)
        first.go.set()
        assert (await client.reply()).body == b"first" and len(asked) == 2 and idle(core)


async def test_a_first_copy_that_is_refused_late_leaves_the_call_to_the_second(ups: list[Upstream]) -> None:
    """The refusal of the first copy must not be passed on while the second copy is under way."""
    first, second = Late(REFUSED), Late(ok(b"second"))
    asked = in_turn(ups, first, second)
    async with gateway(first_route(documents(ports(ups)), HEDGED)) as (port, core), Client(port) as client:
        client.send(INFER, b"x")
        await until(lambda: len(asked) == 2)
        first.go.set()
        await until(lambda: outstanding(core) == 1)
        second.go.set()
        assert (await client.reply()).body == b"second" and len(asked) == 2 and idle(core)


async def test_copies_that_break_count_against_their_servers(ups: list[Upstream]) -> None:
    first = Late(b"")
    asked = in_turn(ups, first, b"")
    async with gateway(first_route(documents(ports(ups)), HEDGED)) as (port, core), Client(port) as client:
        client.send(INFER, b"x")
        await until(lambda: len(asked) == 2)
        first.go.set()
        assert (await client.reply()).status == 502 and len(asked) == 2 and idle(core)
        broken = {e.port: e.record.broken for e in core.pools["p"].endpoints}
        assert [broken[up.port] for up in asked] == [1, 1]


async def test_what_was_not_sent_allows_no_second_tries() -> None:
    """Answers from the cache, and refused calls, are no requests, and add nothing to the budget of second tries."""
    async with house(CACHED) as it, Client(it.port) as client:
        still(it.core)
        for _ in range(100):
            assert (await client.ask(INFER, b"x")).status == 200
        budget = it.core.pools["p0"].retries
        now = monotonic()
        assert [budget.spend(now) for _ in range(3)] == [True, False, False] and len(it.ups[0].seen) == 1


async def test_a_session_stays_with_its_server_also_when_that_is_full(ups: list[Upstream]) -> None:
    """Another server does not know the session; but a server without the model cannot know it either."""
    asked = in_turn(ups, REFUSED, ok(), ABSENT, ok(), ok())
    route = '[[routes]]\nmodel = "*"\npool = "p"\nsticky = "header:x-session"\nidempotent = true\nhedge_ms = 1\n'
    async with gateway(first_route(documents(ports(ups)), route)) as (port, core), Client(port) as client:
        for _ in range(20):
            core.pools["p"].retries.requested(monotonic())

        async def say() -> int:
            return (await client.ask(INFER, b"x", headers="x-session: one\r\n")).status

        assert [await say(), await say()] == [503, 200] and asked[0] is asked[1] and len(asked) == 2
        assert await say() == 200 and asked[2] is asked[0] is not asked[3]
        assert await say() == 200 and asked[4] is asked[3] and len(asked) == 5  # the new server is remembered
        late = Late(ok())
        asked = in_turn(ups, late)
        saying = asyncio.ensure_future(say())
        await until(lambda: len(asked) == 1)
        (hedge,) = [connection.call.life.trouble._hedge for connection in core_connections(core)]
        await until(lambda: hedge._timer.when() < asyncio.get_running_loop().time())
        late.go.set()
        assert await saying == 200 and core.pools["p"].retries.spent == 1  # there was no second copy at another server


async def test_a_service_that_is_full_after_its_model_ran_is_not_asked_again(ups: list[Upstream]) -> None:
    """The service lacks a worker for what follows the model call, and to try again would run the model twice."""
    full = ok(b'{"error":{"reason":"saturated"}}', "x-oriel-cost-us: 900\r\n", "503 No")
    asked = in_turn(ups, full, full.replace(b"900", b"0"))
    async with gateway(documents(ports(ups))) as (port, _), Client(port) as client:
        assert (await client.ask("/v1/services/chat", b"x")).status == 503 and len(asked) == 1
        assert (await client.ask("/v1/services/chat", b"x")).status == 200 and len(asked) == 3


class Inside(Callers):
    """The callers of an inner gateway. Keys are not forwarded to it, so it takes everybody for its first tenant."""

    def identify(self, fields: Sequence[Field] | None, memo: LineMemo) -> ApiKey:
        return next(iter(self.snapshot.keys.values()))


@pytest.mark.parametrize("failure", [REFUSED, b""], ids=["full", "broken"])
async def test_what_one_hop_tried_again_the_hop_before_does_not(ups: list[Upstream], failure: bytes) -> None:
    """R9: a gateway behind a gateway: of 100 calls to failing servers at most 111 requests come, where both retry 120
    would.
    """
    asked = in_turn(ups, *[failure] * 1000)
    async with AsyncExitStack() as stack:
        hops = [
            await stack.enter_async_context(gateway(first_route(documents(ports(ups)), IDEMPOTENT), callers=Inside))
            for _ in range(2)
        ]
        files = first_route(documents([port for port, _ in hops]), IDEMPOTENT)
        outer, front = await stack.enter_async_context(gateway(files))
        for core in (front, *(core for _, core in hops)):
            still(core)
        client = await stack.enter_async_context(Client(outer))
        for _ in range(100):
            reply = await client.ask(INFER, b"x")
            # the header tells a hop further in front not to try again
            assert reply.status == 502 or reply.headers["x-oriel-retry"] == "spent"
        assert 105 <= len(asked) <= 111  # a tenth, which each of the two inner gateways rounds up


async def test_a_call_that_meets_a_thousand_servers_that_are_down_asks_each_once() -> None:
    """Comparing each server with all others would take 1.8 s of the gateway's time for one call."""
    gate = PoolGate(pool(1000))
    attempts, down = Attempts(gate.endpoints, gate.retries, "digits"), UpstreamUnreachable("down")
    asked = []
    decision = attempts.another(1.0, Because.UNREACHABLE)
    while isinstance(decision, Send):
        asked.append(decision.endpoint)
        note_failure(gate.endpoints, decision.endpoint, down, 1.0, "digits")
        decision = attempts.after_failure(decision.endpoint, down, 1.0, kept=True, sent=False, twice=False)
        assert len(attempts.tried) == 1
    assert len(asked) == len(set(asked)) == 1000
    # otherwise the memorised headers of all answers would fill a gigabyte
    assert len({id(endpoint.memo) for endpoint in gate.endpoints}) == 1


async def test_time_in_which_a_client_reads_a_stream_is_no_latency() -> None:
    """A client that leaves during a long answer must not make the server look as slow as the answer was long."""

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await reader.read()
        writer.close()

    async with served(stream) as up, gateway(documents([up])) as (port, core):
        async with Client(port) as client:
            began = monotonic()
            client.send(INFER)
            await client.reader.readuntil(b"ok\r\n")
            came_s = monotonic() - began
            await until(lambda: monotonic() > began + 3 * came_s)
        await until(lambda: idle(core))
        assert 0.0 < core.pools["p"].endpoints[0].cost.cost_s <= came_s


async def test_a_copy_for_a_shadow_is_sent_once_and_tells_of_its_server() -> None:
    """A copy is neither hedged nor repeated as its original would be, but its failures count for its server."""
    async with house(SHADOWED + "idempotent = true\nhedge_ms = 5\n", per_pool=2) as it:
        shadows = it.ups[2:]
        late = Late(ok(b"no", status="500 No"))
        asked = in_turn(shadows, late, b"")
        async with Client(it.port) as client:
            for number in (1, 2):
                assert (await client.ask(INFER, b"x")).status == 200
                await until(lambda number=number: len(asked) == number)  # type: ignore[misc]
                await asyncio.sleep(0.02)  # four times the delay of a second copy
                late.go.set()
                await until(lambda number=number: sum(copies(it.core).values()) == number)  # type: ignore[misc]
        assert copies(it.core) == {"status_differs": 1.0, "failed": 1.0} and len(asked) == 2
        records = [endpoint.record for endpoint in it.core.pools["p1"].endpoints]
        assert sum(record.error_rate > 0.0 for record in records) >= 1 and sum(r.broken for r in records) == 1
        await until(it.idle)


async def test_a_large_post_is_not_sent_on_a_connection_that_is_being_closed() -> None:
    """R11: such a body is not kept to be sent again, so the gateway looks for a FIN before it sends."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(TIMEOUT_S)
    body = b"x" * 100_000

    def serve_one() -> socket.socket:
        connection, _ = listener.accept()
        connection.settimeout(TIMEOUT_S)
        got = b""
        while not got.endswith(body):
            got += connection.recv(1 << 20)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return connection

    loop = asyncio.get_running_loop()
    async with gateway(documents([listener.getsockname()[1]])) as (port, core), Client(port) as client:
        client.send(INFER, body)
        kept = await loop.run_in_executor(None, serve_one)
        assert (await client.reply()).status == 200
        call_port = core.pools["p"].endpoints[0]
        (connection,) = call_port.idle
        begin = call_port.begin

        def closing(*args: Any, **more: Any) -> Any:
            if args[4]:
                kept.close()  # the kernel has received the FIN, and the loop has not read it
            return begin(*args, **more)

        call_port.begin = closing  # type: ignore[method-assign]
        client.send(INFER, body)
        answer = loop.run_in_executor(None, serve_one)
        assert (await client.reply()).status == 200 and not connection.sink
        (await answer).close()
        assert idle(core)
    listener.close()


async def test_a_connection_that_is_lost_as_soon_as_it_is_made_fails_its_call(ups: list[Upstream]) -> None:
    """The connection ends before the call listens to it; the call must not wait until its deadline."""
    loop = asyncio.get_running_loop()

    class Losing:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        async def create_connection(self, *args: Any) -> Any:
            transport, protocol = await loop.create_connection(*args)
            transport.abort()
            for _ in range(10):
                await asyncio.sleep(0)  # by then the protocol has been called
            return transport, protocol

    async with gateway(documents(ports(ups[:1]))) as (port, core), Client(port) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", Losing)
            reply = await client.ask(INFER, b"x")
            assert reply.status == 502 and b"before the request was sent" in reply.body and idle(core)
        assert (await client.ask(INFER, b"x")).status == 200


async def test_a_server_that_speaks_first_is_not_waited_for() -> None:
    """A mail server, or a gRPC port, sends bytes before any request; the call must not wait for the rest of the
    line.
    """

    async def speak_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 hello\r\n")
        await reader.read()
        writer.close()

    async with served(speak_first) as up, gateway(documents([up])) as (port, core), Client(port) as client:
        reply = await client.ask(INFER)
        assert reply.status == 502 and b"does not speak HTTP/1" in reply.body
        await until(lambda: idle(core))


async def test_a_server_that_hangs_is_left_alone_although_a_probe_is_under_way(ups: list[Upstream]) -> None:
    """R11b: the probe under way has a second's time; waiting for it first would take 1.5 s in all."""
    hanging = False

    async def hangs(seen: Seen) -> bytes:
        if hanging:
            await asyncio.Event().wait()
        return ok()

    ups[0].answer = hangs
    async with gateway(with_probe(ports(ups[:2]))) as (port, core), Client(port) as client:
        core.endpoint_watch.probe_timeout_s = 60.0
        these = core.pools["p"].endpoints
        await until(lambda: all(one.reach is Reach.READY for one in these))
        # the endpoint is not asked for models, because it does not report them
        assert (await client.ask(INFER)).status == 200
        hanging = True
        await until(lambda: these[0].probing)
        these.note_answer(these[1], monotonic(), 5.0)  # so that the call goes to the first one
        client.send(INFER)
        await until(lambda: these[0].outstanding == 1)
        await until(lambda: these.ejections == {Cause.STUCK: 1} and these.usable == [these[1]])


async def test_names_of_models_that_nobody_has_leave_something_of_the_budget(ups: list[Upstream]) -> None:
    """Calls for names of models that no server has use up only a part of the budget, so that others can be tried
    again.
    """
    asked = in_turn(ups, *[ABSENT] * 1000)
    async with gateway(documents(ports(ups))) as (port, core), Client(port) as client:
        still(core)
        for number in range(100):
            assert (await client.ask(f"/v2/models/m{number}/infer", b"x")).status == 404
        assert len(asked) == 105
        in_turn(ups, REFUSED)
        assert (await client.ask(INFER, b"x")).status == 200 and core.pools["p"].retries.spent == 6


async def test_a_connection_that_was_answered_before_it_took_the_request_is_not_used_again() -> None:
    """The next call would wait behind a body that the server does not read."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.settimeout(TIMEOUT_S)

    def refuse() -> socket.socket:
        connection, _ = listener.accept()
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        return connection

    loop = asyncio.get_running_loop()
    async with gateway(documents([listener.getsockname()[1]])) as (port, core), Client(port) as client:
        for _ in range(2):
            client.send(INFER, b"x" * 999_000)
            connection = await loop.run_in_executor(None, refuse)
            assert (await client.reply()).status == 413
            assert not core.pools["p"].endpoints[0].idle and idle(core)
            connection.close()
    listener.close()


async def test_an_answer_that_was_not_the_calls_is_not_its_answer(ups: list[Upstream]) -> None:
    """An answer that ended before the request was sent is another one's: its latency would be negative."""
    in_turn(ups, REFUSED, b"")
    async with gateway(documents(ports(ups))) as (port, core), Client(port) as client:
        assert (await client.ask(INFER, b"x", headers="x-request-id: r\r\n")).status == 502
        (decided,) = core.records.decisions.of("r")
        assert decided.sent_s > 0.0 == decided.response_s and len(decided.tried) == 1
