"""The wanted number of replicas: its bounds and its course over time, in virtual time."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.scaling.counter import DemandCounter
from oriel_policies.scaling.members import Demand, Members, State
from oriel_policies.scaling.planner import Plan, Planner, reported_value
from oriel_policies.scaling.records import PoolRecord, TierRecord
from oriel_policies.scaling.wanted import Scaling, ServiceTime, TierLoad, TierScaling, replicas_wanted

GOLD = TierScaling(band=0, target_s=0.5)
BRONZE = TierScaling(band=1, target_s=120.0)
TIERS = {"gold": GOLD, "bronze": BRONZE}
SERVICE = ServiceTime(0.1, 0.1)
BACKLOG = st.lists(st.integers(0, 200).map(float), min_size=24, max_size=24)


def pool(minimum: int = 0, maximum: int = 50, *, spare: int = 0, keep_alive_s: float = 300.0) -> Scaling:
    return Scaling(minimum=minimum, maximum=maximum, spare=spare, start_s=20.0, keep_alive_s=keep_alive_s)


def loads(gold: Sequence[float], bronze: Sequence[float], rate: float) -> list[TierLoad]:
    return [TierLoad(BRONZE, SERVICE, bronze, rate), TierLoad(GOLD, SERVICE, gold, rate)]


@given(BACKLOG, BACKLOG, st.integers(0, 23), st.floats(0.0, 300.0), st.integers(0, 40), st.floats(0.0, 100.0))
def test_the_wanted_number_is_bounded_and_grows_with_the_backlog(
    gold: list[float], bronze: list[float], index: int, rate: float, replicas: int, more: float
) -> None:
    few = replicas_wanted(pool(2, 30), loads(gold, bronze, rate), replicas)
    longer = [calls + more * (each == index) for each, calls in enumerate(bronze)]
    many = replicas_wanted(pool(2, 30), loads(gold, longer, rate), replicas)
    assert 2 <= few <= many <= 30


@given(st.floats(0.1, 300.0), st.floats(1.0, 2.0), st.integers(0, 40))
def test_a_higher_rate_never_wants_fewer(rate: float, factor: float, replicas: int) -> None:
    nothing = [0.0] * 24
    low = replicas_wanted(pool(), loads(nothing, nothing, rate), replicas)
    assert low <= replicas_wanted(pool(), loads(nothing, nothing, rate * factor), replicas)


def test_a_tier_of_weight_0_buys_nothing() -> None:
    free = TierLoad(TierScaling(band=0, target_s=60.0, weight=0.0), SERVICE, [500.0] * 24, 100.0)
    assert replicas_wanted(pool(), [free], 1) == 0


def test_work_that_present_replicas_do_before_a_start_is_left_out() -> None:
    later = [0.0] * 24
    later[14] = 1_000.0  # due in about a minute: 100 s of work
    assert 2 <= replicas_wanted(pool(), [TierLoad(BRONZE, SERVICE, later, 0.0)], 0) <= 10
    assert replicas_wanted(pool(), [TierLoad(BRONZE, SERVICE, later, 0.0)], 6) == 0, "six do it in the time of a start"


def test_a_backlog_that_new_replicas_will_find_is_answered_though_it_is_late() -> None:
    """Orders came only with the rate: calls that were held while no replica was there timed out behind the first."""
    late = [0.0] * 24
    late[0] = 600.0  # 60 s of work; one replica does 20 s of it in the time of a start, and 40 s are left for 10 s
    assert replicas_wanted(pool(), [TierLoad(BRONZE, SERVICE, late, 0.0)], 1) == 4
    assert replicas_wanted(pool(), [TierLoad(BRONZE, SERVICE, late, 0.0)], 3) == 0


def test_spare_replicas_are_beyond_the_most_urgent_band_and_work_for_the_others() -> None:
    nothing = [0.0] * 24
    gold, bronze = TierLoad(GOLD, SERVICE, nothing, 5.0), TierLoad(BRONZE, SERVICE, nothing, 35.0)
    alone = replicas_wanted(pool(), [gold], 10)
    assert replicas_wanted(pool(), [gold], 10, spare=2) == alone + 2 == 4
    assert replicas_wanted(pool(), [gold, bronze], 10, spare=2) == 4, "four replicas do the work of all tiers"


def test_a_steady_urgent_rate_gets_what_the_queueing_formula_says() -> None:
    """Work 10: eleven replicas let far less than 2 of 1,000 calls wait four service times; ten would never catch up."""
    load = TierLoad(GOLD, SERVICE, [0.0] * 24, 100.0)
    assert replicas_wanted(pool(), [load], 10) == 11
    tight = TierLoad(TierScaling(band=0, target_s=0.12), SERVICE, [0.0] * 24, 100.0)
    assert replicas_wanted(pool(), [tight], 10) > 13


@pytest.mark.parametrize("rate", [50.0, 100.0, 300.0])
def test_calls_that_can_wait_for_a_new_replica_get_none_in_reserve(rate: float) -> None:
    """The urgent tier gets its reserve for its own calls, not for those that go after them."""
    nothing = [0.0] * 24
    gold, bronze = TierLoad(GOLD, SERVICE, nothing, 5.0), TierLoad(BRONZE, SERVICE, nothing, rate)
    assert replicas_wanted(pool(), [gold], 10) == 2
    assert replicas_wanted(pool(), [gold, bronze], 10) <= math.ceil((5.0 + rate) * 0.1)


@pytest.mark.parametrize("exactly_a_tenth_counts", [True, False])
@given(st.integers(0, 400), st.integers(0, 400))
def test_the_autoscaler_follows_the_reported_value(exactly_a_tenth_counts: bool, replicas: int, wanted: int) -> None:
    """Both comparisons exist: Kubernetes changed it when the tolerance became a field."""
    value = round(reported_value(replicas, wanted), 3)
    if not replicas:
        assert value == wanted
        return
    ratio = value / replicas
    still = abs(1.0 - ratio) <= 0.1 if exactly_a_tenth_counts else 0.9 <= ratio <= 1.1
    after = replicas if still else math.ceil(value)
    if wanted > replicas:
        assert wanted <= after <= max(wanted, math.floor(1.1 * replicas) + 2)
    elif wanted < 0.9 * replicas - 1e-6:
        assert after == wanted
    else:
        assert wanted <= after <= replicas and after - wanted <= 0.1 * replicas


class Course:
    """A pool in virtual time whose traffic is spread over several gateways. Replicas come at once."""

    def __init__(self, gateways: int = 1, *, settings: Scaling | None = None) -> None:
        self.counters = [DemandCounter(0.0) for _ in range(gateways)]
        self.members = Members(0.0)
        self.planner = Planner(settings or pool(), TIERS, 0.0)
        self.replicas = 0
        self.scheduled = 0
        self.now = 0.0
        self.calls = 0
        self.wanted: list[int] = []

    def second(self, calls: int, *, refused: bool = False) -> Plan:
        for number in range(calls):
            moment = self.now + number / calls
            counter = self.counters[self.calls % len(self.counters)]
            self.calls += 1
            counter.arrived("gold", moment)
            if refused:
                counter.refused("gold", moment)
            counter.executed(1, 0.1, moment)
        self.now += 1.0
        return self.plan()

    def plan(self) -> Plan:
        records = {str(index): (counter.record(self.now), 0.0) for index, counter in enumerate(self.counters)}
        self.members.read(records, self.now)
        demand, replicas = self.members.demand(self.now), self.replicas
        plan = self.planner.plan(demand, self.now, replicas=replicas, ready=replicas, scheduled=self.scheduled)
        self.replicas = plan.wanted
        self.wanted.append(plan.wanted)
        return plan


def changes_of_direction(numbers: Sequence[int]) -> int:
    signs = [1 if after > before else -1 for before, after in pairwise(numbers) if after != before]
    return sum(first != second for first, second in pairwise(signs))


def poisson(rate: float, chance: random.Random) -> int:
    number, left = 0, chance.expovariate(rate)
    while left < 1.0:
        number, left = number + 1, left + chance.expovariate(rate)
    return number


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_gateways_wants_the_same(seed: int) -> None:
    courses = [Course(gateways) for gateways in (1, 2, 8)]
    for course in courses:
        chance = random.Random(seed)
        for second in range(240):
            course.second(poisson(5.0 + second / 2, chance))
    assert courses[0].wanted == courses[1].wanted == courses[2].wanted and max(courses[0].wanted) > 10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rate", [3.0, 40.0])
def test_a_constant_load_changes_direction_at_most_once_in_ten_minutes(rate: float, seed: int) -> None:
    course, chance = Course(settings=pool(1)), random.Random(seed)
    for _ in range(1200):
        course.second(poisson(rate, chance))
    assert changes_of_direction(course.wanted[600:]) <= 1
    assert course.wanted[-1] >= rate * 0.1


def test_refused_calls_count_and_a_pool_grows_from_nothing() -> None:
    served, refused = Course(), Course()
    for _ in range(90):
        served.second(30)
        refused.replicas = 0
        assert refused.second(30, refused=True).active
    assert refused.wanted[-1] == served.wanted[-1] >= 4


def test_the_first_call_of_an_idle_pool_makes_it_active_at_once() -> None:
    course = Course(settings=pool(keep_alive_s=30.0))
    for _ in range(60):
        plan = course.second(0)
    assert not plan.active and plan.wanted == 0
    course.counters[0].arrived("gold", course.now + 0.1)
    course.counters[0].queued("gold", course.now + 0.6)
    course.now += 0.1
    plan = course.plan()
    assert plan.active and plan.wanted == 1


def test_an_idle_pool_goes_to_its_minimum_only_after_the_keep_alive_and_not_while_a_call_runs() -> None:
    course = Course(settings=pool(keep_alive_s=90.0))
    course.second(10)
    course.counters[0].started()
    for _ in range(400):
        assert course.second(0).active
    course.counters[0].finished(course.now)
    active = [course.second(0).active for _ in range(100)]
    assert active == [True] * 89 + [False] * 11
    assert course.wanted[-1] == 0


def test_a_fall_waits_for_the_history_and_goes_as_far_as_the_calls_did() -> None:
    course = Course()
    for _ in range(120):
        course.second(60)
    most = course.wanted[-1]
    for _ in range(120):
        course.second(5)
    first = next(index for index, number in enumerate(course.wanted) if number < most and index > 120)
    assert 120 + 15 <= first <= 120 + 45 and course.wanted[-1] == 2


def test_the_number_never_falls_while_a_record_is_missing_and_is_unavailable_after_a_minute() -> None:
    course = Course(settings=pool(keep_alive_s=10.0))
    for _ in range(400):
        course.second(60)
    steady = course.wanted[-1]
    states = []
    for _ in range(80):
        course.now += 1.0
        demand = course.members.demand(course.now)
        plan = course.planner.plan(demand, course.now, replicas=steady, ready=steady)
        states.append(plan.available)
        assert plan.wanted == steady and plan.active
    assert states == [True] * 59 + [False] * 21


def test_without_a_service_time_the_number_stays_and_one_is_wanted_for_a_call() -> None:
    total = PoolRecord()
    total.tiers["gold"] = TierRecord()
    total.tiers["gold"].arrivals[1] = 100.0
    total.idle_s = 0.0
    demand = Demand(total, State.COMPLETE, continuous=True)
    assert Planner(pool(), TIERS, 0.0).plan(demand, 1.0, replicas=0, ready=0).wanted == 1
    assert Planner(pool(), TIERS, 0.0).plan(demand, 1.0, replicas=7, ready=7).wanted == 7
    told = replace(pool(), call_s=0.1)
    assert Planner(told, TIERS, 0.0).plan(demand, 1.0, replicas=0, ready=0).wanted > 1, "by what the documents say"


@pytest.mark.long
def test_a_pool_that_is_called_every_hour_is_woken_a_start_before() -> None:
    course = Course(settings=pool(keep_alive_s=60.0))
    active: list[list[int]] = []
    for _ in range(13):
        course.second(1)
        plans = [course.second(0).active for _ in range(3599)]
        active.append([second for second, each in enumerate(plans) if each])
    assert active[0][-1] < 60, "nothing is known yet"
    assert active[-1][-1] == 3598 and course.wanted[-1] == 1, "until the call comes"
    expected = [second for second in active[-1] if second > 60]
    assert 3599 - 22 <= expected[0] <= 3599 - 20, "a start of 20 s before"


def test_spare_replicas_are_added_while_the_pool_is_in_use_and_within_its_bounds() -> None:
    plain, spare = (
        Course(settings=pool(keep_alive_s=60.0)),
        Course(settings=pool(maximum=9, keep_alive_s=60.0, spare=2)),
    )
    for _ in range(60):
        plain.second(50)
        spare.second(50)
    assert spare.wanted[-1] == plain.wanted[-1] + 2 <= 9
    for _ in range(60):
        spare.second(90)
    assert spare.wanted[-1] == 9
    for _ in range(120):
        spare.second(0)
    assert spare.wanted[-1] == 0


def test_a_schedule_wakes_a_pool_and_lets_it_go_when_it_ends() -> None:
    course = Course(settings=pool(maximum=4, keep_alive_s=30.0))
    course.second(0)
    assert not course.wanted[-1]
    course.scheduled = 3
    plan = course.second(0)
    assert plan.active and plan.wanted == plan.floor == 3
    course.scheduled = 9
    assert course.second(0).wanted == 4, "its maximum"
    for _ in range(900):
        course.second(1)
    assert course.wanted[-1] == 4
    course.scheduled = 0
    course.second(0)
    for _ in range(27):
        assert course.second(0).active
    for _ in range(3):
        plan = course.second(0)
    assert not plan.active and not plan.wanted


def test_a_floor_that_the_pool_always_has_does_not_wake_it() -> None:
    course = Course(settings=pool(minimum=2))
    course.scheduled = 1
    plan = course.second(0)
    assert not plan.active and plan.wanted == plan.floor == 2


def test_what_an_operator_asked_for_counts_at_every_gateway_until_its_time_is_over() -> None:
    course = Course(gateways=3, settings=pool(keep_alive_s=30.0))
    course.second(0)
    course.counters[0].wake(2, course.now + 20.0)
    course.counters[1].wake(5, course.now + 10.0)
    wanted = [course.second(0).wanted for _ in range(40)]
    assert wanted[:9] == [5] * 9 and wanted[-1] == 0
    course.counters[0].wake(2, course.now + 20.0)
    course.counters[0].wake(1, course.now + 2.5)
    assert [course.second(0).floor for _ in range(4)] == [1, 1, 0, 0], "the latest call counts"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40))
def test_whatever_comes_the_number_stays_within_the_bounds(calls: list[int]) -> None:
    course = Course(settings=pool(1, 7))
    for number in calls:
        course.second(number)
    assert all(1 <= wanted <= 7 for wanted in course.wanted)
