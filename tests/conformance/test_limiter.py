"""The tests that every limiter has to pass: in one process, with a ledger in memory, with a real Redis."""

from collections.abc import AsyncIterator, Callable
from time import monotonic, time

import pytest

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import EmbeddedLimiter, Grant, Limiter, SharedLimiter
from oriel_gateway.limits.redis_ledger import RedisLedger

from ..waiting import until
from .desk import Call, Desk
from .memory_ledger import MemoryLedger
from .redis_server import PASSWORD, redis_server, unhurried

__all__ = ["unhurried"]

Make = Callable[[str], Desk]


@pytest.fixture(params=["embedded", "memory", "redis"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    limiters: list[Limiter] = []

    def embedded(limits: str) -> Desk:
        limiters.append(EmbeddedLimiter())
        return Desk(limiters[-1], limits)

    def shared(ledger: object) -> Make:
        def desk(limits: str) -> Desk:
            # A generous time budget: these tests check what is counted, not how long a busy machine takes.
            limiter = SharedLimiter(ledger, budget_s=2.0)  # type: ignore[arg-type]
            limiter.open()
            limiters.append(limiter)
            return Desk(limiter, limits)

        return desk

    if request.param == "embedded":
        yield embedded
    elif request.param == "memory":
        yield shared(MemoryLedger(lambda: time() * 1e6).seat("one"))
    else:
        async with redis_server() as server:
            yield shared(RedisLedger(server.url, holder="one", password=PASSWORD))
            for limiter in limiters:
                await limiter.close()
        return
    for limiter in limiters:
        await limiter.close()


async def refused(desk: Desk, model: str = "m", size: int = 0) -> Refused:
    with pytest.raises(Refused) as caught:
        await desk.take(model, size)
    return caught.value


async def refused_soon(desk: Desk, size: int = 0) -> Refused:
    """Call until the ledger has been sent what was charged; returns the refusal."""

    async def refusal() -> Refused | None:
        try:
            grant = await desk.take(size=size)
        except Refused as no:
            return no
        grant.settle(0, False, monotonic())
        return None

    found: Refused = await until(refusal)
    return found


async def test_a_burst_is_admitted_and_the_next_told_the_true_wait(make: Make) -> None:
    desk = make("limit = { requests_per_s = 0.1, burst = 3 }")
    for _ in range(3):
        await desk.take()
    for _ in range(3):
        no = await refused(desk)
        assert no.outcome is Outcome.RATE_LIMITED and no.retry_after_s in (9, 10)
        headers = dict(no.headers)
        assert headers["ratelimit-policy"] == '"requests";q=3;w=30'
        assert headers["ratelimit"].startswith('"requests";r=0;t=')


async def test_a_refusal_by_one_bound_gives_back_what_the_others_took(make: Make) -> None:
    desk = make(
        "limit = { requests_per_s = 0.001, burst = 3, concurrency = 3, requests_per_day = 3 }\n"
        'limits = [{ model = "big", requests_per_s = 0.001, burst = 1 }]'
    )
    await desk.take("big")
    for _ in range(4):
        assert "model:big" in (await refused(desk, "big")).message
    await desk.take()
    await desk.take()
    await refused(desk)


async def test_of_two_bounds_that_refuse_the_longer_wait_is_told(make: Make) -> None:
    """A caller that came back when the rate allowed it would only learn that the day's quota is used up."""
    desk = make('limit = { requests_per_s = 0.2, burst = 1 }\nlimits = [{ model = "m", requests_per_day = 1 }]')
    assert await desk.admitted()
    until_midnight = 86400 - time() % 86400
    for _ in range(3):
        refusal = await refused(desk)
        assert refusal.outcome is Outcome.QUOTA_EXCEEDED and abs((refusal.retry_after_s or 0) - until_midnight) < 3
    assert (await refused(desk, "big")).outcome is Outcome.RATE_LIMITED


async def test_slots_are_held_until_settled(make: Make) -> None:
    desk = make("limit = { concurrency = 2 }")
    grants = [await desk.take(), await desk.take()]
    no = await refused(desk)
    assert no.outcome is Outcome.CONCURRENCY_LIMITED and no.retry_after_s is not None
    for grant in grants:
        grant.settle(0, True, monotonic())
    for _ in range(2):
        await until(lambda: _took(desk))
    assert not await _took(desk)


async def _took(desk: Desk) -> bool:
    try:
        await desk.take()
    except Refused:
        return False
    return True


async def test_a_quota_counts_what_ran_and_ends_with_its_window(make: Make) -> None:
    desk = make("limit = { requests_per_day = 3 }")
    (await desk.take()).settle(0, False, monotonic())
    for _ in range(3):
        (await desk.take()).settle(10, True, monotonic())
    no = await refused(desk)
    assert no.outcome is Outcome.QUOTA_EXCEEDED and no.retry_after_s is not None
    assert abs(no.retry_after_s - (86400 - time() % 86400)) <= 3


async def test_computing_is_settled_by_its_charge(make: Make) -> None:
    desk = make("limit = { compute_ms_per_month = 1000 }")
    first = await desk.take()
    first.settle(985_000, True, monotonic())
    no = await refused_soon(desk)
    assert no.outcome is Outcome.QUOTA_EXCEEDED


async def test_bytes_are_admitted_by_size_and_answers_paid_later(make: Make) -> None:
    desk = make("limit = { bytes_per_s = 1000, bytes_burst = 5000 }")
    began = monotonic()
    grant = await desk.take(size=3000)
    grant.move(10_000, monotonic())
    no = await refused_soon(desk, size=10)
    assert 8.01 - (monotonic() - began) <= (no.retry_after_s or 0) <= 9 and "bytes per second" in no.message


async def test_a_call_that_leaves_while_its_limiter_thinks_holds_nothing(make: Make) -> None:
    desk = make("limit = { concurrency = 1 }")
    now = monotonic()
    grant = desk.limiter.acquire(desk.tenant, desk._targets["m"], 0, now)
    assert grant is not None
    grant.waiter = call = Call()
    grant.settle(0, False, now)
    await until(lambda: _took(desk))
    assert not call.answer.done(), "a call that has left gets no answer"


async def test_a_high_rate_is_leased_and_no_call_waits(make: Make) -> None:
    desk = make("limit = { requests_per_s = 100000, burst = 1000 }")
    await desk.press(0.3)
    before, admitted = len(desk.waits), 0
    while admitted < 200:
        admitted += await desk.press(0.1)
    assert len(desk.waits) - before <= 5


async def test_tokens_are_reserved_and_settled_by_what_was_used(make: Make) -> None:
    desk = make("limit = { tokens_per_minute = 6, tokens_burst = 1000 }")
    grant = await desk.reserve(800)
    with pytest.raises(Refused) as caught:
        await desk.reserve(300)
    refusal, wait_s = caught.value, caught.value.retry_after_s or 0
    assert refusal.outcome is Outcome.TOKENS_LIMITED and 980 <= wait_s <= 1000, "100 tokens are missing, 6 a minute"
    grant.tokens = lambda: 50
    grant.settle(0, True, monotonic())

    async def free() -> Grant | None:
        try:
            return await desk.reserve(940)
        except Refused:
            return None

    found: Grant = await until(free)
    with pytest.raises(Refused):
        await desk.reserve(20)
    found.tokens = lambda: 940
    found.settle(0, False, monotonic())  # it reached no server

    async def all_but_the_first() -> Grant | None:
        try:
            return await desk.reserve(950)
        except Refused:
            return None

    await until(all_but_the_first)


async def test_a_budget_admits_calls_until_what_was_used_has_spent_it(make: Make) -> None:
    desk = make('budgets = [{ amount = 10, unit = "device_seconds", period = "day" }]')
    for spent_ns in (9_999_999_000, 500_000_000):
        grant = await desk.take()
        grant.settle(0, True, monotonic())
        desk.limiter.spend(desk.tenant, {"budget-device_seconds-day": spent_ns}, monotonic())
    no = await refused_soon(desk)
    assert no.outcome is Outcome.BUDGET_SPENT and "10 device_seconds per day" in no.message
    assert abs((no.retry_after_s or 0) - (86400 - time() % 86400)) <= 3


async def test_a_budget_is_not_used_up_by_calls_that_cost_nothing(make: Make) -> None:
    desk = make('budgets = [{ amount = 3, unit = "tokens" }]')
    for _ in range(20):
        (await desk.take()).settle(0, True, monotonic())
