"""Synthetic loads, as a rate over time. Pure; the same seed gives the same calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi, sin
from random import Random

MAX_CALLS = 5_000_000
WARM_UP_S = 600  # seconds at the first rate before a load is measured, so that every policy has settled by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """calls: (seconds, index of the tier) in order of time; those before `measured_from` are not counted."""

    name: str
    seconds: int
    measured_from: float
    calls: Sequence[tuple[float, int]]

    @property
    def first_rate(self) -> float:
        """Return the calls per second at the beginning."""
        return sum([1 for moment, _ in self.calls if moment < WARM_UP_S]) / min(WARM_UP_S, self.seconds)


def constant(second: float) -> float:
    """50 calls per second."""
    return 50.0


def ramp(second: float) -> float:
    """Return the calls per second of a load that grows from 10 to 150 in 300 s."""
    return 10.0 + 140.0 * min(1.0, second / 300.0)


def bursts(second: float) -> float:
    """20 calls per second, and 80 for half a minute in every three."""
    return 80.0 if second % 180.0 >= 150.0 else 20.0


def day(second: float) -> float:
    """A day in two hours: from 4 calls per second at night to 60 and more at noon and in the evening."""
    part = second / 7200.0
    return 4.0 + 50.0 * max(0.0, sin(pi * (part - 0.2) / 0.8)) + 20.0 * max(0.0, sin(2 * pi * (part - 0.7) / 0.4))


SYNTHETIC: dict[str, tuple[Callable[[float], float], int]] = {
    "constant": (constant, 1200),
    "ramp": (ramp, 300),
    "bursts": (bursts, 1080),
    "day": (day, 7200),
}


def synthetic(name: str, shares: Sequence[float], *, rate: float, seed: int) -> Load:
    """Return one of SYNTHETIC after a warm-up at its first rate.

    rate: factor on the rate; shares: each tier's part of the calls.
    """
    shape, seconds = SYNTHETIC[name]
    chance, calls = Random(seed), list[tuple[float, int]]()
    tiers = range(len(shares))
    moment, ends = 0.0, WARM_UP_S + seconds
    highest = rate * max(shape(float(second)) for second in range(seconds + 1))
    while (moment := moment + chance.expovariate(highest)) < ends:
        if chance.random() * highest < rate * shape(max(0.0, moment - WARM_UP_S)):
            calls.append((moment, chance.choices(tiers, shares)[0]))
    return Load(name=name, seconds=ends, measured_from=float(WARM_UP_S), calls=calls)


def recorded(name: str, offsets: Sequence[Sequence[float]]) -> Load:
    """Return a recorded load from the times of each tier's calls. It has no warm-up."""
    calls = sorted([(moment, tier) for tier, each in enumerate(offsets) for moment in each])
    return Load(name=name, seconds=int(calls[-1][0]) + 1, measured_from=0.0, calls=calls)
