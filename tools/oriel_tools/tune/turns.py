"""Sends the load of the objectives to settings of a running server, one turn after the other."""

from collections.abc import Sequence
from dataclasses import replace

from oriel_cli.errors import CommandFailed
from oriel_tools.load.tally import Tally, total
from oriel_tools.tune.contest import Measured
from oriel_tools.tune.correction import factors, slowdown
from oriel_tools.tune.machine import SETTLE_S, Machine
from oriel_tools.tune.objective import Reached
from oriel_tools.tune.options import Clock, Options, Say
from oriel_tools.tune.setting import Engine, Setting, Subject, changed
from oriel_tools.tune.trial import WARM_UP, Simulator

FITTING = 8  # turns that have to fit into the time for measurements
ARTEFACT = 0.3  # of the budget, to wait for what a setting is served by
LEAST_TURN_S, MOST_TURN_S = 1.0, 60.0


class Turns:
    """Measures settings in turns, of which about FITTING fit into the time until `end` on the clock."""

    def __init__(
        self, machine: Machine, subject: Subject, options: Options, end: float, say: Say, clock: Clock
    ) -> None:
        self.subject = subject
        self.options = options
        self.clock = clock
        self.say = say
        self._machine = machine
        self._end = end
        fitting_s = ((end - clock()) / FITTING - SETTLE_S) / (1.0 + WARM_UP)
        self._seconds = min(MOST_TURN_S, max(LEAST_TURN_S, fitting_s))
        self._tallies: dict[Setting, list[Sequence[Tally]]] = {}
        self._objections: dict[Setting, str] = {}
        self._slowdowns: dict[Setting, float] = {}

    @property
    def left(self) -> int:
        """The turns for which there is time."""
        return max(0, int((self._end - self.clock()) / (SETTLE_S + (1.0 + WARM_UP) * self._seconds)))

    async def add(self, setting: Setting, name: str) -> None:
        """Send the load to a setting. The first turn of each setting has the same arrivals, and so has the second."""
        without = await self._machine.load(changed(self.subject, setting), within_s=ARTEFACT * self.options.budget_s)
        if without and setting.engine.has_artefact:
            raise CommandFailed(f"{setting.engine} served when it was calibrated, and does not any more: {without}")
        load = self.options.load
        load = replace(load, seed=load.seed + len(self._tallies.get(setting, ())))
        found, objection = await self._machine.offered(
            load.scenario(self._machine.url, self._seconds, part=1.0 / setting.replicas)
        )
        self._tallies.setdefault(setting, []).append(found)
        self._objections[setting] = self._objections.get(setting, "") or objection
        calls = sum([each.scheduled for each in found])
        self.say(f"measured {name}: {sum([each.kept for each in found])} of {calls} calls in time")

    def measured(self, setting: Setting) -> Measured:
        """Return what all turns of a setting come to."""
        turns = self._tallies[setting]
        return Measured(setting=setting, reached=self._judged(turns), objection=self._objections[setting])

    def all(self) -> list[Measured]:
        """Return what all settings got, in the order in which they were first measured."""
        return [self.measured(setting) for setting in self._tallies]

    def slowdowns(self, simulator: Simulator) -> dict[Engine, float]:
        """Return how many times as long as the simulator says everything takes, by the first turn of each setting.

        simulator: with the profiles as they were measured. Turns in which the generator lagged are left out.
        """
        for setting, turns in self._tallies.items():
            if setting not in self._slowdowns and setting.engine in simulator.profiles:
                reached = self._judged(turns[:1])
                self._slowdowns[setting] = slowdown(simulator, setting, reached, self._seconds)
        found = {setting: each for setting, each in self._slowdowns.items() if not self._objections[setting]}
        return factors(found, list(simulator.profiles))

    def _judged(self, turns: Sequence[Sequence[Tally]]) -> list[Reached]:
        tallies = [total(each) for each in zip(*turns, strict=True)]
        return self.options.load.judged(tallies)
