"""The rate of calls to plan for, from the arrivals of the last minute.

The mean of the minute is the base. The further rules only raise it, and only where the difference cannot be the chance
of a Poisson process. They are for tiers whose target is shorter than the start of a replica: their calls cannot wait
for one, so it has to be there before the rate is. A burst is seen in each tier by itself. The trend is that of all
tiers together, because the chance in a slope shrinks with the number of calls, and who calls more in one tier usually
does in the others too.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Final

from oriel_policies.scaling.records import WINDOW_S

SIGMAS: Final = 4.0
SLOPE_SIGMAS: Final = 3.5
BURST_S: Final = 6
RECENT_S: Final = 15
# A HorizontalPodAutoscaler reads the metric every 15 s, 7.5 s later on the mean, and a mean of 15 s is 7.5 s old.
DELAY_S: Final = 15.0
MOST_GROWTH: Final = 2.0


def rate(arrivals: Sequence[float], seconds: int, skip: int = 0) -> float:
    """Calls per second in the `seconds` whole seconds before the last `skip` ones; see `TierRecord.arrivals`."""
    return sum(arrivals[1 + skip : 1 + skip + seconds]) / seconds


def growth(arrivals: Sequence[float], start_s: float) -> float:
    """Return the factor between the mean rate of the minute and the rate to plan for: that at the time when a replica
    that is ordered now is ready if the calls grow, the present one if they shrink, and else 1.0.

    arrivals: those of all tiers, see `TierRecord.arrivals`; the whole minute was observed.
    The slope is that of the line of least squares through the seconds of the minute.
    """
    mean, recent, before = rate(arrivals, WINDOW_S), rate(arrivals, RECENT_S), rate(arrivals, RECENT_S, RECENT_S)
    middle = (WINDOW_S + 1) / 2
    spread = WINDOW_S * (WINDOW_S * WINDOW_S - 1) / 12
    slope = sum([(middle - age) * arrivals[age] for age in range(1, WINDOW_S + 1)]) / spread
    if abs(slope) <= SLOPE_SIGMAS * sqrt(mean / spread):
        return 1.0
    if slope < 0.0:
        return min(1.0, max(recent, mean + slope * WINDOW_S / 2) / mean)
    # After a step the line still rises when the calls do not any more.
    slope = min(slope, (recent - before + sqrt((recent + before) / RECENT_S)) / RECENT_S)
    return max(mean, min(recent + slope * (start_s + DELAY_S), MOST_GROWTH * recent)) / mean


def expected_rate(
    arrivals: Sequence[float],
    *,
    observed_s: float,
    grown: float,
    target_s: float,
    start_s: float,
) -> float:
    """Calls per second of one tier to plan for.

    observed_s: seconds for which arrivals have been counted so far.
    grown: the `growth` of the pool; 1.0 unless the whole minute was seen (see `Demand.continuous`), because a window
    that fills up looks like a rise.
    """
    minute = rate(arrivals, min(WINDOW_S, max(BURST_S, int(observed_s))))
    if target_s >= start_s:
        return minute * min(1.0, grown)
    burst = rate(arrivals, BURST_S)
    expected = minute * grown
    return max(expected, burst) if burst > minute + SIGMAS * sqrt(minute / BURST_S) else expected
