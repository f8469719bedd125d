"""How far the values of a tensor have moved from their reference: bins, the population stability index, its noise.

PSI = sum (p - q) ln(p / q) over the bins, where p is the share of the samples and q that of the reference in one bin.
Two samples of the same source differ by chance as well: by (bins - 1) x (1 / N + 1 / M) on average for N and M rows,
which is 9 x (1 / N + 1 / M) for ten bins. A PSI above 0.1 deserves attention, one above ACT asks for action.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

BINS: Final = 10
FLOOR: Final = 1e-4  # smallest share of a bin: an empty bin has no logarithm
MIN_ROWS: Final = 500  # on both sides: the PSI of fewer rows says little
MIN_BIN_ROWS: Final = 20  # a bin or class of fewer rows is not shown, nor a bin of its own
ACT: Final = 0.25


def psi(live: Sequence[float], reference: Sequence[float]) -> float:
    """Return the population stability index of two lists of counts or shares, by bin. Neither may be all zeros."""
    live_total, reference_total = sum(live), sum(reference)
    found = 0.0
    for one, other in zip(live, reference, strict=True):
        p = max(one / live_total, FLOOR)
        q = max(other / reference_total, FLOOR)
        found += (p - q) * math.log(p / q)
    return found


def noise(bins: int, live_rows: int, reference_rows: int) -> float:
    """Return the PSI that two samples of one source have on average."""
    return (bins - 1) * (1.0 / live_rows + 1.0 / reference_rows)


def edges(values: Sequence[float], rows: int) -> list[float]:
    """Return the inner edges of up to BINS bins of about equal frequency, ascending.

    values: the reference's values, finite and sorted, of `rows` rows. An edge lies between two values, and is none of
    them unless they are neighbours among floating-point numbers. No bin has fewer values than MIN_BIN_ROWS rows bring:
    a value that is frequent makes bins fewer.
    """
    count = len(values)
    least = max(1, math.ceil(count * MIN_BIN_ROWS / max(1, rows)))
    kept: list[float] = []
    start = 0
    for number in range(1, BINS):
        at = bisect_left(values, values[count * number // BINS])
        if at - start >= least and count - at >= least:
            below, above = values[at - 1], values[at]
            between = below / 2 + above / 2
            kept.append(between if below < between < above else above)
            start = at
    return kept


def counts(values: Sequence[float], inner: Sequence[float]) -> list[int]:
    """Return how many of the sorted values are in each bin of these inner edges."""
    ends = [0, *(bisect_left(values, edge) for edge in inner), len(values)]
    return [end - start for start, end in pairwise(ends)]


def outwards(low: float, high: float) -> tuple[float, float]:
    """Return a range around this one whose bounds have two digits, so that they are no value of any one row."""
    size = max(abs(low), abs(high))
    if not size:
        return 0.0, 0.0
    step = max(10.0 ** (math.floor(math.log10(size)) - 1), math.ulp(0.0))
    most = math.nextafter(math.inf, 0.0)
    return max(-most, min(low, math.floor(low / step) * step)), min(most, max(high, math.ceil(high / step) * step))
