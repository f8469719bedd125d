"""Goodput of the batcher in virtual time: answers within their deadline per second, against plain FIFO.

    python benchmarks/goodput.py simulation [--loads 0.8,1,1.5,2,10] [--seeds 5] [--periods 12]
        [--arrivals poisson,bursty]

The real batcher, queue and batch plan on a virtual clock; only the device is made up: a batch of n rows takes a + b*n,
times a noise of some percent. Arrivals are open-loop: nobody waits for an answer before sending the next request. Two
tiers, each with its own deadline. Load 1 is what the device does with full batches. A request that is answered late
counts for nothing. Two rivals, both the same batcher with one tier, no order but arrival, no knowledge of service times
and the best of several fixed delays: `fifo` still drops what has expired in the queue, `blind` knows no deadlines, as
a server without queue policies. `most`: what no policy can exceed, not even one that knows all arrivals in advance,
see `most_in_time`; `/ blind` beside it is what could be reached at best.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
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
    # about the two models of goodput.py servers, with its deadlines: two and six times the largest batch
    Device(name="bench encoder", fixed_s=0.004, per_row_s=0.00128, max_rows=64, deadlines_s=(0.172, 0.517)),
    Device(name="bench MLP", fixed_s=0.0115, per_row_s=0.00035, max_rows=64, deadlines_s=(0.068, 0.203)),
)


class NoCurve(ServiceCurve):
    """The curve of a server that does not learn."""

    def observe(self, rows: int, seconds: float) -> None:
        pass


def poisson(rate: float, until_s: float, chance: random.Random) -> Iterator[float]:
    at = chance.expovariate(rate)
    while at < until_s:
        yield at
        at += chance.expovariate(rate)


def bursty(rate: float, until_s: float, chance: random.Random) -> Iterator[float]:
    """A quarter of the time at three times the rate, else at a third; bursts of about ten batches' time."""
    start, burst = 0.0, False
    while start < until_s:
        length = chance.expovariate(1.0 / (until_s / (60 if burst else 20)))
        own = rate * (3.0 if burst else 1.0 / 3.0)
        for at in poisson(own, length, chance):
            if start + at < until_s:
                yield start + at
        start, burst = start + length, not burst


ARRIVALS = {"poisson": poisson, "bursty": bursty}


@dataclass(slots=True)
class Found:
    """The number of requests by tier: those that came, and those that were answered in time."""

    came: list[int]
    good: list[int]

    def goodput(self) -> float:
        return sum(self.good)


def simulate(
    device: Device,
    arrivals: Sequence[tuple[float, int]],
    seed: int,
    *,
    fifo_delay_s: float | None = None,
    blind: bool = False,
) -> Found:
    """arrivals: (second, tier). fifo_delay_s: None for the batcher as it is."""
    clock, chance = VirtualClock(), random.Random(seed)
    host = SimulatedHost(SimulatedLoop(clock, 0.0, chance), LoopTimes())
    plain = fifo_delay_s is not None

    def seconds(rows: int) -> float:
        return device.seconds(rows) * max(0.5, chance.gauss(1.0, device.noise))

    bounds = BatchBounds(max_rows=device.max_rows, max_delay_s=fifo_delay_s or 0.0)
    batcher = Batcher(
        SimulatedModel(name="m", bounds=bounds, instances=1, seconds=seconds).spec(),
        [SimulatedSession(host, seconds)],
        clock=host,
        cores=Cores(1),
        workers=host,
        curve=NoCurve() if plain else ServiceCurve(),
        inline_s=0.0,
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
            deadline=1e9 if blind else deadline,
            reply=reply,
            band=0 if plain else tier,
        )
        if plain:
            call.ticket.order = now
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


FIFO_DELAYS_S = (0.0, 0.003, 0.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0.8,1,1.5,2,10")
    parser.add_argument("--seeds", type=int, default=3)
    # blind, fifo, ours: goodput, 1 is capacity; gold, bronze: the share of each that ours answered in time
    parser.add_argument("--periods", type=float, default=12.0, help="length of a run, in longest deadlines")
    parser.add_argument("--arrivals", default="poisson,bursty")
    parser.add_argument("--gold", type=float, default=0.5, help="gold share of the requests")
    parser.add_argument("--device", action="append", help="part of a device's name")
    args = parser.parse_args()
    for device in DEVICES:
        if args.device and not any(part in device.name for part in args.device):
            continue
        until_s = args.periods * max(device.deadlines_s)
        print(f"{device.name}: {device.capacity:.0f} rows/s, deadlines {device.deadlines_s} s")
        heads = ("blind", "fifo", "ours", "most", "/ blind", "/ fifo", "most / b", "gold", "bronze")
        print(f"  {'arrivals':9}{'load':>5}" + "".join(f"{head:>9}" for head in heads))
        for kind in args.arrivals.split(","):
            for load in map(float, args.loads.split(",")):
                rows = []
                for seed in range(args.seeds):
                    chance = random.Random(seed)
                    rate = load * device.capacity
                    times = [
                        (at, 0 if chance.random() < args.gold else 1) for at in ARRIVALS[kind](rate, until_s, chance)
                    ]
                    full = device.capacity * until_s
                    ours = simulate(device, times, seed, fifo_delay_s=None)
                    rivals = [simulate(device, times, seed, fifo_delay_s=delay_s) for delay_s in FIFO_DELAYS_S]
                    fifo = max(rival.goodput() for rival in rivals)
                    blind = max(
                        simulate(device, times, seed, fifo_delay_s=delay_s, blind=True).goodput()
                        for delay_s in FIFO_DELAYS_S[:2]
                    )
                    gold, bronze = (good / max(1, came) for good, came in zip(ours.good, ours.came, strict=True))
                    good = ours.goodput()
                    most = most_in_time(times, device.capacity, device.deadlines_s)
                    ratios = (good / max(1.0, blind), good / max(1.0, fifo), most / max(1.0, blind))
                    rows.append((blind / full, fifo / full, good / full, most / full, *ratios, gold, bronze))
                columns = [statistics.median(column) for column in zip(*rows, strict=True)]
                print(f"  {kind:9}{load:5g}" + "".join(f"{each:9.2f}" for each in columns))
