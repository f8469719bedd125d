"""Open-loop loads for the batcher in virtual time, and the most that any policy could answer of them in time.

The real batcher, queue and batch plan on a virtual clock; only the device is made up: a batch of n rows takes a + b*n,
times a noise of some percent. Nobody waits for an answer before sending the next request. Two tiers, each with its own
deadline; a request that is answered late counts for nothing.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import InferenceError
from oriel_inference.simulated import LoopTimes, SimulatedHost, SimulatedLoop, SimulatedModel, SimulatedSession
from oriel_policies.waiting.batch import BatchBounds, ServiceCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A batch of n rows takes fixed_s + per_row_s * n. noise: relative standard deviation."""

    name: str
    fixed_s: float
    per_row_s: float
    max_rows: int
    deadlines_s: tuple[float, float]  # gold, bronze
    noise: float = 0.05

    def seconds(self, rows: int) -> float:
        return self.fixed_s + self.per_row_s * rows

    @property
    def capacity(self) -> float:
        """Rows per second in full batches."""
        return self.max_rows / self.seconds(self.max_rows)


DEVICES = (
    # dominated by loading its weights: batching is nearly free
    Device(name="weight-bound MLP", fixed_s=0.004, per_row_s=0.0002, max_rows=64, deadlines_s=(0.05, 0.2)),
    # five milliseconds alone, batching brings a third
    Device(name="5 ms transformer", fixed_s=0.0015, per_row_s=0.0035, max_rows=16, deadlines_s=(0.1, 0.4)),
    # deadlines that leave room for two full batches at most
    Device(name="tight deadlines", fixed_s=0.010, per_row_s=0.001, max_rows=32, deadlines_s=(0.06, 0.09)),
    # everybody is promised the same
    Device(name="one deadline", fixed_s=0.005, per_row_s=0.001, max_rows=16, deadlines_s=(0.1, 0.1), noise=0.15),
    # about the two models of benchmarks/goodput.py, with its deadlines: two and six times the largest batch
    Device(name="bench encoder", fixed_s=0.004, per_row_s=0.00128, max_rows=64, deadlines_s=(0.172, 0.517)),
    Device(name="bench MLP", fixed_s=0.0115, per_row_s=0.00035, max_rows=64, deadlines_s=(0.068, 0.203)),
)


def poisson(rate: float, until_s: float, chance: random.Random) -> Iterator[float]:
    at = chance.expovariate(rate)
    while at < until_s:
        yield at
        at += chance.expovariate(rate)


@dataclass(slots=True)
class Found:
    """The number of requests by tier: those that came, and those that were answered in time."""

    came: list[int]
    good: list[int]

    def goodput(self) -> float:
        return sum(self.good)


def simulate(device: Device, arrivals: Sequence[tuple[float, int]], seed: int) -> Found:
    """Let the batcher serve these arrivals, each a second and a tier."""
    clock, chance = VirtualClock(), random.Random(seed)
    host = SimulatedHost(SimulatedLoop(clock, 0.0, chance), LoopTimes())

    def seconds(rows: int) -> float:
        return device.seconds(rows) * max(0.5, chance.gauss(1.0, device.noise))

    bounds = BatchBounds(max_rows=device.max_rows, max_delay_s=0.0)
    batcher = Batcher(
        SimulatedModel(name="m", bounds=bounds, instances=1, seconds=seconds).spec(),
        [SimulatedSession(host, seconds)],
        Machine(clock=host, cores=Cores(1), workers=host, inline_s=0.0),
        curve=ServiceCurve(),
    )
    found = Found([0, 0], [0, 0])
    begin_s = clock.now()
    row = np.zeros((1, 1), np.float32)

    def submit(tier: int) -> None:
        now = clock.now()
        found.came[tier] += 1

        def reply(result: Answer | InferenceError) -> None:
            if isinstance(result, Answer) and clock.now() <= deadline:
                found.good[tier] += 1

        deadline = now + device.deadlines_s[tier]
        call = Call(
            inputs={"x": row},
            rows=1,
            signature=None,
            arrived_s=now,
            deadline=deadline,
            reply=reply,
            band=tier,
        )
        batcher.submit(call)

    for at_s, tier in arrivals:
        clock.advance(max(0.0, begin_s + at_s - clock.now()))
        submit(tier)
        clock.run()
    clock.advance(10 * max(device.deadlines_s))
    return found


def most_in_time(arrivals: Sequence[tuple[float, int]], rate: float, deadlines_s: Sequence[float]) -> int:
    """The most requests that a device of at most `rate` rows per second can answer in time, whatever its policy.

    Batches and their latency are left out: the device has a slot for one row every 1 / rate seconds, and a slot serves
    any request whose time from arrival to deadline it meets. The earliest deadline first fills such slots best (Glover
    1967): requests and slots are a convex bipartite graph. So a real device may do less, and none does more.
    """
    step_s = 1.0 / rate
    served, waiting, at = 0, list[float](), 0
    slot = 0
    while at < len(arrivals) or waiting:
        if not waiting:
            slot = max(slot, int(arrivals[at][0] / step_s))
        begin_s = slot * step_s
        while at < len(arrivals) and arrivals[at][0] < begin_s + step_s:
            heappush(waiting, arrivals[at][0] + deadlines_s[arrivals[at][1]])
            at += 1
        while waiting and waiting[0] < begin_s:
            heappop(waiting)
        if waiting:
            heappop(waiting)
            served += 1
        slot += 1
    return served
