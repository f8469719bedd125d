"""Calls for many models in virtual time, and memory for some of them: loads by the rule beside two others.

Hindsight knows every later call (Belady 1966). The odds policy knows how likely each model is, but not what comes: no
policy that cannot see the future does better on independent calls. `python -m tests.policies.memory_sim` prints the
loads of all three.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from oriel_policies.upstreams.model_memory import ModelMemory

LOAD_S = 2.0
DEVICE = "host"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a run came to. loads: including the first of each model. refused: calls that found no room."""

    loads: int
    refused: int


def zipf_trace(seed: int, *, models: int, alpha: float, per_s: float, calls: int) -> list[tuple[float, int]]:
    """Return (time, model) of independent calls at random times; model k is called as often as (k + 1)^-alpha."""
    chance = random.Random(seed)
    sums = list(accumulate((rank + 1) ** -alpha for rank in range(models)))
    now, trace = 0.0, []
    for _ in range(calls):
        now += chance.expovariate(per_s)
        trace.append((now, bisect_right(sums, chance.random() * sums[-1])))
    return trace


def by_rule(trace: Sequence[tuple[float, int]], room: int, *, young_s: float) -> Counts:
    """Run the rule with memory for `room` models of the same size."""
    memory = ModelMemory({DEVICE: room}, young_s=young_s, young_loads=0.0)
    inside: set[str] = set()
    loads = refused = 0
    for now, number in trace:
        name = str(number)
        memory.called(name, 1, now)
        if name in inside:
            continue
        share = memory.request(name, {DEVICE: 1})
        plan = memory.plan(share, now, lambda _: False)
        if plan.refused:
            refused += 1
            continue
        for victim in plan.victims:
            memory.release(victim)
            inside.discard(victim.name)
        if plan.victims:
            assert memory.plan(share, now, lambda _: False).starts
        memory.loaded(share, {DEVICE: 1}, LOAD_S, now)
        inside.add(name)
        loads += 1
    return Counts(loads=loads, refused=refused)


def in_hindsight(trace: Sequence[tuple[float, int]], room: int, *, young_s: float) -> Counts:
    """Evict the model whose next call is the furthest away, under the same rule about young models."""
    following: list[float] = [inf] * len(trace)
    seen: dict[int, int] = {}
    for index in range(len(trace) - 1, -1, -1):
        number = trace[index][1]
        following[index] = seen.get(number, inf)
        seen[number] = index
    return _evicting(trace, room, young_s, lambda index, number: following[index])


def by_odds(trace: Sequence[tuple[float, int]], room: int, *, young_s: float) -> Counts:
    """Evict the model that is the least likely to be called, under the same rule about young models."""
    return _evicting(trace, room, young_s, lambda index, number: number)


def _evicting(
    trace: Sequence[tuple[float, int]], room: int, young_s: float, rank: Callable[[int, int], float]
) -> Counts:
    """Evict the model with the highest rank at its last call."""
    inside: dict[int, tuple[float, float]] = {}  # model -> (its rank, when it was loaded)
    loads = refused = 0
    for index, (now, number) in enumerate(trace):
        if number in inside:
            inside[number] = rank(index, number), inside[number][1]
            continue
        if len(inside) >= room:
            old = [each for each, (_, since_s) in inside.items() if since_s + young_s <= now]
            if not old:
                refused += 1
                continue
            del inside[max(old, key=lambda each: inside[each][0])]
        inside[number] = rank(index, number), now
        loads += 1
    return Counts(loads=loads, refused=refused)


def main() -> None:
    """Print loads and refused calls of each policy, and the ratios of loads."""
    print("models room alpha calls/s young |  rule refused | hindsight refused | odds | rule/hindsight rule/odds")  # noqa: T201
    for models, room in ((20, 10), (50, 25), (100, 30)):
        for alpha in (0.8, 1.0, 1.2):
            for per_s, young_s in ((0.2, 0.0), (0.2, 60.0), (1.0, 60.0), (10.0, 60.0)):
                trace = zipf_trace(1, models=models, alpha=alpha, per_s=per_s, calls=8_000)
                ours = by_rule(trace, room, young_s=young_s)
                best = in_hindsight(trace, room, young_s=young_s)
                odds = by_odds(trace, room, young_s=young_s)
                print(  # noqa: T201
                    f"{models:6} {room:4} {alpha:5} {per_s:7} {young_s:5} | {ours.loads:5} {ours.refused:7} |"
                    f" {best.loads:9} {best.refused:7} | {odds.loads:4} |"
                    f" {ours.loads / best.loads:14.2f} {ours.loads / odds.loads:9.2f}"
                )


if __name__ == "__main__":
    main()
