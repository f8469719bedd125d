"""The scaling rules beside Knative's, as its source describes them, on one load in virtual time."""

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import ceil, inf
from random import Random

from oriel_policies.documents import compile_documents
from oriel_policies.scaling.counter import DemandCounter
from oriel_tools.simulate.autoscaled import Autoscaled

SERVICE_S, TARGET_S, START_S = 0.1, 0.5, 20.0
WARM_UP_S, RAMP_S, MOST = 600, 300, 100
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 500
[pools.p]
discover = "dns:127.0.0.1:1"
[pools.p.scaling]
minimum = 1
maximum = 100
start_ms = 20000
"""


def ramp(seed: int) -> Iterator[float]:
    """Yield when calls come: 10 a second for ten minutes, and then up to 150 a second within five."""
    chance, now = Random(seed), 0.0
    while (now := now + chance.expovariate(150.0)) < WARM_UP_S + RAMP_S:
        if chance.random() * 150.0 < 10.0 + 140.0 * max(0.0, now - WARM_UP_S) / RAMP_S:
            yield now


class Cluster:
    """Replicas that serve one call each; what could not be in time any more when its turn comes is dropped.

    met, offered: calls since the warm-up. replica_s: their cost since then, starts included. area: integral of all
    calls that wait or are served.
    """

    def __init__(self, replicas: int) -> None:
        self.counter = DemandCounter(0.0)
        self.ready = replicas
        self.met = self.offered = 0
        self.replica_s = self.area = 0.0
        self._now = 0.0
        self._waiting: deque[tuple[float, float]] = deque()  # (arrived, deadline)
        self._ends: list[float] = []

    def advance(self, until: float, arrivals: deque[float], replicas: int) -> None:
        """Serve until a time with so many ready replicas. replicas: ready and starting ones, which cost."""
        while (now := min(arrivals[0] if arrivals else inf, self._ends[0] if self._ends else inf)) <= until:
            self._pass(now)
            if self._ends and self._ends[0] == now:
                heappop(self._ends)
                self.counter.ended(now)
                self.counter.executed(1, SERVICE_S, now)
            else:
                arrived = arrivals.popleft()
                self.offered += arrived >= WARM_UP_S
                self._waiting.append((arrived, arrived + TARGET_S))
                self.counter.arrived("gold", now)
                self.counter.queued("gold", arrived + TARGET_S)
            self._serve(now)
        self._pass(until)
        self._serve(until)
        self.replica_s += replicas * (until > WARM_UP_S)

    def _pass(self, now: float) -> None:
        self.area += (now - self._now) * (len(self._ends) + len(self._waiting))
        self._now = now

    def _serve(self, now: float) -> None:
        while self._waiting and (len(self._ends) < self.ready or self._waiting[0][1] < now + SERVICE_S):
            arrived, deadline = self._waiting.popleft()
            self.counter.left("gold", deadline)
            if now + SERVICE_S > deadline:
                self.counter.refused("gold", now)
                continue
            heappush(self._ends, now + SERVICE_S)
            self.counter.started()
            self.met += arrived >= WARM_UP_S


def by_deadline(arrivals: deque[float], replicas: int) -> Cluster:
    """Run the load with the rules of a pool."""
    cluster = Cluster(replicas)

    def more(number: int) -> None:
        cluster.ready += number

    scaled = Autoscaled(
        compile_documents({"all.toml": DOCUMENTS.encode()}),
        "p",
        begins_s=0.0,
        replicas=replicas,
        record=cluster.counter.record,
        change=more,
    )
    return played(cluster, arrivals, scaled.second, lambda: scaled.replicas)


def by_concurrency(arrivals: deque[float], replicas: int) -> Cluster:
    """Run the load with Knative's autoscaler: 0.7 calls at once per replica, as a mean of 60 s, or of 6 s in panic.

    Panic begins when the short window wants twice the ready replicas and lasts a minute beyond that; in it the number
    never falls. It decides every 2 s and falls to half at most.
    """
    cluster, areas, starting = Cluster(replicas), deque([0.0], maxlen=61), deque[float]()
    panic_until, most = -1, 0

    def mean(seconds: int) -> float:
        seconds = min(seconds, len(areas) - 1)
        return (areas[-1] - areas[-1 - seconds]) / seconds / 0.7

    def second(number: int) -> None:
        nonlocal panic_until, most
        while starting and starting[0] <= number:
            starting.popleft()
            cluster.ready += 1
        areas.append(cluster.area)
        if number % 2:
            return
        wanted, urgent = max(ceil(mean(60)), cluster.ready // 2), ceil(mean(6))
        if urgent >= 2 * cluster.ready:
            most = 0 if number > panic_until else most
            panic_until = number + 60
        if number <= panic_until:
            wanted = most = max(most, cluster.ready, urgent, wanted)
        wanted = max(1, min(MOST, wanted))
        while cluster.ready + len(starting) < wanted:
            starting.append(number + START_S)
        while cluster.ready + len(starting) > wanted and starting:
            starting.pop()
        cluster.ready = min(cluster.ready, wanted)

    return played(cluster, arrivals, second, lambda: cluster.ready + len(starting))


def played(
    cluster: Cluster, arrivals: deque[float], second: Callable[[int], None], replicas: Callable[[], int]
) -> Cluster:
    for number in range(1, WARM_UP_S + RAMP_S + 1):
        cluster.advance(float(number), arrivals, replicas())
        second(number)
    return cluster


def test_a_ramp_is_served_with_far_fewer_replicas_than_by_concurrency() -> None:
    """Virtual time and a seed, so the figures are the same everywhere: see the results of serverless pools."""
    calls = list(ramp(1))
    ours, theirs = by_deadline(deque(calls), 2), by_concurrency(deque(calls), 2)
    assert ours.offered == theirs.offered > 20_000
    assert ours.met >= 0.99 * ours.offered and theirs.met >= 0.99 * theirs.offered
    assert ours.replica_s <= 0.8 * theirs.replica_s
