"""Measures how long batches take, for as many engines as the time allows."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from oriel_cli.errors import CommandFailed
from oriel_tools.simulate.profile import Profile
from oriel_tools.tune.machine import Machine, profile_s, seconds_within
from oriel_tools.tune.options import Clock, Options, Say
from oriel_tools.tune.setting import Engine, Subject, changed, engines

VARIANTS = ("bf16", "fp16", "int8")
LEAST_PROFILE_S, WELL_S, MOST_PROFILE_S = 0.05, 0.2, 2.0


def affordable(budget_s: float, wanted: int, max_rows: int, rows: int) -> tuple[int, float]:
    """Return how many engines are measured within a time, and how long each turn of their profiles is.

    As many of those that are wanted as can be measured well, at least one.
    """
    for count in range(wanted, 0, -1):
        seconds = seconds_within(budget_s / count, max_rows, rows)
        if seconds >= WELL_S or count == 1:
            return count, min(MOST_PROFILE_S, max(LEAST_PROFILE_S, seconds))
    return 1, LEAST_PROFILE_S


def variants_of(folder: Path, filename: str) -> list[str]:
    """Return the variants that all versions of a model have. filename: the name of the model's own file; "" for the
    default.
    """
    own = filename or "model.onnx"
    stem = own.removesuffix(".onnx")
    versions = [each for each in folder.iterdir() if each.name.isdigit() and (each / own).is_file()]
    have = [{name for name in VARIANTS if (each / f"{stem}.{name}.onnx").is_file()} for each in versions]
    return sorted(set.intersection(*have)) if have else []


async def profiles(
    machine: Machine, subject: Subject, options: Options, budget_s: float, say: Say, clock: Clock
) -> Mapping[Engine, Profile]:
    """Measure the profiles of as many engines as the time allows, the present one first. Raises CommandFailed if that
    one cannot be measured.
    """
    variants = variants_of(options.repository / options.model, subject.completed.default_model_filename)
    wanted, rows = engines(subject, options.providers, options.compilers, variants), options.load.rows
    max_rows = subject.present.max_rows
    count, seconds = affordable(budget_s, len(wanted), max_rows, rows)
    began, found = clock(), dict[Engine, Profile]()
    for engine in wanted[:count]:
        if found and clock() + profile_s(seconds, max_rows, rows) > began + 1.2 * budget_s:
            break
        # Without delays: batches of all sizes are to be seen, and no answer is to wait for one.
        setting = replace(subject.present.on(engine), delay_us=0, preferred=())
        try:
            objection = await machine.load(changed(subject, setting), within_s=budget_s)
            if objection and engine.has_artefact:
                raise CommandFailed(objection)
            if objection:
                say(f"the model's own file serves: {objection}")
            most = engine.instances if subject.on_device else max(1, subject.cores // engine.threads)
            profile = await machine.profile(seconds=seconds, rows=rows, instances=min(engine.instances, most))
        except CommandFailed as failed:
            if not found:
                raise
            say(f"{engine}: left out: {failed}")
            continue
        found[engine] = profile
        say(f"{engine}: about {profile.capacity:.0f} rows per second")
    if len(found) < len(wanted):
        say(f"{len(wanted) - len(found)} of {len(wanted)} choices of what executes the model were not measured")
    return found
