"""Replicas of a simulated load that follow the `scaling` table of a pool, through the rules of `contestants`."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oriel_policies.documents import Snapshot
from oriel_policies.scaling import PoolScaling, TierScaling
from oriel_tools.simulate.contestants import ByDeadline, Counter


@dataclass(frozen=True, slots=True)
class _Read:
    record: Callable[[float], Any]


class Autoscaled:
    """The replicas of one pool. start: makes one ready. stop: takes so many of the ready ones away.

    At least one replica stays: what becomes of calls without any is not simulated. A replica costs from its order.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        pool: str,
        *,
        begins_s: float,
        replicas: int,
        record: Callable[[float], Any],
        start: Callable[[], None],
        stop: Callable[[int], None],
    ) -> None:
        """begins_s: what the wall clock shows at second 0 of the clock. replicas: ready ones at the beginning."""
        table = snapshot.pools[pool].scaling
        assert table is not None
        scaling = PoolScaling(
            minimum=max(1, table.minimum),
            maximum=table.maximum,
            spare=table.spare,
            start_s=table.start_s,
            capacity=table.capacity,
            miss_share=table.miss_share,
            keep_alive_s=table.keep_alive_s,
        )
        tiers = {
            name: TierScaling(band=tier.band, target_s=tier.target_s, weight=table.weights.get(name, 1.0))
            for name, tier in snapshot.tiers.items()
        }
        self.counters: Sequence[Counter] = [_Read(record)]
        self.ready = replicas
        self.most = replicas
        self._rules = ByDeadline(scaling, tiers, table.schedule, begins_s)
        self._start_s = table.start_s
        self._starting: deque[float] = deque()
        self._now = 0.0
        self._start = start
        self._stop = stop

    @property
    def replicas(self) -> int:
        """Count the ready ones and those that are starting."""
        return self.ready + len(self._starting)

    def second(self, number: int) -> None:
        """Make ready what has started by now, and decide anew. number: whole seconds of the clock."""
        self._now = float(number)
        while self._starting and self._starting[0] <= self._now:
            self._starting.popleft()
            self.ready += 1
            self._start()
        self._rules.second(self, number)
        self.most = max(self.most, self.replicas)

    def scale(self, replicas: int) -> None:
        """Order replicas, or stop some: first those that are starting."""
        while self.replicas < replicas:
            self._starting.append(self._now + self._start_s)
        while self.replicas > replicas and self._starting:
            self._starting.pop()
        if self.ready > replicas:
            self._stop(self.ready - replicas)
            self.ready = replicas
