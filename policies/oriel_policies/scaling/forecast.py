"""The rate of calls to plan for, from the arrivals of the last minute.

The mean of the minute is the base. The further rules only raise it, and only where the difference cannot be the chance
of a Poisson process (four standard deviations). They are for tiers whose target is shorter than the start of a
replica: their calls cannot wait for one, so it has to be there before the rate is.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Final

from oriel_policies.scaling.records import WINDOW_S

SIGMAS: Final = 4.0
BURST_S: Final = 6
HALF_S: Final = 30
# A HorizontalPodAutoscaler reads the metric every 15 s, 7.5 s later on the mean, and a mean of 30 s is 15 s old.
DELAY_S: Final = 22.5
MOST_GROWTH: Final = 1.5


def rate(arrivals: Sequence[float], seconds: int, skip: int = 0) -> float:
    """Calls per second in the `seconds` whole seconds before the last `skip` ones; see `TierRecord.arrivals`."""
    return sum(arrivals[1 + skip : 1 + skip + seconds]) / seconds


def expected_rate(
    arrivals: Sequence[float],
    *,
    observed_s: float,
    continuous: bool,
    target_s: float,
    start_s: float,
) -> float:
    """Calls per second to plan for.

    observed_s: seconds for which arrivals have been counted so far.
    continuous: see `Demand`; without it there is no slope, because a window that fills up looks like a rise.
    """
    seconds = min(WINDOW_S, max(BURST_S, int(observed_s)))
    minute = rate(arrivals, seconds)
    expected = minute
    if target_s >= start_s:
        return expected
    burst = rate(arrivals, BURST_S)
    if burst > minute + SIGMAS * sqrt(minute / BURST_S):
        expected = max(expected, burst)
    if continuous:
        recent, earlier = rate(arrivals, HALF_S), rate(arrivals, HALF_S, HALF_S)
        slope = (recent - earlier) / HALF_S
        if recent - earlier > SIGMAS * sqrt((recent + earlier) / HALF_S):
            present = max(recent, min(burst, recent + slope * HALF_S))
            expected = max(expected, min(recent + slope * (start_s + DELAY_S), MOST_GROWTH * present))
    return expected
