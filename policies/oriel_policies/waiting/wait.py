"""Estimates how long a request that arrives now would wait, from the work ahead of it and the measured speed. Pure.

The work ahead is counted in rows: those that wait in its own band and in more urgent ones, and what is left of the
running batches. It is assumed to be done at the best rate of the service curve, because full batches form by themselves
while there is a backlog. The estimate is no guarantee: it does not foresee more urgent arrivals, the guaranteed share
of lower bands, expiring deadlines, or other models that use the cores.
"""

from collections.abc import Callable


def best_rate(predict: Callable[[int], float], max_rows: int, *, smaller: bool = True) -> float:
    """Rows per second of one instance at its best batch size; 0.0 while nothing is known.

    predict: rows of a batch -> seconds, as `ServiceCurve.predict`.
    smaller: try all powers of two up to `max_rows`; if False, only `max_rows` itself.
    """
    best = 0.0
    rows = 1 if smaller else max_rows
    while True:
        seconds = predict(rows)
        if seconds > 0.0:
            best = max(best, rows / seconds)
        if rows >= max_rows:
            return best
        rows = min(rows * 2, max_rows)


def expected_wait_s(ahead_rows: float, rows_per_s: float) -> float | None:
    """Seconds until work of `ahead_rows` is done at `rows_per_s`; None if there is work and the rate is not known."""
    if ahead_rows <= 0.0:
        return 0.0
    return ahead_rows / rows_per_s if rows_per_s > 0.0 else None
