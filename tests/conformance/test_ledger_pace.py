"""How often and how much at a time a gateway asks the ledger of its limits, and what it may admit without it."""

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from oriel_gateway.limits import ledger_client as module
from oriel_gateway.limits.ledger import LedgerLost, Presence, Question
from oriel_gateway.limits.ledger_client import LedgerClient, LedgerClientLimits
from oriel_policies.bounds.ledger import RATE, Answer, Ask


class Silent:
    """A ledger that answers nothing until `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.batches: list[int] = []
        self.said: list[float] = []
        self.present = Presence(1)

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer]]:
        self.batches.append(len(questions))
        await self.go.wait()
        return [[Answer(granted=1.0, wait_us=0.0, left=1.0)] for _ in questions]

    async def hello(self, share: float) -> Presence:
        self.said.append(share)
        return self.present

    async def close(self) -> None:
        pass


def client(ledger: Silent, now: list[float], **more: Any) -> LedgerClient:
    return LedgerClient(ledger, clock=lambda: now[0], **more)  # type: ignore[arg-type]


def ask() -> list[Ask]:
    return [Ask(key="r", kind=RATE, limit=1, step=1.0)]


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("replicas", "share", "careful"),
    [(1, 1.0, 1.0), (2, 0.5, 0.5), (3, 0.5, 0.25), (4, 0.375, 1 / 6), (6, 0.25, 0.1)],
)
def test_gateways_alone_share_one_and_a_half_of_every_limit(replicas: int, share: float, careful: float) -> None:
    assert module._share(replicas) == pytest.approx(share)
    assert module._careful(replicas) == pytest.approx(careful)


@pytest.mark.parametrize(
    ("present", "rest"),
    [
        (Presence(1), 1.0),
        (Presence(4), 1.0),
        (Presence(4, 2, 0.5), 1.0),
        (Presence(4, 2, 0.75), 0.75),
        (Presence(4, 3, 1.0), 0.5),
        (Presence(4, 3, 1.125), 0.375),
        (Presence(4, 3, 1.5), 0.375),
    ],
)
def test_those_that_ask_have_what_the_silent_ones_leave_and_at_least_their_shares(
    present: Presence, rest: float
) -> None:
    assert module._rest(present) == pytest.approx(rest)


async def test_a_batch_has_at_most_64_asks_and_four_are_within_their_time_at_once() -> None:
    ledger = Silent()
    it = client(ledger, [100.0], budget_s=60.0)
    heard: list[Any] = []
    for _ in range(64 * 4 + 10):
        it.send("t", ask(), heard.append)
    await turns()
    assert ledger.batches == [64] * 4 and len(it._waiting) == 10 and it.batches == 4
    ledger.go.set()
    await turns(20)
    assert ledger.batches == [64] * 4 + [10] and len(heard) == 266 and it._lanes == 0
    assert it.late_batches == 0
    await it.close()


async def test_sixteen_batches_wait_for_an_answer_at_most() -> None:
    ledger = Silent()
    it = client(ledger, [100.0], budget_s=0.0, limits=LedgerClientLimits(max_batch=1))
    it._breaker = SimpleNamespace(closed=True, failed=lambda now: None, succeeded=lambda now: None)  # type: ignore[assignment]
    for _ in range(20):
        it.send("t", ask(), lambda answers: None)
    while len(ledger.batches) < 16:
        await asyncio.sleep(0)
    await turns(50)
    assert len(ledger.batches) == 16 and it.late_batches == 16 and it._lanes == 0 and len(it._waiting) == 4
    ledger.go.set()
    await turns(50)
    assert len(ledger.batches) == 20
    await it.close()


async def test_what_waits_is_bounded_by_100000_asks() -> None:
    assert (module.DEFAULTS.max_waiting, module.DEFAULTS.beat_s, module.DEFAULTS.careful_s) == (100_000, 1.0, 4.5)
    ledger = Silent()
    it = client(ledger, [100.0], limits=LedgerClientLimits(max_waiting=2))
    heard: list[Any] = []
    for _ in range(3):
        it.send("t", ask(), heard.append)
    assert len(it._waiting) == 2
    it._pumping = True
    await asyncio.sleep(0)
    assert heard == [None]
    ledger.go.set()
    await turns()
    await it.close()


async def test_a_call_waits_20_ms_for_an_answer_and_5_while_the_ledger_is_on_probation() -> None:
    it = client(Silent(), [100.0])
    doubtful = [False]
    it._breaker = SimpleNamespace(closed=True, on_probation=lambda now: doubtful[0])  # type: ignore[assignment]
    assert it.patience_s(100.0) == 0.02
    doubtful[0] = True
    assert it.patience_s(100.0) == 0.005
    it._budget_s = 0.001
    assert it.patience_s(100.0) == 0.001


class Ticked:
    tenant = "t"

    def __init__(self, quiet: bool = False) -> None:
        self.ticks = 0
        self.is_quiet = quiet

    def tick(self, now: float) -> Ask | None:
        self.ticks += 1
        return None

    def quiet(self, now: float) -> bool:
        return self.is_quiet


class Later:
    """A loop that notes what is to be called later."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    def call_later(self, delay_s: float, *what: Any) -> Any:
        self.delays.append(delay_s)
        return SimpleNamespace(cancel=lambda: None)


async def test_meters_are_ticked_16_times_a_second_and_2000_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    later = Later()
    it = client(Silent(), [100.0])
    it._beat_s = 1e9
    monkeypatch.setattr(module.asyncio, "get_running_loop", lambda: later)
    meters = [Ticked(quiet=number == 5) for number in range(2001)]
    for meter in meters:
        it.activate(meter)  # type: ignore[arg-type]
    assert later.delays == [0.0625]
    it._tick()
    assert [meter.ticks for meter in meters] == [1] * 2000 + [0] and later.delays == [0.0625] * 2
    it._tick()
    assert [meter.ticks for meter in meters[:6]] == [2, 2, 2, 2, 2, 1] and meters[2000].ticks == 1
    it._closed, it._ticking = True, None
    it._tick()
    it.activate(Ticked())  # type: ignore[arg-type]
    assert len(later.delays) == 3


async def test_a_gateway_announces_itself_once_a_second_and_one_announcement_at_a_time() -> None:
    ledger, now = Silent(), [100.0]
    it = client(ledger, now)
    it._breaker = SimpleNamespace(closed=True, probe=lambda now: False)  # type: ignore[assignment]
    for at_s, said in ((100.0, 1), (100.99, 1), (101.0, 2), (101.5, 2), (102.0, 3)):
        now[0] = at_s
        it._tick()
        it._tick()
        await turns()
        assert len(ledger.said) == said
    await it.close()


async def test_a_gateway_that_was_alone_for_4_5_s_admits_its_whole_share() -> None:
    ledger, now = Silent(), [100.0]
    it = client(ledger, now, replicas=4)
    assert (it.replicas, it.share, it.rest) == (4, pytest.approx(1 / 6), 1.0)
    for _ in range(5):
        assert it.up
        it._failed("gone")
    assert not it.up and it.late_batches == 5
    it._beating = True
    for at_s, share in ((104.49, 1 / 6), (104.5, 0.375)):
        now[0] = at_s
        it._tick()
        assert it.share == pytest.approx(share)
    ledger.present = Presence(2, 1, 0.5)
    await it._beat(probe=True)
    assert ledger.said == [0.375] and it.up and (it.replicas, it.share) == (4, pytest.approx(1 / 6))
    assert it._alone_s is None and it.rest == 1.0
    ledger.present = Presence(6)
    await it._beat(probe=False)
    assert (it.replicas, it.share) == (6, pytest.approx(0.1))
    await it.close()


async def test_the_log_names_a_cause_again_when_it_is_another_or_after_five_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = [100.0]
    it = client(Silent(), now)
    told = 0
    for at_s, why, named in (
        (100.0, "gone", True),
        (399.9, "gone", False),
        (400.0, "gone", True),
        (410.0, "slow", True),
        (420.0, "slow", False),
    ):
        now[0] = at_s
        for _ in range(5):
            it._failed(why)
        while not it.up:
            it._succeeded()
            now[0] += 0.0
        told += named
        assert caplog.text.count("cannot be used") == told == caplog.text.count("ledger answers again")
    await it.close()


async def test_an_answer_that_is_lost_is_given_up_and_its_asks_are_told() -> None:
    ledger = Silent()
    it = client(ledger, [100.0], budget_s=60.0)
    heard: list[Any] = []

    async def lose(questions: Sequence[Question]) -> list[list[Answer]]:
        raise LedgerLost("gone")

    ledger.ask = lose  # type: ignore[method-assign]
    it.send("t", ask(), heard.append)
    await turns()
    assert heard == [None] and it.late_batches == 1 and it._lanes == 0 and it.up
    assert (module.LOST_S, module.PROBE_S, module.CLOSE_S) == (0.5, 0.9, 0.25)
    await it.close()
