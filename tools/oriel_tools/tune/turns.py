"""Sends the load of the objectives to settings of a running server, in turns, and says what each of them got."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oriel_cli.errors import CommandFailed
from oriel_tools.load.tally import Tally, total
from oriel_tools.tune.machine import SETTLE_S, Machine
from oriel_tools.tune.objective import Reached, Score, score
from oriel_tools.tune.options import Options, Say
from oriel_tools.tune.setting import Setting, Subject, changed
from oriel_tools.tune.trial import WARM_UP

TURNS = 2  # turns of each setting
NOISE = 0.005  # a share of calls by which two measurements may differ
NOISY = 1.1  # and a factor between two latencies
ARTEFACT = 0.3  # share of the budget for waiting until the setting's artefact serves
LEAST_TURN_S, MOST_TURN_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a setting to which the load was sent. objection: why it must not be quoted; "" if it may be."""

    setting: Setting
    reached: Sequence[Reached]
    objection: str = ""

    @property
    def met(self) -> bool:
        return not self.objection and all(each.met for each in self.reached)

    @property
    def score(self) -> Score:
        return score(self.reached)

    @property
    def goodput(self) -> float:
        return sum([each.goodput for each in self.reached])


def is_confirmed(present: Measured, chosen: Measured) -> bool:
    """Return whether the measurements speak for the chosen setting: it is not worse than the present one by more than
    chance may do. One with fewer replicas has to reach the objectives, or miss them where the present one does too.
    """
    if present.objection or chosen.objection:
        return False
    if chosen.setting == present.setting:
        return True
    if chosen.setting.replicas < present.setting.replicas:
        return chosen.met or not present.met
    (missing, ratio), (missing_now, ratio_now) = chosen.score, present.score
    if max(missing, missing_now) > NOISE:
        return missing <= missing_now + NOISE
    return chosen.setting.replicas > present.setting.replicas or ratio <= ratio_now * NOISY


async def measure(
    machine: Machine,
    subject: Subject,
    options: Options,
    settings: Sequence[Setting],
    seconds: float,
    say: Say,
) -> list[Measured]:
    """Measure settings TURNS times each, one after the other, for `seconds` in all. Raises CommandFailed.

    All settings get the same arrivals in the first turn, and others in the second: the best of several measurements was
    lucky as well.
    """
    wanted = list(dict.fromkeys(settings))
    fitting_s = (seconds / (TURNS * len(wanted)) - SETTLE_S) / (1.0 + WARM_UP)
    turn_s = min(MOST_TURN_S, max(LEAST_TURN_S, fitting_s))
    tallies: dict[Setting, list[Sequence[Tally]]] = {setting: [] for setting in wanted}
    objections = dict.fromkeys(wanted, "")
    for turn in range(TURNS):
        load = replace(options.load, seed=options.load.seed + turn)
        for setting in wanted:
            without = await machine.load(changed(subject, setting), within_s=ARTEFACT * options.budget_s)
            if without and setting.engine.has_artefact:
                raise CommandFailed(f"{setting.engine} served when it was calibrated, but no longer does: {without}")
            part = 1.0 / setting.replicas
            found, objection = await machine.offered(load.scenario(machine.url, turn_s, part=part))
            tallies[setting].append(found)
            objections[setting] = objections[setting] or objection
            calls, kept = sum([each.scheduled for each in found]), sum([each.kept for each in found])
            say(f"measured {wanted.index(setting) + 1} of {len(wanted)} settings: {kept} of {calls} calls in time")
    return [
        Measured(
            setting=setting,
            reached=options.load.judged([total(each) for each in zip(*turns, strict=True)]),
            objection=objections[setting],
        )
        for setting, turns in tallies.items()
    ]
