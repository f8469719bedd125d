"""The tests that every ledger has to pass: the one in memory, and the Lua script in a real Redis."""

import random
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from time import time

import pytest

from oriel_gateway.limits import redis_ledger
from oriel_gateway.limits.ledger import MISSED_S, PRESENCE_S, SLOT_TTL_S, Ledger, LedgerLost, Presence
from oriel_gateway.limits.redis_ledger import PREFIX, RedisLedger
from oriel_policies.bounds.ledger import RATE, SLOTS, WINDOW, Answer, Ask

from .memory_ledger import MemoryLedger
from .redis_server import PASSWORD, redis_server, unhurried

__all__ = ["unhurried"]

ROOT = Path(__file__).resolve().parents[2]
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US


class Pair:
    """Two gateways on one ledger, and the changes to the ledger that only a test makes."""

    def __init__(self, one: Ledger, two: Ledger) -> None:
        self.one, self.two = one, two

    async def flush(self) -> None:
        raise NotImplementedError


class InMemory(Pair):
    def __init__(self) -> None:
        self.ledger = MemoryLedger(lambda: time() * 1e6)
        super().__init__(self.ledger.seat("one"), self.ledger.seat("two"))

    async def flush(self) -> None:
        self.ledger.records.clear()


class InRedis(Pair):
    async def flush(self) -> None:
        assert isinstance(self.one, RedisLedger)
        await self.one._redis.flushall()


@asynccontextmanager
async def pair(kind: str) -> AsyncIterator[Pair]:
    if kind == "memory":
        yield InMemory()
        return
    async with redis_server() as server:
        one, two = (RedisLedger(server.url, holder=name, password=PASSWORD) for name in ("one", "two"))
        yield InRedis(one, two)
        await one.close()
        await two.close()


@pytest.fixture(params=["memory", "redis"])
async def ledgers(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with pair(request.param) as found:
        yield found


async def ask(ledger: Ledger, *asks: Ask, tenant: str = "t") -> list[Answer]:
    ((answers),) = await ledger.ask([(tenant, asks)])
    return answers


def rate(key: str = "r", *, limit: float = 5, step: float = HOUR_US, **more: float) -> Ask:
    return Ask(key=key, kind=RATE, limit=limit, step=step, **more)  # type: ignore[arg-type]


def slots(key: str = "s", *, limit: float = 3, **more: float) -> Ask:
    return Ask(key=key, kind=SLOTS, limit=limit, step=0.0, **more)  # type: ignore[arg-type]


def window(key: str = "w", *, limit: float = 10, step: float = 0.0, **more: float) -> Ask:
    return Ask(key=key, kind=WINDOW, limit=limit, step=step, **more)  # type: ignore[arg-type]


async def test_a_rate_grants_its_burst_across_gateways_and_says_how_long_the_next_waits(ledgers: Pair) -> None:
    (got,) = await ask(ledgers.one, rate(need=2, want=3))
    assert got.granted == 3 and got.wait_us == 0
    (got,) = await ask(ledgers.two, rate(need=1, want=10))
    assert got.granted == 2, "no more than there is"
    (got,) = await ask(ledgers.one, rate(need=1, want=1))
    assert got.granted == 0 and 0.99 * HOUR_US < got.wait_us <= HOUR_US
    (got,) = await ask(ledgers.one, rate(debt=-2))
    (got,) = await ask(ledgers.two, rate(need=2, want=2))
    assert got.granted == 2, "the other gateway may have what one has given back"


async def test_debt_counts_in_full_and_spent_only_empties(ledgers: Pair) -> None:
    await ask(ledgers.one, rate("a", debt=50))
    (got,) = await ask(ledgers.two, rate("a", need=1, want=1))
    assert 45.9 * HOUR_US < got.wait_us <= 46 * HOUR_US
    await ask(ledgers.one, rate("b", spent=50))
    (got,) = await ask(ledgers.two, rate("b", need=1, want=1))
    assert 0.99 * HOUR_US < got.wait_us <= HOUR_US


async def test_more_than_a_burst_is_granted_when_there_is_no_debt(ledgers: Pair) -> None:
    (got,) = await ask(ledgers.one, rate(need=50, want=50))
    assert got.granted == 50
    (got,) = await ask(ledgers.one, rate(need=1, want=1))
    assert got.wait_us > 45 * HOUR_US


async def test_asks_of_one_call_are_granted_together_or_not_at_all(ledgers: Pair) -> None:
    await ask(ledgers.one, window(need=10, want=10))
    first, second, third = await ask(
        ledgers.two, rate(need=1, want=1), slots(need=1, want=1), window(need=1, want=1, debt=0)
    )
    assert (first.granted, second.granted, third.granted) == (0, 0, 0)
    assert (first.wait_us, second.wait_us) == (0, 0) and third.wait_us > 0, "only the ask that was refused has a wait"
    got = await ask(ledgers.two, rate(need=5, want=5), slots(need=3, want=3))
    assert [each.granted for each in got] == [5, 3]


async def test_slots_are_shared_and_come_back(ledgers: Pair) -> None:
    (got,) = await ask(ledgers.one, slots(need=2, want=2))
    assert (got.granted, got.used) == (2, 2)
    (got,) = await ask(ledgers.two, slots(need=1, want=5))
    assert (got.granted, got.used) == (1, 1)
    (got,) = await ask(ledgers.two, slots(need=1, want=1))
    assert got.granted == 0 and got.wait_us > 0
    await ask(ledgers.one, slots(debt=-1))
    (got,) = await ask(ledgers.two, slots(need=1, want=1))
    assert (got.granted, got.used) == (1, 2)
    assert SLOT_TTL_S < 10


async def test_windows_are_calendar_windows_and_tenants_are_apart(ledgers: Pair) -> None:
    now = time()
    (day,) = await ask(ledgers.one, window(need=4, want=4))
    assert day.number == now // 86400 and abs(day.ends_us / 1e6 - (86400 - now % 86400)) < 2
    (month,) = await ask(ledgers.one, window("m", step=1.0, need=4, want=4))
    assert 2024 * 12 < month.number < 2200 * 12 and 0 < month.ends_us <= 31 * 86400e6
    (got,) = await ask(ledgers.two, window(need=7, want=7))
    assert got.granted == 0 and got.used == 4 and abs(got.wait_us - got.ends_us) < 1
    (got,) = await ask(ledgers.two, window(number=day.number, born=day.born, used=0, debt=-3, need=7, want=7))
    assert (got.granted, got.used) == (7, 8)
    (got,) = await ask(ledgers.two, window(need=7, want=7), tenant="other")
    assert got.granted == 7


async def test_a_flushed_ledger_takes_quotas_from_what_gateways_saw_last(ledgers: Pair) -> None:
    (first,) = await ask(ledgers.one, window(need=4, want=4))
    (second,) = await ask(ledgers.two, window(need=3, want=3))
    await ledgers.flush()
    (got,) = await ask(ledgers.one, window(number=first.number, born=first.born, used=first.used, need=1, want=1))
    assert got.used == 5
    (got,) = await ask(ledgers.two, window(number=second.number, born=second.born, used=second.used, need=1, want=1))
    assert got.used == 8, "the larger of the two gateways' views is taken, and only once"
    (got,) = await ask(ledgers.one, window(number=got.number, born=got.born, used=9999, debt=1))
    assert got.used == 9, "a gateway's view of a quota counts only after a flush"


class Jumping:
    """The time of a ledger and of its gateways, which a test sets.

    now: the gateways' monotonic clock. ahead_s: how far the ledger's clock, which may jump, is ahead of it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ahead_s = 1000.0, 0.0
        for name in ("_SCRIPT", "_HELLO"):
            test_time = "local time = {redis.call('GET', 'clock'), redis.call('GET', 'us')}"
            script = getattr(redis_ledger, name).replace("local time = redis.call('TIME')", test_time)
            assert test_time in script
            monkeypatch.setattr(redis_ledger, name, script)
        monkeypatch.setattr(redis_ledger, "monotonic", lambda: self.now)

    @property
    def wall_s(self) -> float:
        return 1_790_000_000 + self.now + self.ahead_s

    async def passes(self, seconds: float, ledger: Ledger) -> None:
        self.now += seconds
        if isinstance(ledger, RedisLedger):
            whole, part = divmod(self.wall_s, 1.0)
            await ledger._redis.mset({"clock": int(whole), "us": int(part * 1e6)})


@asynccontextmanager
async def pair_on_a_set_clock(kind: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Pair, Jumping]]:
    clock = Jumping(monkeypatch)
    async with pair(kind) as it:
        if isinstance(it, InMemory):
            memory = MemoryLedger(lambda: clock.wall_s * 1e6, clock=lambda: clock.now)
            it.one, it.two = memory.seat("one"), memory.seat("two")
        yield it, clock


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_gateways_are_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair_on_a_set_clock(kind, monkeypatch) as (it, clock):

        async def passes(seconds: float) -> None:
            await clock.passes(seconds, it.one)

        await passes(0.0)
        assert await it.one.hello(1.0) == Presence(1)
        assert await it.two.hello(0.25) == Presence(2)
        assert await it.one.hello(0.5) == Presence(2)
        await passes(PRESENCE_S + 1.0)
        assert await it.one.hello(0.5) == Presence(2, 1, 0.25), "the gateway that fell silent may admit its share"
        assert await it.two.hello(1.0) == Presence(2)
        await passes(PRESENCE_S + 1.0)
        assert await it.one.hello(0.5) == Presence(2), "a gateway that knew of no other one and falls silent has died"
        await passes(MISSED_S)
        assert await it.one.hello(0.5) == Presence(1), "a gateway that was silent for long is not counted"
        assert await it.two.hello(0.5) == Presence(2)
        await it.two.close()
        assert await it.one.hello(0.5) == Presence(1), "nor is a gateway that has signed off"


@pytest.mark.parametrize("kind", ["memory", "redis"])
@pytest.mark.parametrize("jump_s", [-7200.0, -0.7, 7200.0])
async def test_r14_a_rate_stays_what_it_is_when_the_ledgers_clock_jumps(
    kind: str, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways ask 40 times a second for a rate of 10 a second. A jump forward allows one more burst."""
    async with pair_on_a_set_clock(kind, monkeypatch) as (it, clock):
        passed: list[float] = []
        for turn in range(200):
            await clock.passes(0.05, it.one)
            clock.ahead_s = jump_s if turn >= 100 else 0.0
            for each in (it.one, it.two):
                (answer,) = await ask(each, rate(limit=3, step=100_000, need=1))
                passed += [clock.now] * int(answer.granted)
        bursts = 3 if jump_s > 0 else 0
        for begin in range(1, 9):
            within = sum(1 for at in passed if clock.now - 10 + begin < at <= clock.now - 9 + begin)
            assert 9 <= within <= 11 + (bursts if begin == 5 or begin == 4 else 0), (begin, within)


@pytest.mark.parametrize("kind", ["memory", "redis"])
@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0, -30.0])
async def test_r14_a_ledger_whose_clock_jumps_knows_who_is_there_and_what_they_hold(
    kind: str, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a step back of the clock each gateway would count itself alone, and admit the whole limit, until the other
    reports.
    """
    async with pair_on_a_set_clock(kind, monkeypatch) as (it, clock):

        async def passes(seconds: float) -> None:
            await clock.passes(seconds, it.one)

        await passes(0.0)
        for each in (it.one, it.two):
            await each.hello(0.5)
        (held,) = await ask(it.two, slots(limit=4, need=3))
        assert held.granted == 3
        clock.ahead_s = jump_s
        await passes(1.0)
        if jump_s < 0:  # after a jump forward, slots whose holder does not confirm them expire
            (free,) = await ask(it.one, slots(limit=4, need=2))
            assert free.granted == 0 and free.wait_us > 0
        for _ in range(3):
            assert await it.one.hello(0.5) == Presence(2)
            assert await it.two.hello(0.5) == Presence(2)
            await passes(1.0)
        await passes(5.0)
        assert await it.one.hello(0.5) == Presence(2, 1, 0.5), (
            "a gateway that reports nothing counts as silent, also after a jump"
        )
        await passes(70.0)
        assert await it.one.hello(0.5) == Presence(1)


async def test_a_memory_ledger_and_redis_answer_alike_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 random calls while the ledgers' clock runs, jumps days ahead and is set back."""
    clock = {"us": 1_790_000_000_000_000}
    plain = redis_ledger._arguments
    test_time = "local time = {ARGV[#ARGV - 1], ARGV[#ARGV]}"
    script = redis_ledger._SCRIPT.replace("local time = redis.call('TIME')", test_time)
    assert test_time in script
    monkeypatch.setattr(redis_ledger, "_SCRIPT", script)
    monkeypatch.setattr(redis_ledger, "_arguments", lambda asks: [*plain(asks), *divmod(clock["us"], 1_000_000)])
    chance = random.Random(4)
    async with redis_server() as server:
        theirs = {name: RedisLedger(server.url, holder=name, password=PASSWORD) for name in ("one", "two")}
        memory = MemoryLedger(lambda: clock["us"])
        ours = {name: memory.seat(name) for name in ("one", "two")}
        seen: dict[str, Answer] = {}
        for _ in range(600):
            clock["us"] += chance.choice(
                [1000, 1000, 700_000, 5_000_000, 3_600_000_000, 20 * DAY_US, -HOUR_US, -DAY_US]
            )
            asks = []
            for key in chance.sample(["r", "s", "w", "m"], chance.randint(1, 4)):
                need = chance.choice([0, 0, 1, 2, 7])
                more = {"need": need, "want": need + chance.choice([0, 1, 5]), "debt": chance.choice([0, 0, 1, -1, -4])}
                if key == "r":
                    asks.append(rate(spent=chance.choice([0, 0, 3, 30]), **more))
                elif key == "s":
                    asks.append(slots(limit=6, number=chance.choice([-1, 0]), used=chance.randint(0, 4), **more))
                else:
                    known = {}
                    if (last := seen.get(key)) is not None:
                        known = {"number": last.number, "used": last.used + chance.choice([0, 2]), "born": last.born}
                        known["born"] -= chance.choice([0, 0, 1])
                    asks.append(window(key, limit=40, step=1.0 if key == "m" else 0.0, **known, **more))
            name = chance.choice(["one", "two"])
            left, right = await ask(ours[name], *asks), await ask(theirs[name], *asks)
            for question, mine, other in zip(asks, left, right, strict=True):
                assert (mine.granted, mine.used, mine.number) == (other.granted, other.used, other.number), question
                assert mine.born == other.born
                assert abs(mine.wait_us - other.wait_us) < 10 and abs(mine.ends_us - other.ends_us) < 10
                assert abs(mine.left - other.left) < 0.01
                if question.kind == WINDOW:
                    seen[question.key] = mine
        keys = await theirs["one"]._redis.keys("*")
        assert all(key == b"oriel:form" or key.startswith(f"{PREFIX}{{t}}".encode()) for key in keys)
        assert all([await theirs["one"]._redis.pttl(key) > 0 for key in keys]), "nothing stays for ever"
        for each in theirs.values():
            await each.close()


async def test_many_gateways_are_counted_for_all_of_them_at_once() -> None:
    async with redis_server() as server:
        many = [RedisLedger(server.url, holder=f"g{number}", password=PASSWORD) for number in range(61)]
        counts = [(await each.hello(0.02)).gateways for each in many[:60]]
        assert counts == [*range(1, 61)]
        await many[0]._redis.set("oriel:{oriel:present}count", '[59,1,"0.020000"]')
        assert await many[0].hello(0.02) == (59, 1, 0.02)
        assert (await many[60].hello(0.02)).gateways == 61, "a new one counts anew"
        assert (await many[0].hello(0.02)).gateways == 61
        for each in many:
            await each.close()


async def test_gateways_exchange_their_records_of_demand(ledgers: Pair) -> None:
    raw = bytes(range(256)) * 50  # every value of a byte, also colons and zeros
    assert await ledgers.one.exchange(b"first") == {}
    assert await ledgers.one.exchange(raw) == {}
    ((name, (records, age_s)),) = (await ledgers.two.exchange(b"second")).items()
    assert (name, records) == ("one", raw) and 0.0 <= age_s < MISSED_S
    assert [records for records, _ in (await ledgers.one.exchange(b"")).values()] == [b"second"]
    await ledgers.two.close()
    assert await ledgers.one.exchange(b"") == {}


async def test_an_edge_is_heard_by_the_others(ledgers: Pair) -> None:
    async with aclosing(ledgers.one.edges()) as one, aclosing(ledgers.two.edges()) as two:
        for edges in (one, two):
            await anext(edges)  # from here on the gateway listens
        for number in range(3):
            await ledgers.one.exchange(b"no edge")
            await ledgers.one.exchange(b"%d" % number, edge=True)
            await anext(two)
            assert [records for records, _ in (await ledgers.two.exchange(b"")).values()] == [b"%d" % number]
        await ledgers.two.exchange(b"last", edge=True)
        await anext(one)
        assert [records for records, _ in (await ledgers.one.exchange(b"")).values()] == [b"last"]


async def test_a_user_of_redis_without_rights_on_the_channel_exchanges_all_the_same() -> None:
    async with redis_server() as server:
        every = RedisLedger(server.url, holder="one", password=PASSWORD)
        rights = ("on", ">few", "~*", "+@all", "resetchannels")
        await every._redis.execute_command("ACL", "SETUSER", "few", *rights)
        few = RedisLedger(server.url.replace("//", "//few@"), holder="two", password="few")
        await every.exchange(b"first", edge=True)
        ((records, _),) = (await few.exchange(b"second", edge=True)).values()
        assert records == b"first"
        async with aclosing(few.edges()) as edges:
            with pytest.raises(LedgerLost):
                await anext(edges)
        for each in (every, few):
            await each.close()


async def test_a_user_of_redis_who_may_run_scripts_but_not_load_them_counts_all_the_same() -> None:
    """Each of several gateways admitted its share alone then: 49 of 99 calls."""
    async with redis_server() as server:
        every = RedisLedger(server.url, holder="one", password=PASSWORD)
        rights = ("on", ">few", "~*", "&*", "+@all", "-script")
        await every._redis.execute_command("ACL", "SETUSER", "few", *rights)
        few = RedisLedger(server.url.replace("//", "//few@"), holder="two", password="few")
        ask = Ask(key="b", kind=WINDOW, limit=10.0, step=0.0, need=1.0, want=1.0)
        for flushed in (False, True):
            if flushed:
                await every._redis.execute_command("SCRIPT", "FLUSH")
            answers = await few.ask([("t", [ask]), ("u", [ask])])
            assert [answer and answer[0].granted for answer in answers] == [1.0, 1.0]
        assert (await few.examine())[0]
        ((answer,),) = [found or [] for found in await every.ask([("t", [ask])])]
        assert answer.used == 3.0
        for each in (every, few):
            await each.close()


async def test_the_rights_that_the_page_names_are_all_that_a_user_of_redis_needs() -> None:
    (sentence,) = re.findall(r"A user of Redis needs,.*?SCRIPT", (ROOT / "docs" / "policies.md").read_text(), re.DOTALL)
    commands = re.findall(r"\b[A-Z]{3,}\b", sentence.removesuffix("SCRIPT"))
    async with redis_server() as server:
        every = RedisLedger(server.url, holder="one", password=PASSWORD)
        channels = ("resetchannels", f"&{PREFIX}*")  # a new user of Redis 6.2 has all channels
        rights = ("on", ">few", f"~{PREFIX}*", *channels, "-@all", *(f"+{each.lower()}" for each in commands))
        await every._redis.execute_command("ACL", "SETUSER", "few", *rights)
        few = RedisLedger(server.url.replace("//", "//few@"), holder="two", password="few")
        kinds = [
            Ask(key=f"b{kind}", kind=kind, limit=10.0, step=1.0, need=1.0, want=1.0) for kind in (RATE, SLOTS, WINDOW)
        ]
        for _ in range(2):
            ((found,),) = [await few.ask([("t", kinds)])]
            assert found is not None and [each.granted for each in found] == [1.0] * 3
            assert (await few.hello(1.0)).gateways == 1
            assert await few.add_use("2026-11", 1, {"a": 1}, "", 1)
            assert await few.exchange(b"record", edge=True) == {}
        async with aclosing(few.edges()) as edges:
            await anext(edges)
        for each in (every, few):
            await each.close()


async def test_the_cause_that_redis_names_is_passed_on() -> None:
    async with redis_server() as server:
        every = RedisLedger(server.url, holder="one", password=PASSWORD)
        await every._redis.execute_command("ACL", "SETUSER", "few", "on", ">few", "~*", "+@all", "-evalsha")
        few = RedisLedger(server.url.replace("//", "//few@"), holder="two", password="few")
        with pytest.raises(LedgerLost, match="NoPermission.*evalsha"):
            await few.ask([("t", [Ask(key="b", kind=RATE, limit=1.0, step=1.0)])])
        await every._redis.execute_command("ACL", "SETUSER", "few", "-eval")
        with pytest.raises(LedgerLost, match="NoPermission.*eval"):
            await few.hello(1.0)
        for each in (every, few):
            await each.close()


async def test_ledgers_with_other_prefixes_share_nothing_in_one_database() -> None:
    async with redis_server() as server:
        ours = RedisLedger(server.url, holder="one", password=PASSWORD)
        theirs = RedisLedger(server.url, holder="two", password=PASSWORD, prefix="staging:")
        ask = Ask(key="b", kind=WINDOW, limit=1.0, step=0.0, need=1.0, want=1.0)
        for ledger in (ours, theirs):
            ((answer,),) = [found or [] for found in await ledger.ask([("t", [ask])])]
            assert answer.granted == 1.0
            assert (await ledger.hello(1.0)).gateways == 1
            assert await ledger.exchange(b"x") == {}
        keys = {key.partition(b":")[0] for key in await ours._redis.keys("*")}
        assert keys == {b"oriel", b"staging"}
        for each in (ours, theirs):
            await each.close()
