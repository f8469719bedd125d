"""Several gateways show one sum of what a tenant used, and a new budget begins with it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.errors import Outcome
from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_gateway.limits.ledger import Ledger, LedgerLost
from oriel_gateway.limits.redis_ledger import RedisLedger
from oriel_gateway.observe import shared_use
from oriel_gateway.observe.decisions import Decided
from oriel_gateway.observe.objectives import Objectives
from oriel_gateway.observe.shared_use import SharedUse
from oriel_gateway.observe.stats import Stats
from oriel_gateway.observe.usage import Usage

from ..waiting import until
from .desk import Desk
from .memory_ledger import MemoryLedger
from .redis_server import PASSWORD, redis_server

COST = "dev={};cpu=3;class={};tin=1;tout=2"


class Seat:
    """One gateway's use, and its place at the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.usage = Usage()
        self.shared = SharedUse(Stats(Objectives(), self.usage), ledger)

    def call(self, tenant: str, target: str, ns: int, *, device_class: str = "h100", kind: str = "model") -> None:
        """Count one answered call."""
        who = SimpleNamespace(name=tenant, tier=SimpleNamespace(name="gold"), caller="", budgets=())
        plan = SimpleNamespace(name="r")
        what = SimpleNamespace(name=target, route="r", version="", pool="p", plan=plan, kind=kind, executes=True)
        asked: Any = (who, what, Outcome.ANSWERED, 200, "", 1.0)
        ended = Decided(3.0, None, "POST", "http", *asked)  # type: ignore[arg-type]
        self.usage.count([ended._replace(sent_s=2.0, bytes_in=1, bytes_out=2, used=COST.format(ns, device_class))])

    def seen(self, tenant: str) -> dict[str, Any]:
        found = self.usage.of(tenant)
        return {period: found[period] for period in ("day", "month")}


@asynccontextmanager
async def seats(kind: str) -> AsyncIterator[Callable[[str], Ledger]]:
    if kind == "memory":
        ledger = MemoryLedger(lambda: time() * 1e6)
        yield ledger.seat
        return
    async with redis_server() as server:
        made: list[RedisLedger] = []

        def seat(holder: str) -> Ledger:
            made.append(RedisLedger(server.url, holder=holder, password=PASSWORD))
            return made[-1]

        yield seat
        for each in made:
            await each.close()


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_every_gateway_shows_the_sum_of_all_also_after_some_have_ended(kind: str) -> None:
    """A tenant saw 1,159 of its calls, or none, depending on the gateway that it asked."""
    async with seats(kind) as seat:
        one, two = Seat(seat("one")), Seat(seat("two"))
        for each in (one, two):
            each.call("a", "m", 5)
            await each.shared.exchange()
        one.call("a", "m", 7, device_class="cpu")
        one.call("a", "m", 9, kind="service")
        two.call("b", "m", 10**17)
        for _ in range(2):
            for each in (one, two):
                assert await each.shared.exchange() is False
        three = Seat(seat("three"))
        three.call("a", "m", 1)
        for each in (three, one, two):
            await each.shared.exchange()
        assert one.seen("a") == two.seen("a") == three.seen("a")
        day = one.seen("a")["day"]
        assert (day["requests"], day["device_ns"], day["cpu_ns"], day["tokens_out"]) == (5, 27, 15, 10)
        by_kind = {each["kind"]: each["device_ns"] for each in day["targets"]}
        assert by_kind == {"model": 18, "service": 9}  # of one name
        assert three.seen("b")["month"]["device_ns"] == 10**17
        assert three.usage.today("a")[1].device_ns == {"h100": 20, "cpu": 7}
        assert three.usage.since <= two.usage.since


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_an_addition_whose_answer_was_lost_counts_once(kind: str) -> None:
    async with seats(kind) as seat:
        ledger = seat("one")
        one, two = Seat(ledger), Seat(seat("two"))
        await one.shared.exchange()
        one.call("a", "m", 5)
        add_use = ledger.add_use

        async def lost(*given: Any) -> Any:
            await add_use(*given)
            raise LedgerLost("the answer is lost")

        ledger.add_use = lost  # type: ignore[method-assign]
        with pytest.raises(LedgerLost):
            await one.shared.exchange()
        one.call("a", "m", 6)
        ledger.add_use = add_use  # type: ignore[method-assign]
        while await one.shared.exchange():
            pass
        await two.shared.exchange()
        assert one.seen("a") == two.seen("a") and two.seen("a")["day"]["device_ns"] == 11


async def test_after_a_long_time_without_the_ledger_the_sums_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with seats("memory") as seat:
        one, two = Seat(seat("one")), Seat(seat("two"))
        for each in (one, two):
            await each.shared.exchange()
        monkeypatch.setattr(shared_use, "OUTDATED_S", -1.0)
        one.call("a", "m", 5)
        two.call("a", "m", 6)
        for _ in range(2):
            for each in (one, two):
                await each.shared.exchange()
        assert one.seen("a") == two.seen("a") and one.seen("a")["day"]["device_ns"] == 11


@given(st.dictionaries(st.text(max_size=30), st.integers(-5, 5), max_size=5))
def test_sums_that_no_gateway_wrote_are_left_out(sums: dict[str, int]) -> None:
    usage = Usage()
    usage.take_over(sums, whole=False)
    assert usage.of("")["day"]["requests"] == 0


BUDGET = 'budgets = [{{ amount = {amount}, unit = "device_seconds", period = "{period}" }}]'


@pytest.mark.parametrize("period", ["day", "month"])
@pytest.mark.parametrize("kind", ["embedded", "memory", "redis"])
async def test_a_new_budget_begins_with_what_was_used(kind: str, period: str) -> None:
    """A budget that was set today began at zero, although 406 s were used."""

    def used(tenant: str, budget: Any) -> int:
        return 4 * 10**9

    async with seats("redis" if kind == "redis" else "memory") as seat:
        limiters: list[Any] = [EmbeddedLimiter()] if kind == "embedded" else []
        if not limiters:
            limiters = [SharedLimiter(seat(name), replicas=2, budget_s=2.0) for name in ("one", "two")]
        for limiter in limiters:
            limiter.used_before = used
            if kind != "embedded":
                limiter.open()
        desks = [Desk(limiter, BUDGET.format(amount=5, period=period)) for limiter in limiters]
        (allowance,) = [each for each in desks[0].tenant.allowances if each.budgets]

        def left() -> list[float]:
            return [bound[1] for limiter in limiters for bound in limiter.left("t", allowance, monotonic())]

        for desk in desks:
            assert await desk.admitted()
        if kind == "embedded":
            assert left() == [10**9]
        await until(lambda: all(each <= 10**9 + 10 for each in left()))
        limiters[0].spend(desks[0].tenant, {allowance.budgets[0].name: 10**9 + 10}, monotonic())

        async def refused() -> bool:
            return not await desks[0].admitted()

        await until(refused)
        assert left()[0] <= 0
        for limiter in limiters:
            await limiter.close()
