"""A full pool in virtual time: as many calls as the limit allows, with one server behind it."""

import heapq
import random
from collections import deque
from dataclasses import dataclass

from oriel_policies.waiting.concurrency import LearnedLimit

RTT_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A server that takes several calls at once, each for `service_s`."""

    slots: int
    service_s: float

    def seconds(self, rows: int) -> float:
        return self.service_s

    def rows(self, waiting: int) -> int:
        return min(1, waiting)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A server that takes all waiting calls, up to `most`, as one batch; it takes `fixed_s`, and `row_s` per call."""

    fixed_s: float
    row_s: float
    most: int
    slots: int = 1

    def seconds(self, rows: int) -> float:
        return self.fixed_s + rows * self.row_s

    def rows(self, waiting: int) -> int:
        return min(waiting, self.most)


Server = Rate | Batches


@dataclass(kw_only=True)
class Run:
    """Figures of a run. per_s: answered calls per second. waiting: mean number of calls that wait in the server. limit:
    mean.
    """

    per_s: float
    waiting: float
    limit: float


def run(
    server: Server,
    limit: int | LearnedLimit,
    *,
    seconds: float,
    skip_s: float = 0.0,
    start_s: float = 0.0,
    noise: float = 0.05,
    seed: int = 1,
) -> Run:
    """Offer more calls than the pool can take, for `seconds` from `start_s` on. The figures leave out the first
    `skip_s`.
    """
    skip_s, ends_s = start_s + skip_s, start_s + seconds
    chance = random.Random(seed)
    events: list[tuple[float, int, list[float]]] = []  # when; what becomes free; begins of the calls in it
    waiting: deque[float] = deque()
    free, inflight, sequence, now = server.slots, 0, 0, start_s
    answered, waited, limits = 0, 0.0, 0.0

    def at(when: float, calls: list[float]) -> None:
        nonlocal sequence
        sequence += 1
        heapq.heappush(events, (when, sequence, calls))

    def most() -> int:
        return limit.limit if isinstance(limit, LearnedLimit) else limit

    def admit() -> None:
        nonlocal inflight
        while inflight < most():
            inflight += 1
            at(now + RTT_S, [-now - 1.0])  # negative: it arrives at the server

    admit()
    while now < ends_s:
        when, _, calls = heapq.heappop(events)
        if when > skip_s:
            since = when - max(now, skip_s)
            waited += since * len(waiting)
            limits += since * most()
        now = when
        if calls[0] < 0.0:
            waiting.append(-calls[0] - 1.0)
        else:
            free += 1
            for began in calls:
                inflight -= 1
                answered += now >= skip_s
                if isinstance(limit, LearnedLimit):
                    limit.note_finished(now - began, now)
            admit()
        # Whatever arrives at the same moment is in the same batch.
        while free and waiting and not (events and events[0][0] <= now + 1e-4 and events[0][2][0] < 0.0):
            free -= 1
            batch = [waiting.popleft() for _ in range(server.rows(len(waiting)))]
            at(now + server.seconds(len(batch)) * chance.lognormvariate(0.0, noise), batch)
    span = ends_s - skip_s
    return Run(per_s=answered / span, waiting=waited / span, limit=limits / span)
