"""The search of `oriel tune`: on scores with one best setting, and on invented profiles whose best setting is known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_tools.simulate.profile import Size
from oriel_tools.tune.calibration import affordable
from oriel_tools.tune.machine import profile_s, seconds_within
from oriel_tools.tune.objective import Reached, Score, parse
from oriel_tools.tune.options import Options
from oriel_tools.tune.plan import Plan, clearly_worse, limit, planned
from oriel_tools.tune.search import Near, groups_of, put_back, search, simplified
from oriel_tools.tune.session import winner
from oriel_tools.tune.setting import Engine, Setting, Subject, changed, neighbours
from oriel_tools.tune.trial import Load
from oriel_tools.tune.turns import Measured, is_confirmed, measure

from .tuning import ALONE, ENGINES, FLAT, QUICK, STEEP, CountingMachine, simulator, subject


def near_of(model: Subject) -> Near:
    return lambda setting: neighbours(setting, model, rows=1, bound_ms=50.0)


# The scores of a model whose fields do not depend on one another ----------------------------------------------------


@settings(max_examples=30)
@given(st.data())
def test_the_best_value_of_each_field_is_found(data: st.DataObject) -> None:
    model = subject("max_queue_delay_microseconds: 20000 preferred_batch_size: 4")
    near = near_of(model)(model.present)
    rows = data.draw(st.sampled_from([each.max_rows for each in near["max_rows"]]))
    delay_us = data.draw(st.sampled_from([each.delay_us for each in near["delay_us"]]))
    engine = data.draw(st.sampled_from(ENGINES))

    def attempt(setting: Setting, calls: int) -> Score:
        missed = abs(setting.max_rows - rows) + abs(setting.delay_us - delay_us) / 1e3 + len(setting.preferred)
        return missed + 3.0 * (setting.engine != engine), 0.0

    found = search(model.present, ENGINES, near_of(model), attempt, lambda: True, QUICK)
    best = replace(model.present, max_rows=rows, delay_us=delay_us, preferred=()).on(engine)
    assert found.setting == best and found.score == (0.0, 0.0) and not found.cut_off


def test_a_search_whose_time_is_over_returns_the_best_so_far_and_says_so() -> None:
    model, left = subject("max_queue_delay_microseconds: 20000"), iter([True] * 6 + [False] * 99)
    tried: list[Setting] = []

    def attempt(setting: Setting, calls: int) -> Score:
        tried.append(setting)
        return float(setting.delay_us), 0.0

    found = search(model.present, ENGINES, near_of(model), attempt, lambda: next(left), QUICK)
    assert found.cut_off and found.setting in tried and len(tried) < 24
    assert model.present in tried, "what is there now is always tried with the long load"


def test_changes_that_bring_nothing_are_put_back() -> None:
    present = Setting(max_rows=16, instances=1, threads=1, delay_us=500, preferred=(4,))
    found = Setting(max_rows=8, instances=2, threads=1, delay_us=0)
    groups = groups_of(present, found, ENGINES)
    assert groups == [("instances",), ("max_rows",), ("preferred",), ("delay_us",)]
    assert simplified(present, found, groups, lambda each: each.instances == 1) == replace(present, instances=2)
    assert simplified(present, found, groups, lambda each: True) == found
    both = replace(found, instances=1, threads=2).on(Engine(instances=2, threads=2))
    assert groups_of(present, both, [*ENGINES[:1], both.engine])[0] == ("instances", "threads"), "only together"
    assert put_back(replace(found, max_rows=2), present, ["preferred"]).preferred == (), "no batch is so large"


# Invented profiles --------------------------------------------------------------------------------------------------


def plan(model: Subject, goal: str, milliseconds: Sequence[Size], *, engines: int = 1, most_replicas: int = 1) -> Plan:
    return planned(
        simulator(goal, milliseconds, engines),
        model,
        most_replicas=most_replicas,
        has_time=lambda: True,
        effort=QUICK,
    )


def test_a_preferred_size_that_keeps_batches_small_is_removed() -> None:
    """Batches of two rows would do 200 of the 300 calls a second; without the field they grow with the backlog."""
    found = plan(subject("preferred_batch_size: 2"), "p95 <= 40 ms at 300/s", FLAT)
    assert not found.present.met and found.chosen.met
    assert found.chosen.setting.preferred == () and found.chosen.setting.max_rows == 16
    assert [worth.fields for worth in found.worths] == [("preferred",)]
    assert not found.worths[0].without.met and found.worths[0].text.startswith("p95 ")
    assert found.most > 1.0


def test_batches_beyond_what_the_cache_holds_are_forbidden() -> None:
    """Batches of eight rows do 500 calls a second, of sixteen 145: with 16 the queue never ends once there is one."""
    found = plan(subject(), "p95 <= 80 ms at 400/s", STEEP)
    assert found.chosen.met and found.chosen.setting.max_rows in (4, 8) and not found.present.met
    assert ("max_rows",) in [worth.fields for worth in found.worths]


def test_a_second_instance_is_used_where_one_is_not_enough_and_slower_threads_are_not() -> None:
    found = plan(subject(), "p95 <= 60 ms at 140/s", ALONE, engines=3)
    assert found.chosen.met and found.chosen.setting.engine == ENGINES[1] and not found.present.met
    assert ("instances",) in [worth.fields for worth in found.worths]


def test_replicas_are_as_few_as_are_enough() -> None:
    found = plan(subject(), "p90 <= 60 ms at 220/s", ALONE, most_replicas=8)
    assert found.chosen.met and found.chosen.setting.replicas in (3, 4)
    fewer = plan(subject(replicas=6), "p90 <= 60 ms at 20/s", ALONE, most_replicas=8)
    assert fewer.chosen.met and fewer.chosen.setting.replicas == 1
    assert [worth.fields for worth in fewer.worths][-1] == ("replicas",)


def test_what_no_setting_can_reach_is_named() -> None:
    found = plan(subject("max_queue_delay_microseconds: 9000"), "p99 <= 5 ms at 20/s", FLAT)
    assert not found.chosen.met and found.most == 0.0
    assert found.limit[0] == "bound" and "takes 10.0 ms at best" in found.limit[1]


def test_a_present_setting_that_is_good_is_kept() -> None:
    found = plan(subject(), "p95 <= 60 ms at 100/s", FLAT)
    assert found.chosen.setting == found.present.setting and found.chosen.met and not found.worths


def test_executions_that_hardly_pause_are_what_limits_and_else_calls_that_come_together() -> None:
    model, alone = subject(), simulator("p50 <= 200 ms at 95/s", ALONE)
    busy, calm = alone.trial(model.present, 400), alone.trial(model.present, 400, 0.4)
    assert limit(alone, busy, model) == (
        "device",
        f"the 1 instances are busy: executions run for {busy.utilisation:.0%} of "
        f"the time, {busy.rows_per_batch:.1f} rows each",
    )
    assert limit(alone, busy, replace(model, cores=1))[0] == "cores"
    assert limit(alone, calm, model)[0] == "queue"
    waiting = alone.trial(replace(model.present, delay_us=90_000), 400, 0.4)
    assert limit(alone, waiting, model)[0] == "delay"


@given(st.lists(st.floats(0.01, 5000.0), min_size=1, max_size=8), st.floats(1.0, 60.0), st.floats(0.05, 8.0))
def test_what_is_rare_is_sent_more_often_at_the_cost_of_two_percent(
    rates: list[float], seconds: float, part: float
) -> None:
    objectives = [
        replace(parse("p99 <= 50 ms at 1/s"), tier=str(number), rate=rate) for number, rate in enumerate(rates)
    ]
    load = Load(model="m", objectives=objectives)
    sent = load.rates(seconds, part=part)
    assert sum(sent.values()) <= 1.02 * part * load.rate * (1.0 + 1e-9)
    for each in objectives:
        assert sent[each.name] >= part * each.rate * (1.0 - 1e-9)
        if each.rate > 0.1 * max(rates):
            assert sent[each.name] == part * each.rate, "what is not rare is sent as it comes"
        assert sent[each.name] * seconds <= max(100.0, part * each.rate * seconds) * (1.0 + 1e-9)


# Measurements -------------------------------------------------------------------------------------------------------


def test_one_score_is_clearly_worse_than_another_beyond_chance() -> None:
    assert not clearly_worse((0.0, 1.02), (0.0, 1.0)) and clearly_worse((0.0, 1.1), (0.0, 1.0))
    assert not clearly_worse((0.0101, 9.0), (0.01, 1.0)) and clearly_worse((0.03, 0.1), (0.01, 1.0))
    assert clearly_worse((0.001, 1.0), (0.0, 1.0)), "just missed is not met"


@given(st.floats(1.0, 600.0), st.integers(0, 512), st.integers(1, 4), st.integers(1, 12))
def test_profiles_take_the_time_that_they_are_given(budget_s: float, max_rows: int, rows: int, wanted: int) -> None:
    count, seconds = affordable(budget_s, wanted, max_rows, rows)
    assert 1 <= count <= wanted and 0.05 <= seconds <= 2.0
    if count > 1 or seconds > 0.05:
        assert count * profile_s(seconds, max_rows, rows) <= budget_s * (1.0 + 1e-9)
    assert profile_s(max(0.05, seconds_within(1e6, max_rows, rows)), max_rows, rows) == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("chosen_in_time", "best_in_time", "wins"), [(96, 100, "chosen"), (90, 99, "best"), (90, 80, "chosen")]
)
async def test_each_setting_is_measured_twice_and_the_smallest_change_wins_if_it_is_enough(
    chosen_in_time: int, best_in_time: int, wins: str
) -> None:
    model, simulated = subject("max_queue_delay_microseconds: 20000"), simulator("p95 <= 50 ms at 20/s", FLAT, 2)
    chosen = replace(model.present, delay_us=0)
    settings = {"present": model.present, "chosen": chosen, "best": chosen.on(ENGINES[1])}
    in_time = {"present": 50, "chosen": chosen_in_time, "best": best_in_time}
    machine = CountingMachine({changed(model, each): in_time[name] for name, each in settings.items()})
    options = Options(repository=Path(), model="m", load=simulated.load, budget_s=5.0, cores=2)
    found = await measure(machine, model, options, [*settings.values()], 9.0, lambda _: None)  # type: ignore[arg-type]
    assert machine.loaded == [changed(model, each) for each in settings.values()] * 2, "in turns"
    assert [each.reached[0].calls for each in found] == [200] * 3
    assert winner(chosen, found).setting == settings[wins]
    assert winner(chosen, found).reached[0].attained == in_time[wins] / 100.0


def test_the_present_setting_stays_where_it_is_enough_though_another_one_is_better() -> None:
    now, better = measured(0.995, 40.0), measured(1.0, 10.0)
    assert winner(now.setting, [now, better]) is now
    late = measured(0.9, 80.0)
    assert winner(late.setting, [late, better]) is better and winner(late.setting, [late]) is late


def measured(in_time: float, latency_ms: float, *, replicas: int = 1, objection: str = "") -> Measured:
    found = Reached(
        objective=parse("p99 <= 50 ms at 100/s"), calls=1000, attained=in_time, latency_ms=latency_ms, goodput=in_time
    )
    setting = Setting(max_rows=round(latency_ms), instances=1, threads=1, replicas=replicas)
    return Measured(setting=setting, reached=[found], objection=objection)


@pytest.mark.parametrize(
    ("present", "chosen", "confirmed"),
    [
        (measured(0.9, 80.0), measured(0.995, 40.0), True),
        (measured(0.995, 40.0), measured(0.995, 43.0), True),
        (measured(0.995, 40.0), measured(0.995, 48.0), False),
        (measured(0.995, 40.0), measured(0.9, 80.0), False),
        (measured(0.9, 80.0, replicas=2), measured(0.9, 70.0), True),
        (measured(0.995, 40.0, replicas=2), measured(0.9, 80.0), False),
        (measured(0.995, 40.0, replicas=2), measured(0.995, 49.0), True),
        (measured(0.995, 40.0, replicas=2), measured(0.995, 30.0, objection="the generator was late"), False),
        (measured(0.9, 80.0, objection="the generator was late"), measured(1.0, 9.0), False),
        (measured(0.9, 80.0), measured(0.992, 49.0, replicas=2), True),
    ],
)
def test_a_choice_that_the_measurement_speaks_against_is_not_recommended(
    present: Measured, chosen: Measured, confirmed: bool
) -> None:
    assert is_confirmed(present, chosen) is confirmed
    assert is_confirmed(present, present) is not present.objection.startswith("the generator")
