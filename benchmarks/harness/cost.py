"""CPU time per request of a server's own code in this process, without sockets: in rounds, or at depths of a queue."""

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

import uvloop

__all__ = ["Transport", "compare_depths", "options", "per_call", "rounds", "turn"]


class Connection(Protocol):
    def data_received(self, data: bytes) -> None: ...


class Transport:
    """The transport of a client: counts answers, and does nothing else that a transport does."""

    answered = 0

    def write(self, data: bytes) -> None:
        Transport.answered += 1
        if not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"an answer was not 200: {data[:400]!r}")

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.write(b"".join(parts))

    def get_extra_info(self, name: str) -> object:
        # On a busy machine the server asks the socket when its bytes arrived: there is none.
        return None if name == "socket" else ("127.0.0.1", 1)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return lambda *_, **more: None


def options(doc: str | None, *, connections: int, rounds: int) -> argparse.ArgumentParser:
    """The options of such a command, with its defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=connections)
    parser.add_argument("--seconds", type=float, default=3.0, help="of all rounds together (3)")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--profile", action="store_true", help="also say which functions take the time")
    return parser


async def turn(connections: Sequence[Connection], requests: Iterator[bytes], seconds: float) -> float:
    """Hand every connection one whole request and wait for all answers, again and again: microseconds per request."""
    before, began, done = Transport.answered, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < done:
        wanted = Transport.answered + len(connections)
        for connection in connections:
            connection.data_received(next(requests))
        while Transport.answered < wanted:
            await asyncio.sleep(0)
    return (time.process_time() - began) * 1e6 / (Transport.answered - before)


async def rounds(connections: Sequence[Connection], requests: Iterator[bytes], args: argparse.Namespace) -> None:
    """Print the best and the median of the rounds; with `--profile` the functions that took most as well."""
    found = [await turn(connections, requests, args.seconds / args.rounds) for _ in range(args.rounds)]
    print(f"{min(found):.1f} us per request at best, {statistics.median(found):.1f} median of {len(found)}")
    if not args.profile:
        return
    profile = cProfile.Profile()
    profile.enable()
    before = Transport.answered
    await turn(connections, requests, args.seconds)
    profile.disable()
    print(f"{Transport.answered - before} requests under the profiler, which slows small functions most")
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def per_call(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, cProfile.Profile | None], Coroutine[Any, Any, list[float]]],
    what: str = "call",
) -> None:
    """A command that prints what a call costs. measure: returns the microseconds of CPU per call, of each round."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="say which functions take the time, instead")
    args = parser.parse_args()
    profile = cProfile.Profile(time.process_time) if args.profile else None
    found = uvloop.run(measure(args, profile))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        return
    print(f"{min(found):.1f} us per {what} at best, {statistics.median(found):.1f} median of {len(found)}")


def compare_depths(
    doc: str | None, cases: Mapping[str, object], measure: Callable[[str, int, int], Coroutine[Any, Any, float]]
) -> None:
    """A command that prints what every case costs at every depth.

    measure: case, depth, requests -> microseconds of CPU per request.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="10,1000,10000", help="the first one is what the others are compared with")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", choices=cases, action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    depths = [int(depth) for depth in args.depths.split(",")]
    found: dict[str, dict[int, float]] = {}
    for case in args.case or cases:
        # Depths take turns, so that a noisy moment of the machine meets all of them.
        runs: dict[int, list[float]] = {depth: [] for depth in depths}
        for _ in range(args.repeats):
            for depth in depths:
                runs[depth].append(uvloop.run(measure(case, depth, args.requests)))
        found[case] = {depth: statistics.median(times) for depth, times in runs.items()}
    if args.json:
        print(json.dumps(found))
        return
    print(f"{'us CPU per request':24}" + "".join(f"{depth:>10,}" for depth in depths) + f"{'ratio':>8}")
    for case, times in found.items():
        cells = "".join(f"{times[depth]:10.1f}" for depth in depths)
        print(f"{case:24}{cells}{times[depths[-1]] / times[depths[0]]:8.2f}")
