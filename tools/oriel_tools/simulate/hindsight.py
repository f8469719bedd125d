"""An estimate of the fewest replica-seconds with which a load could have been served, knowing all of it beforehand.

Step by step the smallest number of replicas is taken with which at most the share `miss_share` of all calls so far is
lost. Only the replicas of the first `start_s` are given, because nothing could have been started for them. Stops
that would be shorter than a start are left out, because they save nothing. It is close to the optimum, not proven to
be one: the steps are taken one after the other.
"""

from itertools import pairwise

from oriel_tools.simulate.cluster import Cluster

STEP_S = 5


def hindsight(cluster: Cluster, seconds: int, *, minimum: int, maximum: int, miss_share: float) -> Cluster:
    """Run a copy of `cluster` to the end of the load; its `replica_s` is the cost, starts included."""
    initial, numbers = cluster.ready, list[int]()
    begin = cluster
    for step in range(0, seconds, STEP_S):
        end = min(step + STEP_S, seconds)
        if step < cluster.start_s:
            cluster = _tried(cluster, initial, end)
        else:
            cluster = _smallest(begin, cluster, end, minimum, maximum, miss_share)
        if end <= max(cluster.start_s, cluster.measured_from):
            begin = cluster
        numbers.append(cluster.ready)
    kept = _without_short_stops(numbers, round(cluster.start_s / STEP_S))
    first = int(cluster.measured_from) // STEP_S
    started = sum([max(0, after - before) for before, after in pairwise(kept[first:])])
    cluster.replica_s = float(sum(kept[first:]) * STEP_S) + started * cluster.start_s
    return cluster


def _smallest(begin: Cluster, cluster: Cluster, end: int, minimum: int, maximum: int, miss_share: float) -> Cluster:
    """Return the state at `end` with the fewest replicas that lose at most `miss_share` of the calls since `begin`."""

    def enough(after: Cluster) -> bool:
        return after.lost - begin.lost <= miss_share * (after.arrived - begin.arrived)

    number = cluster.ready
    found = _tried(cluster, number, end)
    if enough(found):
        while number > minimum and enough(fewer := _tried(cluster, number - 1, end)):
            found, number = fewer, number - 1
    else:
        while number < maximum and not enough(found):
            number += 1
            found = _tried(cluster, number, end)
    return found


def _tried(cluster: Cluster, number: int, end: int) -> Cluster:
    tried = cluster.copy()
    tried.ready = number
    tried.advance(float(end))
    return tried


def _without_short_stops(numbers: list[int], steps: int) -> list[int]:
    """Fill every stretch of fewer replicas that is at most `steps` long, level by level."""
    filled = list(numbers)
    for level in range(1, max(numbers, default=0) + 1):
        last = -1
        for index, number in enumerate(numbers):
            if number >= level:
                if last >= 0 and index - last - 1 <= steps:
                    for at in range(last + 1, index):
                        filled[at] = max(filled[at], level)
                last = index
    return filled
