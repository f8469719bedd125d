"""A server that hangs while a probe of it is under way (R11b)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from oriel_gateway.pools.endpoint_state import Reach
from oriel_policies.upstreams.ejection import MIN_ANSWERS, Cause

from ..waiting import until
from .endpoint_pools import with_probe
from .gate import INFER
from .stack import Client, Seen, Upstream, documents, gateway, upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def one_of_two_hangs() -> AsyncIterator[tuple[Upstream, Upstream, asyncio.Event]]:
    """Yield two servers, and an event after which the first of them answers nothing."""
    hangs, never = asyncio.Event(), asyncio.Event()

    async def hanging(seen: Seen) -> bytes:
        if hangs.is_set():
            await never.wait()
        return OK

    async def other(seen: Seen) -> bytes:
        return OK

    async with upstream() as bad, upstream() as good:
        bad.answer, good.answer = hanging, other
        yield bad, good, hangs


async def test_a_regular_probe_under_way_does_not_put_the_verdict_off() -> None:
    async with one_of_two_hangs() as (bad, good, hangs):
        async with gateway(with_probe([bad.port, good.port])) as (port, core):
            core.endpoint_watch.probe_timeout_s = 3600.0
            these = core.pools["p"].endpoints
            victim = next(each for each in these if each.port == bad.port)
            await until(lambda: [each.reach for each in these] == [Reach.READY] * 2)
            async with Client(port) as first:  # the endpoint is not asked for models, because it does not report them
                assert (await first.ask(INFER)).status == 200
            hangs.set()
            await until(lambda: victim.probing)
            these.note_answer(next(each for each in these if each is not victim), monotonic(), 5.0)
            async with Client(port) as one, Client(port) as two, Client(port) as three:
                # whichever server is called, one of the calls goes to the one that hangs
                for client in (one, two, three):
                    client.send(INFER, b"x")
                    await until(lambda: victim.outstanding > 0 or len(good.seen) > 0)
                await until(lambda: victim.outstanding > 0)
                await until(lambda: victim.ejection.cause is Cause.STUCK)
                assert these.usable == [each for each in these if each is not victim]
                assert victim.probing, "the probe is still waited for"


async def test_a_server_that_has_all_calls_and_answers_none_is_left_alone() -> None:
    """Without a probe it is judged by its own history, as the other server answers nothing either: it has no calls."""
    async with one_of_two_hangs() as (bad, good, hangs):
        async with gateway(documents([bad.port, good.port])) as (port, core):
            these = core.pools["p"].endpoints
            victim, well = sorted(these, key=lambda each: each.port != bad.port)
            async with Client(port) as one, Client(port) as two:
                while min(each.record.answers for each in these) < MIN_ANSWERS:
                    assert (await one.ask(INFER)).status == 200
                hangs.set()
                well.cost.observed(5.0, monotonic())  # so that the next calls go to the server that hangs
                one.send(INFER, b"x")
                two.send(INFER, b"x")
                await until(lambda: victim.outstanding == 2)
                await until(lambda: victim.ejection.cause is Cause.STUCK)
                assert these.usable == [well]
