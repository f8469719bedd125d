"""What tracing costs the gateway for an HTTP/1.1 request of 1 KB: CPU-microseconds, without sockets.

    python benchmarks/cost.py tracing [--connections 32] [--requests 10000] [--rounds 15]

The gateway of `cost.py gateway`, four times: without tracing; with a collector, and no trace is kept; one in a hundred
is kept; each is kept. They take turns, and medians of what each round costs beside the one without tracing are
compared. Counted is the whole process, so also the thread that makes the spans of traces that are kept, writes them as
OTLP and compresses them, until the last one is written; they are sent nowhere. The clients send no `traceparent`, so
that every trace begins here. Ends with exit status 1 if a bound is passed: not kept 1 us and 2 %, one in a hundred 2 %,
kept 15 us.
"""

import argparse
import asyncio
import gc
import gzip
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import uvloop

from gateway_bench.http_cost import BareGateway, request
from gateway_bench.traffic import IDS, REQUESTS
from oriel_gateway.app import COLLECTOR
from oriel_wire.observe.otel_settings import Queue, resource_of
from oriel_wire.observe.otlp import ProtobufEncoder
from oriel_wire.observe.sampling import Sampling
from oriel_wire.observe.spans import ExportingSink, Lane
from oriel_wire.observe.trace import NullSink, Span, SpanSink

OFF, NOT_KEPT, SOME, KEPT = "without tracing", "not kept", "1 % kept", "kept"
RATIOS = {NOT_KEPT: 0.0, SOME: 0.01, KEPT: 1.0}
# Case -> the most that it may add: microseconds, and a share of a request without tracing.
BOUNDS: Mapping[str, tuple[float, float]] = {
    NOT_KEPT: (1.0, 0.02),
    SOME: (float("inf"), 0.02),
    KEPT: (15.0, float("inf")),
}
HEAD = REQUESTS.replace(IDS, "x-request-id: @id\r\n")
QUEUE = Queue(max_spans=1 << 20, delay_s=0.02)
WAIT_S = 0.01
WARM_TURNS = 64


def sink_of(case: str) -> tuple[SpanSink, Lane | None]:
    """Return where a gateway's spans go, and their queue."""
    if case == OFF:
        return NullSink(), None
    encoder = ProtobufEncoder(resource_of("gateway", {}), "1")

    def deliver(spans: Sequence[Span]) -> int:
        gzip.compress(encoder.encode(spans), 1)
        return 0

    lane = Lane(deliver, queue=QUEUE)
    return ExportingSink([lane], sampling=Sampling.by_ratio(RATIOS[case])), lane


async def one_round(gateway: BareGateway, lane: Lane | None, turns: Sequence[Sequence[bytes]]) -> float:
    """Return the CPU-microseconds per request."""
    began = time.process_time()
    for reads in turns:
        await gateway.turn(reads)
    while lane is not None and lane.queued:
        await asyncio.sleep(WAIT_S)
    used = time.process_time() - began
    gateway.check()
    if lane is not None and any(lane.dropped.values()):
        raise SystemExit(f"spans were lost: {lane.dropped}")
    return used * 1e6 / (len(turns) * len(turns[0]))


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the CPU-microseconds per request, by case, of each round."""
    gc.set_threshold(*COLLECTOR)  # as the gateway
    cases = (OFF, *RATIOS)
    sinks = {case: sink_of(case) for case in cases}
    gateways = {case: BareGateway(args.connections, sink) for case, (sink, _) in sinks.items()}
    found: dict[str, list[float]] = {case: [] for case in cases}
    chance = random.Random(1)
    for number in range(args.rounds + 1):  # the first one warms up
        count = -(-args.requests // args.connections) if number else WARM_TURNS
        turns = [[request(HEAD, chance) for _ in range(args.connections)] for _ in range(count)]
        first = number % len(cases)
        for case in (*cases[first:], *cases[:first]):
            used = await one_round(gateways[case], sinks[case][1], turns)
            if number:
                found[case].append(used)
    for case, each in gateways.items():
        await each.gateway.close()
        sinks[case][0].close()
    return found


def added(found: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return what each case adds: microseconds, and a share of a request without tracing; medians over the rounds."""
    without = found[OFF]
    return {
        case: (
            statistics.median([one - other for one, other in zip(each, without, strict=True)]),
            statistics.median([one / other - 1.0 for one, other in zip(each, without, strict=True)]),
        )
        for case, each in found.items()
        if case != OFF
    }


def kept(more: Mapping[str, tuple[float, float]]) -> bool:
    """Return whether no bound is passed."""
    return all(us <= BOUNDS[case][0] and share <= BOUNDS[case][1] for case, (us, share) in more.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=10_000, help="of one round of one case")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    found = uvloop.run(measure(args))
    more = added(found)
    print(f"{'CPU per request':18}{'us':>8}{'adds us':>10}{'adds %':>9}")
    for case, each in found.items():
        us, share = more.get(case, (0.0, 0.0))
        print(f"{case:18}{statistics.median(each):8.1f}{us:10.2f}{share:9.2%}")
    return 0 if kept(more) else 1


if __name__ == "__main__":
    sys.exit(main())
