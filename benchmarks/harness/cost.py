"""CPU time per request of a server's own code in this process, without sockets, in rounds."""

import argparse
import asyncio
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import uvloop

__all__ = ["Transport", "options", "per_call", "rounds", "turn"]


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
