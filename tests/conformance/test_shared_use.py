"""Several gateways show one sum of what a tenant used and of promises, and a new budget begins with the use."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_gateway.limits.ledger import Ledger, LedgerLost
from oriel_gateway.limits.redis_ledger import RedisLedger
from oriel_gateway.observe import shared_use
from oriel_gateway.observe.budgets import Budgets
from oriel_gateway.observe.cube import add_up
from oriel_gateway.observe.objectives import Objectives
from oriel_gateway.observe.record import Judged
from oriel_gateway.observe.shared_use import SharedUse
from oriel_gateway.observe.stats import Stats
from oriel_gateway.observe.usage import Usage
from oriel_policies.promise.error_budget import WINDOWS

from ..gateway.records import record
from ..gateway.records import target as model
from ..waiting import until
from .desk import Desk
from .memory_ledger import MemoryLedger
from .redis_server import PASSWORD, redis_server

COST = "dev={};cpu=3;class={};tin=1;tout=2"


class Seat:
    """One gateway's use, and its place at the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.usage = Usage()
        self.objectives = Objectives()
        self.shared = SharedUse(Stats(self.objectives, self.usage), ledger)

    def call(self, tenant: str, target: str, ns: int, *, device_class: str = "h100", kind: str = "model") -> None:
        """Count one answered call."""
        who = SimpleNamespace(name=tenant, tier=SimpleNamespace(name="gold"), caller="", budgets=())
        what = model(target, kind=kind)
        facts = {"opened": True, "status": 200, "sent_s": 2.0, "ended_s": 3.0, "bytes_in": 1, "bytes_out": 2}
        ended = record(who, what, used=COST.format(ns, device_class), **facts)
        self.usage.count(add_up([ended], self.usage.classes))

    def seen(self, tenant: str) -> dict[str, Any]:
        found = self.usage.of(tenant)
        return {period: found[period] for period in ("day", "month")}

    def promise(self, tenant: str, *, met: int = 0, late: int = 0, target: str = "m") -> None:
        """Count calls that kept their promise, and such that did not."""
        cell = self.objectives.counts(tenant, "gold", target)
        cell.met += met
        for _ in range(late):
            cell.broke(Judged("late", "queue"))

    def promises(self, *windows: str) -> Any:
        """Return what `/slo` says of the tier and of each target, without what is not counted."""
        budgets = self.objectives.budgets
        listed, _ = budgets.of_pairs({"gold": 0.99}, time())
        found = [("", budgets.of_tier("gold", 0.99, time())), *((":".join(key), of) for key, of in listed)]
        return {name: {each: (of["calls"][each], of["bad"][each]) for each in windows or WINDOWS} for name, of in found}


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
        assert three.usage.today("a")[1][0].device_ns == {"h100": 20, "cpu": 7}
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


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_every_gateway_shows_the_promises_of_all_also_after_some_have_ended(kind: str) -> None:
    """`/slo` and the console showed the calls of one gateway only, and a new one began with an empty history."""
    async with seats(kind) as seat:
        one, two = Seat(seat("one")), Seat(seat("two"))
        for each in (one, two, one, two):
            await each.shared.exchange()
            each.promise("a", met=45, late=5)
        await two.shared.exchange()
        one.promise("b", met=5)
        for each in (one, two, one):
            await each.shared.exchange()
        assert one.promises() == two.promises()
        assert one.promises("5m", "1h", "30d")[""] == dict.fromkeys(("5m", "1h", "30d"), (205, 20))
        assert two.objectives.budgets.of_tier("gold", 0.99, time())["causes"] == {"queue": 20}
        three = Seat(seat("three"))
        three.promise("b", late=1)
        for each in (three, one, two):
            await each.shared.exchange()
        assert three.promises("6h", "3d", "30d") == one.promises("6h", "3d", "30d") == two.promises("6h", "3d", "30d")
        assert three.promises("1d")[""] == {"1d": (206, 21)} and three.promises("1d")["b:gold:m"] == {"1d": (6, 1)}


async def test_promises_of_the_month_before_are_taken_over_and_nothing_is_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with seats("memory") as seat:
        one, two = Seat(seat("one")), Seat(seat("two"))
        one.promise("a", met=7)
        monkeypatch.setattr(Usage, "month", lambda self: "2026-11")
        await one.shared.exchange()
        monkeypatch.setattr(Usage, "month", lambda self: "2026-12")
        monkeypatch.setattr(shared_use, "OUTDATED_S", -1.0)  # the sums are read anew each time
        for each in (two, one, two):
            each.promise("a", met=1, late=1)
            await each.shared.exchange()
        await one.shared.exchange()
        assert one.promises("1d") == two.promises("1d")
        assert one.promises("1d", "30d")[""] == {"1d": (13, 3), "30d": (13, 3)}


@given(st.dictionaries(st.text(max_size=30), st.integers(-5, 5), max_size=5), st.booleans())
def test_sums_that_no_gateway_wrote_are_left_out(sums: dict[str, int], whole: bool) -> None:
    usage, budgets = Usage(), Budgets()
    usage.take_over(sums, whole=whole)
    budgets.take_over(sums, time(), whole=whole)
    assert usage.of("")["day"]["requests"] == 0


@given(st.integers(-(10**9), 10**12), st.booleans(), st.sampled_from(["+calls", "+bad", "queue", ""]))
def test_hours_that_no_window_has_change_nothing(hour: int, whole: bool, counter: str) -> None:
    budgets, now = Budgets(max_pairs=2), 10_000_000.0
    budgets.take_over({"\x1f".join(("slo", str(hour), "t", "gold", "m", counter)): 3}, now, whole=whole)
    counted = now - WINDOWS["30d"] <= hour <= now + 3600 and counter in ("+calls", "+bad")
    calls, bad = (int(counted and counter == each) * 3 for each in ("+calls", "+bad"))
    budgets.add(("t", "gold", "m"), now, 1, 0, {})
    listed, _ = budgets.of_pairs({"gold": 0.9}, now, tenant="t")
    assert listed[0][1]["calls"]["30d"] <= 1 + calls and listed[0][1]["bad"]["30d"] <= bad
    assert counted or listed[0][1]["calls"]["3d"] == 1


def test_more_pairs_than_there_is_place_for_leave_the_latest() -> None:
    budgets, now = Budgets(max_pairs=2), 10_010 * 86400.0
    names = {
        "\x1f".join(("slo", str(86400 * (10_000 + day)), f"t{day}", "gold", "m", "+calls")): day for day in range(1, 10)
    }
    budgets.take_over(names, now, whole=True)
    listed, _ = budgets.of_pairs({"gold": 0.9}, now)
    assert [(key[0], of["calls"]["30d"], of["calls"]["1h"]) for key, of in listed] == [("t9", 9, 0), ("t8", 8, 0)]


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
            return [bound[1] for limiter in limiters for bound in limiter.remaining("t", allowance, monotonic())]

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


@pytest.mark.parametrize("gateways", [1, 25, 100, 1000])
def test_the_log_of_additions_reaches_back_far_enough_for_any_number_of_gateways(gateways: int) -> None:
    shared = SharedUse(Stats(Objectives(), Usage()), MemoryLedger(lambda: 0.0).seat("one"), lambda: gateways)
    assert shared_use.EXCHANGE_S <= shared.every_s <= max(shared_use.EXCHANGE_S, gateways / 50)
    assert gateways / shared.every_s * shared_use.OUTDATED_S < 20_000
