"""Replicas and the calls that they serve, in virtual time.

Each replica serves one call at a time, for a constant time. Calls wait in one queue: the most urgent tier first, in a
tier the earliest deadline. A call that could not be in time any more when its turn comes is dropped. A replica that is
ordered serves after `start_s`, and costs from the moment when it is ordered.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from oriel_policies.scaling import DemandCounter


class Cluster:
    """The state at one moment. arrivals: (seconds, index of the tier) in order of time; targets: seconds by tier.

    counters: demand as the gateways count it, calls being spread over them; none are kept for other policies.
    met, offered: calls by tier that arrived since `measured_from`. busy_s, area: integrals of serving replicas and of
    all calls that wait or are served. lost, arrived: calls of the whole load.
    """

    def __init__(
        self,
        arrivals: Sequence[tuple[float, int]],
        targets: Sequence[float],
        names: Sequence[str],
        *,
        service_s: float,
        start_s: float,
        replicas: int,
        measured_from: float,
        gateways: int = 0,
    ) -> None:
        self.arrivals = arrivals
        self.targets = targets
        self.names = names
        self.service_s = service_s
        self.start_s = start_s
        self.measured_from = measured_from
        self.counters = [DemandCounter(0.0) for _ in range(gateways)]
        self.ready = replicas
        self.starting: deque[float] = deque()
        self.finishing: list[float] = []
        self.waiting: list[list[tuple[float, int]]] = [[] for _ in targets]  # (deadline, number) by tier
        self.next = 0
        self.now = 0.0
        self.met = [0] * len(targets)
        self.offered = [0] * len(targets)
        self.lost = 0
        self.replica_s = 0.0
        self.busy_s = 0.0
        self.area = 0.0
        self.arrived = 0

    @property
    def replicas(self) -> int:
        """Count the replicas that are ready and those that are starting."""
        return self.ready + len(self.starting)

    def copy(self) -> "Cluster":
        """Return a copy of the state, without counters, to try something without changing this one."""
        other = Cluster(
            self.arrivals,
            self.targets,
            self.names,
            service_s=self.service_s,
            start_s=self.start_s,
            replicas=self.ready,
            measured_from=self.measured_from,
        )
        other.starting = deque(self.starting)
        other.finishing = list(self.finishing)
        other.waiting = [list(each) for each in self.waiting]
        other.next, other.now, other.arrived = self.next, self.now, self.arrived
        other.met, other.offered = list(self.met), list(self.offered)
        other.lost = self.lost
        other.replica_s, other.busy_s, other.area = self.replica_s, self.busy_s, self.area
        return other

    def scale(self, replicas: int) -> None:
        """Order replicas, or stop some: first those that start. A call that is being served is finished."""
        while self.replicas < replicas:
            self.starting.append(self.now + self.start_s)
        while self.replicas > replicas and self.starting:
            self.starting.pop()
        self.ready = min(self.ready, replicas)

    def advance(self, until: float) -> None:
        """Advance to `until`, about a second later. Replicas that become ready in between serve from `until` on."""
        arrivals, finishing, count = self.arrivals, self.finishing, len(self.arrivals)
        now = self.now
        while True:
            arrival = arrivals[self.next][0] if self.next < count else inf
            end = finishing[0] if finishing else inf
            moment = arrival if arrival < end else end
            if moment > until:
                break
            self._pass(moment - now)
            now = self.now = moment
            if end <= arrival:
                heappop(finishing)
                if self.counters:
                    self.counters[0].ended(now)
                    self.counters[0].executed(1, self.service_s, now)
                self._serve()
            else:
                self._arrive(arrivals[self.next][1])
        self._pass(until - now)
        self.now = until
        while self.starting and self.starting[0] <= until + 1e-9:
            self.starting.popleft()
            self.ready += 1
        self._drop_late()
        self._serve()

    def _pass(self, seconds: float) -> None:
        busy = len(self.finishing)
        self.replica_s += seconds * self.replicas * (self.now >= self.measured_from)
        self.busy_s += seconds * busy
        self.area += seconds * (busy + sum(map(len, self.waiting)))

    def _arrive(self, tier: int) -> None:
        number, deadline = self.next, self.now + self.targets[tier]
        self.next += 1
        self.arrived += 1
        if self.now >= self.measured_from:
            self.offered[tier] += 1
        heappush(self.waiting[tier], (deadline, number))
        if self.counters:
            counter = self._counter(number)
            counter.arrived(self.names[tier], self.now)
            counter.queued(self.names[tier], deadline)
        self._serve()

    def _counter(self, number: int) -> DemandCounter:
        return self.counters[number % len(self.counters)]

    def _serve(self) -> None:
        finishing = self.finishing
        while len(finishing) < self.ready:
            tier = next((index for index, each in enumerate(self.waiting) if each), -1)
            if tier < 0:
                return
            deadline, number = heappop(self.waiting[tier])
            in_time = self.now + self.service_s <= deadline + 1e-9
            self._leave(tier, deadline, number, in_time)
            if in_time:
                heappush(finishing, self.now + self.service_s)
                if self.arrivals[number][0] >= self.measured_from:
                    self.met[tier] += 1
                if self.counters:
                    self.counters[0].started()

    def _drop_late(self) -> None:
        for tier, waiting in enumerate(self.waiting):
            while waiting and waiting[0][0] < self.now + self.service_s - 1e-9:
                deadline, number = heappop(waiting)
                self._leave(tier, deadline, number, False)

    def _leave(self, tier: int, deadline: float, number: int, in_time: bool) -> None:
        self.lost += not in_time
        if not self.counters:
            return
        counter = self._counter(number)
        counter.left(self.names[tier], deadline)
        if not in_time:
            counter.refused(self.names[tier], self.now)
