"""The gateway's HTTP path, from a raw client's bytes to a scripted upstream's."""

import asyncio
import json
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from oriel_gateway.call import call as http_call
from oriel_gateway.clock import deadline_of
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .gate import INFER, Gate, idle
from .stack import BRONZE, GOLD, LIMITED, Client, Seen, Upstream, documents, gateway, nobody, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


@pytest.mark.parametrize("other", ["5", "9"])
async def test_a_repeated_header_length_is_refused(up: Upstream, other: str) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        name = "inference-header-content-length"
        reply = await client.ask(INFER, b'{"a"}123', headers=f"{name}: 5\r\n{name}: {other}\r\n")
        assert reply.status == 400 and b"twice" in reply.body and not up.seen


async def test_a_request_reaches_the_upstream_as_it_should(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        reply = await client.ask(
            INFER + "?a=b",
            b"body",
            headers="x-mine: 1\r\nx-oriel-tier: gold-forged\r\nConnection: keep-alive, x-hop\r\nx-hop: 1\r\n"
            "x-request-id: abc-1\r\ntraceparent: 00-000000000000000000000000000000aa-00000000000000bb-01\r\n"
            "tracestate: v=1\r\n",
        )
        assert (reply.status, reply.body, reply.headers["x-up"]) == (200, b"ok", "1")
        seen = up.seen[0]
        assert seen.head.startswith(f"POST {INFER}?a=b HTTP/1.1\r\n") and seen.body == b"body"
        assert seen.get("x-mine") == "1" and seen.get("x-hop") is None
        assert seen.get("authorization") is None and GOLD not in seen.head and "forged" not in seen.head
        assert (seen.get("x-oriel-tier"), seen.get("x-oriel-priority")) == ("gold", "0")
        assert seen.get("x-oriel-tenant") == "g"
        assert 7000 < int(seen.get("x-oriel-timeout-ms") or 0) <= 8000
        assert seen.get("x-request-id") == reply.headers["x-request-id"] == "abc-1"
        assert (seen.get("traceparent") or "").startswith("00-000000000000000000000000000000aa-")
        assert seen.get("tracestate") == "v=1"
        assert reply.headers["traceresponse"].startswith("00-000000000000000000000000000000aa-")
        timing = reply.headers["server-timing"]
        assert "gateway-queue;dur=" in timing and "gateway-upstream;dur=" in timing and "infer;dur=1.5" in timing
        assert isinstance(core.sink, ListSink)
        spans = {span.name: span for span in core.sink.spans}
        assert sorted(spans) == ["POST", "POST /v2/models/{model}/infer"]
        root = spans["POST /v2/models/{model}/infer"]
        assert root.parent_id == 0xBB and root.attributes["oriel.request_id"] == "abc-1"
        assert spans["POST"].parent_id == root.context.span_id
        assert f"{spans['POST'].context.span_id:016x}" in (seen.get("traceparent") or "")
        assert idle(core)


async def test_how_loaded_an_upstream_is_concerns_no_tenant(up: Upstream) -> None:
    async def answer(seen: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\nEndpoint-Load-Metrics: TEXT eps=1\r\nx-up: 1\r\ncontent-length: 0\r\n\r\n"

    up.answer = answer
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        reply = await client.ask(INFER, b"body", headers="Endpoint-Load-Metrics-Format: text\r\n")
        assert reply.status == 200 and reply.headers["x-up"] == "1"
        assert "endpoint-load-metrics" not in reply.headers
        assert up.seen[0].get("endpoint-load-metrics-format") is None


@pytest.mark.parametrize(
    ("target", "key", "headers", "method", "status", "reason"),
    [
        (INFER, None, "", "POST", 401, "unauthenticated"),
        (INFER, "wrong", "", "POST", 401, "unauthenticated"),
        (INFER, "old", "", "POST", 401, "unauthenticated"),
        (INFER, None, "authorization: Basic eDp5\r\n", "POST", 401, "unauthenticated"),
        (INFER, GOLD, "x-api-key: key-gold\r\n", "POST", 400, "ambiguous_credentials"),
        (INFER, GOLD, "authorization: Bearer key-gold\r\n", "POST", 400, "ambiguous_credentials"),
        ("/v2/models/mlp/infer", BRONZE, "", "POST", 404, "not_found"),
        ("/v2/models/%6dlp/infer", BRONZE, "", "POST", 404, "not_found"),
        ("/v2/models/digits%2F..%2Fmlp/infer", BRONZE, "", "POST", 404, "not_found"),
        ("/v2/models/digits/../mlp/infer", BRONZE, "", "POST", 404, "not_found"),
        ("/v2/models/.digits", GOLD, "", "GET", 404, "not_found"),
        ("/v2/models/digits/versions/x/infer", GOLD, "", "POST", 404, "not_found"),
        ("/v2/models/digits/nonsense", GOLD, "", "POST", 404, "not_found"),
        ("/v2/repository/index", GOLD, "", "POST", 404, "not_found"),
        ("/v2/models/stats", GOLD, "", "GET", 404, "not_found"),
        ("/v1/services/other", BRONZE, "", "POST", 404, "not_found"),
        ("/nothing", GOLD, "", "GET", 404, "not_found"),
        (INFER, GOLD, "", "DELETE", 405, "method_not_allowed"),
        (INFER, GOLD, "x-request-timeout-ms: soon\r\n", "POST", 400, "bad_request"),
        (INFER, GOLD, "x-request-timeout-ms: 0\r\n", "POST", 400, "bad_request"),
        (INFER, GOLD, f"x-request-timeout-ms: {'9' * 40}\r\n", "POST", 400, "bad_request"),
    ],
)
async def test_refusals_before_the_body(
    up: Upstream, target: str, key: str | None, headers: str, method: str, status: int, reason: str
) -> None:
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        reply = await client.ask(target, b"body", key=key, headers=headers, method=method)
        assert reply.status == status, reply.body
        error = json.loads(reply.body)
        if target.startswith("/v2"):
            assert isinstance(error["error"], str) and error["reason"] == reason
        else:
            assert error["error"]["reason"] == reason and error["error"]["message"]
        assert len(reply.body) < 500 and "traceresponse" in reply.headers and "server-timing" in reply.headers
        assert reply.headers["x-request-id"] in reply.body.decode()
        if status == 405:
            assert reply.headers["allow"] == "POST"
        if "timeout-ms" in headers:
            assert b"a whole number of milliseconds > 0 of at most 18 digits" in reply.body
        if status == 401:
            assert reply.headers["www-authenticate"].startswith("Bearer")
        assert not up.seen
        # The connection is kept: the whole body had arrived.
        assert (await client.ask(INFER, b"x")).status == 200
        assert idle(core)


async def test_too_many_requests_say_when_to_come_back(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        assert [(await client.ask(INFER, key=LIMITED)).status for _ in range(2)] == [200, 200]
        reply = await client.ask(INFER, key=LIMITED)
        assert reply.status == 429 and reply.headers["retry-after"] == "2"
        assert reply.headers["ratelimit"] == '"requests";r=0;t=2'
        assert reply.headers["ratelimit-policy"] == '"requests";q=2;w=4'


async def test_a_large_body_streams_through_unchanged(up: Upstream) -> None:
    body = bytes(range(256)) * 3900
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        reply = await client.ask(INFER, body)
        assert reply.status == 200 and up.seen[0].body == body
        head = b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-gold\r\n"
        client.writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        for n in range(0, len(body), 50_000):
            piece = body[n : n + 50_000]
            client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await client.writer.drain()
        client.writer.write(b"0\r\n\r\n")
        assert (await client.reply()).status == 200 and up.seen[1].body == body
        assert idle(core)


async def test_gold_overtakes_bronze_in_the_queue(up: Upstream) -> None:
    gate = Gate()
    up.answer = gate
    async with gateway(documents([up.port], max_inflight=1)) as (port, core):
        clients = [await Client(port).__aenter__() for _ in range(5)]
        tags = [("first", GOLD), ("b1", BRONZE), ("b2", BRONZE), ("g1", GOLD), ("g2", GOLD)]
        for n, (client, (tag, key)) in enumerate(zip(clients, tags, strict=True)):
            client.send(INFER, key=key, headers=f"x-tag: {tag}\r\n")
            await until(lambda n=n: core.pools["p"].admission.inflight + len(core.pools["p"].admission.queue) == n + 1)
        for _ in clients:
            gate.go.release()
        assert [(await client.reply()).status for client in clients] == [200] * 5
        assert gate.order == ["first", "g1", "g2", "b1", "b2"]
        for client in clients:
            await client.__aexit__()
        assert idle(core)


async def test_a_waiting_call_expires_on_time_and_is_never_sent(up: Upstream) -> None:
    gate = Gate()
    up.answer = gate
    async with gateway(documents([up.port], max_inflight=1)) as (port, core):
        async with Client(port) as first, Client(port) as second:
            first.send(INFER, headers="x-tag: first\r\n")
            await until(lambda: gate.order == ["first"])
            before = monotonic()
            reply = await second.ask(INFER, headers="x-tag: second\r\nx-request-timeout-ms: 50\r\n")
            assert monotonic() - before >= 0.05
            assert reply.status == 504 and json.loads(reply.body)["reason"] == "deadline_exceeded"
            assert "waiting for a permit" in json.loads(reply.body)["error"] and "retry-after" not in reply.headers
            gate.go.release()
            assert (await first.reply()).status == 200
        assert gate.order == ["first"] and idle(core)


async def test_a_permit_that_comes_after_the_deadline_sends_nothing(
    up: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5: several calls share a deadline. The first is answered too late, and hands its permit on before the timers
    have run. R45: it is charged, as its own client's deadline cut it off.
    """
    gate = Gate()
    up.answer = gate
    async with gateway(documents([up.port], max_inflight=1)) as (port, core):
        async with Client(port) as first, Client(port) as second, Client(port) as third:
            first.send(INFER, headers="x-tag: first\r\nx-request-timeout-ms: 1900\r\n")
            await until(lambda: gate.order == ["first"])
            for client in (second, third):
                client.send(INFER, headers="x-tag: late\r\n")
            await until(lambda: len(core.pools["p"].admission.queue) == 2)
            monkeypatch.setattr(http_call, "monotonic", lambda: monotonic() + 3600.0)
            gate.go.release()
            for client, stage in ((first, b"the upstream"), (second, b"a permit"), (third, b"a permit")):
                reply = await client.reply()
                assert reply.status == 504 and b"while waiting for " + stage in reply.body
        assert gate.order == ["first"] and idle(core)
        core.records.stats.count()
        assert core.records.stats.usage.of("g")["day"]["device_ns"] == 7


async def test_a_slow_upstream_is_given_up_on_time_and_told_so(up: Upstream) -> None:
    up.answer = Gate()
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        reply = await client.ask(INFER, headers="x-request-timeout-ms: 50\r\n")
        assert reply.status == 504 and "waiting for the upstream" in json.loads(reply.body)["error"]
        await until(lambda: up.departures == 1)
        assert idle(core)


@pytest.mark.parametrize(
    ("asked_ms", "given_ms"), [(None, 8000), ("7999", 7999), ("8000", 8000), ("8001", 8000), ("999999999999", 8000)]
)
async def test_a_client_may_only_shorten_the_time_of_its_tier(asked_ms: str | None, given_ms: int) -> None:
    """A deadline above the tier's `give_up_ms`, here four times its target, is not the call's."""
    async with gateway(documents([1])) as (_, core):
        assert deadline_of(core.snapshot.tenants["g"], 100.0, asked_ms) == 100.0 + given_ms / 1000.0


async def test_a_client_that_leaves_frees_its_place_and_its_upstream(up: Upstream) -> None:
    gate = Gate()
    up.answer = gate
    async with gateway(documents([up.port], max_inflight=1)) as (port, core):
        admission = core.pools["p"].admission
        async with Client(port) as running, Client(port) as waiting:
            running.send(INFER)
            await until(lambda: len(gate.order) == 1)
            waiting.send(INFER)
            await until(lambda: len(admission.queue) == 1)
            waiting.writer.close()
            await until(lambda: len(admission.queue) == 0)
            running.writer.close()
            await until(lambda: up.departures == 1 and idle(core))


async def test_a_full_queue_refuses_and_a_higher_tier_displaces(up: Upstream) -> None:
    gate = Gate()
    up.answer = gate
    async with gateway(documents([up.port], max_inflight=1, max_queue=1)) as (port, core):
        async with Client(port) as a, Client(port) as b, Client(port) as c, Client(port) as d:
            a.send(INFER)
            await until(lambda: len(gate.order) == 1)
            b.send(INFER, key=BRONZE)
            await until(lambda: len(core.pools["p"].admission.queue) == 1)
            full = await c.ask(INFER, key=BRONZE)
            assert full.status == 503 and json.loads(full.body)["reason"] == "queue_full"
            assert 1 <= int(full.headers["retry-after"]) <= 60
            d.send(INFER, key=GOLD)
            lost = await b.reply()
            assert lost.status == 503 and json.loads(lost.body)["reason"] == "displaced"
            assert 1 <= int(lost.headers["retry-after"]) <= 60
            gate.go.release()
            gate.go.release()
            assert (await a.reply()).status == (await d.reply()).status == 200
        assert idle(core)


async def test_an_unreachable_endpoint_is_passed_over(up: Upstream) -> None:
    with nobody() as gone:
        async with gateway(documents([gone, up.port])) as (port, core), Client(port) as client:
            assert [(await client.ask(INFER)).status for _ in range(4)] == [200] * 4
        async with gateway(documents([gone])) as (port, core), Client(port) as client:
            reply = await client.ask(INFER, headers="x-request-timeout-ms: 100\r\n")  # it waits for a usable endpoint
            assert reply.status == 502 and reply.headers["retry-after"] == "1"
            assert json.loads(reply.body)["reason"] == "upstream_unreachable" and idle(core)


async def test_an_upstream_that_breaks_off_is_a_502_and_not_retried(up: Upstream) -> None:
    async def nothing(_: Seen) -> bytes:
        return b""

    up.answer = nothing
    async with gateway(documents([up.port, up.port])) as (port, core), Client(port) as client:
        reply = await client.ask(INFER)
        assert reply.status == 502 and json.loads(reply.body)["reason"] == "upstream_broken"
        assert len(up.seen) == 1 and idle(core)


async def test_an_answer_that_breaks_off_cuts_the_client(up: Upstream) -> None:
    async def half(_: Seen) -> bytes:
        up.answer = up.ok
        return b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\nconnection: close\r\n\r\nhalf"

    async with gateway(documents([up.port])) as (port, core), Client(port) as client:

        async def closing(seen: Seen) -> bytes:
            return await half(seen)

        up.answer = closing
        client.send(INFER)
        await client.reader.readuntil(b"\r\n\r\n")
        await until(lambda: len(up.seen) == 1)
        async with Client(port) as other:
            assert (await other.ask(INFER)).status == 200
        client.writer.close()
        await until(lambda: idle(core))


async def test_health_needs_no_key_and_follows_the_drain(up: Upstream) -> None:
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        assert (await client.ask("/v2/health/ready", key=None, method="GET")).status == 200
        core.draining = True
        ready = await client.ask("/v2/health/ready", key=None, method="GET")
        assert ready.status == 503 and ready.headers["retry-after"] == "1"
        live = await client.ask("/v2/health/live", key=None, method="GET")
        assert live.status == 200 and {"x-request-id", "traceresponse", "server-timing"} <= set(live.headers)


async def test_a_slow_body_is_cut_and_holds_no_permit(up: Upstream) -> None:
    async with gateway(documents([up.port]), limits=HttpLimits(body_timeout_s=0.05)) as (port, core):
        async with Client(port) as client:
            client.writer.write(
                b"POST /v2/models/digits/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-gold\r\n"
                b"content-length: 100\r\n\r\nabc"
            )
            await until(lambda: len(core.clock) == 1)
            assert core.pools["p"].admission.inflight == 0
            assert (await client.reply()).status == 408
            await until(lambda: idle(core))


async def test_any_order_of_arrivals_departures_and_answers_gives_everything_back(up: Upstream) -> None:
    """Clients of both tiers come, leave or expire at random, and the upstream answers at random; all permits and bytes
    return.
    """
    import random

    rng = random.Random(7)

    async def answer(_: Seen) -> bytes:
        await asyncio.sleep(rng.random() * 0.01)
        return rng.choice([b"", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"])

    up.answer = answer
    async with gateway(documents([up.port], max_inflight=3, max_queue=10)) as (port, core):

        async def one() -> None:
            async with Client(port) as client:
                for _ in range(4):
                    timeout = f"x-request-timeout-ms: {rng.randint(1, 40)}\r\n" if rng.random() < 0.5 else ""
                    client.send(INFER, rng.randbytes(rng.choice([0, 10, 200_000])), headers=timeout,
                                key=rng.choice([GOLD, BRONZE]))  # fmt: skip
                    if rng.random() < 0.3:
                        await asyncio.sleep(rng.random() * 0.01)
                        return
                    try:
                        assert (await client.reply()).status in (200, 502, 503, 504)
                    except (asyncio.IncompleteReadError, ConnectionError):
                        return

        for _ in range(6):
            await asyncio.gather(*(one() for _ in range(20)))
        await until(lambda: idle(core))
