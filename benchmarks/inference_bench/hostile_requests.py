"""Measures how long each attack on the inference server waits for its refusal.

    python benchmarks/neighbours.py hostile-requests
        [--rounds 3] [--only WORD] [--slowest 25] [--limit-s 1] [--json FILE]

Promise R24: each <= 1 s. The attacks are those of tests/inference/attacks.py, over HTTP and over both gRPC calls. Every
body is made before its clock starts, which stops at the last byte of the answer. Round one meets a server that has just
started, so what it starts when first needed is in the figures; a canary is asked after each attack. Printed: the
slowest, with the first round's seconds and the median and the slowest of all rounds, and by its whole name each attack
of each round that took longer than --limit-s, with what the server's process computed meanwhile: little of it means
that the machine had other work. The attacker runs on the same machine: what sending 60 MB costs it is in the figures as
well. Exit status 1 if one took longer.
"""

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from harness.processes import cpu_s
from tests.inference.attacked import ANSWER_S, Server, attacked
from tests.inference.attacks import CALLS, GOOD, PATHS, POSTS

Attack = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One attack in one round (the first is 1). cpu_s: of the server's process and its helpers."""

    attack: str
    round: int
    seconds: float
    cpu_s: float

    def __str__(self) -> str:
        return f"round {self.round}: {self.attack}: {self.seconds:.3f} s, of them computing {self.cpu_s:.2f} s"


def attacks(server: Server) -> dict[str, Callable[[], Attack]]:
    """Return, by name, functions that make the body of an attack and return one that sends it and waits."""
    found: dict[str, Callable[[], Attack]] = {}

    def post(name: str) -> Attack:
        each = POSTS[name]
        body = each.body()
        return lambda: void(server.http.post(each.path, content=body, headers=each.headers))

    def path(text: str) -> Attack:
        def ask() -> None:
            client = http.client.HTTPConnection("127.0.0.1", server.http.base_url.port or 0, timeout=ANSWER_S)
            with contextlib.closing(client):
                client.request("POST", text, GOOD)
                client.getresponse().read()

        return ask

    def call(name: str, stream: bool) -> Attack:
        data = CALLS[name]()
        streaming = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

        def ask() -> None:
            with contextlib.suppress(grpc.RpcError):
                if stream:
                    list(streaming(iter([data]), timeout=ANSWER_S))
                else:
                    server.call("ModelInfer", data)

        return ask

    for name in POSTS:
        found[f"HTTP {name}"] = lambda name=name: post(name)  # type: ignore[misc]
    for text in PATHS:
        found[f"HTTP {text[:50]}"] = lambda text=text: path(text)  # type: ignore[misc]
    for name in CALLS:
        found[f"gRPC {name}"] = lambda name=name: call(name, False)  # type: ignore[misc]
        found[f"gRPC stream {name}"] = lambda name=name: call(name, True)  # type: ignore[misc]
    return found


def void(_: object) -> None:
    """Ignore an answer."""


def measured(rounds: int, only: str) -> list[Taken]:
    """Every attack, a server per round."""
    found: list[Taken] = []
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder, attacked(Path(folder)) as server:
            chosen = {name: make for name, make in attacks(server).items() if only in name}
            for at, (name, make) in enumerate(chosen.items()):
                attack = make()
                if sys.stderr.isatty():
                    print(f"\rround {turn + 1}/{rounds}  {at + 1}/{len(chosen)}", end="", file=sys.stderr)
                pid, before_s = server.process.pid, cpu_s(server.process.pid, ended=True)
                began = time.perf_counter()
                attack()
                seconds = time.perf_counter() - began
                found.append(
                    Taken(attack=name, round=turn + 1, seconds=seconds, cpu_s=cpu_s(pid, ended=True) - before_s)
                )
                server.canary()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="attacks whose name has this word")
    parser.add_argument("--slowest", type=int, default=25, help="how many are printed")
    parser.add_argument("--limit-s", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="all figures")
    args = parser.parse_args()
    found = measured(args.rounds, args.only)
    seconds: dict[str, list[float]] = {}
    for each in found:
        seconds.setdefault(each.attack, []).append(each.seconds)
    ranked = sorted(seconds, key=lambda name: -max(seconds[name]))
    print(f"{'attack':60} {'first':>7} {'median':>7} {'slowest':>7}  s")
    for name in ranked[: args.slowest]:
        times = seconds[name]
        print(f"{name[:60]:60} {times[0]:7.3f} {statistics.median(times):7.3f} {max(times):7.3f}")
    late = sorted((each for each in found if each.seconds > args.limit_s), key=lambda each: -each.seconds)
    names = len({each.attack for each in late})
    print(f"{len(seconds)} attacks, {args.rounds} rounds: {names} took longer than {args.limit_s:g} s")
    for each in late:
        print(each)
    if args.json:
        figures = {"seconds": seconds, "limit_s": args.limit_s, "late": [asdict(each) for each in late]}
        args.json.write_text(json.dumps(figures, indent=1))
    return 1 if late else 0
