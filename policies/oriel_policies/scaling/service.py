"""The service time of a call, from the points of a curve that servers reported."""

from collections.abc import Mapping

from oriel_policies.waiting.batch import non_decreasing


class ServiceTime:
    """device_s: seconds of one device per call, when batches are as large as planned; latency_s: the time that such a
    batch takes, which every call in it spends."""

    __slots__ = ("device_s", "latency_s")

    def __init__(self, device_s: float, latency_s: float) -> None:
        self.device_s = device_s
        self.latency_s = latency_s


def service_time(curve: Mapping[int, tuple[float, float]], target_s: float) -> ServiceTime | None:
    """The service time at the planned batch; None while no execution is known.

    curve: rows -> (executions, their seconds), as in `PoolRecord`. The planned batch is the largest known one that
    takes at most half of the target: a call that has just missed one batch still makes the next (`batch`). If none is
    that short, it is the smallest.
    """
    rows = sorted([rows for rows, (executions, _) in curve.items() if executions > 0.0])
    if not rows:
        return None
    means = non_decreasing([(curve[each][1] / curve[each][0], curve[each][0]) for each in rows])
    planned, seconds = rows[0], means[0]
    for each, mean in zip(rows, means, strict=True):
        if 2.0 * mean <= target_s:
            planned, seconds = each, mean
    return ServiceTime(seconds / planned, seconds)
