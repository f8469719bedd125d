"""How long each attack on the inference server waits for its refusal: `python tests/bench/hostile_answers.py`.

    [--rounds 3] [--only WORD] [--slowest 25] [--limit-s 1] [--json FILE]

Promise R24: each <= 1 s. The attacks are those of tests/inference/attacks.py, over HTTP and over both gRPC calls. Every
body is made before its clock starts, which stops at the last byte of the answer. Round one meets a server that has just
started, so what it starts when first needed is in the figures; a canary is asked after each attack. Printed: the
slowest, with the first round's seconds and the median and the slowest of all rounds. The attacker runs on the same
machine: what sending 60 MB costs it is in the figures as well. Exit status 1 if one took longer than --limit-s.
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
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.inference.attacked import ANSWER_S, Server, attacked
from tests.inference.attacks import CALLS, GOOD, PATHS, POSTS

Attack = Callable[[], None]


def attacks(server: Server) -> dict[str, Callable[[], Attack]]:
    """By name: what makes the body and gives what sends it and waits."""
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
    """Nothing."""


def measured(rounds: int, only: str) -> dict[str, list[float]]:
    """Seconds of each attack, a server per round."""
    seconds: dict[str, list[float]] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder, attacked(Path(folder)) as server:
            chosen = {name: make for name, make in attacks(server).items() if only in name}
            for at, (name, make) in enumerate(chosen.items()):
                attack = make()
                if sys.stderr.isatty():
                    print(f"\rround {turn + 1}/{rounds}  {at + 1}/{len(chosen)}", end="", file=sys.stderr)
                began = time.perf_counter()
                attack()
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                server.canary()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="attacks whose name has this word")
    parser.add_argument("--slowest", type=int, default=25, help="how many are printed")
    parser.add_argument("--limit-s", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="all figures")
    args = parser.parse_args()
    seconds = measured(args.rounds, args.only)
    ranked = sorted(seconds, key=lambda name: -max(seconds[name]))
    print(f"{'attack':60} {'first':>7} {'median':>7} {'slowest':>7}  s")
    for name in ranked[: args.slowest]:
        each = seconds[name]
        print(f"{name[:60]:60} {each[0]:7.3f} {statistics.median(each):7.3f} {max(each):7.3f}")
    late = [name for name in ranked if max(seconds[name]) > args.limit_s]
    print(f"{len(seconds)} attacks, {args.rounds} rounds: {len(late)} took longer than {args.limit_s:g} s")
    if args.json:
        args.json.write_text(json.dumps({"seconds": seconds, "limit_s": args.limit_s}, indent=1))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
