"""Answers that a route keeps: who gets them, and what is not kept."""

import asyncio
from time import monotonic

import pytest

from ..waiting import until
from .special_routes import (
    BRONZE,
    CACHED,
    FLOWN,
    INFER,
    OTHER,
    answering,
    ask,
    house,
    metric,
    ok,
)
from .stack import GOLD, Seen


async def test_an_equal_call_is_answered_from_the_first_ones_answer_with_its_own_ids() -> None:
    async with house(CACHED) as it:
        up = it.ups[0]
        up.answer = answering(ok(b"result", "x-up: 1\r\nx-request-id: theirs\r\nserver-timing: infer;dur=1\r\n"))
        requested_s = monotonic()
        first = await ask(it.port, headers="x-request-id: first\r\n")
        again = await ask(it.port, headers="x-request-id: again\r\n")
        assert (first.status, first.body, first.headers["x-oriel-cache"]) == (200, b"result", "miss")
        assert (again.status, again.body, again.headers["x-oriel-cache"]) == (200, b"result", "hit")
        assert 0 <= int(again.headers["age"]) <= monotonic() - requested_s
        assert "age" not in first.headers and again.headers["x-up"] == "1"
        assert (first.headers["x-request-id"], again.headers["x-request-id"]) == ("first", "again")
        assert first.headers["traceresponse"][:35] != again.headers["traceresponse"][:35]
        assert "infer" not in again.headers["server-timing"] and "gateway-cache" in again.headers["server-timing"]
        assert len(up.seen) == 1
        (made,), (kept,) = (it.core.records.decisions.of(one) for one in ("first", "again"))
        assert made.endpoint is it.core.pools["p0"].endpoints[0] and kept.endpoint is None
        assert made.bytes_out == kept.bytes_out == 6 and made.response_s > made.sent_s > 0.0 == kept.sent_s
        for other in (
            {"body": b"y"},
            {"key": OTHER},
            {"target": INFER + "?a=b"},
            {"target": "/v2/models/mlp/infer"},
            {"headers": "accept: text/plain\r\n"},
            {"headers": "cache-control: no-cache\r\n"},
        ):
            before = len(up.seen)
            reply = await ask(it.port, **other)  # type: ignore[arg-type]
            assert reply.status == 200 and reply.headers.get("x-oriel-cache") != "hit" and len(up.seen) == before + 1
        assert metric(it.core, "oriel_gateway_cache_answers_total") == {("d", "miss"): 6.0, ("d", "hit"): 1.0}
        assert it.idle()


async def test_answers_go_to_other_tenants_only_where_the_route_says_so() -> None:
    async with house(CACHED + "cache_shared = true\n") as it:
        await ask(it.port)
        assert (await ask(it.port, key=OTHER)).headers["x-oriel-cache"] == "hit"
        assert (await ask(it.port, key="nobody")).status == 401


async def test_a_shared_answer_of_a_service_is_for_those_who_may_use_the_same_models() -> None:
    """A body can name a model, which logic checks against the caller's patterns; no such check is made for a kept
    answer.
    """
    async with house(CACHED.replace("model =", "service =") + "cache_shared = true\n") as it:
        body = b'{"model": "secret"}'
        for key, how in ((GOLD, "miss"), (OTHER, "hit"), (BRONZE, "miss")):
            assert (await ask(it.port, "/v1/services/chat", body, key=key)).headers["x-oriel-cache"] == how


@pytest.mark.parametrize(
    "more",
    [
        "connection: accept\r\n",
        "connection: content-type\r\n",
        "accept: text/html\r\n",
        "x-lang: de\r\n",
        "cookie: a=b\r\n",
    ],
)
@pytest.mark.parametrize("cached", [True, False], ids=["kept", "flown"])
async def test_only_calls_that_are_the_same_to_the_upstream_share_an_answer(more: str, cached: bool) -> None:
    """The requests differ in a field that `Connection` names, that is repeated, or that the gateway does not know."""
    victim = "accept: text/plain\r\ncontent-type: application/json\r\n"
    async with house(CACHED if cached else FLOWN) as it:
        up = it.ups[0]

        async def by_what_it_gets(seen: Seen) -> bytes:
            await held.acquire()
            fields = sorted(
                line
                for line in seen.head.lower().split("\r\n")
                if line.startswith(("accept:", "content-type:", "x-lang:", "cookie:"))
            )
            return ok("; ".join(fields).encode())

        held = asyncio.Semaphore(2 if cached else 0)
        up.answer = by_what_it_gets
        if cached:
            await ask(it.port, headers=victim + more)
            reply = await ask(it.port, headers=victim)
        else:
            calls = [asyncio.ensure_future(ask(it.port, headers=each)) for each in (victim + more, victim)]
            await until(lambda: len(up.seen) == 2)
            held.release()
            held.release()
            reply = (await asyncio.gather(*calls))[1]
        assert reply.body == b"accept: text/plain; content-type: application/json"
        assert reply.headers["x-oriel-cache"] == "miss" and len(up.seen) == 2


async def test_who_asks_makes_no_difference_and_is_not_sent_on() -> None:
    async with house(CACHED) as it:
        headers = "accept: a/b\r\nContent-Type: c/d\r\n"
        assert (await ask(it.port, headers=f"{headers}user-agent: one\r\n")).headers["x-oriel-cache"] == "miss"
        again = "content-type: c/d\r\nuser-agent: two\r\nACCEPT:  a/b\r\n"
        assert (await ask(it.port, headers=again)).headers["x-oriel-cache"] == "hit"
        assert it.ups[0].seen[0].get("user-agent") is None and it.ups[0].seen[0].get("content-type") == "c/d"
        alone = f"{headers}user-agent: one\r\ncache-control: no-cache\r\n"
        await ask(it.port, headers=alone)
        assert it.ups[0].seen[1].get("user-agent") == "one"


@pytest.mark.parametrize(
    "answer",
    [
        ok(status="404 Not Found"),
        ok(status="500 Oops"),
        ok(status="206 Partial Content"),
        ok(fields="set-cookie: a=b\r\n"),
        ok(fields="cache-control: max-age=1, private\r\n"),
        ok(fields="vary: x-user\r\n"),
        ok(fields="vary: *\r\n"),
        ok(fields="content-type: text/event-stream\r\n"),
        ok(b"x" * (1024 * 1024 + 1)),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n100001\r\n" + b"y" * 0x100001 + b"\r\n0\r\n\r\n",
    ],
    ids=["404", "500", "206", "cookie", "private", "vary", "vary-all", "stream", "large", "large-chunked"],
)
async def test_what_is_not_meant_for_all_is_passed_on_and_not_kept(answer: bytes) -> None:
    async with house(CACHED) as it:
        it.ups[0].answer = answering(answer)
        for number in (1, 2):
            reply = await ask(it.port)
            assert reply.status == int(answer.split()[1]) and reply.headers["x-oriel-cache"] == "miss"
            assert len(reply.body) in (2, 1024 * 1024 + 1) and len(it.ups[0].seen) == number
        await until(it.idle)


async def test_reads_of_a_models_state_are_never_kept() -> None:
    async with house(CACHED) as it:
        for target in ("/v2/models/digits/ready", "/v2/models/digits/stats", "/v2"):
            for _ in range(2):
                assert "x-oriel-cache" not in (await ask(it.port, target, b"", method="GET")).headers
        await ask(it.port, "/v2/models/digits/generate_stream")
        await ask(it.port, "/v2/models/digits/generate_stream")
        await ask(it.port, body=b"z" * (64 * 1024 + 1))
        await ask(it.port, body=b"z" * (64 * 1024 + 1))
        assert len(it.ups[0].seen) == 10


async def test_a_cache_of_little_memory_stays_within_it() -> None:
    async with house(CACHED) as it:
        it.core.routing.cache.max_bytes, it.core.routing.cache.owner_bytes = 4000, 2000
        for number in range(20):
            await ask(it.port, body=b"%d" % number)
        assert 0 < it.core.routing.cache.size_bytes <= 2000 and it.core.routing.cache.evicted > 10
