"""A service with one model call and no other work: CPU of the logic process per request, beside other frameworks.

    python benchmarks/logic_server.py [--connections 1 16 64] [--seconds 2] [--rounds 5] [--only oriel ...]
                                     [--out FOLDER]
    python benchmarks/logic_server.py --digits [--connections 1 16] [--seconds 2] [--rounds 5] [--only oriel ...]

With `--digits` the example service behind a gateway instead, pure and compiled, beside nginx and FastAPI: see
logic_bench/digits.py. Otherwise:

Every contender is the same service: JSON {"image": [64 floats]} in, one call of the model `digits`, {"label": 7} out
(benchmarks/peers/logic). All of them call one `oriel inference` (one process, the committed model): Oriel over HTTP
with binary tensors, as it always does, the others over gRPC with Triton's asyncio client or grpc.aio itself, or HTTP.

    oriel                      typed: `label(image: list[float], models) -> Label` under `oriel logic`
    oriel, untyped             the same with the request as it came
    fastapi+tritonclient.aio   pydantic in and out, uvicorn on uvloop and httptools
    asgi+grpc.aio              no framework at all: json, numpy, protobuf
    litserve                   LitAPI(enable_async=True), one worker
    bentoml                    async api, one worker, its metrics and access log off
    model, called directly     the infer request that Oriel sends, sent by the load generator: what `added p50` is from

One logic process each where the framework allows (LitServe and BentoML bring their own helpers, which are counted),
everyone in an environment of its own under build/ with pinned versions, made on first use. They take turns (A B C, A B
C, ...) on kept connections and medians are compared. Counted is the CPU time of the contender's whole process tree
(user and system, from /proc), not wall time: the load generator and the inference server share the machine. Each one's
answer is checked before it is measured; a run in which a request fails ends the bench. Needs Linux and `wrk`.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.environments import TRITON, UVICORN, commit, machine, versions
from harness.load import require, wrk
from harness.pages import conditions, write_page
from harness.processes import ROOT, cpu_s, inference, pss_mb
from logic_bench import digits
from logic_bench.contenders import CONTENDERS, DIRECT, start
from logic_bench.report import Figures, as_markdown, verdicts

ENVIRONMENTS = ("logic-fastapi", "logic-asgi", "logic-litserve", "logic-bentoml")


def measure(names: Sequence[str], connections: Sequence[int], seconds: int, rounds: int) -> tuple[Figures, Figures]:
    """Medians, and memory in MB under connections 0."""
    figures: dict[int, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(inference(ROOT / "examples" / "models", own_session=True))
        started = {name: stack.enter_context(start(name, servers, folder)) for name in names}
        for each in started.values():
            wrk(each.url, each.script, 4, 1)  # warm-up
        for count in connections:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in started}
            for number in range(rounds):
                for name, each in started.items():
                    before = cpu_s(each.pid)
                    turn = wrk(each.url, each.script, count, seconds)
                    cpu_us = (cpu_s(each.pid) - before) * 1e6 / turn.requests
                    found = {"cpu_us": cpu_us, "per_s": turn.rate, "p50_ms": turn.p50_ms, "p99_ms": turn.p99_ms}
                    runs[name].append(found)
                    line = f"{count:3} connections {number + 1} {name:25} {cpu_us:8.0f} us {turn.rate:8.0f}/s"
                    print(f"{line} p50 {turn.p50_ms:.3f} ms", file=sys.stderr)
            figures[count] = {name: medians(found) for name, found in runs.items()}
        memory = {0: {name: {"pss_mb": pss_mb(each.pid)} for name, each in started.items()}}
    return figures, memory


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every figure, and the range of the CPU's."""
    cpu = [run["cpu_us"] for run in runs]
    middle = {what: statistics.median(run[what] for run in runs) for what in runs[0]}
    return {**middle, "cpu_us_min": min(cpu), "cpu_us_max": max(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="+", help="callers (1 16 64; digits: 1 16)")
    parser.add_argument("--seconds", type=int, default=2, help="of one turn (2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--only", nargs="+", choices=(*CONTENDERS, *digits.CONTENDERS[1:]))
    parser.add_argument("--digits", action="store_true", help="the example service behind a gateway")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a page and its figures there")
    args = parser.parse_args()
    require("wrk")
    where = machine(os.cpu_count() or 1)
    if args.digits:
        names, counts = args.only or digits.CONTENDERS, args.connections or [1, 16]
        with tempfile.TemporaryDirectory() as folder:
            print(digits.measure(names, counts, args.seconds, args.rounds, Path(folder)))
        print(f"\n{conditions(where, commit(), 'least and most in brackets')}")
        return
    figures, memory = measure(args.only or CONTENDERS, args.connections or [1, 16, 64], args.seconds, args.rounds)
    used = {what: said for what, said in versions(list(ENVIRONMENTS)).items() if what not in ("onnxruntime", "h2load")}
    used |= {f"the others' {what}": said for what, said in (package.split("==") for package in (*UVICORN, *TRITON))}
    resident = ", ".join(f"{name} {f['pss_mb']:.0f}" for name, f in memory[0].items() if name != DIRECT)
    text = f"{as_markdown(figures)}\nMemory of the logic processes afterwards (PSS, MB): {resident}.\n"
    print(text)
    if args.out is None:
        return
    said = ", ".join(f"{what} {number}" for what, number in used.items())
    about = f"`python benchmarks/logic_server.py`, {args.rounds} rounds of {args.seconds} s, medians; "
    about += f"{where}; {said}."
    document = {
        "rounds": args.rounds,
        "seconds": args.seconds,
        "versions": used,
        "connections": figures,
        "pss_mb": {name: f["pss_mb"] for name, f in memory[0].items()},
        "targets": [{"target": v.target, "found": v.found, "met": v.met} for v in verdicts(figures)],
    }
    held = conditions(where, commit(), "the columns of least and most")
    write_page(args.out, "logic-call", "A service with one model call", f"{held}\n\n{about}", text, document)


if __name__ == "__main__":
    main()
