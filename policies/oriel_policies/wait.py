"""How long a request that arrives now would wait, from what is ahead of it and how fast that has been computed. Pure.

Work ahead is rows: those that wait in its own band and in more urgent ones, and what is left of the batches that run.
It leaves at the best rate the service curve promises, since full batches form by themselves while there is a backlog.
More urgent arrivals, the guaranteed share of lower bands and deadlines that pass are not foreseen: it is what a caller
may expect, not what it is promised.
"""

from collections.abc import Callable

__all__ = ["best_rate", "expected_wait_s"]


def best_rate(predict: Callable[[int], float], max_rows: int) -> float:
    """Rows per second of one instance at its best batch size; 0.0 while nothing is known.

    predict: rows of a batch -> seconds, as `ServiceCurve.predict`. Sizes are tried by powers of two up to `max_rows`.
    """
    best = 0.0
    rows = 1
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
