"""The objective of a tuning: its grammar, and whether a load reached it. Pure.

    p99 <= 50 ms for gold at 300/s          a percentile, a bound, the tier (optional) and the calls per second
    99 % within 50 ms for gold at 300/s     the same as a share of the calls

Both count all calls: one that was refused, failed or is not answered missed the bound.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from oriel_tools.load.tally import Tally

FORMS = "'p99 <= 50 ms for gold at 300/s' or '99 % within 50 ms for gold at 300/s' ('for TIER' may be left out)"
LEAST_PERCENT, MOST_PERCENT = 1.0, 99.99
LEAST_MS, MOST_MS = 0.1, 600_000.0
LEAST_RATE, MOST_RATE = 0.01, 100_000.0
MAX_OBJECTIVES = 8
MOST_RATIO = 1e9  # largest ratio of a latency to its bound, so that infinite ones can be subtracted
NO_TIER = "load"  # the name of the stream of an objective without a tier
_SHOWN = 48
_NUMBER = r"(\d{1,7}(?:\.\d{1,6})?)"
_GOAL = re.compile(rf"(?:p{_NUMBER}\s*<=|{_NUMBER}\s*%\s*within(?=\s))\s*", re.ASCII)
_BOUND = re.compile(rf"{_NUMBER}\s*(ms|s)(?=\s|\Z)\s*", re.ASCII)
_FOR = re.compile(r"for(?=\s)\s*", re.ASCII)
_TIER = re.compile(r"([A-Za-z0-9_-]{1,64})(?=\s|\Z)\s*", re.ASCII)
_RATE = re.compile(rf"at\s+{_NUMBER}\s*/\s*s\Z", re.ASCII)


class BadObjective(ValueError):
    """The text is one line for the person at the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One objective.

    percent: share of all calls, in percent, that must be answered within bound_ms. rate: calls per second.
    as_percentile: it was written as a percentile, so that a loss is counted in milliseconds, else in percent of the
    calls.
    """

    percent: float
    bound_ms: float
    rate: float
    tier: str = ""
    as_percentile: bool = True

    @property
    def share(self) -> float:
        return self.percent / 100.0

    @property
    def name(self) -> str:
        """The stream and the tier of its calls."""
        return self.tier or NO_TIER

    def __str__(self) -> str:
        goal = f"p{number(self.percent)} <=" if self.as_percentile else f"{number(self.percent)} % within"
        tier = f" for {self.tier}" if self.tier else ""
        return f"{goal} {number(self.bound_ms)} ms{tier} at {number(self.rate)}/s"


def number(value: float) -> str:
    """Write a number with at most six decimals, and without any that are zero."""
    text = f"{value:.6f}".rstrip("0")
    return text.removesuffix(".")


def parse(text: str) -> Objective:
    """Read one objective. Raises BadObjective with the first wrong part and the form that is expected there."""
    rest = text.strip()

    def expect(pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        nonlocal rest
        found = pattern.match(rest)
        if found is None:
            there = f", not {rest[:_SHOWN]!r}" if rest and rest != text.strip() else ""
            raise BadObjective(f"objective {text[:_SHOWN]!r}: {expected} is expected{there}. The form is {FORMS}")
        rest = rest[found.end() :]
        return found

    if rest.startswith("p") and "<" in rest and "<=" not in rest:
        raise BadObjective(f"objective {text[:_SHOWN]!r}: write <= in place of <. The form is {FORMS}")
    goal = expect(_GOAL, "a percentile such as 'p99 <=', or a share such as '99 % within',")
    bound = expect(_BOUND, "a bound such as '50 ms' or '0.05 s'")
    tier = ""
    if _FOR.match(rest):
        expect(_FOR, "'for'")
        tier = expect(_TIER, "the name of a tier (letters, digits, '_' and '-')")[1]
    rate = expect(_RATE, "the calls per second, such as 'at 300/s', and nothing after it,")
    return Objective(
        percent=_within(text, "the percentile", float(goal[1] or goal[2]), LEAST_PERCENT, MOST_PERCENT),
        bound_ms=_within(
            text, "the bound in ms", round(float(bound[1]) * (1e3 if bound[2] == "s" else 1.0), 6), LEAST_MS, MOST_MS
        ),
        rate=_within(text, "the rate", float(rate[1]), LEAST_RATE, MOST_RATE),
        tier=tier,
        as_percentile=goal[1] is not None,
    )


def _within(text: str, what: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise BadObjective(f"objective {text[:_SHOWN]!r}: {what} must be {number(least)} to {number(most)}")
    return value


def checked(objectives: Sequence[Objective]) -> list[Objective]:
    """Return the objectives if they go together. Raises BadObjective."""
    names = [each.name for each in objectives]
    if len(set(names)) < len(names):
        raise BadObjective("each objective needs a tier of its own: 'for gold', 'for bronze'")
    if len(names) > MAX_OBJECTIVES:
        raise BadObjective(f"{len(names)} objectives, at most {MAX_OBJECTIVES} go together")
    return list(objectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The result of a load for one objective.

    calls: all that arrived. attained: the share of them that was answered within the bound. latency_ms: within which
    the objective's share of all calls was answered; infinite if fewer were answered at all. goodput: answers within the
    bound per second.
    """

    objective: Objective
    calls: int
    attained: float
    latency_ms: float
    goodput: float

    @property
    def met(self) -> bool:
        return self.calls > 0 and self.latency_ms <= self.objective.bound_ms

    @property
    def shortfall(self) -> float:
        """The share of the calls that is missing; 0 if the objective is met."""
        return 0.0 if self.met else max(0.0, self.objective.share - self.attained)

    @property
    def ratio(self) -> float:
        """The latency over the bound."""
        return self.latency_ms / self.objective.bound_ms

    def __str__(self) -> str:
        if not self.calls:
            return "no call arrived"
        name = f"p{number(self.objective.percent)}"
        latency = f"{name} {self.latency_ms:.1f} ms" if self.latency_ms < inf else f"{name} beyond every answer"
        return f"{latency}, {self.attained:.2%} within {number(self.objective.bound_ms)} ms"


def reached(objective: Objective, tally: Tally, seconds: float) -> Reached:
    """Judge the calls of one objective, whose target was its bound, after `seconds` of arrivals."""
    needed = max(1, ceil(objective.share * tally.scheduled - 1e-9))
    latency_ms = inf
    if tally.scheduled and tally.good >= needed:
        found_ms = tally.latency.percentile_s((needed - 0.5) / tally.good) * 1e3
        # The histogram rounds up by half a percent. On which side of the bound it is was counted exactly.
        bound_ms = objective.bound_ms
        latency_ms = min(found_ms, bound_ms) if tally.kept >= needed else max(found_ms, bound_ms * (1.0 + 1e-6))
    return Reached(
        objective=objective,
        calls=tally.scheduled,
        attained=tally.kept / tally.scheduled if tally.scheduled else 0.0,
        latency_ms=latency_ms,
        goodput=tally.kept / seconds if seconds else 0.0,
    )


Score = tuple[float, float]


def score(found: Sequence[Reached]) -> Score:
    """Return how far a load is from its objectives, less is better: the largest share of calls that is missing, then
    the largest latency over its bound.
    """
    return max([each.shortfall for each in found]), max([min(each.ratio, MOST_RATIO) for each in found])


def loss_text(better: Reached, worse: Reached) -> str:
    """Say how much `worse` loses against `better`, in the unit of the objective."""
    objective = better.objective
    tier = f" of {objective.tier}" if objective.tier else ""
    points = (better.attained - worse.attained) * 100.0
    in_time = f"{worse.attained:.2%}{tier} in time instead of {better.attained:.2%} ({-points:+.2f} points)"
    if not objective.as_percentile or worse.latency_ms == inf or better.latency_ms == inf:
        return in_time
    name, more = f"p{number(objective.percent)}{tier}", worse.latency_ms - better.latency_ms
    return f"{name} {worse.latency_ms:.1f} ms instead of {better.latency_ms:.1f} ({more:+.1f} ms)"


def most_lost(better: Sequence[Reached], worse: Sequence[Reached]) -> tuple[Reached, Reached]:
    """Return the objective that a change of the setting harms most, with its values before and after the change."""

    def lost(pair: tuple[Reached, Reached]) -> Score:
        before, after = pair
        return after.shortfall - before.shortfall, min(after.ratio, MOST_RATIO) - min(before.ratio, MOST_RATIO)

    return max(zip(better, worse, strict=True), key=lost)
