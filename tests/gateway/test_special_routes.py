"""Routes by header, splits, shadows, kept answers, single-flight, stickiness, from raw clients to scripted servers."""

import asyncio
from time import monotonic

import pytest

from ..waiting import until
from .special_routes import (
    BRONZE,
    CACHED,
    FLOWN,
    INFER,
    OPERATOR,
    OTHER,
    SHADOWED,
    Held,
    answering,
    copies,
    house,
    metric,
    ok,
)
from .stack import GOLD, Client, Reply, Seen, digest


async def ask(port: int, target: str = INFER, body: bytes = b"x", **more: str | None) -> Reply:
    async with Client(port) as client:
        return await client.ask(target, body, **more)


# Headers and splits --------------------------------------------------------------------------------------------


async def test_the_first_route_whose_headers_fit_decides() -> None:
    routes = """
[[routes]]
model = "*"
headers = { x-stage = "next", x-region = "eu" }
pool = "p1"
[[routes]]
model = "digits"
version = "7"
pool = "p1"
[[routes]]
model = "*"
pool = "p0"
"""
    async with house(routes) as it, Client(it.port) as client:
        for headers, target, pool in (
            ("", INFER, 0),
            ("x-stage: next\r\nX-Region: eu\r\n", INFER, 1),
            ("x-stage: next\r\n", INFER, 0),
            ("x-stage: Next\r\nx-region: eu\r\n", INFER, 0),
            ("", "/v2/models/digits/versions/7/infer", 1),
            ("", "/v2/models/digits/versions/8/infer", 0),
            ("", INFER, 0),
        ):
            before = len(it.ups[pool].seen)
            assert (await client.ask(target, b"x", headers=headers)).status == 200
            assert len(it.ups[pool].seen) == before + 1, (headers, target)
        plain = it.core.targets.of_line(next(iter(it.core.snapshot.tenants.values())), b"x", "POST", INFER, "")
        assert plain.choices is not None and it.idle()


async def test_a_call_that_fits_no_route_sees_what_it_sees_for_an_absent_model() -> None:
    async with house('[[routes]]\nmodel = "*"\nheaders = { x-in = "1" }\npool = "p0"\n') as it:
        refused = await ask(it.port)
        assert refused.status == 404 and b"there is no model 'digits' here" in refused.body
        assert (await ask(it.port, headers="x-in: 1\r\n")).status == 200


async def test_targets_that_depend_on_no_header_are_remembered_as_they_were() -> None:
    routes = """
[[routes]]
service = "*"
headers = { x-in = "1" }
pool = "p1"
[[routes]]
model = "*"
split = [{ pool = "p0", weight = 1 }, { pool = "p1", weight = 1 }]
"""
    async with house(routes) as it:
        await ask(it.port)
        (target,) = it.core.targets._targets.values()
        assert target.choices is None and target.side in ("p0", "p1")


async def test_a_split_by_header_stays_and_a_version_side_rewrites_the_path() -> None:
    routes = """
[[routes]]
model = "*"
name = "canary"
split = [{ pool = "p0", weight = 70 }, { pool = "p1", version = "3", weight = 30 }]
split_by = "header:x-user"
"""
    async with house(routes) as it, Client(it.port) as client:
        for _ in range(2):
            for number in range(40):
                reply = await client.ask(INFER, b"x", key=OPERATOR, headers=f"x-user: u{number}\r\n")
                assert reply.status == 200 and reply.headers["x-oriel-route"].startswith("canary; side=p")
        first, second = it.ups
        assert 8 <= len(second.seen) <= 40 and len(first.seen) + len(second.seen) == 80
        users = [{seen.get("x-user") for seen in up.seen} for up in it.ups]
        assert not users[0] & users[1]
        assert all(seen.head.startswith("POST /v2/models/digits/versions/3/infer ") for seen in second.seen)
        assert all(seen.head.startswith(f"POST {INFER} ") for seen in first.seen)
        # A version that the client names is what it gets, on whichever side it is.
        await client.ask("/v2/models/digits/versions/9/infer", b"x", headers=f"x-user: {users[1].pop()}\r\n")
        assert second.seen[-1].head.startswith("POST /v2/models/digits/versions/9/infer ")
        assert "x-oriel-route" not in (await client.ask(INFER, b"x")).headers
        counted = metric(it.core, "oriel_gateway_split_calls_total")
        assert counted["canary", "p1@3"] == len(second.seen) and counted["canary", "p0"] == len(first.seen)


async def test_a_request_that_comes_again_under_its_id_meets_the_same_side() -> None:
    routes = """
[[routes]]
model = "*"
split = [{ pool = "p0", weight = 1 }, { pool = "p1", weight = 1 }]
split_by = "request"
"""
    async with house(routes) as it, Client(it.port) as client:
        for _ in range(2):
            for number in range(20):
                await client.ask(INFER, b"x", headers=f"x-request-id: r{number}\r\n")
        ids = [{seen.get("x-request-id") for seen in up.seen} for up in it.ups]
        assert ids[0] and ids[1] and not ids[0] & ids[1]


# Stickiness ----------------------------------------------------------------------------------------------------


async def test_equal_values_meet_the_same_endpoint_until_it_is_gone() -> None:
    routes = '[[routes]]\nmodel = "*"\npool = "p0"\nsticky = "header:x-session"\n'
    async with house(routes, pools=1, per_pool=3) as it, Client(it.port) as client:

        async def where(session: str) -> int:
            reply = await client.ask(INFER, b"x", headers=f"x-session: {session}\r\n")
            assert reply.status == 200
            (index,) = [n for n, up in enumerate(it.ups) if any(s.get("x-session") == session for s in up.seen)]
            return index

        places = {f"s{n}": await where(f"s{n}") for n in range(60)}
        assert set(places.values()) == {0, 1, 2}
        assert {name: await where(name) for name in places} == places
        gone = places["s0"]
        endpoint = next(e for e in it.core.pools["p0"].endpoints if e.port == it.ups[gone].port)
        assert await it.core.pools["p0"].endpoints[0].close() is None
        endpoint.port = 1  # nobody listens there any more
        for up in it.ups:
            up.seen.clear()
        for connection in list(endpoint.idle):
            connection.transport.abort()
        endpoint.idle.clear()
        after = {name: await where(name) for name in places}
        assert all(after[name] == place for name, place in places.items() if place != gone)
        assert gone not in after.values()


# Kept answers and single-flight --------------------------------------------------------------------------------


async def test_an_equal_call_is_answered_from_the_first_ones_answer_with_its_own_ids() -> None:
    async with house(CACHED) as it:
        up = it.ups[0]
        up.answer = answering(ok(b"result", "x-up: 1\r\nx-request-id: theirs\r\nserver-timing: infer;dur=1\r\n"))
        asked_s = monotonic()
        first = await ask(it.port, headers="x-request-id: first\r\n")
        again = await ask(it.port, headers="x-request-id: again\r\n")
        assert (first.status, first.body, first.headers["x-oriel-cache"]) == (200, b"result", "miss")
        assert (again.status, again.body, again.headers["x-oriel-cache"]) == (200, b"result", "hit")
        assert 0 <= int(again.headers["age"]) <= monotonic() - asked_s
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
    """A body can name a model, which logic checks against the caller's patterns; a kept answer passes no such check."""
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
    """A field that `Connection` names, that is repeated or that no list knows used to leave two requests equal."""
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


async def test_equal_calls_at_the_same_time_are_made_once() -> None:
    async with house(FLOWN) as it:
        held = it.ups[0].answer = Held(ok(b"once"))
        asking = [asyncio.ensure_future(ask(it.port, headers=f"x-request-id: r{n}\r\n")) for n in range(5)]
        await until(lambda: bool(it.ups[0].seen) and it.members() == 5)
        held.go.release()
        replies = await asyncio.gather(*asking)
        assert [reply.body for reply in replies] == [b"once"] * 5 and len(it.ups[0].seen) == 1
        assert sorted(reply.headers["x-oriel-cache"] for reply in replies) == ["joined"] * 4 + ["miss"]
        assert {reply.headers["x-request-id"] for reply in replies} == {f"r{n}" for n in range(5)}
        held.go.release()
        assert (await ask(it.port)).headers["x-oriel-cache"] == "miss"  # nothing is kept without cache_s
        assert it.idle()


async def test_a_founder_that_leaves_fails_nobody_and_the_last_one_frees_everything() -> None:
    async with house(FLOWN) as it:
        held = it.ups[0].answer = Held(ok(b"once"))
        async with Client(it.port) as founder:
            founder.send(INFER, b"x")
            await until(lambda: bool(it.ups[0].seen))
            follower = asyncio.ensure_future(ask(it.port))
            await until(lambda: it.members() == 2)
        await until(lambda: it.members() == 1)
        held.go.release()
        reply = await follower
        assert reply.body == b"once" and len(it.ups[0].seen) == 1 and it.ups[0].departures == 0
        async with Client(it.port) as one, Client(it.port) as two:
            one.send(INFER, b"y")
            two.send(INFER, b"y")
            await until(lambda: it.members() == 2 and len(it.ups[0].seen) == 2)
        await until(lambda: it.idle() and it.ups[0].departures == 1)


async def test_who_leaves_an_equal_call_pays_for_what_was_sent() -> None:
    """On a deterministic route nothing was paid by whoever left before the answer: requests and computing were free."""
    tenant = f'[tenants.q]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest("key-q")}" }}]\n'
    tenant += "limit = { requests_per_day = 100, compute_ms_per_day = 1000000 }\n"
    async with house(FLOWN + tenant) as it:
        held = it.ups[0].answer = Held(ok(b"once"))

        def used() -> tuple[float, float]:
            requests, compute = it.core.limiter._accounts["q", "all"].meters  # type: ignore[attr-defined]
            return 100 - requests.left(monotonic())[0], 1e9 - compute.left(monotonic())[0]

        async with Client(it.port) as one, Client(it.port) as two:
            began = monotonic()
            one.send(INFER, b"x", key="key-q")
            two.send(INFER, b"x", key="key-q")
            await until(lambda: it.members() == 2 and len(it.ups[0].seen) == 1)
            assert used() == (2, 20_000), "10 ms are reserved for each"
            sent = monotonic()
            await until(lambda: monotonic() - sent >= 0.1)
        await until(lambda: it.idle())
        requests, compute_us = used()
        took_us = (monotonic() - began) * 1e6
        assert requests == 2 and 100_000 <= compute_us <= took_us, "both asked; the work was done once"
        # One that waits for the permit of another tenant's call and leaves has cost nothing.
        async with Client(it.port) as full, Client(it.port) as waits:
            for number in range(8):
                full.send(INFER, b"%d" % number)
            await until(lambda: len(it.ups[0].seen) == 2)
            it.core.pools["p0"].admission.limit = 1
            waits.send(INFER, b"y", key="key-q")
            await until(lambda: it.members() == 2)
            waits.writer.close()
            await until(lambda: it.members() == 1)
            assert used()[0] == 2 and used()[1] == compute_us
            held.go.release()
            it.ups[0].answer = it.ups[0].ok
            await full.reply()
        held.go.release()

        # And an upstream that breaks after it was sent to has been asked.
        async def broken(seen: Seen) -> bytes:
            return b""

        it.ups[0].answer = broken
        assert (await ask(it.port, body=b"z", key="key-q")).status == 502
        assert used()[0] == 3


async def test_members_keep_their_own_deadlines() -> None:
    async with house(FLOWN) as it:
        held = it.ups[0].answer = Held(ok(b"once"))
        short = asyncio.ensure_future(ask(it.port, headers="x-request-timeout-ms: 60\r\n"))
        await until(lambda: bool(it.ups[0].seen))
        long = asyncio.ensure_future(ask(it.port))
        late = await short
        assert late.status == 504 and b"waiting for the answer to an equal request" in late.body
        held.go.release()
        assert (await long).body == b"once" and len(it.ups[0].seen) == 1
        await until(it.idle)


async def test_an_error_is_for_the_founder_and_one_of_the_others_leads_them_again() -> None:
    """All of them went to a server that had just failed, at once."""
    async with house(FLOWN) as it:
        up = it.ups[0]
        held = up.answer = Held(ok(b"request first failed", status="500 Oops"))
        first = asyncio.ensure_future(ask(it.port, headers="x-request-id: first\r\n"))
        await until(lambda: bool(up.seen))
        rest = [asyncio.ensure_future(ask(it.port, headers=f"x-request-id: r{n}\r\n")) for n in range(4)]
        await until(lambda: it.members() == 5)
        once_more = up.answer = Held(ok(b"fine"))
        held.go.release()
        assert (await first).status == 500
        await until(lambda: it.members() == 4 and len(up.seen) == 2)
        once_more.go.release()
        replies = await asyncio.gather(*rest)
        assert [reply.body for reply in replies] == [b"fine"] * 4 and len(up.seen) == 2
        assert sorted(reply.headers["x-oriel-cache"] for reply in replies) == ["joined"] * 3 + ["miss"]
        await until(it.idle)


async def test_after_two_errors_each_goes_on_its_own() -> None:
    """One after the other they would pass their deadlines in line."""
    async with house(FLOWN) as it:
        up = it.ups[0]
        held = up.answer = Held(ok(b"no", status="500 Oops"))
        asking = [asyncio.ensure_future(ask(it.port)) for _ in range(5)]
        await until(lambda: it.members() == 5 and len(up.seen) == 1)
        once_more = up.answer = Held(ok(b"no", status="500 Oops"))
        held.go.release()
        await until(lambda: it.members() == 4 and len(up.seen) == 2)
        up.answer = alone = Held(ok(b"fine"))
        once_more.go.release()
        await until(lambda: len(up.seen) == 5 and it.members() == 0)
        for _ in range(3):
            alone.go.release()
        assert sorted([(await reply).status for reply in asking]) == [200, 200, 200, 500, 500]
        await until(it.idle)


async def test_a_good_answer_that_is_not_for_all_is_not_waited_for_twice() -> None:
    async with house(FLOWN) as it:
        up = it.ups[0]
        held = up.answer = Held(ok(b"mine", "set-cookie: a=b\r\n"))
        asking = [asyncio.ensure_future(ask(it.port)) for _ in range(4)]
        await until(lambda: it.members() == 4 and len(up.seen) == 1)
        up.answer = others = Held(ok(b"mine", "set-cookie: a=b\r\n"))
        held.go.release()
        await until(lambda: len(up.seen) == 4)
        for _ in range(3):
            others.go.release()
        assert [(await reply).body for reply in asking] == [b"mine"] * 4 and it.idle()


async def test_an_error_for_a_founder_that_left_is_for_nobody() -> None:
    async with house(FLOWN) as it:
        up = it.ups[0]
        held = up.answer = Held(ok(b"oops", status="500 Oops"))
        async with Client(it.port) as founder:
            founder.send(INFER, b"x")
            await until(lambda: bool(up.seen))
            follower = asyncio.ensure_future(ask(it.port))
            await until(lambda: it.members() == 2)
        await until(lambda: it.members() == 1)
        up.answer = answering(ok(b"fine"))
        held.go.release()
        assert (await follower).body == b"fine"
        await until(it.idle)


async def test_an_urgent_call_does_not_wait_for_one_of_a_lower_tier() -> None:
    async with house(FLOWN + "cache_shared = true\n") as it:
        held = it.ups[0].answer = Held()
        asking = [asyncio.ensure_future(ask(it.port, key=key)) for key in (BRONZE, GOLD, OTHER)]
        await until(lambda: len(it.ups[0].seen) == 2 and len(it.core.routing.flights) == 2)
        for _ in range(2):
            held.go.release()
        assert [(await reply).status for reply in asking] == [200] * 3 and len(it.ups[0].seen) == 2


async def test_an_upstream_that_breaks_twice_fails_the_founder_only_with_its_own_reason() -> None:
    async with house(FLOWN) as it:

        async def broken_again(_: Seen) -> bytes:
            return b"" if len(it.ups[0].seen) < 3 else ok(b"fine")

        held = it.ups[0].answer = Held(b"")
        first = asyncio.ensure_future(ask(it.port))
        await until(lambda: bool(it.ups[0].seen))
        rest = [asyncio.ensure_future(ask(it.port)) for _ in range(3)]
        await until(lambda: it.members() == 4)
        it.ups[0].answer = broken_again
        held.go.release()
        assert (await first).status == 502 and {(await reply).body for reply in rest} == {b"fine"}
        assert len(it.ups[0].seen) <= 4, "they did not all go at once"
        await until(it.idle)


async def test_a_cache_of_little_memory_stays_within_it() -> None:
    async with house(CACHED) as it:
        it.core.routing.cache.max_bytes, it.core.routing.cache.owner_bytes = 4000, 2000
        for number in range(20):
            await ask(it.port, body=b"%d" % number)
        assert 0 < it.core.routing.cache.size_bytes <= 2000 and it.core.routing.cache.evicted > 10


# Shadows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (ok(b"ok"), "same"),
        (ok(b"no"), "body_differs"),
        (ok(b"ok!"), "body_differs"),
        (ok(b"ok", status="400 Bad"), "status_differs"),
        (b"", "failed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", "same"),
    ],
)
async def test_a_copy_is_compared_and_seen_by_nobody(answer: bytes, result: str) -> None:
    async with house(SHADOWED) as it:
        it.ups[0].answer = answering(ok())
        it.ups[1].answer = answering(answer)
        reply = await ask(it.port, body=b"body", headers="x-mine: 1\r\n")
        assert (reply.status, reply.body) == (200, b"ok")
        await until(lambda: copies(it.core) == {result: 1.0})
        (original,), (copy,) = (up.seen for up in it.ups)
        assert copy.body == b"body" and copy.get("x-mine") == "1" and copy.get("x-oriel-tenant") == "g"
        assert (original.get("x-oriel-priority"), copy.get("x-oriel-priority")) == ("0", "255")
        assert original.get("x-request-id") == copy.get("x-request-id")
        assert sum(s.count for s in it.core.records.stats.series.values()) == 1  # a copy is no request
        await until(it.idle)


async def test_a_shadow_that_hangs_delays_and_fails_nobody_and_is_bounded() -> None:
    async with house(SHADOWED, inflight=4) as it:
        it.ups[1].answer = Held()
        async with Client(it.port) as client:
            for _ in range(10):
                assert (await client.ask(INFER, b"x")).status == 200
        await until(lambda: copies(it.core) == {"dropped": 9.0} and it.core.pools["p1"].shadows == 1)
    assert it.core.routing.shadows == 0 and copies(it.core) == {"dropped": 9.0, "failed": 1.0}


async def test_nothing_is_copied_past_its_bounds() -> None:
    async with house(SHADOWED) as it:
        await ask(it.port, body=b"x" * (64 * 1024 + 1))
        await ask(it.port, "/v2/models/digits/ready", b"", method="GET")
        it.core.pools["p1"].held_bytes = it.core.pools["p1"].pool.max_queue_bytes
        await ask(it.port)
        await until(lambda: copies(it.core) == {"dropped": 1.0})
        it.core.pools["p1"].held_bytes = 0
        assert not it.ups[1].seen


async def test_a_refused_call_is_not_copied() -> None:
    async with house(SHADOWED) as it:
        it.ups[0].answer = answering(b"")
        assert (await ask(it.port)).status == 502
        assert copies(it.core) == {} and it.idle()


async def test_a_call_that_was_cut_short_is_not_copied() -> None:
    async with house(SHADOWED) as it:
        it.ups[0].answer = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        async with Client(it.port) as client:
            client.send(INFER, b"x")
            await client.reader.readuntil(b"half")
        await until(it.idle)
        assert copies(it.core) == {} and not it.ups[1].seen


async def test_a_copy_does_not_queue_behind_others() -> None:
    routes = '[[routes]]\nmodel = "*"\nheaders = { x-pool = "1" }\npool = "p1"\n'
    async with house(routes + SHADOWED, inflight=1) as it:
        held = it.ups[1].answer = Held()
        asking = [asyncio.ensure_future(ask(it.port, headers="x-pool: 1\r\n")) for _ in range(2)]
        await until(lambda: len(it.core.pools["p1"].admission.queue) == 1)
        assert (await ask(it.port)).status == 200
        await until(lambda: copies(it.core) == {"dropped": 1.0})
        held.go.release()
        held.go.release()
        assert [(await reply).status for reply in asking] == [200, 200]


async def test_a_share_of_the_calls_is_copied_by_their_ids() -> None:
    async with house(SHADOWED.replace('"p1" }', '"p1", percent = 30.0 }'), inflight=400) as it:
        async with Client(it.port) as client:
            for _ in range(2):
                for number in range(60):
                    await client.ask(INFER, b"x", headers=f"x-request-id: r{number}\r\n")
        await until(it.idle)
        ids = [seen.get("x-request-id") for seen in it.ups[1].seen]
        assert 8 <= len(set(ids)) <= 30 and len(ids) == 2 * len(set(ids))
