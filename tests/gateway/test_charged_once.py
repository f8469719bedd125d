"""What a call costs of its tenant's quotas, however it ends: one request and its computing time if it was sent, else
nothing.

Every server in these tests reports a cost of 5 ms per call; 10 ms are reserved while nothing is known of a route.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import pytest

from oriel_gateway.limits.meters import QuotaMeter

from ..waiting import until
from .special_routes import INFER, House, house
from .stack import GOLD, Client, Reply, Seen, digest

PLAIN = '[[routes]]\nmodel = "*"\npool = "p0"\n'
COST_US = 5000
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-oriel-cost-us: 5000\r\n\r\nok"
TENANT = f"""[tenants.q]
tier = "gold"
models = ["*"]
keys = [{{ sha256 = "{digest("key-q")}" }}]
limit = {{ requests_per_day = 100, compute_ms_per_day = 1000, requests_per_month = 100, compute_ms_per_month = 1000 }}
"""


@dataclass
class Till:
    it: House

    def used(self) -> tuple[int, int]:
        """Return the used requests and microseconds of computing time; the counts per day and per month have to
        agree.
        """
        meters = self.it.core.limiter._accounts["q", "all"].meters  # type: ignore[attr-defined]
        used = {meter.bound.name: meter.window.used for meter in meters if isinstance(meter, QuotaMeter)}
        assert len(used) == len(meters)
        assert (used["requests-day"], used["compute-day"]) == (used["requests-month"], used["compute-month"])
        return used["requests-day"], used["compute-day"]

    def allow(self) -> None:
        """Count enough calls for the retry budget to allow a second copy."""
        for _ in range(20):
            self.it.core.pools["p0"].retries.requested(monotonic())

    async def ask(self, **more: str) -> Reply:
        async with Client(self.it.port) as client:
            return await client.ask(INFER, b"x", key="key-q", **more)


@asynccontextmanager
async def till(routes: str, **more: int) -> AsyncIterator[Till]:
    async with house(routes + TENANT, **more) as it:
        for up in it.ups:
            up.answer = answering(ANSWER)
        yield Till(it)
        await until(it.idle)


async def never() -> None:
    await asyncio.Event().wait()


def answering(*answers: bytes | Callable[[], Awaitable[None]]) -> Callable[[Seen], Awaitable[bytes]]:
    """Return a server that gives these answers one after the other, and repeats the last one.

    b"" breaks the connection; a function is called first.
    """
    left = list(answers)

    async def answer(_: Seen) -> bytes:
        now = left.pop(0) if len(left) > 1 else left[0]
        if callable(now):
            await now()
            return ANSWER
        return now

    return answer


@pytest.mark.parametrize(
    ("status", "answer", "paid"),
    [
        (200, ANSWER, COST_US),
        (400, ANSWER.replace(b"200 OK", b"400 Bad"), COST_US),
        (500, ANSWER.replace(b"200 OK", b"500 Oh"), COST_US),
    ],
)
async def test_an_answer_is_paid_whatever_it_says(status: int, answer: bytes, paid: int) -> None:
    async with till(PLAIN) as it:
        it.it.ups[0].answer = answering(answer)
        assert (await it.ask()).status == status
        assert it.used() == (1, paid)


async def test_what_was_never_sent_is_not_paid() -> None:
    async with till(PLAIN, inflight=1) as it:
        gate = it.it.core.pools["p0"]
        gate.admission.limit = 0  # no call gets a permit
        assert (await it.ask(headers="x-request-timeout-ms: 30\r\n")).status == 504
        assert it.used() == (0, 0)
        async with Client(it.it.port) as leaves:
            leaves.send(INFER, b"x", key="key-q")
            await until(lambda: len(gate.admission.queue) == 1)
            assert it.used() == (1, 10_000)
        await until(lambda: it.used() == (0, 0))
    dead = '[pools.dead]\nendpoints = ["127.0.0.1:1"]\nprobe = ""\n' + PLAIN.replace("p0", "dead")
    async with till(dead) as it:
        assert (await it.ask(headers="x-request-timeout-ms: 100\r\n")).status == 502
        assert it.used() == (0, 0)


async def test_what_was_sent_is_paid_by_time_though_nobody_waits_for_it() -> None:
    async with till(PLAIN) as it:
        it.it.ups[0].answer = answering(never)
        began = monotonic()
        assert (await it.ask(headers="x-request-timeout-ms: 100\r\n")).status == 504
        requests, first_us = it.used()
        assert requests == 1 and 20_000 <= first_us <= 1e6 * (monotonic() - began)
        async with Client(it.it.port) as leaves:
            leaves.send(INFER, b"x", key="key-q")
            await until(lambda: len(it.it.ups[0].seen) == 2)
            seen_s = monotonic()
            await until(lambda: monotonic() - seen_s >= 0.01)
        await until(it.it.idle)
        assert it.used()[0] == 2 and it.used()[1] >= first_us + 10_000


async def test_a_stream_is_paid_once_at_its_end_and_when_it_is_cut() -> None:
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-oriel-cost-us: 5000\r\n\r\n1\r\na\r\n"
    async with till(PLAIN) as it:
        it.it.ups[0].answer = answering(chunks + b"1\r\nb\r\n0\r\n\r\n")
        assert (await it.ask()).body == b"ab"
        assert it.used() == (1, COST_US)
        it.it.ups[0].answer = answering(chunks)
        async with Client(it.it.port) as cuts:
            cuts.send(INFER, b"x", key="key-q")
            await cuts.reader.readuntil(b"1\r\na\r\n")
        await until(it.it.idle)
        assert it.used() == (2, 2 * COST_US)


async def test_a_second_try_and_a_hedge_are_one_call() -> None:
    tried = '[[routes]]\nmodel = "*"\npool = "p0"\nidempotent = true\n'
    async with till(tried, per_pool=2) as it:
        it.allow()
        it.it.ups[1].answer = answering(ANSWER)
        it.it.ups[0].answer = answering(b"")
        while not it.it.ups[0].seen:
            before = it.used() if it.it.ups[1].seen else (0, 0)
            assert (await it.ask()).status == 200
            assert it.used() == (before[0] + 1, before[1] + COST_US)
    async with till(tried + "hedge_ms = 10\n", per_pool=2) as it:

        async def both_have_it() -> None:
            await until(lambda: sum(len(up.seen) for up in it.it.ups) == 2)

        for up in it.it.ups[:2]:
            up.answer = answering(both_have_it)
        it.allow()
        assert (await it.ask()).status == 200
        assert sum(len(up.seen) for up in it.it.ups) == 2 and it.used() == (1, COST_US)
        charged = [up.seen[0].get("x-oriel-unbilled") or "the tenant" for up in it.it.ups[:2]]
        assert sorted(charged) == ["repeat", "the tenant"]


async def test_a_kept_answer_is_a_request_that_costs_no_computing() -> None:
    async with till('[[routes]]\nmodel = "*"\npool = "p0"\ndeterministic = true\ncache_s = 60\n') as it:
        replies = [await it.ask() for _ in range(3)]
        assert [reply.headers["x-oriel-cache"] for reply in replies] == ["miss", "hit", "hit"]
        assert it.used() == (3, COST_US)
        left = [int(reply.headers["ratelimit"].split('"requests-day";r=')[1].split(";")[0]) for reply in replies]
        assert left == [99, 98, 97]


async def test_a_shadow_copy_is_not_the_tenants() -> None:
    async with till('[[routes]]\nmodel = "*"\npool = "p0"\nshadow = { pool = "p1" }\n') as it:
        assert (await it.ask()).status == 200
        await until(lambda: len(it.it.ups[1].seen) == 1)
        await until(it.it.idle)
        assert it.used() == (1, COST_US)


async def test_whoever_is_not_limited_meets_none_of_this() -> None:
    async with till(PLAIN) as it:
        async with Client(it.it.port) as client:
            assert "ratelimit" not in (await client.ask(INFER, b"x", key=GOLD)).headers
        assert not it.it.core.limiter.accounts  # type: ignore[attr-defined]
