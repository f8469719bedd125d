"""Tries settings in virtual time: the load of the objectives against the batchers of the server, on measured profiles.

All settings get the same arrivals, so that what differs between two of them is not chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from oriel_tools.load.generator import Record
from oriel_tools.load.scenario import Phase, Scenario, Stream, checked
from oriel_tools.load.tally import Tally
from oriel_tools.simulate.profile import Profile, mean_ms
from oriel_tools.simulate.requests import request_of
from oriel_tools.simulate.virtual import Servers, Use, VirtualLoad
from oriel_tools.tune.objective import Objective, Reached, Score, reached, score
from oriel_tools.tune.setting import Engine, Setting

GIVE_UP = 4.0  # the deadline of a call over the bound of its objective, as that of tiers over their target
LEAST_CALLS = 100  # calls of each objective in one trial
MOST_CALLS = 50_000
RARE = 0.1  # part of the largest rate, up to which an objective has few calls beside the others
EXTRA = 0.02  # part of the load that may be added, so that those few can be judged
SHORT = 0.25  # part of the bound: batches that take no longer are not too large
WARM_UP = 0.15  # part of a load that is sent before it counts
HIGHEST = 8.0  # part of the rates that is tried to see how far a setting goes
IN_FLIGHT = 8192
LAG, LAG_MS = 0.1, 10.0  # largest lag of the generator in a valid load: a part of the bound, or milliseconds
Arrivals = Literal["poisson", "bursty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of the objectives. rows: the rows of each request. deadline_ms: sent with each; 0: GIVE_UP times the
    bound.
    """

    model: str
    objectives: Sequence[Objective]
    rows: int = 1
    arrivals: Arrivals = "poisson"
    deadline_ms: float = 0.0
    seed: int = 1

    @property
    def rate(self) -> float:
        return sum([each.rate for each in self.objectives])

    @property
    def bound_ms(self) -> float:
        """The tightest of the bounds."""
        return min([each.bound_ms for each in self.objectives])

    def seconds(self, calls: int) -> float:
        """Return the seconds that it takes for this number of calls, and for LEAST_CALLS of each objective as far as
        MOST_CALLS go.
        """
        slowest = min([each.rate for each in self.objectives])
        rare = [each for each in self.objectives if self._is_rare(each)]
        enough = LEAST_CALLS / slowest
        if rare:
            enough = min(enough, LEAST_CALLS * len(rare) / (EXTRA * self.rate))
        seconds = max(calls / self.rate, enough, 10.0 * self.bound_ms / 1e3)
        return min(seconds, MOST_CALLS / self.rate)

    def rates(self, seconds: float, *, part: float = 1.0) -> dict[str, float]:
        """Return the calls per second that are sent for each objective. part: factor on all rates.

        Calls of a rare objective are sent more often, up to LEAST_CALLS in these seconds: a percentile of two calls
        says nothing. Together they add at most EXTRA to the load.
        """
        found = {each.name: each.rate * part for each in self.objectives}
        missing = {
            each.name: max(0.0, LEAST_CALLS / seconds - found[each.name])
            for each in self.objectives
            if self._is_rare(each)
        }
        if (wanted := sum(missing.values())) > 0.0:
            share = min(1.0, EXTRA * self.rate * part / wanted)
            found |= {name: found[name] + share * more for name, more in missing.items()}
        return found

    def _is_rare(self, objective: Objective) -> bool:
        return objective.rate <= RARE * max([each.rate for each in self.objectives])

    def scenario(self, url: str, seconds: float, *, part: float = 1.0) -> Scenario:
        """Return the load in a form that can be sent as well as simulated: a warm-up, and `seconds` that count.

        The first objective is the most urgent one. part: the factor on the rates.
        """
        streams = [
            Stream(
                url=f"{url}/v2/models/{self.model}/infer",
                name=each.name,
                rows=self.rows,
                encoding="binary",
                headers={"x-oriel-priority": str(band)},
                target_ms=each.bound_ms,
                deadline_ms=self.deadline_ms or min(GIVE_UP * each.bound_ms, 1e6),
            )
            for band, each in enumerate(self.objectives)
        ]
        rates = self.rates(seconds, part=part)
        phases = [
            Phase(name="warm-up", seconds=WARM_UP * seconds, rates=rates, warm_up=True),
            Phase(name="measured", seconds=seconds, rates=rates, arrivals=self.arrivals),
        ]
        found = Scenario(
            stream=streams,
            phase=phases,
            seed=self.seed,
            max_in_flight=IN_FLIGHT,
            max_lag_ms=max(LAG_MS, LAG * self.bound_ms),
        )
        return checked(found, Path())

    def judged(self, tallies: Sequence[Tally]) -> list[Reached]:
        """Judge the tallies of the streams. The goodput is related to the rate of the objective, not to the rate that
        was sent.
        """
        return [
            reached(objective, tally, tally.scheduled / objective.rate)
            for objective, tally in zip(self.objectives, tallies, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one setting in virtual time. seconds: the time of simulated arrivals that count."""

    setting: Setting
    reached: Sequence[Reached]
    use: Use
    seconds: float

    @property
    def score(self) -> Score:
        return score(self.reached)

    @property
    def met(self) -> bool:
        return all(each.met for each in self.reached)

    @property
    def utilisation(self) -> float:
        """The share of the time in which executions that can run did run."""
        offered_s = self.use.replica_s * self.use.slots
        return sum(map(sum, self.use.busy.values())) / offered_s if offered_s else 0.0

    @property
    def rows_per_batch(self) -> float:
        sizes = [each for counts in self.use.batches.values() for each in counts.items()]
        batches = sum([count for _, count in sizes])
        return sum([rows * count for rows, count in sizes]) / batches if batches else 0.0


class Simulator:
    """Tries settings. profiles: the profiles of the engines that were measured."""

    def __init__(self, load: Load, profiles: Mapping[Engine, Profile]) -> None:
        self.load = load
        self.profiles = profiles
        self.trials = 0
        self.trial = cache(self._trial)

    def profile(self, setting: Setting) -> Profile:
        """Return the profile of a setting whose engine was measured."""
        measured = self.profiles[setting.engine]
        if not setting.max_rows:
            return measured
        return msgspec.structs.replace(
            measured,
            max_rows=setting.max_rows,
            preferred_rows=list(setting.preferred),
            max_delay_ms=setting.delay_us / 1e3,
        )

    def least_rows(self, setting: Setting) -> int:
        """Return the smallest largest batch that is tried: a batch of these rows takes SHORT of the bound."""
        sizes, rows = self.profile(setting).sizes, self.load.rows
        while rows < setting.max_rows and mean_ms(sizes, rows + 1) <= SHORT * self.load.bound_ms:
            rows += 1
        return rows

    def alone_ms(self, setting: Setting) -> float:
        """Return the milliseconds of a request that meets no other."""
        profile, rows = self.profile(setting), self.load.rows
        return mean_ms(profile.sizes, rows) + profile.overhead_ms + rows * profile.row_ms + profile.loop.alone_ms

    def record(self, setting: Setting, seconds: float, part: float = 1.0) -> tuple[Record, Use]:
        """Simulate the load."""
        scenario = self.load.scenario("http://simulated", seconds, part=part)
        requests = [request_of(stream) for stream in scenario.stream]
        profiles = {self.load.model: self.profile(setting)}
        load = VirtualLoad(scenario, requests, profiles, Servers(replicas=setting.replicas))
        return load.run(), load.use

    def _trial(self, setting: Setting, calls: int, part: float = 1.0) -> Trial:
        """Try a setting with a load of about this number of calls. part: the factor on the rates."""
        self.trials += 1
        seconds = self.load.seconds(calls) / part
        record, use = self.record(setting, seconds, part)
        found = self.load.judged(record.tallies[-1])
        return Trial(setting=setting, reached=found, use=use, seconds=seconds)

    def most(self, setting: Setting, calls: int, *, steps: int = 7) -> float:
        """Return which part of the rates the setting reaches the objectives with, up to HIGHEST; 0 for none that was
        tried.
        """
        if self.trial(setting, calls, HIGHEST).met:
            return HIGHEST
        low, high = (1.0, HIGHEST) if self.trial(setting, calls).met else (0.0, 1.0)
        for _ in range(steps):
            middle = (low * high) ** 0.5 if low else high / 2.0
            if self.trial(setting, calls, middle).met:
                low = middle
            else:
                high = middle
        return low
