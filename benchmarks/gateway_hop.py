"""What one hop costs: CPU microseconds per request of the gateway beside nginx, Envoy and two naive Python proxies.

    python benchmarks/gateway_hop.py [--seconds 3] [--rounds 5] [--cases same varying one big tls] [--out FOLDER]

Every contender forwards POST /v2/models/digits/infer to the same trivial upstream over kept connections, one process
(one worker) each. They take turns (A B C D, A B C D, ...) and the medians are compared, so that a machine whose speed
drifts is unfair to nobody. Counted is the CPU time of the contender's own processes (user + system, from /proc), not
wall time: the load generator shares the machine. The gateway does all its work: key, limits, admission, deadline, trace
context, tier headers, metrics; the others only forward.

    same      1 KB each way, 32 connections, heads that repeat byte by byte, as most clients send them
    varying   the same, but no two heads alike (request id and trace context in each)
    one       1 connection: the latency one hop adds
    big       600 KB bodies, 16 connections
    tls       1 KB over kept TLS connections, 32 of them

`oriel compiled` is the same gateway from the wheel of `make compiled` (docs/decisions/0046); both are judged.

Needs `nginx`, `wrk` and for `tls` `openssl` on PATH (Debian packages), and Linux. Envoy and the Python peers get an
environment of their own under build/bench-proxies, with pinned versions. `--out` writes a .json and a .md there.
"""

import argparse
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from gateway_bench.contenders import CONTENDERS, start, upstream
from harness.load import Run, post, require, wrk
from harness.pages import write_page
from harness.processes import cpu_s, free_port

OURS = ("oriel", "oriel compiled")
FAST = (*OURS, "nginx", "tcp floor", "envoy")
PATH = "/v2/models/digits/infer"
HEADERS = {"Authorization": "Bearer oriel-demo-gold", "Content-Type": "application/json"}
# A request id and a trace context of its own in every request.
VARYING = """
local n = 0
request = function()
  n = n + 1
  wrk.headers["x-request-id"] = string.format("r%016x", n)
  wrk.headers["traceparent"] = string.format("00-%032x-%016x-00", n, n)
  return wrk.format(nil)
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One workload. contenders: who is measured under it. size_bytes: of each body."""

    contenders: tuple[str, ...] = FAST
    connections: int = 32
    size_bytes: int = 1024
    varying: bool = False
    tls: bool = False


LOADS = {
    "same": Load(contenders=CONTENDERS),
    "varying": Load(varying=True),
    "one": Load(connections=1),
    "big": Load(connections=16, size_bytes=600_000),
    "tls": Load(tls=True, contenders=(*OURS, "nginx", "tcp floor")),
}
# (case, what is promised, peer, at most this times the peer's CPU)
TARGETS = (
    ("same", "CPU <= 2.2 x nginx", "nginx", 2.2),
    ("same", "CPU <= 0.6 x Envoy", "envoy", 0.6),
    ("same", "CPU <= 1/5 of Starlette + aiohttp", "starlette+aiohttp", 0.2),
    ("big", "CPU <= 1.3 x nginx", "nginx", 1.3),
    ("tls", "CPU <= 2.5 x nginx with TLS", "nginx", 2.5),
)

Figures = dict[str, dict[str, float]]


def drive(load: Load, port: int, seconds: int, folder: Path) -> Run:
    """One turn. Raises Failed if a request failed."""
    script = folder / f"{load.size_bytes}-{load.varying}.lua"
    post(script, b"x" * load.size_bytes, HEADERS, VARYING if load.varying else "")
    return wrk(f"{'https' if load.tls else 'http'}://127.0.0.1:{port}{PATH}", script, load.connections, seconds)


def case(name: str, rounds: int, seconds: int, contenders: Sequence[str] = CONTENDERS) -> Figures:
    """Medians per contender of one case."""
    load = LOADS[name]
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in load.contenders if who in contenders}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        behind = free_port()
        stack.enter_context(upstream([behind]))
        started = {who: stack.enter_context(start(who, folder, behind, tls=load.tls)) for who in runs}
        for _, port in started.values():
            drive(replace(load, varying=False), port, 1, folder)  # warm-up
        for number in range(rounds):
            for who, (pid, port) in started.items():
                before = cpu_s(pid)
                run = drive(load, port, seconds, folder)
                cpu_us = (cpu_s(pid) - before) * 1e6 / run.requests
                runs[who].append({"cpu_us": cpu_us, "per_s": run.rate, "p50_ms": run.p50_ms, "p99_ms": run.p99_ms})
                print(f"{name} {number + 1} {who:18} {cpu_us:8.1f} us  {run.rate:8.0f}/s", file=sys.stderr)
    return {
        who: {
            **{what: statistics.median(run[what] for run in found) for what in found[0]},
            "cpu_us_min": min(run["cpu_us"] for run in found),
            "cpu_us_max": max(run["cpu_us"] for run in found),
        }
        for who, found in runs.items()
    }


def verdicts(cases: dict[str, Figures]) -> list[tuple[str, str, str]]:
    """(target, what was measured, met or missed) for every target whose case was run, for each of ours."""
    out = []
    for ours in OURS:
        for name, text, peer, bound in TARGETS:
            figures = cases.get(name, {})
            if ours in figures and peer in figures:
                ratio = figures[ours]["cpu_us"] / figures[peer]["cpu_us"]
                out.append((f"{ours}, {name}: {text}", f"{ratio:.2f} x", "met" if ratio <= bound else "missed"))
        figures = cases.get("one", {})
        if ours in figures and "nginx" in figures:
            added = figures[ours]["p50_ms"] - figures["nginx"]["p50_ms"]
            out.append((f"{ours}, one: p50 <= nginx + 0.1 ms", f"{added:+.3f} ms", "met" if added <= 0.1 else "missed"))
    return out


def as_markdown(cases: dict[str, Figures]) -> str:
    """Tables of every case, and the targets."""
    lines = []
    for name, figures in cases.items():
        load = LOADS[name]
        ours = [each for each in OURS if each in figures]
        ratios = "".join(f" {each} / it |" for each in ours)
        lines += [
            f"## {name}: {load.size_bytes} bytes each request, {load.connections} connections{', TLS' * load.tls}",
            "",
            f"| contender | CPU-us per request | min-max | req/s | p50 ms | p99 ms |{ratios}",
            "|---|---|---|---|---|---|" + "---|" * len(ours),
        ]
        for who, f in figures.items():
            lines.append(
                f"| {who} | {f['cpu_us']:.1f} | {f['cpu_us_min']:.1f}-{f['cpu_us_max']:.1f} | {f['per_s']:,.0f} "
                f"| {f['p50_ms']:.3f} | {f['p99_ms']:.2f} |"
                + "".join(f" {figures[each]['cpu_us'] / f['cpu_us']:.2f} |" for each in ours)
            )
        lines.append("")
    lines += ["## Targets", "", "| target | measured | |", "|---|---|---|"]
    lines += [f"| {text} | {measured} | {word} |" for text, measured, word in verdicts(cases)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=tuple(LOADS), default=list(LOADS))
    parser.add_argument("--who", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    require("nginx", "nginx-light")
    require("wrk")
    cases = {name: case(name, args.rounds, args.seconds, args.who) for name in args.cases}
    text = as_markdown(cases)
    print(text)
    if args.out is not None:
        about = f"`python benchmarks/gateway_hop.py`, {args.rounds} rounds of {args.seconds} s; {platform.platform()}."
        document = {"rounds": args.rounds, "seconds": args.seconds, "cases": cases}
        write_page(args.out, "gateway-hop", "One hop through the gateway", about, text, document)


if __name__ == "__main__":
    main()
