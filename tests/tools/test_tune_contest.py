"""What `oriel tune` measures after its search: which setting next, and how measurements correct the simulation."""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_tools.simulate.profile import Size
from oriel_tools.tune.contest import Measured, contest
from oriel_tools.tune.correction import LEAST, MOST, corrected, factors, slowdown
from oriel_tools.tune.objective import Reached, parse
from oriel_tools.tune.options import Options
from oriel_tools.tune.plan import explained, planned, promises, replanned
from oriel_tools.tune.report import as_document, as_text
from oriel_tools.tune.session import Tuned, tuned
from oriel_tools.tune.setting import Engine, Setting
from oriel_tools.tune.trial import Load

from .tuning import ALONE, ENGINES, FLAT, QUICK, MadeUpMachine, simulator, simulator_of, subject, times

PRESENT, FIRST, SECOND, THIRD, FOURTH = [Setting(max_rows=rows, instances=1, threads=1) for rows in (1, 2, 3, 4, 5)]


def measured(setting: Setting, latency_ms: float) -> Measured:
    objective = parse("p99 <= 50 ms at 100/s")
    in_time = 1.0 if latency_ms <= objective.bound_ms else 0.9
    found = Reached(objective=objective, calls=100, attained=in_time, latency_ms=latency_ms, goodput=in_time)
    return Measured(setting=setting, reached=[found])


def played(
    latencies: Mapping[Setting, Sequence[float]], first: Sequence[Setting], later: Sequence[Setting], most: int
) -> tuple[list[Setting], Setting]:
    """Play a contest. latencies: of each turn of a setting; the last one stays. later: what a search with corrected
    profiles names each time. most: turns for which there is time.
    """
    turns: list[Setting] = []
    course = contest(PRESENT, first, lambda: later, lambda: most - len(turns))
    wanted = next(course)
    while True:
        turns.append(wanted)
        found = latencies[wanted][: turns.count(wanted)]
        try:
            wanted = course.send(measured(wanted, found[-1]))
        except StopIteration as ended:
            return turns, ended.value


def test_a_choice_that_reaches_the_objective_is_only_confirmed() -> None:
    turns, best = played({PRESENT: [90.0], FIRST: [40.0]}, [FIRST, SECOND], [], 8)
    assert turns == [FIRST, PRESENT, PRESENT, FIRST] and best == FIRST


def test_what_a_corrected_search_names_is_measured_until_something_reaches_the_objective() -> None:
    latencies = {PRESENT: [90.0], FIRST: [80.0], SECOND: [70.0], THIRD: [40.0], FOURTH: [10.0]}
    turns, best = played(latencies, [FIRST, SECOND], [SECOND, THIRD, FOURTH], 8)
    assert turns == [FIRST, PRESENT, SECOND, THIRD, PRESENT, THIRD] and best == THIRD


def test_the_time_for_confirming_is_kept() -> None:
    latencies = {PRESENT: [90.0], FIRST: [80.0], SECOND: [70.0], THIRD: [40.0]}
    turns, best = played(latencies, [FIRST], [SECOND, THIRD], 5)
    assert turns == [FIRST, PRESENT, SECOND, PRESENT, SECOND] and best == SECOND
    assert len(played(latencies, [FIRST], [SECOND, THIRD], 0)[0]) == 4, "the two that confirm are made in any case"


def test_a_setting_that_was_only_lucky_in_its_first_turn_gives_way_to_a_better_one() -> None:
    turns, best = played({PRESENT: [90.0], FIRST: [45.0, 80.0], SECOND: [60.0]}, [FIRST, SECOND], [], 8)
    assert turns == [FIRST, PRESENT, PRESENT, FIRST, SECOND, SECOND] and best == SECOND


def test_a_present_setting_that_is_the_choice_is_measured_alone() -> None:
    assert played({PRESENT: [40.0]}, [PRESENT], [], 8) == ([PRESENT, PRESENT], PRESENT)


@given(st.data())
def test_every_contest_ends_with_two_turns_of_both_sides(data: st.DataObject) -> None:
    settings = [PRESENT, FIRST, SECOND, THIRD, FOURTH]
    latency = st.floats(1.0, 200.0)
    latencies = {each: data.draw(st.lists(latency, min_size=1, max_size=3)) for each in settings}
    first = data.draw(st.lists(st.sampled_from(settings), min_size=1, max_size=3))
    later = data.draw(st.lists(st.sampled_from(settings), max_size=4))
    turns, best = played(latencies, first, later, data.draw(st.integers(0, 12)))
    assert turns.count(best) >= 2 and turns.count(PRESENT) >= 2
    assert best != PRESENT or set(turns) == {PRESENT}
    assert len(turns) <= 2 * len(settings)


# The correction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.4])
def test_the_factor_is_found_by_which_everything_took_longer(factor: float) -> None:
    model, simulated = subject(), simulator("p95 <= 60 ms at 60/s", ALONE)
    true = corrected(simulated, {ENGINES[0]: factor})
    record, _ = true.record(model.present, 10.0)
    found = simulated.load.judged(record.tallies[-1])
    assert slowdown(simulated, model.present, found, 10.0) == pytest.approx(factor, rel=0.05)


def test_a_measurement_that_nothing_explains_is_believed_within_bounds_only() -> None:
    model, simulated = subject(), simulator("p95 <= 60 ms at 20/s", ALONE)
    none = [Reached(objective=simulated.load.objectives[0], calls=100, attained=0.0, latency_ms=math.inf, goodput=0.0)]
    assert MOST * 0.95 < slowdown(simulated, model.present, none, 5.0) <= MOST
    quick = [replace(none[0], attained=1.0, latency_ms=0.1)]
    assert LEAST <= slowdown(simulated, model.present, quick, 5.0) < LEAST * 1.05


def test_engines_that_were_not_measured_share_the_trouble_of_the_others() -> None:
    on_first = subject().present
    found = factors({on_first: 1.2, replace(on_first, max_rows=8): 1.2**3, on_first.on(ENGINES[1]): 1.0}, ENGINES)
    assert found == {
        ENGINES[0]: pytest.approx(1.44),
        ENGINES[1]: pytest.approx(1.0),
        ENGINES[2]: pytest.approx(1.2),
    }
    assert factors({}, ENGINES[:1]) == {ENGINES[0]: 1.0}


def test_a_corrected_simulation_finds_what_reaches_the_objective_where_the_profile_was_too_good() -> None:
    """By the profile one instance is enough, and it is the smallest change. In truth all takes 1.6 times as long."""
    model = subject("max_queue_delay_microseconds: 30000")
    simulated = simulator("p95 <= 60 ms at 60/s", ALONE, 2)
    slower = corrected(simulated, dict.fromkeys(ENGINES, 1.6))
    first = replace(model.present, delay_us=0)
    assert simulated.trial(first, 300).met and not slower.trial(first, 300).met
    (again, *_) = replanned(slower, model, first, has_time=lambda: True, effort=QUICK)
    assert again.engine == ENGINES[1] and slower.trial(again, 300).met


# Targets ------------------------------------------------------------------------------------------------------------


def test_targets_that_can_be_promised_grow_with_the_load_and_end_where_calls_are_refused() -> None:
    simulated = simulator("p90 <= 60 ms at 70/s", ALONE)  # 100 calls a second are possible
    found = promises(simulated, subject().present, 600)
    assert [each.part for each in found] == [0.5, 0.75, 1.0, 1.25, 1.5]
    targets = [each.targets_ms[0] for each in found]
    assert targets == sorted(targets) and targets[0] < 60.0
    assert found[0].kept and not found[-1].kept, "calls that are given up are answered by nobody"


# All of it, on a machine that is made up ----------------------------------------------------------------------------


def tuned_on(
    folder: Path,
    goal: str,
    true: Mapping[Engine, Sequence[Size]],
    *,
    profiled: Mapping[Engine, Sequence[Size]] | None = None,
    variants: Sequence[str] = (),
    compilers: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
) -> tuple[Tuned, list[str], MadeUpMachine]:
    """Tune a model on one core, with one instance of one thread."""
    text = subject().text + "\n"
    (folder / "m/1").mkdir(parents=True)
    (folder / "m/config.pbtxt").write_text(text)
    (folder / "m/1/model.onnx").touch()
    for name in variants:
        (folder / f"m/1/model.{name}.onnx").touch()
    load = Load(model="m", objectives=[parse(goal)])
    machine = MadeUpMachine(text, true, profiled or true, load, refused or {})
    options = Options(
        repository=folder, model="m", load=load, budget_s=45.0, cores=1, most_replicas=1, compilers=compilers
    )
    progress: list[str] = []
    found = asyncio.run(tuned(options, progress.append, serve=machine.serve, clock=machine.clock, effort=QUICK))
    return found, progress, machine


def test_a_profile_that_was_too_good_is_found_out_and_what_is_printed_is_corrected(tmp_path: Path) -> None:
    """By the profile the objective is reached. In truth everything takes 1.6 times as long, and it is not."""
    found, progress, _ = tuned_on(
        tmp_path, "p95 <= 50 ms at 50/s", {ENGINES[0]: times(1.6, ALONE)}, profiled={ENGINES[0]: ALONE}
    )
    assert any(line.startswith("searched again, with all times multiplied by 1.") for line in progress)
    assert not found.chosen.met and found.plan.most < 1.0
    assert found.slowdowns == {ENGINES[0]: pytest.approx(1.6, rel=0.1)}
    document = as_document(found, [], today="2026-11-25", version="0")
    assert [each["instances"] for each in document["corrected"]] == [each.instances for each in found.slowdowns]
    (line,) = [each for each in as_text(document, found) if each.startswith("what is called simulated was corrected")]
    assert re.search(r": everything takes 1\.[45678]\d times as long as the profiles say$", line)


def test_a_variant_is_chosen_where_the_model_itself_is_too_slow(tmp_path: Path) -> None:
    true = {ENGINES[0]: FLAT, replace(ENGINES[0], variant="int8"): times(0.3, FLAT)}
    found, _, machine = tuned_on(tmp_path, "p95 <= 9 ms at 20/s", true, variants=["int8"])
    assert set(found.profiles) == set(true)
    assert found.plan.chosen.setting.variant == "int8" and found.confirmed and found.chosen.met
    assert [worth.fields for worth in found.plan.worths] == [("variant",)], "nothing else has to change"
    assert 'parameters { key: "oriel.variant" value: { string_value: "int8" } }' in found.text
    assert parse_variants(machine) == {"", "int8"}
    document = as_document(found, [], today="2026-11-25", version="0")
    lines = as_text(document, found)
    (row,) = [line for line in lines if line.startswith("oriel.variant")]
    assert row.split()[1:4] == ["as", "configured", "int8"] and " ms instead of " in row
    assert document["patch"].count("\n+") == 2, "the name of the file, and one line"
    table = lines.index("the tightest targets that each load allows (simulated, with a tenth more calls):")
    assert lines[table + 1].split() == ["calls/s", "p95"]
    assert [line.split()[0] for line in lines[table + 2 : table + 7]] == ["10", "15", "20", "25", "30"]


def parse_variants(machine: MadeUpMachine) -> set[str]:
    return {"int8" if "oriel.variant" in text else "" for text in machine.loads}


def test_a_variant_that_is_not_needed_is_left_alone(tmp_path: Path) -> None:
    true = {ENGINES[0]: FLAT, replace(ENGINES[0], variant="int8"): times(0.3, FLAT)}
    found, _, _ = tuned_on(tmp_path, "p95 <= 60 ms at 20/s", true, variants=["int8"])
    assert found.plan.chosen.setting == found.subject.present and not found.plan.worths


def test_a_second_instance_is_preferred_to_another_precision() -> None:
    """Either of the two would do, and only one of them changes what is computed."""
    true = dict.fromkeys(ENGINES[:2], ALONE) | {
        replace(each, variant="int8"): times(0.5, ALONE) for each in ENGINES[:2]
    }
    simulated = simulator_of("p95 <= 60 ms at 120/s", true)
    assert all(simulated.trial(subject().present.on(each), 300).met for each in list(true)[1:])
    found = planned(simulated, subject(), most_replicas=1, has_time=lambda: True, effort=QUICK)
    assert found.chosen.met and found.chosen.setting == subject().present.on(ENGINES[1])


def test_a_compiler_is_chosen_where_the_model_itself_is_too_slow(tmp_path: Path) -> None:
    true = {ENGINES[0]: FLAT, replace(ENGINES[0], compiler="openvino"): times(0.3, FLAT)}
    found, _, _ = tuned_on(tmp_path, "p95 <= 9 ms at 20/s", true, compilers=["openvino"])
    assert found.plan.chosen.setting.compiler == "openvino" and found.confirmed and found.chosen.met
    assert 'parameters { key: "oriel.compile" value: { string_value: "openvino" } }' in found.text


def test_an_artefact_that_does_not_serve_is_left_out_with_the_reason(tmp_path: Path) -> None:
    """Else the times of the model's own file would be taken for those of the variant."""
    true = {ENGINES[0]: FLAT, replace(ENGINES[0], variant="int8"): times(0.3, FLAT)}
    why = "refused: output 'y' differs"
    found, progress, _ = tuned_on(
        tmp_path, "p95 <= 9 ms at 20/s", true, variants=["int8"], refused={"oriel.variant": why}
    )
    assert set(found.profiles) == set(ENGINES[:1]) and not found.chosen.met
    assert f"1 x 1 thread of variant int8: left out: {why}" in progress


def test_a_rate_at_which_a_setting_is_explained_is_that_of_the_objective() -> None:
    model, simulated = subject(), simulator("p95 <= 60 ms at 60/s", ALONE)
    plan = explained(simulated, model, model.present, model.present, QUICK, cut_off=False)
    assert plan.chosen == plan.present == simulated.trial(model.present, QUICK.long)
