"""The endpoints of a pool: which are ejected, probed and discovered, and which calls wait while there is none."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from time import monotonic
from types import SimpleNamespace

import pytest
from scripted_discovery import ScriptedDiscovery

from oriel_gateway.call.call import GatewayCall
from oriel_gateway.pools.endpoint_state import MAX_RECORDS, Reach
from oriel_gateway.pools.grpc_endpoint import GrpcEndpoint
from oriel_gateway.pools.health import COMPARE_EVERY, Watch
from oriel_policies.upstreams import ejection
from oriel_policies.upstreams.ejection import Cause
from oriel_wire.discovery.discovery import Address, DiscoveryFailed
from oriel_wire.h2.fields import check_request
from oriel_wire.h2.hpack import Decoder

from ..waiting import until
from .endpoint_pools import PROBED, endpoints, not_ready, pool, served, with_probe
from .gate import INFER, idle
from .stack import BRONZE, GOLD, Client, Seen, Upstream, documents, gateway, nobody, upstream


@pytest.fixture
async def two() -> AsyncIterator[tuple[Upstream, Upstream]]:
    async with upstream() as a, upstream() as b:
        yield a, b


async def test_at_most_half_are_ejected_and_what_is_left_is_used() -> None:
    these = endpoints(5)
    assert [these.eject(member, Cause.BROKEN, 10.0) for member in these] == [True, True, False, False, False]
    assert these.usable == these.members[2:] and these.ejections == {Cause.BROKEN: 2}
    # Two others are lost. Of the three that can be reached only one may be ejected, so an ejected one comes back.
    these.note_reach(these[2], Reach.UNREACHABLE)
    these.note_reach(these[3], Reach.UNREACHABLE)
    assert len(these.usable) == 2 and these[4] in these.usable
    these.note_reach(these[4], Reach.NOT_READY)
    assert len(these.usable) == 1  # an ejected endpoint is used rather than none
    these.note_reach(these[2], Reach.READY)
    assert these[2] in these.usable
    await these.close()


async def test_a_probe_over_grpc_is_a_request_that_strict_servers_take() -> None:
    """Pseudo-header fields come before all others: gRPC's servers tolerate another order, this engine and Envoy do
    not.
    """
    heads = []

    class Exchange:
        def send(self, block: bytes, data: bytes, end: bool) -> bool:
            heads.append(Decoder().decode(block))
            return True

        def abandon(self) -> None:
            pass

    class Endpoint(GrpcEndpoint):
        def begin(self, *_: object) -> Exchange:  # type: ignore[override]
            return Exchange()

    endpoint = Endpoint(("127.0.0.1", 1), pool(1))
    endpoint.probe(0.0, "/ready", lambda _: None)
    endpoint.ask_for_model("digits", 0.0, lambda _: None)
    assert [check_request(head) for head in heads] == [-1, -1]
    assert [dict(head)[b":path"].rpartition(b"/")[2] for head in heads] == [b"ServerReady", b"ModelReady"]
    await endpoint.close()


async def test_the_only_endpoint_is_never_ejected() -> None:
    these = endpoints(1)
    assert not these.eject(these[0], Cause.STUCK, 1.0) and these.usable == [these[0]]


async def test_a_restored_endpoint_gets_one_call_at_a_time_until_it_has_proven_itself() -> None:
    these = endpoints(2)
    back, other = these
    these.eject(back, Cause.STUCK, 1.0)
    assert {these.pick(1.0) for _ in range(20)} == {other}
    these.restore(back, 2.0)
    back.outstanding = 1
    other.outstanding = 50
    these.note_answer(other, 2.0, 0.5)
    assert {these.pick(2.0) for _ in range(20)} == {other}
    for _ in range(5):
        these.note_answer(back, 2.0, 0.01)
    assert {these.pick(2.0) for _ in range(20)} == {back}
    these.note_broken(back, 3.0)
    assert back.ejection.cause is None  # it is trusted again, so one broken exchange does not eject it
    these.eject(back, Cause.STUCK, 3.0)
    these.restore(back, 6.0)
    these.note_broken(back, 6.0)
    assert back.ejection.cause is Cause.BROKEN  # during its trial one broken exchange ejects it


async def test_an_endpoint_that_lost_a_connection_gets_no_further_call_until_it_has_answered() -> None:
    """R10: the connections of a dying process end one by one, and its kernel accepts new calls until the last has
    ended.
    """
    these = endpoints(2)
    dying, other = these
    dying.outstanding, other.outstanding = 3, 50
    these.note_answer(dying, 1.0, 0.01)
    these.note_answer(other, 1.0, 0.5)
    assert {these.pick(1.0) for _ in range(20)} == {dying}
    these.note_broken(dying, 2.0)
    assert {these.pick(2.0) for _ in range(20)} == {other}
    assert {these.pick(2.3) for _ in range(20)} == {dying}  # it has answered since: a call has failed, not the process
    these.note_broken(dying, 3.0)
    dying.outstanding = 0
    assert {these.pick(3.0) for _ in range(20)} == {dying}  # one call is sent, to find out
    dying.outstanding = 1
    these.note_answer(dying, 3.1, 0.001)
    assert {these.pick(3.1) for _ in range(20)} == {dying}
    for one in these:
        these.note_broken(one, 4.0)
    assert {these.pick(4.0) for _ in range(20)} == {dying}  # no endpoint is better


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


async def test_an_endpoint_that_is_not_ready_is_not_requested_until_it_is(two: tuple[Upstream, Upstream]) -> None:
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
    "states",
    [["READY", "UNAVAILABLE"], ["READY"] * 3000 + ["UNAVAILABLE"], ["UNAVAILABLE"], ["READY", "LOADING"]],
    ids=["one of two", "one of many", "the only one", "loading"],
)
async def test_a_broken_model_takes_no_other_model_of_its_server_out_of_service(
    two: tuple[Upstream, Upstream], states: list[str]
) -> None:
    """Servers say by default that they are not ready while one of their models is not, and that may be for ever."""
    up, _ = two
    index = json.dumps([{"name": f"m{n}", "state": state} for n, state in enumerate(states)]).encode()

    async def broken(seen: Seen) -> bytes:
        if seen.head.startswith("POST /v2/repository/index "):
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(index) + index
        return not_ready(400) if "/v2/health/ready" in seen.head else await up.ok(seen)

    up.answer = broken
    async with gateway(with_probe([up.port])) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        if states[-2:] == ["READY", "UNAVAILABLE"]:
            await until(lambda: these[0].reach is Reach.READY)
            index = index.replace(b"UNAVAILABLE", b"LOADING")  # another try: the first model goes on
            count = len(up.seen)
            await until(lambda: len(up.seen) > count + 4)
            assert these[0].reach is Reach.READY and (await client.ask(INFER)).status == 200
            up.answer = stopping
        await until(lambda: these[0].reach is Reach.NOT_READY)
        client.send(INFER, b"x")
        await until(lambda: these.parked == 1)
        next(item for item in core.clock if isinstance(item, GatewayCall)).expired()
        reply = await client.reply()
        error = "model 'digits' was not ready on any server of this pool before the deadline"
        assert (reply.status, json.loads(reply.body)["error"]) == (502, error)


async def stopping(seen: Seen) -> bytes:
    return not_ready(503)


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


async def test_an_endpoint_that_fails_for_one_model_keeps_the_calls_for_others() -> None:
    these = endpoints(2)
    bad, good = these
    watch = Watch(lambda: ())
    gate = SimpleNamespace(pool=pool(2))

    def answers(of_slow: Callable[[], None]) -> None:
        for _ in range(30):
            of_slow()
            these.note_answer(good, monotonic(), 0.01, "slow")
            for one in these:
                these.note_answer(one, monotonic(), 0.01, "well")

    for of_slow, cause in (
        (lambda: these.note_answer(bad, monotonic(), 3.0, "slow"), Cause.LATENCY),
        (lambda: these.note_error(bad, 500, monotonic(), 0.01, model="slow"), Cause.ERRORS),
        (lambda: these.note_broken(bad, monotonic(), "slow"), Cause.BROKEN),
    ):
        answers(of_slow)
        if cause is Cause.BROKEN:
            for _ in range(3):
                of_slow()
        watch._ticks = COMPARE_EVERY
        watch._look_after(gate, these, None)  # type: ignore[arg-type]
        assert bad.ejection.cause is None and not these.ejections, cause
        now = monotonic()
        assert {these.pick(now, (), "slow") for _ in range(20)} == {good}, cause
        assert these.model_locations.among(these.usable, "well", now) == [bad, good], cause
        these.restore(bad, now)
        bad.trial = 0
        these.model_locations.assigned([], [])
    await watch.close()
    await these.close()


async def test_a_model_that_fails_everywhere_does_not_eject_an_endpoint_again() -> None:
    these = endpoints(2)
    back, other = these
    for _ in range(10):
        these.note_error(other, 500, 1.0, 0.01, model="broken")
    these.eject(back, Cause.STUCK, 1.0)
    these.restore(back, 2.0)
    these.note_answer(back, 2.0, 0.01, "well")
    these.note_error(back, 500, 2.0, 0.01, model="broken")
    these.note_broken(back, 2.0, "broken")
    assert back.ejection.cause is None and back.trial
    these.note_error(back, 500, 2.0, 0.01, model="well")
    assert back.ejection.cause is Cause.ERRORS
    await these.close()


async def test_records_of_models_are_bounded() -> None:
    these = endpoints(1)
    for n in range(MAX_RECORDS + 9):
        these.note_answer(these[0], 1.0, 0.01, f"m{n}")
        these.note_error(these[0], 404, 1.0, 0.01, model=f"none{n}")
    assert list(these[0].records) == [f"m{n}" for n in range(9, MAX_RECORDS + 9)]
    await these.close()


async def test_an_endpoint_that_fails_beside_another_is_left_alone_and_tried_again(
    two: tuple[Upstream, Upstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ejection, "BASE_S", 3600.0)
    async with gateway(documents([up.port for up in two])) as (port, core), Client(port) as client:
        core.endpoint_watch.tick_s = 0.01
        these = core.pools["p"].endpoints
        for _ in range(30):
            these.note_error(these[0], 500, monotonic(), 0.01)
            these.note_answer(these[1], monotonic(), 0.01)
        await until(lambda: these.ejections == {Cause.ERRORS: 1})
        assert (await client.ask(INFER)).status == 200
        these[0].ejection.until_s = monotonic()  # the end of its ejection
        await until(lambda: these[0].ejection.cause is None and these[0].trial > 0)
        assert len(these.usable) == 2 and not two[0].seen  # without a path to probe, it was only connected to


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
        # its endpoint is missing from the lookup's answer, which the call does not notice
        assert (await early.reply()).status == 200
        await until(lambda: not these.leaving)
        source.error = DiscoveryFailed("the name server is down")
        before = source.lookups
        await until(lambda: source.lookups > before + 1)
        assert [e.port for e in these] == [b.port] and (await client.ask(INFER)).status == 200


async def test_calls_wait_for_the_first_server_and_no_more_of_them_than_may(two: tuple[Upstream, Upstream]) -> None:
    late, held = Upstream(), socket.socket()
    held.bind(("127.0.0.1", 0))  # connections are refused until it listens
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
