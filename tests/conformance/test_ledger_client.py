"""A ledger client whose ledger is slow, silent or gone: time budgets, bounds, and answers that come too late."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic, time

import pytest

from oriel_gateway.errors import Refused
from oriel_gateway.limits import SharedLimiter
from oriel_gateway.limits import ledger_client as module
from oriel_gateway.limits.ledger import LedgerLost, Presence, Question
from oriel_gateway.limits.ledger_client import LedgerClient, LedgerClientLimits
from oriel_policies.bounds.ledger import RATE, Answer, Ask

from ..waiting import until
from .desk import Desk
from .memory_ledger import MemoryLedger


class Moody:
    """A ledger that answers when `go` is set, unless it is `lost`."""

    def __init__(self) -> None:
        self.behind = MemoryLedger(lambda: time() * 1e6)
        self.seat = self.behind.seat("one")
        self.go = asyncio.Event()
        self.go.set()
        self.lost = False
        self.batches: list[int] = []

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer]]:
        self.batches.append(len(questions))
        if self.lost:
            raise LedgerLost("gone")
        await self.go.wait()
        return await self.seat.ask(questions)

    async def hello(self, share: float) -> Presence:
        if self.lost:
            raise LedgerLost("gone")
        await self.go.wait()
        return await self.seat.hello(share)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def desk(limits: str, *, budget_s: float) -> AsyncIterator[tuple[Desk, Moody, SharedLimiter]]:
    ledger = Moody()
    limiter = SharedLimiter(ledger, budget_s=budget_s)
    yield Desk(limiter, limits), ledger, limiter
    ledger.go.set()
    await limiter.close()


async def test_calls_of_one_moment_travel_together() -> None:
    async with desk("limit = { requests_per_s = 10, burst = 10 }", budget_s=2.0) as (it, ledger, _):
        assert sum(await asyncio.gather(*(it.admitted() for _ in range(30)))) == 10
        assert ledger.batches == [30]


async def test_a_late_answer_decides_nothing_but_its_units_are_not_lost() -> None:
    async with desk("limit = { requests_per_s = 0.001, burst = 4 }", budget_s=0.005) as (it, ledger, limiter):
        ledger.go.clear()
        assert await it.admitted() and await it.admitted(), "this gateway's own share decided"
        ledger.go.set()
        async with asyncio.timeout(60):
            await until(lambda: not (limiter.ledger_client._lanes or limiter.ledger_client._tasks))
        limiter.ledger_client._budget_s = 2.0
        got = [await it.admitted() for _ in range(6)]
        assert sum(got) + 2 <= 6, "two were admitted alone and two granted: never more than half as much again"
        assert sum(got) >= 2


async def test_five_silent_batches_open_the_breaker_and_then_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    async with desk("limit = { requests_per_s = 1000, burst = 1000 }", budget_s=0.002) as (it, ledger, limiter):
        ledger.go.clear()
        for _ in range(5):
            assert limiter.ledger_client.up
            assert await it.admitted()
        asked = len(ledger.batches)
        it.waits.clear()
        for _ in range(20):
            assert await it.admitted()
        # A second may have passed: then one of them has been a probe.
        assert not limiter.ledger_client.up and len(it.waits) <= len(ledger.batches) - asked <= 1
        assert caplog.text.count("cannot be used") == 1


async def test_a_lost_ledger_never_becomes_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with desk("limit = { requests_per_day = 5, concurrency = 3 }", budget_s=2.0) as (it, ledger, limiter):
        ledger.lost = True
        outcomes = [await it.admitted() for _ in range(12)]
        assert outcomes == [True] * 5 + [False] * 7 and not limiter.ledger_client.up
        assert "(gone)" in caplog.text
        ledger.lost = False
        limiter.open()
        async with asyncio.timeout(60):
            await until(lambda: limiter.ledger_client.up)
            record = ledger.behind.records.setdefault("t", {})
            await until(lambda: record.get("requests-day") and record["requests-day"].used == 5)
        assert not await it.admitted()


async def test_what_waits_for_a_ledger_is_bounded() -> None:
    ledger = Moody()
    ledger.go.clear()
    limits = LedgerClientLimits(max_waiting=3, max_batch=2, max_lanes=1)
    ledger_client = LedgerClient(ledger, budget_s=5.0, limits=limits)
    heard: list[list[Answer] | None] = []
    for _ in range(5):
        ledger_client.send("t", [Ask(key="r", kind=RATE, limit=1, step=1.0)], heard.append)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard == [None, None], "beyond the number that may wait, calls are answered at once"
    assert ledger.batches == [2]
    ledger.go.set()
    async with asyncio.timeout(60):
        await until(lambda: len(heard) >= 5)
    assert ledger.batches == [2, 1]
    await ledger_client.close()


async def test_leases_go_back_when_a_gateway_ends() -> None:
    ledger = Moody()
    limiter = SharedLimiter(ledger, budget_s=2.0)
    limiter.open()
    it = Desk(limiter, "limit = { requests_per_day = 1000000 }")
    count = await it.press(0.3)
    await limiter.close()
    assert ledger.behind.records["t"]["requests-day"].used == count


async def test_a_grant_that_is_given_up_before_its_answer_costs_nothing() -> None:
    async with desk("limit = { concurrency = 1 }", budget_s=2.0) as (it, _, limiter):
        grant = limiter.acquire(it.tenant, it._targets["m"], 0, monotonic())
        assert grant is not None and not grant.ready
        grant.settle(0, False, monotonic())
        await asyncio.sleep(0)
        with pytest.raises(Refused):
            while True:
                await it.take()


@pytest.mark.parametrize("gateways", [1, 2, 3, 4, 7, 50])
def test_however_many_are_cut_off_together_they_admit_half_as_much_again_at_most(gateways: int) -> None:
    """Gateways that lose the ledger admit their shares alone; with what the others get from the ledger that stays below
    1.5.
    """
    for alone in range(gateways + 1):
        assert alone * module._share(gateways) <= 1.5 + 1e-9
        if alone < gateways:
            rest = module._rest(Presence(gateways, alone, alone * module._share(gateways)))
            assert 0.0 < rest <= 1.0 and rest + alone * module._share(gateways) <= 1.5 + 1e-9
            assert rest >= 1.0 or alone * 3 > gateways, "while at most a third is silent, the others give up nothing"
            assert 1.0 + alone * module._careful(gateways) <= 1.5 + 1e-9 or alone == 0
    assert module._careful(gateways) <= module._share(gateways)


async def test_who_is_alone_is_careful_until_the_others_have_made_room() -> None:
    ledger, now = Moody(), 100.0
    others = [ledger.behind.seat(name) for name in ("two", "three", "four")]
    for other in others:
        await other.hello(0.375)
    ledger_client = LedgerClient(ledger, budget_s=5.0, clock=lambda: now)
    await ledger_client._beat(probe=False)
    assert (ledger_client.replicas, ledger_client.share, ledger_client.rest) == (4, pytest.approx(1 / 6), 1.0)
    ledger_client._failed("gone")
    for _ in range(4):
        ledger_client._failed("gone")
    assert not ledger_client.up and ledger_client.share == pytest.approx(1 / 6)
    ledger.lost = True
    now += module.DEFAULTS.careful_s
    ledger_client._tick()
    assert ledger_client.share == 0.375
    ledger.lost = False
    for at in range(3):  # the three other gateways fall silent
        ledger.behind.present[("two", "three", "four")[at]] = ((time() - 4.0) * 1e6, 0.375)
    await ledger_client._beat(probe=True)
    assert ledger_client.up and (ledger_client.replicas, ledger_client.share) == (4, pytest.approx(1 / 6))
    assert ledger_client.rest == pytest.approx(0.375)
    await others[0].close()
    await others[1].hello(0.375)
    await ledger_client._beat(probe=False)
    assert (ledger_client.replicas, ledger_client.rest) == (3, 1.0)
    await ledger_client.close()


def test_those_that_came_in_the_place_of_the_dead_are_not_starved() -> None:
    """Three gateways are killed and replaced: six are counted, and the three dead ones may still be admitting their
    shares.
    """
    assert module._rest(Presence(6, 3, 1.5)) == 0.75
    assert module._rest(Presence(2)) == 1.0, "the only other gateway was killed"


async def test_on_probation_calls_wait_little() -> None:
    now = 100.0
    ledger_client = LedgerClient(Moody(), clock=lambda: now)
    assert ledger_client.patience_s(now) == module.BUDGET_S
    for _ in range(5):
        ledger_client._failed("gone")
    await ledger_client._beat(probe=True)
    assert ledger_client.up and ledger_client.patience_s(now) == module.DOUBTFUL_S
    assert ledger_client.patience_s(now + 10.0) == module.BUDGET_S
    await ledger_client.close()


async def test_a_ledger_that_refuses_asks_is_named_once_with_its_cause(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat was answered and its asks were not: each second the log said that it was slow, and was back."""
    monkeypatch.setattr(module, "PROBE_S", 0.001)
    async with desk("limit = { requests_per_s = 1000, burst = 1000 }", budget_s=2.0) as (it, ledger, limiter):
        limiter.open()
        opened = 0

        async def refuse(questions: Sequence[Question]) -> list[list[Answer]]:
            raise LedgerLost("NoPermissionError: NOPERM no right to run evalsha")

        monkeypatch.setattr(ledger, "ask", refuse)
        while opened < 3:
            await until(lambda: limiter.ledger_client.up)
            while limiter.ledger_client.up:
                await it.admitted()
            opened += 1
        told = [each.message for each in caplog.records if "ledger" in each.message]
        assert len([each for each in told if "cannot be used" in each]) == 1 and "NOPERM" in told[0]
        assert len([each for each in told if "answers again" in each]) <= 1
