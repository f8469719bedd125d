"""`oriel tune` from its profiles to its result, on a machine that is made up."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oriel_tools.simulate.profile import Size
from oriel_tools.tune.objective import parse
from oriel_tools.tune.options import Options
from oriel_tools.tune.plan import explained, planned, promises
from oriel_tools.tune.report import as_document, as_text
from oriel_tools.tune.session import Tuned, tuned
from oriel_tools.tune.setting import Engine
from oriel_tools.tune.trial import Load

from .tuning import ALONE, ENGINES, FLAT, QUICK, MadeUpMachine, simulator, simulator_of, subject, times

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
    objection: str = "",
) -> tuple[Tuned, list[str], MadeUpMachine]:
    """Tune a model on one core, with one instance of one thread."""
    text = subject().text + "\n"
    (folder / "m/1").mkdir(parents=True)
    (folder / "m/config.pbtxt").write_text(text)
    (folder / "m/1/model.onnx").touch()
    for name in variants:
        (folder / f"m/1/model.{name}.onnx").touch()
    load = Load(model="m", objectives=[parse(goal)])
    machine = MadeUpMachine(text, true, profiled or true, load, refused or {}, objection)
    options = Options(
        repository=folder, model="m", load=load, budget_s=45.0, cores=1, most_replicas=1, compilers=compilers
    )
    progress: list[str] = []
    found = asyncio.run(tuned(options, progress.append, serve=machine.serve, clock=machine.clock, effort=QUICK))
    return found, progress, machine


def test_a_profile_that_was_too_good_is_found_out_by_the_measurement(tmp_path: Path) -> None:
    """By the profile the objective is reached. In truth everything takes 1.6 times as long, and it is not."""
    found, progress, machine = tuned_on(
        tmp_path, "p95 <= 50 ms at 50/s", {ENGINES[0]: times(1.6, ALONE)}, profiled={ENGINES[0]: ALONE}
    )
    assert found.plan.chosen.met and not found.chosen.met
    document = as_document(found, [], today="2026-11-25", version="0")
    assert document["met"] is False and any("is not reached" in line for line in as_text(document, found))


def test_a_measurement_that_is_not_quoted_gives_no_verdict(tmp_path: Path) -> None:
    """Whatever was measured: reached by the present setting, or only by the chosen one."""
    for goal, engines, variants in (
        ("p95 <= 60 ms at 20/s", {ENGINES[0]: FLAT}, []),
        ("p95 <= 9 ms at 20/s", {ENGINES[0]: FLAT, replace(ENGINES[0], variant="int8"): times(0.3, FLAT)}, ["int8"]),
    ):
        folder = tmp_path / str(len(variants))
        found, _, _ = tuned_on(folder, goal, engines, variants=variants, objection="1 % of the calls were sent late")
        document = as_document(found, [], today="2026-11-25", version="0")
        assert (document["met"], document["confirmed"], document["patch"]) == (False, False, "")
        lines = as_text(document, found)
        assert "there is no verdict from a measurement that is not quoted: measure again on a quiet machine" in lines
        assert not any("the objective is" in line or "has to be changed" in line for line in lines)


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
