"""The endpoints of a pool: who is asked, who is left alone, and what happens to calls meanwhile."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from time import monotonic

import pytest

from oriel_gateway.call import trouble
from oriel_gateway.call.hedge import Hedge, Hedged
from oriel_gateway.pools import health
from oriel_gateway.pools.endpoints import Reach
from oriel_gateway.pools.health import Watch
from oriel_policies import ejection
from oriel_policies.ejection import Cause
from oriel_wire.engine.discovery import Address, DiscoveryFailed, ScriptedDiscovery

from ..waiting import until
from .endpoint_pools import FULL, HEDGED, IDEMPOTENT, PROBED, endpoints, first_route, served, still, with_probe
from .gate import INFER, idle
from .stack import BRONZE, GOLD, Client, Seen, Upstream, documents, gateway, nobody, upstream


@pytest.fixture
async def two() -> AsyncIterator[tuple[Upstream, Upstream]]:
    async with upstream() as a, upstream() as b:
        yield a, b


def not_ready(status: int = 503) -> bytes:
    return b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status


# The set alone ---------------------------------------------------------------------------------------------------


async def test_at_most_half_are_ejected_and_what_is_left_is_used() -> None:
    these = endpoints(5)
    assert [these.eject(member, Cause.BROKEN, 10.0) for member in these] == [True, True, False, False, False]
    assert these.usable == these.members[2:] and these.ejections == {Cause.BROKEN: 2}
    # Two of the others are lost: of three that can be reached one may be ejected, so one comes back.
    these.note_reach(these[2], Reach.UNREACHABLE)
    these.note_reach(these[3], Reach.UNREACHABLE)
    assert len(these.usable) == 2 and these[4] in these.usable
    these.note_reach(these[4], Reach.NOT_READY)
    assert len(these.usable) == 1  # an ejected one is better than none
    these.note_reach(these[2], Reach.READY)
    assert these[2] in these.usable
    await these.close()


async def test_the_only_endpoint_is_never_ejected() -> None:
    these = endpoints(1)
    assert not these.eject(these[0], Cause.STUCK, 1.0) and these.usable == [these[0]]


async def test_a_readmitted_endpoint_gets_one_call_at_a_time_until_it_has_proven_itself() -> None:
    these = endpoints(2)
    back, other = these
    these.eject(back, Cause.STUCK, 1.0)
    assert {these.pick(1.0) for _ in range(20)} == {other}
    these.restore(back, 2.0)
    back.outstanding = 1
    other.outstanding = 50
    other.note_answer(2.0, 0.5)
    assert {these.pick(2.0) for _ in range(20)} == {other}
    for _ in range(5):
        back.note_answer(2.0, 0.01)
    assert {these.pick(2.0) for _ in range(20)} == {back}
    these.note_broken(back, 3.0)
    assert back.ejection.cause is None  # it is trusted again: one broken exchange is not enough
    these.eject(back, Cause.STUCK, 3.0)
    these.restore(back, 6.0)
    these.note_broken(back, 6.0)
    assert back.ejection.cause is Cause.BROKEN  # on trial one is


async def test_an_endpoint_that_lost_a_connection_gets_no_further_call_until_it_has_answered() -> None:
    """R10: a process that dies loses its connections one by one, and its kernel took new calls until the last."""
    these = endpoints(2)
    dying, other = these
    dying.outstanding, other.outstanding = 3, 50
    dying.note_answer(1.0, 0.01)
    other.note_answer(1.0, 0.5)
    assert {these.pick(1.0) for _ in range(20)} == {dying}
    these.note_broken(dying, 2.0)
    assert {these.pick(2.0) for _ in range(20)} == {other}
    assert {these.pick(2.3) for _ in range(20)} == {dying}  # it lives: a call, not the process, went wrong
    these.note_broken(dying, 3.0)
    dying.outstanding = 0
    assert {these.pick(3.0) for _ in range(20)} == {dying}  # one more tells
    dying.outstanding = 1
    dying.note_answer(3.1, 0.001)
    assert {these.pick(3.1) for _ in range(20)} == {dying}
    for one in these:
        these.note_broken(one, 4.0)
    assert {these.pick(4.0) for _ in range(20)} == {dying}  # nobody is better


async def test_addresses_come_and_go_with_their_records() -> None:
    these = endpoints(2)
    stays, goes = these
    goes.outstanding = 1
    these.assign((stays.address,))
    assert list(these) == [stays] and these.gone() == []
    these.assign((stays.address, goes.address))
    assert these[1] is goes and not goes.leaving
    these.assign((stays.address,))
    goes.outstanding = 0
    assert these.gone() == [goes]


# Probes ----------------------------------------------------------------------------------------------------------


async def test_an_endpoint_that_is_not_ready_is_not_asked_until_it_is(two: tuple[Upstream, Upstream]) -> None:
    a, b = two
    ready = False

    async def starting(seen: Seen) -> bytes:
        return await b.ok(seen) if ready else not_ready()

    b.answer = starting
    async with gateway(with_probe([a.port, b.port])) as (port, core), Client(port) as client:
        await until(lambda: [e.reach for e in core.pools["p"].endpoints] == [Reach.READY, Reach.NOT_READY])
        await until(lambda: core.ready)
        for _ in range(10):
            assert (await client.ask(INFER)).status == 200
        assert {seen.get("host") for seen in b.seen} and all("/v2/health/ready" in seen.head for seen in b.seen)
        ready = True
        await until(lambda: len(core.pools["p"].endpoints.usable) == 2)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:%d/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n",
    ],
)
async def test_a_probe_follows_no_redirect_and_reads_no_endless_body(
    two: tuple[Upstream, Upstream], answer: bytes
) -> None:
    a, sink = two

    async def probed(seen: Seen) -> bytes:
        return answer.replace(b"%d", b"%d" % sink.port)

    a.answer = probed
    async with gateway(with_probe([a.port])) as (_, core):
        await until(lambda: len(a.seen) >= 2)
        assert core.pools["p"].endpoints[0].reach is not Reach.READY and not sink.seen


async def test_a_gateway_is_not_ready_before_it_has_asked(two: tuple[Upstream, Upstream]) -> None:
    go = asyncio.Event()

    async def slow(seen: Seen) -> bytes:
        await go.wait()
        return await two[0].ok(seen)

    two[0].answer = slow
    async with gateway(documents([two[0].port], pool=PROBED)) as (port, core), Client(port) as client:
        assert (await client.ask("/v2/health/ready", key=None, method="GET")).status == 503
        go.set()
        await until(lambda: core.ready)
        assert (await client.ask("/v2/health/ready", key=None, method="GET")).status == 200


async def test_an_endpoint_that_fails_beside_another_is_left_alone_and_tried_again(
    two: tuple[Upstream, Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "TICK_S", 0.01)
    monkeypatch.setattr(ejection, "BASE_S", 3600.0)
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        for _ in range(30):
            these.note_error(these[0], 500, monotonic(), 0.01)
            these[1].note_answer(monotonic(), 0.01)
        await until(lambda: these.ejections == {Cause.ERRORS: 1})
        assert (await client.ask(INFER)).status == 200
        these[0].ejection.until_s = monotonic()  # its time is over
        await until(lambda: these[0].ejection.cause is None and these[0].trial > 0)
        assert len(these.usable) == 2 and not two[0].seen  # no path to probe: it was only connected to


# Discovery -------------------------------------------------------------------------------------------------------


async def test_discovery_adds_and_removes_without_dropping_a_call(
    two: tuple[Upstream, Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two
    source = ScriptedDiscovery([("127.0.0.1", a.port)])
    asked: list[Address] = []

    def discover(address: Address) -> ScriptedDiscovery:
        asked.append(address)
        return source

    monkeypatch.setattr(Watch, "discover", staticmethod(discover))
    files = documents([a.port])
    lines = [line for line in files["all.toml"].split(b"\n") if not line.startswith((b"endpoints", b"grpc_endp"))]
    files["all.toml"] = b"\n".join(lines).replace(b"[pools.p]", b'[pools.p]\ndiscover = "dns:pods.example:8000"')
    hold = asyncio.Event()

    async def held(seen: Seen) -> bytes:
        await hold.wait()
        return await a.ok(seen)

    a.answer = held
    async with gateway(files) as (port, core), Client(port) as early, Client(port) as client:
        early.send(INFER)  # before the first lookup: it waits
        await until(lambda: len(a.seen) == 1)
        assert asked[0] == ("pods.example", 8000)
        these = core.pools["p"].endpoints
        source.addresses = (("127.0.0.1", b.port),)
        await until(lambda: [e.port for e in these] == [b.port])
        assert (await client.ask(INFER)).status == 200 and len(b.seen) == 1
        hold.set()
        assert (await early.reply()).status == 200  # its endpoint has left the answer, the call has not noticed
        await until(lambda: not these.leaving)
        source.error = DiscoveryFailed("the name server is down")
        before = source.lookups
        await until(lambda: source.lookups > before + 1)
        assert [e.port for e in these] == [b.port] and (await client.ask(INFER)).status == 200


# What is sent again ----------------------------------------------------------------------------------------------


async def ask_both(client: Client, two: tuple[Upstream, Upstream], times: int = 20) -> list[int]:
    return [(await client.ask(INFER, b"body")).status for _ in range(times)]


async def test_what_a_full_server_did_not_execute_goes_to_another(two: tuple[Upstream, Upstream]) -> None:
    asked, fulls = 0, 1

    async def answer(seen: Seen) -> bytes:
        nonlocal asked
        asked += 1
        if asked > fulls:
            return await two[0].ok(seen)
        return b"HTTP/1.1 503 No\r\ncontent-length: %d\r\n\r\n" % len(FULL) + FULL

    two[0].answer = two[1].answer = answer
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        still(core)
        assert await ask_both(client, two, 1) == [200]
        assert [up.seen[0].body for up in two] == [b"body", b"body"] and core.pools["p"].retries.spent == 1
        fulls = 1000
        assert await ask_both(client, two, 49) == [503] * 49  # both are full: the storm gets its tenth, no more
        assert core.pools["p"].retries.spent == 5 and asked == 55 and idle(core)


async def test_a_503_that_says_nothing_of_execution_is_passed_on(two: tuple[Upstream, Upstream]) -> None:
    async def broken(seen: Seen) -> bytes:
        return not_ready()

    two[0].answer = two[1].answer = broken
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        assert set(await ask_both(client, two)) == {503}
        assert len(two[0].seen) + len(two[1].seen) == 20 and core.pools["p"].retries.spent == 0


async def test_only_a_route_that_says_so_is_sent_again_after_it_broke(two: tuple[Upstream, Upstream]) -> None:
    broken = 0

    async def once(seen: Seen) -> bytes:
        nonlocal broken
        broken += 1
        return b"" if broken == 1 else await two[0].ok(seen)

    two[0].answer = two[1].answer = once
    files = documents([up.port for up in two])
    async with gateway(files) as (port, core), Client(port) as client:
        assert await ask_both(client, two, 3) == [502, 200, 200]
        assert core.pools["p"].retries.spent == 0 and idle(core)
    for up in two:
        up.seen.clear()
    broken = 0
    async with gateway(first_route(files, IDEMPOTENT)) as (port, core), Client(port) as client:
        assert await ask_both(client, two, 3) == [200] * 3
        assert core.pools["p"].retries.spent == 1 and idle(core)
        assert sum(len(up.seen) for up in two) == 4
        assert [up.seen[0].body for up in two] == [b"body", b"body"]  # the second time at the other one


@pytest.mark.parametrize("size_bytes", [4, 100_000])
async def test_an_endpoint_that_breaks_is_ejected_whatever_the_size_of_the_body(
    two: tuple[Upstream, Upstream], size_bytes: int
) -> None:
    """A body of more than 64 KiB is not kept: its failure was not counted, and the endpoint went on failing calls."""

    async def nothing(_: Seen) -> bytes:
        return b""

    two[0].answer = two[1].answer = nothing
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        while not these.ejections:
            assert (await client.ask(INFER, bytes(size_bytes))).status == 502
            assert len(two[0].seen) + len(two[1].seen) <= 20
        assert these.ejections == {Cause.BROKEN: 1} and idle(core)


async def test_no_call_is_sent_more_than_twice(two: tuple[Upstream, Upstream]) -> None:
    async def nothing(_: Seen) -> bytes:
        return b""

    two[0].answer = two[1].answer = nothing
    async with gateway(first_route(documents([up.port for up in two]), IDEMPOTENT)) as (port, core):
        async with Client(port) as client:
            assert (await client.ask(INFER, b"body")).status == 502
            assert len(two[0].seen) + len(two[1].seen) == 2 and idle(core)


async def test_a_late_call_gets_a_second_copy_and_the_first_answer_wins(two: tuple[Upstream, Upstream]) -> None:
    slow: list[Upstream] = []

    def late(up: Upstream) -> None:
        async def answer(seen: Seen) -> bytes:
            if not slow or slow[0] is up:  # whoever is asked first never answers
                slow[:] = [up]
                await asyncio.Event().wait()
            return b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond"

        up.answer = answer

    late(two[0])
    late(two[1])
    async with gateway(first_route(documents([up.port for up in two]), HEDGED)) as (port, core), Client(port) as client:
        reply = await client.ask(INFER, b"body")
        assert (reply.status, reply.body) == (200, b"second")
        assert [up.seen[0].body for up in two] == [b"body", b"body"] and core.pools["p"].retries.spent == 1
        await until(lambda: slow[0].departures == 1)  # the loser saw its caller leave
        assert idle(core)


async def test_a_call_that_is_answered_in_time_has_no_second_copy(
    two: tuple[Upstream, Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[asyncio.TimerHandle] = []

    class Timed(Hedge):
        __slots__ = ()

        def __init__(self, call: Hedged, after_s: float) -> None:
            super().__init__(call, after_s)
            timers.append(self._timer)

    monkeypatch.setattr(trouble, "Hedge", Timed)
    files = first_route(documents([up.port for up in two]), HEDGED.replace("30", "60000"))
    async with gateway(files) as (port, core), Client(port) as client:
        assert set(await ask_both(client, two)) == {200}
        assert len(timers) == 20 and all(timer.cancelled() for timer in timers)
        assert len(two[0].seen) + len(two[1].seen) == 20 and core.pools["p"].retries.spent == 0 and idle(core)


async def test_a_second_copy_saves_a_call_whose_first_one_breaks(two: tuple[Upstream, Upstream]) -> None:
    asked = 0

    async def answer(seen: Seen) -> bytes:
        nonlocal asked
        asked += 1
        if asked == 1:
            await until(lambda: asked == 2)
            return b""
        await until(lambda: sum(endpoint.outstanding for endpoint in core.pools["p"].endpoints) == 1)
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    two[0].answer = two[1].answer = answer
    async with gateway(first_route(documents([up.port for up in two]), HEDGED)) as (port, core), Client(port) as client:
        assert (await client.ask(INFER, b"body")).status == 200 and asked == 2 and idle(core)


async def test_a_post_meets_a_kept_connection_that_is_being_closed(two: tuple[Upstream, Upstream]) -> None:
    """The FIN is in the gateway's kernel, its loop has not seen it, and the request is written: it used to be a 502."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(5)
    seen = []

    def serve_one(close: bool) -> socket.socket:
        connection, _ = listener.accept()
        connection.settimeout(5)
        seen.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return connection

    loop = asyncio.get_running_loop()
    async with gateway(documents([listener.getsockname()[1]])) as (port, core), Client(port) as client:
        client.send(INFER, b"one")
        kept = await loop.run_in_executor(None, serve_one, False)
        assert (await client.reply()).status == 200
        (connection,) = core.pools["p"].endpoints[0].idle
        kept.close()  # without giving the loop a turn, the next request is begun
        client.send(INFER, b"two")
        answer = loop.run_in_executor(None, serve_one, True)
        assert not connection.transport.is_closing()
        assert (await client.reply()).status == 200
        (await answer).close()
        assert [each.rpartition(b"\r\n\r\n")[2] for each in seen] == [b"one", b"two"] and idle(core)
    listener.close()


# Nobody is there: R19 --------------------------------------------------------------------------------------------


async def test_calls_wait_for_the_first_server_and_no_more_of_them_than_may(two: tuple[Upstream, Upstream]) -> None:
    late, held = Upstream(), socket.socket()
    held.bind(("127.0.0.1", 0))  # refuses connections until it listens
    port_to_be = held.getsockname()[1]
    async with gateway(documents([port_to_be], max_inflight=1, max_queue=4)) as (port, core), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(port)) for _ in range(6)]
        these = core.pools["p"].endpoints
        for n, client in enumerate(clients[:4]):
            client.send(INFER, b"x" * 1000, key=BRONZE)
            await until(lambda n=n: these.parked == n + 1)  # type: ignore[misc]
        assert core.pools["p"].admission.inflight == 0 and core.pools["p"].held_bytes == 4000
        full = await clients[4].ask(INFER, key=BRONZE)
        assert full.status == 503 and full.headers["retry-after"] == "1"
        assert json.loads(full.body)["reason"] == "queue_full"
        clients[5].send(INFER, key=GOLD)
        lost = await clients[3].reply()  # the newest of the lowest tier makes room
        assert lost.status == 503 and json.loads(lost.body)["reason"] == "displaced"
        await stack.enter_async_context(served(late.serve, sock=held))
        statuses = [(await client.reply()).status for client in (*clients[:3], clients[5])]
        assert statuses == [200] * 4 and len(late.seen) == 4
        assert late.seen[0].get("x-oriel-tier") == "gold"
        await until(lambda: idle(core) and core.pools["p"].held_bytes == 0)


async def test_a_call_that_waits_for_a_server_leaves_at_once_with_its_client(two: tuple[Upstream, Upstream]) -> None:
    with nobody() as gone:
        async with gateway(documents([gone])) as (port, core):
            async with Client(port) as client:
                client.send(INFER, b"x")
                await until(lambda: core.pools["p"].endpoints.parked == 1)
            await until(lambda: core.pools["p"].endpoints.parked == 0 and idle(core))


# Malicious upstreams: R28, R29 -----------------------------------------------------------------------------------


async def test_a_redirect_is_the_clients_to_judge_and_never_followed(two: tuple[Upstream, Upstream]) -> None:
    a, sink = two

    async def redirect(_: Seen) -> bytes:
        return b"HTTP/1.1 307 T\r\nlocation: http://127.0.0.1:%d/x\r\ncontent-length: 0\r\n\r\n" % sink.port

    a.answer = redirect
    async with gateway(documents([a.port])) as (port, _), Client(port) as client:
        assert (await client.ask(INFER, headers=f"host-override: 127.0.0.1:{sink.port}\r\n")).status == 307
        # Neither an absolute target nor any header names the upstream.
        reply = await client.ask(f"http://127.0.0.1:{sink.port}{INFER}", headers=f"x-oriel-pool: {sink.port}\r\n")
        assert reply.status == 307 and len(a.seen) == 2 and not sink.seen


BIG = 'probe = ""\nmax_response_bytes = 100000'


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100001\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n" + b"x" * 100_001,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nxxx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nxxx",
        b"HTTP/1.1 200 OK\r\nx: a\nb: c\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"SSH-2.0-nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_a_malicious_answer_is_a_502_with_retry_after(two: tuple[Upstream, Upstream], answer: bytes) -> None:
    async def malicious(_: Seen) -> bytes:
        return answer

    two[0].answer = malicious
    async with gateway(documents([two[0].port], pool=BIG)) as (port, core), Client(port) as client:
        reply = await client.ask(INFER, b"x")
        assert reply.status == 502 and 1 <= int(reply.headers["retry-after"]) <= 60
        assert json.loads(reply.body)["reason"] == "upstream_broken" and len(reply.body) < 500
        assert idle(core)


@pytest.mark.parametrize("head", [b"transfer-encoding: chunked", b"x-until: close"])
async def test_an_answer_without_a_length_is_cut_at_its_bound(two: tuple[Upstream, Upstream], head: bytes) -> None:
    began = asyncio.Event()
    cut = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n2\r\nxx\r\n")
        await began.wait()
        writer.write(b"20000\r\n" + b"x" * 0x20000)  # more is announced than comes, and what comes is too much
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        cut.set()

    async with (
        served(endless) as upstream_port,
        gateway(documents([upstream_port], pool=BIG)) as (port, core),
        Client(port) as client,
    ):
        client.send(INFER)
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        began.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            async with asyncio.timeout(60):
                await client.reader.readexactly(1_000_000)  # cut before its end, so that nobody takes it for whole
        await until(lambda: idle(core) and cut.is_set())


@pytest.mark.parametrize("drip", [b"HTTP/1.1 200 OK\r\nx-a: ", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"])
async def test_an_answer_that_drips_ends_with_the_deadline(two: tuple[Upstream, Upstream], drip: bytes) -> None:
    async def loris(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(drip)
        try:
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    async with (
        served(loris) as upstream_port,
        gateway(documents([upstream_port])) as (port, core),
        Client(port) as client,
    ):
        before = monotonic()
        client.send(INFER, headers="x-request-timeout-ms: 100\r\n")
        async with asyncio.timeout(60):
            if b"content-length" in drip:
                await client.reader.read()  # the head went out: all that is left is to cut
            else:
                assert (await client.reply()).status == 504
        assert monotonic() - before >= 0.1
        await until(lambda: idle(core))


async def test_the_second_half_of_a_split_answer_reaches_nobody(two: tuple[Upstream, Upstream]) -> None:
    stolen = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nstolen"
    honest = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhonest"

    async def split(_: Seen) -> bytes:
        return honest + stolen

    two[0].answer = split
    async with gateway(documents([two[0].port])) as (port, core), Client(port) as victim, Client(port) as other:
        for client in (victim, other, victim, other):
            assert (await client.ask(INFER)).body == b"honest"
        assert idle(core)


async def test_an_answer_nobody_asked_for_closes_its_connection(two: tuple[Upstream, Upstream]) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhonest")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async with (
        served(late) as upstream_port,
        gateway(documents([upstream_port])) as (port, core),
        Client(port) as client,
    ):
        assert (await client.ask(INFER)).body == b"honest"
        endpoint = core.pools["p"].endpoints[0]
        assert len(endpoint.idle) == 1
        writers[0].write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nstolen")
        await until(lambda: not endpoint.idle)
        assert (await client.ask(INFER)).body == b"honest"
    for writer in writers:
        writer.close()
