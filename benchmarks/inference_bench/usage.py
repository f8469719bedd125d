"""Compares what tenants are charged with the time of the device (PROMISES R41): overload, cancels, kill -9.

    python benchmarks/faults.py usage [--seconds 120] [--connections 96] [--instances 2]

A tiny model with batches of up to 64 rows serves five tenants, each of which sends as fast as it can; one connection in
six leaves before its answer. The judge writes the beginning and the end of each execution to a file of its own, and the
union of these times is compared with the usage ledger: once when the server has stopped, once when it was killed and
started again. Ends with exit status 1 if the sums differ by more than 0.1 % after a stop, or 1 % after a kill, if more
than a second is lost, or if anything is counted twice.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import uvloop
from harness.processes import ROOT, free_ports, serving, status_of

from inference_bench.models import MODELS, write
from oriel_cli.usage.grouping import hours
from oriel_cli.usage.reading import Usage, read
from oriel_wire.usage.lines import UsageLine

CONFIG = """
backend: "onnxruntime" max_batch_size: 64
input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { count: COUNT kind: KIND_CPU } ]
dynamic_batching { }
"""
INTERVAL = struct.Struct("<QQ")
ALWAYS = ("2000-01-01T00:00", "9999-01-01T00:00")
RUNNING, KILLED, LOST_S = 0.001, 0.01, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--connections", type=int, default=96)
    parser.add_argument("--instances", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = root / "models/tiny"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG.replace("COUNT", str(args.instances)))
        write(MODELS["tiny"], model / "1/model.onnx")
        stopped = judged(args, root, "stopped", kill=False)
        killed = judged(args, root, "killed", kill=True)
    return 0 if stopped and killed else 1


def judged(args: argparse.Namespace, root: Path, name: str, *, kill: bool) -> bool:
    """Run one server under load to its end, compare the sums, print them, and return whether they are good."""
    state, busy = root / name / "state", root / name / "busy"
    state.mkdir(parents=True)
    port, grpc_port, metrics_port = free_ports(3)
    command = [
        *(sys.executable, str(ROOT / "benchmarks/inference_bench/serve.py"), "--busy", str(busy)),
        *("--model-repository", str(root / "models"), "--usage", str(state), "--cores", str(args.instances)),
        *("--http-port", str(port), "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)),
    ]

    def ready() -> bool:
        return status_of(f"http://127.0.0.1:{port}/v2/health/ready") == 200

    with serving(command, ready) as pid:
        calls = uvloop.run(load(port, args.seconds, args.connections))
        if kill:
            os.kill(pid, signal.SIGKILL)
    if kill:
        with serving([*command[:2], *command[4:]], ready):
            pass  # it seals what the killed one left
    usage = read(str(state), *ALWAYS)
    again = read(str(state), *ALWAYS)
    # The first instance alone: the one that was started again has not executed anything but its first runs.
    first = usage.lines[0][0].partition("-")[0]
    lines = [(identity, line) for identity, line in usage.lines if identity.startswith(f"{first}-")]
    return report(name, usage, again, lines, measured_ns(busy), calls, kill=kill)


def report(
    name: str,
    usage: Usage,
    again: Usage,
    lines: list[tuple[str, UsageLine]],
    busy_ns: int,
    calls: tuple[int, int],
    *,
    kill: bool,
) -> bool:
    charged_ns = sum(line.device_ns for _, line in lines)
    tenants_ns = sum(line.device_ns for _, line in lines if line.tenant and not line.why)
    left_ns = sum(line.device_ns for _, line in lines if line.why == "left")
    rows, requests = (sum(getattr(line, field) for _, line in lines) for field in ("rows", "requests"))
    worst = max((hour.ratio for hour in hours(lines).values()), default=0.0)
    difference, lost_s = abs(busy_ns - charged_ns) / busy_ns, max(0, busy_ns - charged_ns) / 1e9
    twice = usage.repeats + len({identity for identity, _ in usage.lines} ^ {identity for identity, _ in again.lines})
    crash_reported = usage.crashes == int(kill)
    good = (
        difference <= (KILLED if kill else RUNNING)
        and lost_s <= LOST_S
        and charged_ns <= busy_ns * (1 + RUNNING)
        and not twice
        and crash_reported
        and not usage.gaps
        and requests <= calls[0] + calls[1]
    )
    facts = {
        "case": name,
        "device_busy_s": round(busy_ns / 1e9, 6),
        "charged_s": round(charged_ns / 1e9, 6),
        "difference": f"{difference:.5%}",
        "lost_s": round(lost_s, 3) if kill else 0,
        "tenants_s": round(tenants_ns / 1e9, 3),
        "left_s": round(left_ns / 1e9, 3),
        "answered": calls[0],
        "cancelled": calls[1],
        "recorded_requests": requests,
        "rows": rows,
        "largest_difference_of_an_hour": f"{worst:.5%}",
        "twice": twice,
        "gaps": len(usage.gaps),
        "crashes_reported": usage.crashes,
        "good": good,
    }
    print(json.dumps(facts), flush=True)
    return good


def measured_ns(path: Path) -> int:
    """Return for how long at least one execution ran, by the judge's own file."""
    total = end = 0
    for begin, until in sorted(intervals(path.read_bytes())):
        total += max(0, until - max(begin, end))
        end = max(end, until)
    return total


def intervals(data: bytes) -> Iterator[tuple[int, int]]:
    whole = len(data) // INTERVAL.size * INTERVAL.size
    yield from INTERVAL.iter_unpack(data[:whole])


async def load(port: int, seconds: float, connections: int) -> tuple[int, int]:
    """Send calls of five tenants for some seconds; return how many were answered, and how many left."""
    until = time.monotonic() + seconds
    found = await asyncio.gather(*(caller(port, until, number) for number in range(connections)))
    return sum(each[0] for each in found), sum(each[1] for each in found)


async def caller(port: int, until: float, number: int) -> tuple[int, int]:
    leaves, chance, answered, left = number % 6 == 5, random.Random(number), 0, 0
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            while time.monotonic() < until:
                writer.write(request(number % 5, 1 + chance.randrange(4)))
                if leaves and chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.01)
                    left += 1
                    break
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                answered += head.split()[1] == "200"
        except (OSError, asyncio.IncompleteReadError):
            return answered, left
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return answered, left


def request(tenant: int, rows: int) -> bytes:
    numbers = ",".join(["0.5"] * (16 * rows))
    body = f'{{"inputs":[{{"name":"x","shape":[{rows},16],"datatype":"FP32","data":[{numbers}]}}]}}'
    head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: bench\r\nx-oriel-tenant: tenant-{tenant}\r\n"
    return f"{head}x-oriel-tier: gold\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
