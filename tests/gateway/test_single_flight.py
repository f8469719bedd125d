"""Equal calls at the same time are made once: how the first of them and the others end."""

import asyncio
from time import monotonic

from ..waiting import until
from .special_routes import (
    BRONZE,
    FLOWN,
    INFER,
    OTHER,
    Held,
    answering,
    ask,
    house,
    ok,
)
from .stack import GOLD, Client, Seen, digest


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
        assert (await ask(it.port)).headers["x-oriel-cache"] == "miss"  # without cache_s no answer is kept
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
    """A caller that leaves before the answer pays for the request and the computing time like any other."""
    tenant = f'[tenants.q]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest("key-q")}" }}]\n'
    tenant += "limit = { requests_per_day = 100, compute_ms_per_day = 1000000 }\n"
    async with house(FLOWN + tenant) as it:
        held = it.ups[0].answer = Held(ok(b"once"))

        def used() -> tuple[float, float]:
            requests, compute = it.core.limiter._accounts["q", "all"].meters  # type: ignore[attr-defined]
            return 100 - requests.remaining(monotonic())[0], 1e9 - compute.remaining(monotonic())[0]

        async with Client(it.port) as one, Client(it.port) as two:
            began = monotonic()
            one.send(INFER, b"x", key="key-q")
            two.send(INFER, b"x", key="key-q")
            await until(lambda: it.members() == 2 and len(it.ups[0].seen) == 1)
            assert used() == (2, 20_000), "10 ms are reserved for each of the two"
            sent = monotonic()
            await until(lambda: monotonic() - sent >= 0.1)
        await until(lambda: it.idle())
        requests, compute_us = used()
        took_us = (monotonic() - began) * 1e6
        assert requests == 2 and 100_000 <= compute_us <= took_us, "both requests count, the computing time only once"
        # A call that leaves while it waits for the permit of another tenant's call costs nothing.
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

        # A call counts as sent also if the upstream closes the connection without an answer.
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
    """Otherwise all of them would go at once to a server that has just failed."""
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
    """If each of them led in turn, they would pass their deadlines in the queue."""
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
        assert len(it.ups[0].seen) <= 4, "the calls did not all go at once"
        await until(it.idle)
