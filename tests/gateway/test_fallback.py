"""Calls that their own pool cannot serve in time go on to the next pools of their route, and only those."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random
from time import monotonic
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from oriel_gateway.admin.metrics import GatewayCollector
from oriel_gateway.core import Gateway
from oriel_gateway.observe.decisions import explain
from oriel_gateway.pools.demand import PoolDemand
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .endpoint_pools import FULL, still
from .special_routes import BRONZE, INFER, OPERATOR, Held, House, answering, ask, house, ok
from .stack import GOLD, Client, Seen, digest, nobody

ROUTE = '[[routes]]\nmodel = "*"\nname = "r"\npool = "p0"\nfallback = ["p1"]\n'
SMALLER = '[[routes]]\nmodel = "*"\nname = "r"\npool = "p0"\nfallback = [{ pool = "p1", model = "tiny" }]\n'
SERVICE = '[[routes]]\nservice = "*"\nname = "r"\npool = "p0"\nfallback = [{ pool = "p1", model = "tiny/1b" }]\n'
CHAT = "/v1/chat/completions"


def spilled(core: Gateway) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(GatewayCollector(core))
    return {
        (s.labels["route"], s.labels["from"], s.labels["to"], s.labels["reason"]): s.value
        for family in registry.collect()
        for s in family.samples
        if s.name == "oriel_gateway_spilled_calls_total"
    }


def asked(it: House) -> list[int]:
    """Return how many requests the server of each pool received."""
    return [len(up.seen) for up in it.ups]


def latest(it: House, before: int = 0) -> dict[str, Any]:
    """Return the recorded decision of the latest call, or of one before it."""
    return explain(it.core.records.decisions.where(limit=9)[before], 0.0)


async def test_a_pool_without_servers_sends_its_calls_on() -> None:
    async with house(ROUTE) as it:
        it.core.pools["p0"].endpoints.assign([])
        reply = await ask(it.port, INFER, b"body", key=OPERATOR)
        assert (reply.status, reply.body) == (200, b"ok") and asked(it) == [0, 1]
        assert reply.headers["x-oriel-route"] == "r; fallback=p1"
        seen = it.ups[1].seen[0]
        assert seen.body == b"body" and seen.get("x-oriel-fallback") == "true"
        assert int(seen.get("x-oriel-timeout-ms") or 0) <= 8000
        assert spilled(it.core) == {("r", "p0", "p1", "upstream_unreachable"): 1.0}
        decision = latest(it)
        assert decision["pool"] == "p1"
        assert decision["spilled"] == [{"pool": "p0", "reason": "upstream_unreachable"}]
        assert it.idle()


async def test_a_server_that_refuses_connections_sends_its_calls_on() -> None:
    with nobody() as port:
        async with house(ROUTE) as it:
            it.core.pools["p0"].endpoints.assign([("127.0.0.1", port)])
            for number in range(1, 3):  # the first call finds the pool unreachable, the second finds it known
                assert (await ask(it.port, INFER, b"body")).status == 200 and asked(it) == [0, number]
            assert latest(it, 1)["tried"] == [f"127.0.0.1:{port}"] and latest(it)["tried"] == []
            assert spilled(it.core) == {("r", "p0", "p1", "upstream_unreachable"): 2.0}
            assert it.core.pools["p1"].retries.spent == 0 and it.idle()


async def test_a_pool_that_is_too_slow_for_the_deadline_keeps_one_call_in_twenty() -> None:
    async with house(ROUTE) as it, Client(it.port) as client:
        gate = it.core.pools["p0"]
        for seconds in (0.9, 1.1) * 50:  # service times, as if calls had been answered
            gate._time("model:/v2/models/digits/infer", 4, seconds)
        soon = "x-request-timeout-ms: 1200\r\n"
        assert (await client.ask(INFER, b"body")).status == 200 and asked(it) == [1, 0]  # 8 s are enough
        for _ in range(40):
            assert (await client.ask(INFER, b"body", headers=soon)).status == 200
        assert asked(it) == [3, 38]
        assert spilled(it.core) == {("r", "p0", "p1", "infeasible"): 38.0}
        # the deadline goes on; it does not begin anew
        assert all(int(seen.get("x-oriel-timeout-ms") or 0) <= 1200 for seen in it.ups[1].seen)
        for seconds in (0.9, 1.1) * 50:
            it.core.pools["p1"]._time("model:/v2/models/digits/infer", 4, seconds)
        for _ in range(20):  # the other pool is as bad
            assert (await client.ask(INFER, b"body", headers=soon)).status == 200
        assert asked(it) == [23, 38]
        gate.endpoints.assign([])  # without a server a pool's service times do not matter
        assert (await client.ask(INFER, b"body")).status == 200
        assert latest(it)["spilled"] == [{"pool": "p0", "reason": "upstream_unreachable"}] and it.idle()


async def test_a_wait_that_is_longer_than_the_deadline_sends_a_call_on() -> None:
    async with house(ROUTE, inflight=1) as it, AsyncExitStack() as exits:
        held = it.ups[0].answer = Held()
        clients = [await exits.enter_async_context(Client(it.port)) for _ in range(12)]
        gate = it.core.pools["p0"]
        for client in clients[:11]:
            client.send(INFER, b"x")
        await until(lambda: len(gate.admission.queue) == 10)
        held.go.release()
        await until(lambda: len(gate.admission.queue) == 9)
        backlog, _, _ = gate.admission.queue.backlog(0, "g")
        assert backlog is not None
        backlog.turns, backlog.turn_s = 100, 0.5  # nine turns of 0.5 s take 4.5 s
        assert (await clients[11].ask(INFER, b"y", headers="x-request-timeout-ms: 3000\r\n")).status == 200
        assert asked(it) == [2, 1] and spilled(it.core) == {("r", "p0", "p1", "infeasible"): 1.0}
        for _ in range(10):
            held.go.release()
        assert [(await client.reply()).status for client in clients[:11]] == [200] * 11
        assert it.idle()


async def test_a_full_queue_and_a_displaced_call_go_on() -> None:
    async with house(ROUTE, inflight=1) as it, AsyncExitStack() as exits:
        held = it.ups[0].answer = Held()
        gate = it.core.pools["p0"]
        gate.admission.queue.slots.bound = 1
        first, low, high, last = [await exits.enter_async_context(Client(it.port)) for _ in range(4)]
        first.send(INFER, b"1")
        await until(lambda: asked(it) == [1, 0])
        low.send(INFER, b"2", key=BRONZE)
        await until(lambda: len(gate.admission.queue) == 1)
        high.send(INFER, b"3")
        assert (await low.reply()).status == 200  # the call had waited before it was displaced
        assert (await last.ask(INFER, b"4", key=BRONZE)).status == 200
        assert asked(it) == [1, 2] and [seen.body for seen in it.ups[1].seen] == [b"2", b"4"]
        assert spilled(it.core) == {("r", "p0", "p1", "displaced"): 1.0, ("r", "p0", "p1", "queue_full"): 1.0}
        assert not any(kept.payload for kept in gate.admission.queue.waiting(2))
        held.go.release()
        held.go.release()
        assert [(await first.reply()).status, (await high.reply()).status] == [200, 200] and it.idle()


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"", 502), (ok(b"broken", status="500 No"), 500), (ok(b"perhaps", status="503 No"), 503)],
    ids=["closed", "500", "503"],
)
async def test_what_may_have_been_executed_is_not_sent_on(answer: bytes, status: int) -> None:
    async with house(ROUTE) as it:
        it.ups[0].answer = answering(answer)
        assert (await ask(it.port, INFER, b"body")).status == status
        assert asked(it) == [1, 0] and spilled(it.core) == {} and it.idle()


async def test_what_a_server_refused_before_it_ran_goes_on_within_the_retry_budget() -> None:
    async with house(ROUTE) as it:
        still(it.core)
        it.ups[0].answer = answering(ok(FULL, status="503 No"))
        assert [(await ask(it.port, INFER, b"body")).status for _ in range(11)] == [200] + [503] * 9 + [200]
        assert asked(it) == [11, 2] and it.core.pools["p0"].retries.spent == 2
        assert spilled(it.core) == {("r", "p0", "p1", "queue_full"): 2.0} and it.idle()
        assert latest(it)["spilled"] == [{"pool": "p0", "reason": "queue_full"}]
        spent = ok(FULL, "x-oriel-retry: spent\r\n", "503 No")
        it.ups[0].answer = answering(spent)  # another gateway has already sent it to a second pool
        it.core.pools["p0"].retries.requested(0.0)
        assert (await ask(it.port, INFER, b"body")).status == 503 and asked(it) == [12, 2]


async def test_a_body_that_is_gone_is_not_sent_on_and_one_that_is_here_goes_on_whole() -> None:
    large = b"x" * 100_000
    async with house(ROUTE) as it, Client(it.port) as client:
        it.ups[0].answer = answering(ok(FULL, status="503 No"))
        assert (await client.ask(INFER, large)).status == 503 and asked(it) == [1, 0]
        it.core.pools["p0"].endpoints.assign([])
        head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: {GOLD}\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(head.encode())
        for _ in range(4):  # the body comes in pieces, which are on the byte budget
            client.writer.write(b"%x\r\n%b\r\n" % (len(large), large))
            await until(lambda: it.core.pools["p0"].held_bytes >= len(large))
        client.writer.write(b"0\r\n\r\n")
        assert (await client.reply()).status == 200 and it.ups[1].seen[0].body == large * 4
        assert not it.core.pools["p0"].held_bytes and it.idle()
        it.core.pools["p1"].pool = replace(it.core.pools["p1"].pool, max_body_bytes=10)
        client.send(INFER, large, headers="x-request-timeout-ms: 50\r\n")
        assert (await client.reply()).status == 502 and asked(it) == [1, 1]  # the call has waited in its own pool


async def test_a_tenants_own_limit_sends_nothing_on() -> None:
    limited = '[tenants.l]\ntier = "gold"\nmodels = ["*"]\nlimit = { requests_per_s = 0.001, burst = 1 }\n'
    limited += f'keys = [{{ sha256 = "{digest("l")}" }}]\n'
    async with house(limited + ROUTE) as it:
        it.core.pools["p0"].endpoints.assign([])
        assert [(await ask(it.port, INFER, b"x", key="l")).status for _ in range(3)] == [200, 429, 429]
        assert asked(it) == [0, 1]


async def test_where_no_pool_can_serve_it_a_call_waits_in_its_own_as_ever() -> None:
    async with house(ROUTE) as it, Client(it.port) as client:
        own, other = (it.core.pools[name].endpoints for name in ("p0", "p1"))
        own.assign([])
        other.assign([])
        client.send(INFER, b"x")
        await until(lambda: own.parked == 1)
        own.assign([("127.0.0.1", it.ups[0].port)])
        assert (await client.reply()).status == 200 and asked(it) == [1, 0]
        assert spilled(it.core) == {} and it.idle()


async def test_the_pools_are_asked_in_their_order_and_none_twice() -> None:
    order = '[[routes]]\nmodel = "*"\nname = "r"\npool = "p0"\nfallback = ["p1", "p2", "p3"]\n'
    with nobody() as port:
        async with house(order, pools=4) as it:
            for name in ("p0", "p1"):
                it.core.pools[name].endpoints.assign([])
            it.core.pools["p2"].endpoints.assign([("127.0.0.1", port)])
            assert (await ask(it.port, INFER, b"x")).status == 200 and asked(it) == [0, 0, 0, 1]
            gone = [{"pool": name, "reason": "upstream_unreachable"} for name in ("p0", "p1", "p2")]
            assert latest(it)["spilled"] == gone and latest(it)["pool"] == "p3"
            assert set(spilled(it.core)) == {
                ("r", "p0", "p2", "upstream_unreachable"),
                ("r", "p2", "p3", "upstream_unreachable"),
            }
            assert it.ups[3].seen[0].head.count("x-oriel-fallback") == 1 and it.idle()


async def test_what_another_gateway_has_sent_on_stays() -> None:
    """Otherwise two gateways that name each other as fallback would send a call to and fro until its deadline."""
    async with house(ROUTE) as it:
        it.core.pools["p0"].endpoints.assign([])
        soon = "x-oriel-fallback: true\r\nx-request-timeout-ms: 50\r\n"
        assert (await ask(it.port, INFER, b"x", headers=soon)).status == 502 and asked(it) == [0, 0]


async def test_a_call_that_executes_nothing_stays() -> None:
    async with house(ROUTE) as it:
        it.core.pools["p0"].endpoints.assign([])
        soon = "x-request-timeout-ms: 50\r\n"
        reply = await ask(it.port, "/v2/models/digits/ready", method="GET", headers=soon)
        assert reply.status == 502 and asked(it) == [0, 0]


async def test_a_smaller_model_is_for_tenants_that_may_use_it() -> None:
    async with house(SMALLER) as it:
        it.core.pools["p0"].endpoints.assign([])
        assert (await ask(it.port, f"{INFER}?a=b", b"x")).status == 200
        assert it.ups[1].seen[0].head.startswith("POST /v2/models/tiny/infer?a=b HTTP/1.1\r\n")
        assert latest(it)["target"] == "model:tiny"
        soon = "x-request-timeout-ms: 50\r\n"
        # this tenant may use no model but digits
        assert (await ask(it.port, INFER, b"x", key=BRONZE, headers=soon)).status == 502
        versioned = "/v2/models/digits/versions/3/infer"
        assert (await ask(it.port, versioned, b"x", headers=soon)).status == 502
        assert asked(it) == [0, 1] and it.idle()


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (b'{"model": "big", "n": 1.50}', b'{"model":"tiny/1b","n":1.50}'),
        (b'{"n": {"model": 1}, "model": "big"}', b'{"n":{"model": 1},"model":"tiny/1b"}'),
        (b'{"model": "big", "model": "huge"}', None),
        (b'{"model": "big", "Model": "huge"}', None),
        (b'{"n": 1}', None),
        (b'{"model": ["big"]}', None),
        (b"\x1f\x8b compressed", None),
    ],
)
async def test_a_body_names_the_other_model_in_every_readers_eyes_or_stays(sent: bytes, arrives: bytes | None) -> None:
    async with house(SERVICE) as it:
        it.core.pools["p0"].endpoints.assign([])
        more = "content-type: application/json\r\n" + ("" if arrives else "x-request-timeout-ms: 50\r\n")
        reply = await ask(it.port, CHAT, sent, headers=more)
        assert reply.status == (200 if arrives else 502)
        assert [seen.body for seen in it.ups[1].seen] == ([arrives] if arrives else []) and it.idle()


async def test_a_body_of_a_tenant_with_a_list_names_only_its_models() -> None:
    listed = "".join(
        f'[tenants.{name}]\ntier = "gold"\nmodels = {models}\nservices = ["*"]\n'
        f'keys = [{{ sha256 = "{digest(name)}" }}]\n'
        for name, models in (("one", '["big"]'), ("two", '["big", "tiny/*"]'))
    )
    async with house(listed + SERVICE) as it:
        it.core.pools["p0"].endpoints.assign([])
        more = "content-type: application/json\r\nx-request-timeout-ms: 500\r\n"
        for key, status in (("one", 502), ("two", 200)):
            assert (await ask(it.port, CHAT, b'{"model":"big"}', key=key, headers=more)).status == status
        assert [seen.body for seen in it.ups[1].seen] == [b'{"model":"tiny/1b"}']
        own = "/v1/services/mine"  # in the body of a service `model` means what the service's author says
        more = "x-request-timeout-ms: 50\r\n"
        assert (await ask(it.port, own, b'{"model":"big"}', headers=more)).status == 502 and asked(it) == [0, 1]


async def test_a_call_that_went_on_is_demand_of_its_first_pool() -> None:
    async with house(ROUTE) as it:
        gate = it.core.pools["p0"]
        gate.endpoints.assign([])
        gate.count_demand(demand := PoolDemand(monotonic(), lambda: None))
        assert (await ask(it.port, INFER, b"x")).status == 200
        record = demand.record(0, monotonic())
        assert sum(record.tiers["gold"].arrivals) == record.tiers["gold"].refused == 1
        assert record.held == 0 and sum(record.tiers["gold"].backlog) == 0


async def test_the_span_names_the_pools_and_no_copy_is_compared() -> None:
    route = ROUTE.replace('"p1"', '"p1", "p2"') + 'shadow = { pool = "p3" }\n'
    async with house(route, pools=4) as it:
        it.core.pools["p0"].endpoints.assign([])
        it.core.pools["p1"].endpoints.assign([])
        sampled = f"traceparent: 00-{'1' * 32}-{'2' * 16}-01\r\n"
        assert (await ask(it.port, INFER, b"x", headers=sampled)).status == 200
        assert (await ask(it.port, INFER, b"x")).status == 200  # when it is answered, the first call has been recorded
        assert asked(it) == [0, 0, 2, 0] and it.idle()
        assert isinstance(it.core.sink, ListSink)
        span = next(span for span in it.core.sink.spans if span.kind == "server")
        assert span.attributes["oriel.spilled"] == "p0: upstream_unreachable, p1: upstream_unreachable"


async def test_requests_of_http_2_go_on_with_bodies_that_come_in_pieces() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 50_000

    async with house(ROUTE) as it, httpx.AsyncClient(http1=False, http2=True, trust_env=False, timeout=60.0) as client:
        it.core.pools["p0"].endpoints.assign([])
        url = f"http://127.0.0.1:{it.port}{INFER}"
        reply = await client.post(url, content=pieces(), headers={"x-api-key": OPERATOR})
        assert (reply.http_version, reply.status_code) == ("HTTP/2", 200)
        assert reply.headers["x-oriel-route"] == "r; fallback=p1" and it.ups[1].seen[0].body == b"x" * 250_000
        assert asked(it) == [0, 1] and it.idle()


async def test_an_answer_that_breaks_off_is_not_sent_on() -> None:
    async with house(ROUTE) as it, Client(it.port) as client:
        it.ups[0].answer = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        client.send(INFER, b"x")
        head = await client.reader.readuntil(b"half")
        assert b"200 OK" in head
        await it.ups[0].close()
        assert await client.reader.read() == b""
        assert asked(it) == [1, 0] and spilled(it.core) == {}
        await until(it.idle)


async def test_whatever_pools_do_each_call_is_executed_at_most_once_and_leaves_nothing_behind() -> None:
    order = '[[routes]]\nmodel = "*"\nname = "r"\npool = "p0"\nfallback = ["p1", "p2"]\n'
    chance, ran = Random(7), Counter[bytes]()

    async def answer(seen: Seen) -> bytes:
        await asyncio.sleep(0)
        kind = chance.random()
        if kind < 0.3:
            return ok(FULL, status="503 No")
        ran[seen.body] += 1
        return b"" if kind < 0.4 else ok(b"broken", status="500 No") if kind < 0.5 else ok(seen.body)

    async with house(order, pools=3, inflight=2, per_pool=2) as it:
        for up in it.ups:
            up.answer = answer
        answered = Counter[int]()

        async def calls(first: int) -> None:
            async with Client(it.port) as client:
                for number in range(first, first + 30):
                    body = b"%d" % number
                    key = chance.choice((GOLD, BRONZE))
                    reply = await client.ask(INFER, body, key=key, headers="x-request-timeout-ms: 60000\r\n")
                    answered[reply.status] += 1
                    assert reply.status != 200 or (reply.body == body and ran[body] == 1)

        async def changes() -> None:
            while True:
                gate = it.core.pools[chance.choice(("p0", "p1", "p2"))]
                number = int(gate.name[1]) * 2
                these = [("127.0.0.1", up.port) for up in it.ups[number : number + 2]]
                gate.endpoints.assign(these[: chance.randrange(3)])
                gate.admission.queue.slots.bound = chance.randrange(4)
                await asyncio.sleep(0.001)
                gate.endpoints.assign(these)

        changing = asyncio.ensure_future(changes())
        await asyncio.gather(*(calls(1000 * number) for number in range(12)))
        changing.cancel()
        assert sum(answered.values()) == 360 and answered[200] > 36 and set(answered) <= {200, 500, 502, 503}
        assert max(ran.values()) == 1 and len(spilled(it.core)) >= 3
        assert all(gate.calls == 0 for gate in it.core.pools.values())
        await until(it.idle)


async def test_an_idempotent_call_that_may_have_run_is_tried_again_in_its_own_pool_only() -> None:
    async with house(ROUTE + "idempotent = true\n") as it, Client(it.port) as client:
        own, there = it.core.pools["p0"].endpoints, [("127.0.0.1", it.ups[0].port)]

        async def dies(seen: Seen) -> bytes:
            own.assign([])
            it.ups[0].answer = it.ups[0].ok
            return b""

        it.ups[0].answer = dies
        still(it.core)
        client.send(INFER, b"x")
        await until(lambda: own.parked == 1)
        own.assign(there)
        assert (await client.reply()).status == 200
        assert asked(it) == [2, 0] and spilled(it.core) == {} and it.idle()
