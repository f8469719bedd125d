"""Gold's share in time while bronze sends more than the gateway's event loop can even refuse.

    python benchmarks/neighbours.py flood [--seconds 3] [--factor 1.5] [--rounds 1] [--cases http/1.1 grpc ...]
        [--rate REFUSALS_PER_SECOND]

The gateway has one core and the load generator with the upstream servers another one. Bronze's pool is full, so that
each of its requests is refused. First bronze alone, closed loop: the rate at which the loop refuses everything. Then
`factor` times as much on schedule, on up to 2,000 connections (HTTP/2 and gRPC: 24 of 120 streams), and GOLD_RATE
requests of gold a second on connections of their own, one in ten on a new one; `mixed`: as streams on the flood's
connections. Each request is of 1 KB and has a request id of its own. Attainment: answered with success within TARGET_MS
of when it was scheduled. `late` is by how much the generator itself sent 1 % of gold's requests too late; above
LATE_MS a row is not judged. Exit status 1 if gold's attainment is below 99 % in a judged row.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness.processes import PEERS, accepts, cpu_s, free_ports, gateway, serving

from gateway_bench.contenders import upstream

GOLD_RATE = 200.0
TARGET_MS = 100
LATE_MS = 20.0
GOAL = 0.99
FILES = PEERS / "gateway"
CASES = {
    "http/1.1": {"protocol": "http/1.1", "connections": 2000, "streams": 1},
    "http/2": {"protocol": "http/2", "connections": 24, "streams": 120},
    "http/2 mixed": {"protocol": "http/2", "connections": 24, "streams": 120, "mixed": True},
    "grpc": {"protocol": "grpc", "connections": 24, "streams": 120},
    "grpc mixed": {"protocol": "grpc", "connections": 24, "streams": 120, "mixed": True},
}


def policies(folder: Path, quick: int, grpc: int, held: int) -> Path:
    lines: list[str] = []
    for band, tenant in enumerate(("gold", "bronze")):
        digest = sha256(f"bench-{tenant}".encode()).hexdigest()
        lines += [f"[tiers.{tenant}]", f"band = {band}", f"target_ms = {TARGET_MS}", "give_up_ms = 3600000"]
        lines += [f"[tenants.{tenant}]", f'tier = "{tenant}"', 'models = ["*"]']
        lines += [f'keys = [{{ sha256 = "{digest}" }}]']
    lines += ["[pools.quick]", f'endpoints = ["127.0.0.1:{quick}"]', f'grpc_endpoints = ["127.0.0.1:{grpc}"]']
    lines += ["max_inflight = 64", "[pools.held]", f'endpoints = ["127.0.0.1:{held}"]']
    lines += [f'grpc_endpoints = ["127.0.0.1:{grpc}"]', "max_inflight = 1", "max_queue = 0"]
    for name in ("quick", "held"):
        lines += ["[[routes]]", f'model = "{name}"', f'pool = "{name}"']
    folder.mkdir()
    (folder / "bench.toml").write_text("\n".join(lines) + "\n")
    return folder


def pin(pids: Sequence[int], core: int) -> None:
    for pid in pids:
        os.sched_setaffinity(pid, {core})


def offer(port: int, core: int, **plan: Any) -> dict[str, Any]:
    """Run the generator once; returns what it found."""
    command = [sys.executable, str(FILES / "flood.py"), json.dumps({"port": port, **plan})]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=lambda: pin([0], core))
    if done.returncode:
        sys.exit(f"the generator failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="refusals per second: not measured if given")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed: one for the gateway, one for the load")
    failed = False
    print(
        f"{'':14}{'refusals/s':>11}{'offered/s':>11}{'refused/s':>11}{'gold':>7}{'in time':>9}{'p50 ms':>8}"
        f"{'p99 ms':>8}{'failed':>8}{'late':>7}{'generator':>10}{'gateway':>9}",
        flush=True,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        behind, grpc = free_ports(2)
        pin([stack.enter_context(upstream([behind]))], cores[1])
        calls = serving([sys.executable, str(FILES / "grpc_upstream.py"), str(grpc)], lambda: accepts(grpc))
        pin([stack.enter_context(calls)], cores[1])
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # accepts and never answers
        files = policies(folder / "policies", behind, grpc, silent.getsockname()[1])
        pid, port, _ = stack.enter_context(gateway(files, environment={"OTEL_TRACES_SAMPLER_ARG": "0"}))
        pin([int(task) for task in os.listdir(f"/proc/{pid}/task")], cores[0])
        holder = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        holder.sendall(
            b"POST /v2/models/held/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer bench-bronze\r\n"
            b"content-length: 1\r\n\r\nx"
        )
        for name in args.cases * args.rounds:
            case = CASES[name]
            rate = args.rate
            if not rate:
                alone = {**case, "connections": 32 if name == "http/1.1" else 2, "streams": 32, "mixed": False}
                rate = offer(port, cores[1], **alone, seconds=1.5, rate=0.0, gold_rate=0.0)["refused_rate"]
            before = cpu_s(pid)
            found = offer(port, cores[1], **case, seconds=args.seconds, rate=args.factor * rate, gold_rate=GOLD_RATE)
            used = (cpu_s(pid) - before) / (args.seconds + 0.5)
            times = found["gold_ms"]
            in_time = sum(value <= TARGET_MS for value in times) / found["gold_asked"]
            judged = found["late_p99_ms"] <= LATE_MS
            failed |= judged and in_time < GOAL
            p99 = times[int(len(times) * 0.99)] if times else 0.0
            p50 = statistics.median(times) if times else 0.0
            print(
                f"{name:14}{rate:11,.0f}{found['offered_rate']:11,.0f}{found['refused_rate']:11,.0f}"
                f"{found['gold_asked']:7}{in_time:9.2%}{p50:8.1f}{p99:8.1f}{found['gold_failed']:8}"
                f"{found['late_p99_ms']:7.1f}{found['busy']:10.2f}{used:9.2f}{'' if judged else '  not judged'}",
                flush=True,
            )
    sys.exit(failed)
