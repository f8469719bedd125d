"""Where the rules of leased meters turn, without a network or a real clock: what they ask for, keep and give back."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from oriel_gateway.limits.leased import LeasedMeter
from oriel_gateway.limits.leased_kinds import LeasedQuota, LeasedRate, LeasedSlots, leased_meter
from oriel_gateway.limits.meters import ASK, RateMeter, SlotMeter
from oriel_policies.bounds.calendar import CalendarClock, Period
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.ledger import RATE, SLOTS, WINDOW, Answer, Ask
from oriel_policies.bounds.limits import Bound
from oriel_policies.documents import RateLimit

TICK_S = 0.0625
MIDNIGHT = 1_790_000_000.0 // 86400 * 86400


@dataclass
class Line:
    """Stands in for the ledger client. sent: the asks that were sent without a call."""

    replicas: int = 1
    share: float = 0.5
    rest: float = 1.0
    up: bool = True
    sent: list[Ask] = field(default_factory=list)
    active: list[LeasedMeter] = field(default_factory=list)

    def activate(self, meter: LeasedMeter) -> None:
        self.active.append(meter)

    def send(self, tenant: str, asks: list[Ask], done: Any) -> None:
        self.sent += asks
        done([Answer(granted=0.0, wait_us=0.0, left=1.0)])


def meter(bound: Bound, line: Line, wall_s: float = MIDNIGHT + 43_200) -> Any:
    return leased_meter(bound, "t", line, CalendarClock(lambda: wall_s))  # type: ignore[arg-type]


def rate(per_s: float, burst: int = 20, counts: Counts = Counts.REQUESTS) -> Bound:
    return Bound(name="r", counts=counts, limit=burst, rate=RateLimit(requests_per_s=per_s, burst=burst))


def answer(granted: float = 0.0, wait_us: float = 0.0, **more: Any) -> Answer:
    return Answer(granted=granted, wait_us=wait_us, **{"left": 5.0, **more})


# Leases ahead of need -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_s", "replicas", "leased"), [(199, 1, 0), (200, 1, 12), (399, 2, 0), (400, 2, 12)])
def test_units_are_leased_ahead_from_50_calls_in_a_quarter_of_a_second(per_s: int, replicas: int, leased: int) -> None:
    """100 calls in the second before: half of them count at first, and a quarter of a second of those is leased."""
    it = meter(rate(per_s), Line(replicas=replicas))
    for _ in range(100):
        assert it.acquire(1, 100.0) == ASK
    ask = it.tick(100.0)
    if not leased:
        assert ask is None
        return
    assert (ask.need, ask.want, ask.debt, ask.spent) == (0, leased, 0, 0)
    assert (ask.kind, ask.limit, ask.step) == (RATE, max(20, per_s / 4), 1e6 / per_s)
    assert it.tick(100.0 + TICK_S) is None, "one ask at a time"


def test_the_demand_is_smoothed_by_half_and_no_more_is_leased_than_a_share() -> None:
    it = meter(rate(200), Line())
    for _ in range(100):
        it.acquire(1, 100.0)
    first = it.tick(100.0)
    it.ask_finished(first, answer(12), 100.0)
    assert it.balance == 12
    for _ in range(7):
        assert it.acquire(1, 100.0) == 0.0
    it._demand = 10
    more = it.tick(100.0 + TICK_S)  # 50, and 160 now: 105 a second
    assert (more.want, it.balance) == (26 - 5, 5)
    it.ask_finished(more, answer(21), 100.1)
    it._demand = 1000
    most = it.tick(100.1 + TICK_S)
    assert most.want == 50 - 26 == 24


@pytest.mark.parametrize(("balance", "asks"), [(0, True), (12, False), (11, False), (8, False), (7, True)])
def test_a_lease_is_renewed_when_more_is_wanted_than_half_of_what_is_left(balance: int, asks: bool) -> None:
    """12 are wanted in all: with 8 left 4 are wanted, and that is half of them."""
    it = meter(rate(200), Line())
    it._rate, it._demand, it._ticked_s, it._used_s, it.balance = 50.0, 50, 99.0, 100.0, balance
    ask = it.tick(100.0)
    assert (ask is not None) is asks and (ask is None or ask.want == 12 - balance)


def test_a_lease_that_was_not_granted_in_full_is_not_asked_for_again_for_a_tick() -> None:
    it = meter(rate(200), Line())
    it._rate = 100.0
    ask = it.ask(1, 100.0)
    assert (ask.need, ask.want) == (1, 26)
    it.ask_finished(ask, answer(20), 100.0)
    it.use(20, 100.0)
    for units, wait_s in ((1, TICK_S), (2, TICK_S), (3, ASK)):
        it._mean = 1.0
        assert it.acquire(units, 100.0) == wait_s
    it._mean, it._demand, it._ticked_s = 1.0, 0, 100.0
    assert it.tick(100.0 + TICK_S / 2) is None
    it._rate = 100.0
    assert it.acquire(1, 100.0 + TICK_S) == ASK and it.tick(100.0 + TICK_S) is not None


@pytest.mark.parametrize(("granted", "need", "want"), [(26, 1, 26), (27, 1, 26), (1, 1, 1), (0, 2, 2)])
def test_a_lease_that_was_granted_or_not_wanted_delays_nothing(granted: int, need: int, want: int) -> None:
    it = meter(rate(200), Line())
    it.ask(1, 100.0)
    it.ask_finished(Ask(key="r", kind=RATE, limit=1, step=1, need=need, want=want), answer(granted), 100.0)
    assert it._next_ask_s == 0.0


def test_what_the_ledger_refused_is_refused_until_its_time_and_less_is_asked_for() -> None:
    line = Line()
    it = meter(rate(10), line)
    ask = it.ask(4, 100.0)
    it.ask_finished(ask, answer(0, 500_000.0), 100.0)
    assert it.acquire(4, 100.0) == pytest.approx(0.5)
    assert it.acquire(4, 100.25) == pytest.approx(0.25)
    assert it.acquire(3, 100.0) == ASK and it.acquire(4, 100.5) == ASK
    assert it.refused_s(answer(0, 250_000.0), 100.0) == 0.25
    it.charge(1, 100.0)
    assert it.acquire(4, 100.0) == pytest.approx(0.5)
    it.charge(-1, 100.0)
    assert it.acquire(4, 100.0) == ASK, "what was given back may be enough"


@pytest.mark.parametrize(("idle_s", "returned"), [(0.2, False), (0.25, False), (0.2501, True)])
def test_units_that_are_idle_for_a_quarter_of_a_second_go_back(idle_s: float, returned: bool) -> None:
    it = meter(rate(200), Line())
    it.acquire(1, 128.0)
    it.balance, it._demand = 7, 0
    ask = it.tick(128.0 + idle_s)
    assert (ask is not None and ask.debt == -7 and ask.want == 0 and it.balance == 0) is returned
    it._asking = 0
    it.balance = 0
    for later_s, idle in ((0.5, False), (0.5001, True)):
        assert it.droppable(128.0 + later_s) is it.quiet(128.0 + later_s) is idle
    it.balance = 1
    assert not it.droppable(200.0) and not it.quiet(200.0)


def test_a_debt_is_reported_with_the_next_ask_and_again_if_that_is_lost() -> None:
    it = meter(rate(10), Line())
    it.charge(3, 100.0)
    assert it.balance == -3 and it.remaining(100.0) == (17.0, 0.0)
    ask = it.tick(100.0)
    assert ask is not None and (ask.need, ask.debt, it.balance) == (0, 3, 0)
    it.ask_finished(ask, None, 100.0)
    assert it.balance == -3
    final = it.final_ask(100.0)
    assert final is not None and (final.debt, it.balance) == (3, 0)
    it.ask_finished(final, answer(), 100.0)
    assert it.final_ask(100.0) is None
    it.balance = 2
    final = it.final_ask(100.0)
    assert final is not None and (final.debt, it.balance) == (-2, 0)


def test_units_go_back_at_once_only_if_no_ask_is_under_way() -> None:
    line = Line()
    it = meter(rate(10, counts=Counts.TOKENS), line)
    it.charge(-1, 100.0)
    assert [ask.debt for ask in line.sent] == [-1] and it.balance == 0 and not it._asking
    it.charge(0, 100.0)
    it.charge(1, 100.0)
    assert len(line.sent) == 1 and it.balance == -1
    ask = it.ask(1, 100.0)
    it.charge(-3, 100.0)
    assert len(line.sent) == 1 and it.balance == 3
    it.ask_finished(ask, answer(), 100.0)
    line.up = False
    it.charge(-1, 100.0)
    assert len(line.sent) == 1 and it.balance == 4
    leases = meter(rate(200, counts=Counts.TOKENS), line)
    line.up = True
    leases.charge(-1, 100.0)
    assert len(line.sent) == 1 and leases.balance == 1, "what is leased ahead goes back when it is idle"
    requests = meter(rate(10), line)
    requests.charge(-1, 100.0)
    assert len(line.sent) == 1


# Rates ----------------------------------------------------------------------------------------------------------------


def test_a_gateway_alone_admits_its_share_of_a_rate_and_reports_it_as_spent() -> None:
    line = Line(up=False)
    it = meter(rate(10, burst=4), line)
    assert [it.acquire(1, 100.0) for _ in range(2)] == [0.0, 0.0]
    assert it.acquire(1, 100.0) == pytest.approx(0.2), "5 a second, of which 2 at once"
    assert (it._spent, it.balance) == (2, 0) and not it.droppable(200.0) and not it.quiet(200.0)
    it.undo(1, 100.0)
    assert (it._spent, it.balance) == (1, 0) and it.acquire(1, 100.0) == 0.0
    line.up = True
    ask = it.tick(100.0)
    assert ask is not None and (ask.spent, ask.debt, it._spent) == (2, 0, 0)
    it.ask_finished(ask, None, 100.0)
    assert it._spent == 2
    it.undo(3, 100.0)
    assert (it._spent, it.balance) == (0, 1), "what was not spent alone was of the balance"


def test_units_that_are_admitted_because_an_answer_was_late_count_in_full() -> None:
    it = meter(rate(10, burst=4), Line())
    assert it.alone(2, 100.0) == 0.0 and (it.balance, it._spent) == (-2, 0)
    assert it.alone(1, 100.0) > 0.0 and (it.balance, it._spent) == (-2, 0)


def test_what_is_used_of_a_lease_empties_the_own_share_at_most() -> None:
    it = meter(rate(10, burst=4), Line())
    it.balance = 100
    for _ in range(20):
        it.acquire(1, 100.0)
    assert it.balance == 80
    assert it._local.arrival == pytest.approx(100.4), "2 of 5 a second"


@pytest.mark.parametrize(("rest", "burst", "step"), [(1.0, 4.0, 1e5), (0.5, 2.0, 2e5), (0.1, 1.0, 1e6)])
def test_a_rate_is_asked_for_within_what_silent_gateways_leave(rest: float, burst: float, step: float) -> None:
    ask = meter(rate(10, burst=4), Line(rest=rest)).ask(1, 100.0)
    assert (ask.limit, ask.step) == (pytest.approx(burst), pytest.approx(step))


def test_tokens_are_asked_for_again_after_a_second_at_most() -> None:
    for counts, wait_s in ((Counts.TOKENS, 1.0), (Counts.REQUESTS, 5.0)):
        it = meter(rate(1, counts=counts), Line())
        it.ask_finished(it.ask(1, 100.0), answer(0, 5e6), 100.0)
        assert it._blocked_s == 100.0 + wait_s
        assert it.acquire(1, 100.0) == pytest.approx(5.0), "the whole wait is told"


def test_a_share_of_a_burst_is_at_least_one() -> None:
    it = meter(rate(10, burst=3), Line(share=0.25))
    assert it._share() == RateLimit(requests_per_s=2.5, burst=1) and it._share() is it._share()
    it._ledger_client.share = 1.0
    assert it._share() == RateLimit(requests_per_s=10, burst=3)


# Slots ----------------------------------------------------------------------------------------------------------------


def slots(limit: int) -> Bound:
    return Bound(name="s", counts=Counts.REQUESTS, limit=limit, slots=True)


@pytest.mark.parametrize(("limit", "share", "admitted"), [(8, 0.5, 4), (9, 0.5, 4), (3, 0.1, 1), (1, 1.0, 1)])
def test_a_gateway_alone_admits_its_share_of_slots_and_at_least_one(limit: int, share: float, admitted: int) -> None:
    it = meter(slots(limit), Line(share=share, up=False))
    assert isinstance(it, LeasedSlots)
    outcomes = [it.acquire(1, 100.0) for _ in range(admitted + 2)]
    assert outcomes == [0.0] * admitted + [1e-3] * 2
    assert (it.inflight, it.balance) == (admitted, -admitted)


def test_a_slot_comes_free_after_the_mean_time_that_one_is_held() -> None:
    it = meter(slots(4), Line())
    for held_s, mean_s in ((2.0, 2.0), (1.0, 1.9), (0.0, 1.71)):
        it.balance = 3
        assert it.acquire(1, 100.0) == 0.0 and it.inflight == 1
        it.release_slot(held_s, 100.0)
        assert it.inflight == 0
        assert it.refused_s(answer(), 100.0) == pytest.approx(mean_s / 4)
    it._hold_s = 1e-4
    assert it.refused_s(answer(), 100.0) == 1e-3


def test_free_slots_go_back_at_once_where_calls_ask_and_later_where_they_are_leased() -> None:
    line = Line()
    few, many = meter(slots(4), line), meter(slots(200), line)
    assert (few._most(), many._most()) == (1, 50)
    for it, sent in ((few, 1), (many, 1)):
        it.balance = 1
        it.acquire(1, 100.0)
        it.release_slot(1.0, 100.0)
        assert len(line.sent) == sent
    assert (line.sent[0].debt, few.balance, many.balance) == (-1, 0, 1)
    assert meter(slots(199), line)._most() == 49 and meter(slots(200), Line(replicas=2))._most() == 25


def test_an_ask_for_slots_reports_the_own_count_unless_another_is_under_way() -> None:
    it = meter(slots(10), Line(rest=0.55))
    it.inflight, it.balance = 3, 1
    first, second = it.ask(1, 100.0), it.ask(1, 100.0)
    assert (first.kind, first.limit, first.step, first.number, first.used) == (SLOTS, 5, 0.0, 0, 4)
    assert second.number == -1
    assert meter(slots(10), Line(rest=0.01)).ask(1, 100.0).limit == 1
    assert meter(slots(10), Line(rest=0.7)).ask(1, 100.0).limit == 7


@pytest.mark.parametrize(("held", "after_s", "reports"), [(1, 0.99, False), (1, 1.0, True), (0, 5.0, False)])
def test_held_slots_are_reported_every_second(held: int, after_s: float, reports: bool) -> None:
    it = meter(slots(10), Line())
    it.ask_finished(it.ask(0, 128.0), answer(), 128.0)
    it.inflight, it._used_s = held, 128.0
    assert (it.tick(128.0 + after_s) is not None) is reports
    it.inflight, it._unsure = 0, True
    assert it._reports(128.0), "after a lost answer the ledger's count is unknown"


def test_no_more_slots_are_taken_than_there_are_whatever_the_ledger_grants() -> None:
    it = meter(slots(4), Line())
    it.inflight = 3
    it.ask_finished(it.ask(1, 100.0), answer(1), 100.0)
    assert (it.balance, it._unsure) == (1, False)
    it.ask_finished(it.ask(1, 100.0), answer(2), 100.0)
    assert (it.balance, it._unsure) == (1, True)
    it.balance, it.inflight = 0, 4
    late = answer(1)
    it.ask_finished(it.ask(1, 100.0), late, 100.0)
    assert late.wait_us == 1.0 and it.balance == 0
    report = answer(0)
    it.ask_finished(it.ask(0, 100.0), report, 100.0)
    assert report.wait_us == 0.0 and not it._unsure
    it.ask_finished(it.ask(0, 100.0), None, 100.0)
    assert it._unsure
    it.ask_finished(Ask(key="s", kind=SLOTS, limit=4, step=0, number=-1), answer(), 100.0)
    assert it._unsure, "a report that was overtaken makes nothing sure"


def test_a_ledger_without_a_free_slot_is_asked_again_after_20_ms() -> None:
    it = meter(slots(4), Line())
    it.ask_finished(it.ask(1, 100.0), answer(0, 9e6), 100.0)
    assert it._blocked_s == pytest.approx(100.02)


# Quotas ---------------------------------------------------------------------------------------------------------------


def quota(limit: int, period: Period = Period.DAY) -> Bound:
    return Bound(name="q", counts=Counts.REQUESTS, limit=limit, period=period)


@pytest.mark.parametrize(
    ("seen", "share", "admitted"), [(0, 0.5, 5), (4, 0.5, 3), (9, 0.5, 1), (10, 0.5, 0), (11, 0.5, 0), (0, 1.0, 10)]
)
def test_a_gateway_alone_admits_its_share_of_what_is_left_of_a_quota(seen: int, share: float, admitted: int) -> None:
    it = meter(quota(10), Line(share=share, up=False))
    assert isinstance(it, LeasedQuota)
    it._seen = float(seen)
    assert [it.acquire(1, 100.0) for _ in range(admitted)] == [0.0] * admitted
    assert it.acquire(1, 100.0) == 43_200.0 and (it._alone, it.balance) == (admitted, -admitted)


def test_one_call_larger_than_the_share_of_a_quota_is_admitted_first_and_no_other() -> None:
    it = meter(quota(10), Line(up=False))
    assert it.acquire(50, 100.0) == 0.0 and it.balance == -50
    assert it.acquire(1, 100.0) == 43_200.0


def test_counts_of_a_quota_begin_anew_with_its_window() -> None:
    it = meter(quota(10), Line())
    it.ask_finished(it.ask(1, 100.0), answer(3, number=7, born=9, used=4.0, ends_us=50e6), 100.0)
    it.use(1, 100.0)
    assert (it._number, it._born, it._seen, it.balance) == (7, 9, 4.0, 2) and it.remaining(100.0) == (7.0, 50.0)
    assert it.began(100.0) == 150.0 - 86_400.0
    assert it._may_report() and it._lasts(149.999) and it.balance == 2
    assert not it._lasts(150.0)
    assert (it._number, it._seen, it._alone, it.balance, it._ends_s) == (-1, 0.0, 0, 0, 100.0 + 43_200.0)
    assert not it._may_report() and it.remaining(150.0) == (5.0, 43_150.0)
    it.charge(2, 150.0)
    ask = it.tick(150.0)
    assert ask is not None and (ask.debt, it.balance) == (0, -2), "in an unknown window nothing is reported"


def test_what_was_admitted_alone_counts_until_no_ask_is_under_way() -> None:
    it = meter(quota(10), Line())
    it._alone = 2
    first, second = it.ask(1, 100.0), it.ask(1, 100.0)
    it.ask_finished(first, answer(1, ends_us=1e6), 100.0)
    assert it._alone == 2
    it.ask_finished(second, answer(1, ends_us=1e6), 100.0)
    assert it._alone == 0


@pytest.mark.parametrize(("used", "seen", "born", "least"), [(3.0, 5.0, 0, 5), (5.0, 5.0, 9, 0), (6.0, 6.0, 9, 0)])
def test_what_was_used_before_is_reported_as_a_flushed_ledger_gets_it(
    used: float, seen: float, born: int, least: int
) -> None:
    it = meter(quota(10), Line())
    it.at_least(5, 100.0)
    assert it.tick(100.0) is not None and it._reports(100.0)
    it.ask_finished(Ask(key="q", kind=WINDOW, limit=10, step=0), answer(0, born=9, used=used, ends_us=9e6), 100.0)
    assert (it._seen, it._born, it._least) == (seen, born, least)


@pytest.mark.parametrize(("left", "replicas", "most"), [(400.0, 1, 50), (399.0, 1, 49), (400.0, 2, 25), (-8.0, 1, 0)])
def test_an_eighth_of_what_is_left_of_a_quota_is_leased_at_most(left: float, replicas: int, most: int) -> None:
    it = meter(quota(1000), Line(replicas=replicas))
    it._left = left
    assert it._most() == most
    assert meter(quota(9), Line()).ask(1, 100.0).step == 0.0
    assert meter(quota(9, Period.MONTH), Line()).ask(1, 100.0).step == 1.0


def test_each_bound_has_its_kind_of_meter() -> None:
    line = Line()
    kinds = [type(meter(bound, line)) for bound in (slots(1), rate(1), quota(1))]
    assert kinds == [LeasedSlots, LeasedRate, LeasedQuota]


# Meters of one process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "left", "wait_s"), [(0, 10, None), (1, 9, 1), (7, 3, 1), (10, 0, 1), (25, 0, 3)])
def test_a_rate_tells_whole_units_that_are_left(used: int, left: int, wait_s: int | None) -> None:
    it = RateMeter(rate(10, burst=10))
    it.charge(used, 100.0)
    assert it.state(100.0) == f'"r";r={left}' + (f";t={wait_s}" if wait_s else "")
    assert it.remaining(100.0) == (left, pytest.approx(used / 10)) and it.droppable(100.0) is (used == 0)
    assert it.droppable(100.0 + used / 10 + 1e-9)


def test_slots_tell_how_many_are_left() -> None:
    it = SlotMeter(slots(2))
    assert it.state(1.0) == '"s";r=2' and it.droppable(1.0)
    assert it.acquire(1, 1.0) == it.acquire(1, 1.0) == 0.0
    assert it.state(1.0) == '"s";r=0' and it.remaining(1.0) == (0, 0.0) and not it.droppable(1.0)
    it.bound = slots(1)
    assert it.state(1.0) == '"s";r=0'
