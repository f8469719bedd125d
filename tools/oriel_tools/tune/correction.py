"""Corrects profiles by what a load got when it was sent: by how much longer everything takes than they say. Pure.

Under load a batch shares the cores with sockets, other batches and the machine's other work in another way than when
its profile was measured. One factor for each engine stands for all of that: the one with which the simulation of the
very same arrivals comes out as they did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log, sqrt

import msgspec

from oriel_tools.simulate.profile import Profile
from oriel_tools.tune.objective import Reached, Score, score
from oriel_tools.tune.setting import Engine, Setting
from oriel_tools.tune.trial import Simulator

LEAST, MOST = 0.7, 2.0  # factors that are believed
STEPS = 5  # of halving between them and 1: to 2 %
MOST_CALLS = 3000  # in one simulation, so that a high rate does not take the time of the next search


def slowdown(simulator: Simulator, setting: Setting, found: Sequence[Reached], seconds: float) -> float:
    """Return the factor of a setting that was measured for `seconds` with the simulator's own arrivals: of all those
    that explain the measurement, the one that is nearest to 1.

    Of a load of more than MOST_CALLS another sample of so many stands for them.
    """
    measured, part = score(found), 1.0 / setting.replicas
    seconds = min(seconds, MOST_CALLS / (simulator.load.rate * part))

    def simulated(factor: float) -> Score:
        slower = corrected(simulator, {setting.engine: factor})
        record, _ = slower.record(replace(setting, replicas=1), seconds, part)
        return score(simulator.load.judged(record.tallies[-1]))

    expected = simulated(1.0)
    if expected == measured:  # as well where nearly all calls are late, whatever the factor is
        return 1.0
    low, high = (1.0, MOST) if expected < measured else (LEAST, 1.0)
    for _ in range(STEPS):
        middle = sqrt(low * high)
        tried = simulated(middle)
        if tried > measured or (tried == measured and expected < measured):
            high = middle
        else:
            low = middle
    return sqrt(low * high)


def factors(found: Mapping[Setting, float], engines: Sequence[Engine]) -> dict[Engine, float]:
    """Return the factor of each engine: the mean of its settings, or of all settings if none of it was measured.

    Means are geometric. An engine that was not measured is believed to be in the same trouble as the others.
    """
    of = {engine: [log(each) for setting, each in found.items() if setting.engine == engine] for engine in engines}
    known = {engine: sum(logs) / len(logs) for engine, logs in of.items() if logs}
    common = sum(known.values()) / len(known) if known else 0.0
    return {engine: exp(known.get(engine, common)) for engine in engines}


def factors_text(found: Mapping[Engine, float]) -> str:
    """Write the range of the factors."""
    least, most = min(found.values()), max(found.values())
    return f"{least:.2f}" if most - least < 0.005 else f"{least:.2f} to {most:.2f}"


def corrected(simulator: Simulator, by: Mapping[Engine, float]) -> Simulator:
    """Return a simulator in which everything takes so many times as long on these engines."""
    profiles = {engine: _longer(profile, by.get(engine, 1.0)) for engine, profile in simulator.profiles.items()}
    return Simulator(simulator.load, profiles)


def _longer(profile: Profile, factor: float) -> Profile:
    return msgspec.structs.replace(
        profile,
        sizes=[msgspec.structs.replace(size, mean_ms=size.mean_ms * factor) for size in profile.sizes],
        overhead_ms=profile.overhead_ms * factor,
        row_ms=profile.row_ms * factor,
        loop=profile.loop.times(factor),
    )
