"""Callers of more models than fit in memory, in virtual time. Each sends its next call when the last one is answered.

`python -m tests.policies.demand_sim` prints the shares of calls that were refused or waited: by the rule, by the least
recently used model, and with the best models in memory for ever.
"""

import heapq
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate

from oriel_policies.upstreams.model_memory import MemoryPlan, MemoryShare, ModelMemory, ShareState

DEVICE = "host"
PAUSE_S = 0.25  # after a refused load
SERVED_S, REFUSED_S, LOAD_S, CLOSE_S = 0.01, 0.002, 1.0, 0.05


class LeastRecentlyUsed(ModelMemory):
    """Takes out what was called the longest ago and has no call now."""

    def plan(self, share: MemoryShare, now: float, leased: Callable[[str], bool]) -> MemoryPlan:
        """Evict one model if there is no room: all have the same size."""
        room = self.budgets[DEVICE] - sum(each.state is not ShareState.LEAVING for each in self.shares())
        victims: tuple[MemoryShare, ...] = ()
        if room < 0:
            idle = [each for each in self.shares() if each.state is ShareState.LOADED and not leased(each.name)]
            if not idle:
                self.release(share)
                return MemoryPlan(refused=True, retry_s=1.0)
            victims = (min(idle, key=lambda each: self._use(each.name, now).called_s),)
            victims[0].state = ShareState.LEAVING
        starts = self.used_bytes(DEVICE) < self.budgets[DEVICE]
        share.state = ShareState.LOADING if starts else ShareState.WAITING
        return MemoryPlan(starts=starts, victims=victims)


class Callers:
    """The callers, and a server with memory for some models.

    favourite: the most called model. Its calls that were refused after its first load are in `favourite_refused`.
    """

    def __init__(self, memory: ModelMemory, *, seed: int, models: int = 30, callers: int = 12) -> None:
        self._memory = memory
        self._chance = random.Random(seed)
        self._sums = list(accumulate(1.0 / (rank + 1) for rank in range(models)))
        self.order = [str(rank) for rank in range(models)]  # the most called first
        self.counts: Counter[str] = Counter()
        self.favourite_refused = self.loads = 0
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._inside: set[str] = set()
        self._seen: set[str] = set()
        self._active: Counter[str] = Counter()
        self._new_calls: Counter[str] = Counter()
        self._waiting: dict[str, int] = {}
        self._shares: dict[str, MemoryShare] = {}
        self._paused: dict[str, float] = {}
        for _ in range(callers):
            self._at(self._chance.random() * 0.01, self._call)

    def run(self, until_s: float) -> float:
        """Run until then; return the share of calls since the last time that were refused or waited."""
        before = self.counts.copy()
        while self._events and self._events[0][0] <= until_s:
            self._now, _, event = heapq.heappop(self._events)
            event()
        since = self.counts - before
        return 1.0 - since["served"] / since.total()

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (self._now + delay_s, self._numbers, event))

    def _call(self) -> None:
        name = self.order[bisect_right(self._sums, self._chance.random() * self._sums[-1])]
        self._new_calls[name] += 1
        if name in self._inside:
            self.counts["served"] += 1
            self._serve(name, SERVED_S * (0.5 + self._chance.random()))
        elif name in self._waiting or self._paused.get(name, 0.0) <= self._now:
            first = name not in self._waiting
            self._waiting[name] = self._waiting.get(name, 0) + 1
            self.counts["waited"] += 1
            if first:
                self._load(name)
        else:
            self._refuse(name)

    def _serve(self, name: str, takes_s: float) -> None:
        self._active[name] += 1

        def end() -> None:
            self._active[name] -= 1
            self._call()

        self._at(takes_s, end)

    def _refuse(self, name: str) -> None:
        self.counts["refused"] += 1
        self.favourite_refused += name == self.order[0] and name in self._seen
        self._at(REFUSED_S, self._call)

    def _load(self, name: str) -> None:
        for model, calls in self._new_calls.items():
            self._memory.called(model, calls, self._now)
        self._new_calls.clear()
        share = self._shares.get(name) or self._memory.request(name, {DEVICE: 1})
        plan = self._memory.plan(share, self._now, lambda model: model in self._waiting or self._active[model] > 0)
        if plan.refused:
            self._shares.pop(name, None)
            self._paused[name] = self._now + PAUSE_S
            for _ in range(self._waiting.pop(name)):
                self.counts["waited"] -= 1
                self._refuse(name)
            return
        self._shares[name] = share
        for victim in plan.victims:
            self._inside.discard(victim.name)
            self._at(CLOSE_S, partial(self._close, victim))
        if plan.starts:
            self._at(LOAD_S * (0.5 + self._chance.random()), lambda: self._loaded(name))

    def _close(self, victim: MemoryShare) -> None:
        self._memory.release(victim)
        self._go_on()

    def _go_on(self) -> None:
        for name, share in list(self._shares.items()):
            if share.state is ShareState.WAITING:
                self._load(name)

    def _loaded(self, name: str) -> None:
        self._memory.loaded(self._shares.pop(name), {DEVICE: 1}, LOAD_S, self._now)
        self.loads += 1
        self._inside.add(name)
        self._seen.add(name)
        for _ in range(self._waiting.pop(name)):
            self._serve(name, SERVED_S)
        self._go_on()


def main() -> None:
    """Print the shares of three minutes."""
    sums = list(accumulate(1.0 / rank for rank in range(1, 31)))
    print(f"the best seven models for ever: {1 - sums[6] / sums[-1]:.1%} refused")  # noqa: T201
    for rule in (ModelMemory, LeastRecentlyUsed):
        for seed in (1, 2, 3):
            callers = Callers(rule({DEVICE: 7}), seed=seed)
            bad = callers.run(180.0)
            served_s = callers.counts["served"] / 180
            print(  # noqa: T201
                f"{rule.__name__} {seed}: {bad:.1%} refused or waiting, {callers.loads} loads,"
                f" {served_s:.0f} served a second, {callers.favourite_refused} refused of the most called"
            )


if __name__ == "__main__":
    main()
