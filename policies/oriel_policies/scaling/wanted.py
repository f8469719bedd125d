"""The number of replicas that lets the waiting and the expected calls meet their deadlines.

Work is measured in device-seconds; a replica does `capacity` of them per second. A replica that is ordered now is
ready `start_s` (S) later. Until then the present ones work alone, so what is due before S is theirs: new replicas
cannot save it, and it does not count for them. For a later moment D the work that is due between S and D, less what
the present replicas can do of it before S, has to fit into the time between S and D. The largest number over a series
of moments D is wanted. Work comes from the waiting calls and from the expected ones, which are due one target time
after they arrive.

A tier whose target is shorter than S has to find a free replica when its calls arrive. For it the number must also
keep the probability of waiting too long below `miss_share`: with a = the probability of waiting at all (Halfin and
Whitt 1981) and constant service times, a call waits longer than t with probability a exp(-2 (servers - work) t / s).

Calls that wait are answered even if they are late. Those that will still wait when new replicas are ready have to be
done in half a start after that (at least DRAIN_LEAST_S).

Tiers are taken cumulatively from the most urgent band downwards. `weight` is the share of a tier's work for which
replicas may be paid: a tier of weight 0 uses what is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, erfc, exp, floor, pi, sqrt
from typing import Final, NamedTuple

from oriel_policies.scaling.records import due_by
from oriel_policies.scaling.schedule import Window
from oriel_policies.waiting.batch import non_decreasing

MOMENTS: Final = 14
DRAIN_LEAST_S: Final = 10.0
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The `scaling` table of a pool, by which its replicas are planned.

    start_s: time until a new replica serves its first call, in 95 of 100 cases. capacity: device-seconds per second of
    one replica; e.g. its instances. call_s: device time of a call until answers show it; None: not known.
    miss_share: share of the calls of an urgent tier that may wait too long.
    keep_alive_s: the longest time that an idle pool keeps its last replica, if `minimum` is 0. spare: replicas beyond
    those that the most urgent band needs, while the pool is in use.
    weights: tier -> the share of its work for which replicas may be paid, 0 to 1; 1 if it is absent.
    hold_s: seconds for which a call is held while the pool has no server, within the deadline that its caller asks for;
    None until its deadline.
    tier_hold_s: the same by tier.
    """

    minimum: int
    maximum: int
    start_s: float
    spare: int = 0
    capacity: float = 1.0
    call_s: float | None = None
    miss_share: float = 0.002
    keep_alive_s: float = 300.0
    weights: Mapping[str, float] = field(default_factory=dict)
    schedule: tuple[Window, ...] = ()
    hold_s: float | None = None
    tier_hold_s: Mapping[str, float] = field(default_factory=dict)

    def hold_for(self, tier: str) -> float | None:
        """Return how many seconds a call of this tier is held; None until its deadline."""
        return self.tier_hold_s.get(tier, self.hold_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierScaling:
    """A tier as its document describes it. weight: the share of its work for which replicas may be paid, 0 to 1."""

    band: int
    target_s: float
    weight: float = 1.0


class ServiceTime(NamedTuple):
    """device_s: seconds of one device per call, when batches are as large as planned; latency_s: the time that such a
    batch takes, which every call in it spends."""

    device_s: float
    latency_s: float


@dataclass(slots=True, eq=False, repr=False)
class TierLoad:
    """The load of one tier. backlog: waiting calls, see `TierRecord`; rate: expected calls per second."""

    tier: TierScaling
    service: ServiceTime
    backlog: Sequence[float]
    rate: float


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


def replicas_wanted(
    pool: Scaling, loads: Sequence[TierLoad], replicas: float, model_replicas: float = 0.0, *, spare: int = 0
) -> int:
    """The wanted number, within the pool's bounds. replicas: the number of replicas that are ready, or will be within
    `start_s`.

    model_replicas: the number of replicas whose memory the models in use fill. spare: replicas beyond those that the
    most urgent band needs; the other bands use them meanwhile. Non-decreasing in every backlog.
    """
    paid = sorted([load for load in loads if load.tier.weight > 0.0], key=_band)
    urgent = [load for load in paid if load.tier.band == paid[0].tier.band and load.rate > 0.0]
    reserve = max(1, _ceil(_by_waiting(pool, urgent))) + spare if spare else 0
    most = max(
        _by_deadline(pool, paid, replicas), _by_waiting(pool, paid), _by_backlog(pool, paid, replicas), model_replicas
    )
    return max(pool.minimum, min(pool.maximum, max(reserve, _ceil(most)) if most < pool.maximum else pool.maximum))


def _band(load: TierLoad) -> int:
    return load.tier.band


def _ceil(number: float) -> int:
    return ceil(number - _ROUNDING)


def _by_backlog(pool: Scaling, loads: Sequence[TierLoad], replicas: float) -> float:
    """Return the number with which the calls that will wait when new replicas are ready are answered soon after."""
    start_s, work = pool.start_s, sum([_work(load) for load in loads])
    waiting = sum([load.tier.weight * load.service.device_s * sum(load.backlog) for load in loads])
    left = waiting + (work - replicas * pool.capacity) * start_s
    return (work + left / max(DRAIN_LEAST_S, start_s / 2)) / pool.capacity if waiting and left > 0.0 else 0.0


def _by_deadline(pool: Scaling, loads: Sequence[TierLoad], replicas: float) -> float:
    """Return the largest number over all moments. All bands count: a lower one only adds work."""
    start_s, capacity = pool.start_s, pool.capacity
    lost = sum([_queued(load, start_s) + _expected(load, start_s) for load in loads])
    spare = max(0.0, replicas * capacity * start_s - lost)
    most, step_s = 0.0, max(2.0, start_s / 20.0)
    for _ in range(MOMENTS):
        due = at_hand = 0.0
        for load in loads:
            queued = _queued(load, start_s + step_s) - _queued(load, start_s)
            expected, before = _expected(load, start_s + step_s), _expected(load, start_s)
            due += queued + expected - before
            # Work that arrives after S cannot be done before S, even if replicas are idle until then.
            at_hand += queued + max(0.0, min(expected, _work(load) * start_s) - before)
        most = max(most, (due - min(spare, at_hand)) / (capacity * step_s))
        step_s *= 1.6
    return most


def _work(load: TierLoad) -> float:
    """Return the device-seconds per second of a tier that may be paid for."""
    return load.tier.weight * load.service.device_s * load.rate


def _queued(load: TierLoad, left_s: float) -> float:
    """Return the device-seconds of the waiting calls that are due within `left_s`."""
    return load.tier.weight * load.service.device_s * due_by(load.backlog, left_s)


def _expected(load: TierLoad, left_s: float) -> float:
    """Return the device-seconds of the calls that will have arrived and be due within `left_s`."""
    return _work(load) * max(0.0, left_s - load.tier.target_s)


def _by_waiting(pool: Scaling, loads: Sequence[TierLoad]) -> float:
    """Return the largest number over the tiers that cannot wait for a new replica."""
    most, work = 0.0, 0.0
    for index, load in enumerate(loads):
        work += _work(load)
        last_of_band = index + 1 == len(loads) or loads[index + 1].tier.band > load.tier.band
        if not last_of_band or work <= 0.0:
            continue
        for each in loads[: index + 1]:
            if each.tier.band == load.tier.band and each.rate > 0.0 and each.tier.target_s < pool.start_s:
                most = max(most, _enough(pool, work, each))
    return most


def _enough(pool: Scaling, work: float, load: TierLoad) -> float:
    """Return the smallest number of replicas with which at most `miss_share` of the calls wait too long."""
    low, high = floor(work / pool.capacity), pool.maximum
    if low >= high:
        return float(high)
    slack_s = max(0.0, load.tier.target_s - load.service.latency_s)
    while high - low > 1:
        middle = (low + high) // 2
        if _too_late(middle * pool.capacity, work, slack_s / load.service.device_s) <= pool.miss_share:
            high = middle
        else:
            low = middle
    return float(high)


def _too_late(servers: float, work: float, slack: float) -> float:
    """Return the probability of waiting longer than `slack` service times. The first factor is that of waiting at
    all.
    """
    if servers <= work:
        return 1.0
    excess = (servers - work) / sqrt(work)
    density = exp(-excess * excess / 2.0) / sqrt(2.0 * pi)
    below = 1.0 - erfc(excess / sqrt(2.0)) / 2.0
    waits = density / (density + excess * below)
    return waits * exp(-2.0 * (servers - work) * slack)
