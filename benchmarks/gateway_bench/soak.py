"""Soak of one gateway: whether memory, descriptors, latency and answers stay as they were, over ten minutes.

    python benchmarks/soak.py gateway                          ten minutes
    python benchmarks/soak.py gateway --seconds 60 --json out.json
    python benchmarks/soak.py gateway --collector blackhole    the same while the trace collector never answers

A real `oriel gateway` process stands in front of a small upstream in this process; closed-loop clients send 1 KB
requests of three tiers, unauthorised, unknown and cancelled ones among them. Prints a table, writes JSON with --json,
and ends with exit status 1 if a bound of the promise is missed (--report-only: never). A run that is too short for a
bound says so and does not judge it.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from harness.processes import ROOT, free_ports

DROPPED_S = 60.0  # within which a collector that never answers has cost a span
KEYS = {"gold": "soak-gold", "silver": "soak-silver", "bronze": "soak-bronze"}
BODY = b"x" * 1024
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 1024\r\n\r\n" + BODY
AT_LEAST = 64  # requests of a client
SLOPE_MIB_PER_MIN = 0.5
P99_RATIO = 1.2
# In a shorter run one block of 1 MiB, CPython's unit of memory, that is taken in the second half is above the bound.
SLOPE_JUDGED_S = 360.0
# In quarters of less than 15 s one pause of the machine decides the p99, and one connection the count of descriptors.
STEADY_JUDGED_S = 60.0


@dataclass(slots=True, kw_only=True)
class Report:
    """latencies_ms: of well-formed requests, in order of their end."""

    seconds: float
    rss_mib: list[tuple[float, float]] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    bad: int = 0
    refused_as_meant: int = 0
    cancelled: int = 0
    spans_dropped: float = 0.0
    stop_s: float = 0.0

    def summary(self) -> dict[str, float]:
        """The figures of the promise."""
        half = [point for point in self.rss_mib if point[0] >= self.seconds / 2]
        quarter = max(1, len(self.latencies_ms) // 4)
        first, last = p99(self.latencies_ms[:quarter]), p99(self.latencies_ms[-quarter:])
        steady = self.fds[1:] or self.fds or [0]
        return {
            "requests": len(self.latencies_ms),
            "not_200": self.bad,
            "refused_as_meant": self.refused_as_meant,
            "cancelled": self.cancelled,
            "rss_first_mib": self.rss_mib[0][1] if self.rss_mib else 0.0,
            "rss_last_mib": self.rss_mib[-1][1] if self.rss_mib else 0.0,
            "rss_slope_mib_per_min": slope(half) * 60.0,
            "fds_first": steady[0],
            "fds_last": steady[-1],
            "p50_ms": median(self.latencies_ms) if self.latencies_ms else 0.0,
            "p99_first_quarter_ms": first,
            "p99_last_quarter_ms": last,
            "p99_ratio": last / first if first else 0.0,
            "spans_dropped": self.spans_dropped,
            "stop_s": self.stop_s,
        }


def p99(values: Sequence[float]) -> float:
    """0.0 of nothing."""
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares, per second; 0.0 of fewer than two."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def missed(found: dict[str, float], seconds: float = SLOPE_JUDGED_S) -> list[str]:
    """The bounds that a run of `seconds` has to keep and did not."""
    said = []
    if found["not_200"]:
        said.append(f"{found['not_200']:.0f} well-formed requests were not answered with 200")
    if seconds >= SLOPE_JUDGED_S and found["rss_slope_mib_per_min"] > SLOPE_MIB_PER_MIN:
        said.append(f"memory grows by {found['rss_slope_mib_per_min']:.2f} MiB a minute")
    if seconds < STEADY_JUDGED_S:
        return said
    if found["fds_last"] > found["fds_first"]:
        said.append(f"open descriptors went from {found['fds_first']:.0f} to {found['fds_last']:.0f}")
    if found["p99_ratio"] > P99_RATIO:
        said.append(f"p99 of the last quarter is {found['p99_ratio']:.2f} x the first's")
    return said


def not_judged(seconds: float) -> list[str]:
    """A sentence for each bound that a run of `seconds` is too short for."""
    bounds = {
        "memory": SLOPE_JUDGED_S,
        "open descriptors": STEADY_JUDGED_S,
        "p99": STEADY_JUDGED_S,
    }
    return [
        f"not judged: {name}, because a run of {seconds:g} s is too short; it takes {least_s:g} s"
        for name, least_s in bounds.items()
        if seconds < least_s
    ]


def documents(folder: Path, port: int) -> None:
    """Three tiers, one tenant each."""
    tiers = "".join(
        f'[tiers.{name}]\nband = {band}\ntarget_ms = 15000\n[tenants.{name}]\ntier = "{name}"\nmodels = ["*"]\n'
        f'keys = [{{ sha256 = "{sha256(key.encode()).hexdigest()}" }}]\n'
        for band, (name, key) in enumerate(KEYS.items())
    )
    pool = f'[pools.p]\nendpoints = ["127.0.0.1:{port}"]\n[[routes]]\nmodel = "*"\npool = "p"\n'
    (folder / "all.toml").write_text(tiers + pool)


async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0))
            writer.write(ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def request(model: str, key: str) -> bytes:
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY


async def client(port: int, number: int, until: float, report: Report) -> None:
    """Mostly well-formed; every 16th request is refused as meant, every 64th is left before its answer.

    However short the run, there are some of each kind.
    """
    key = list(KEYS.values())[number % len(KEYS)]
    good, unknown, wrong = request("digits", key), request("", key), request("digits", "nobody")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = number
    while time.monotonic() < until or sent < AT_LEAST:
        sent += 1
        if sent % 64 == 0:
            writer.write(good)
            writer.transport.abort()
            report.cancelled += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        odd = sent % 16 == 0
        begun = time.monotonic()
        writer.write((unknown if sent % 32 else wrong) if odd else good)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        status = int(head.split(b" ", 2)[1])
        if odd:
            report.refused_as_meant += status in (401, 404)
            report.bad += status not in (401, 404)
        else:
            report.latencies_ms.append((time.monotonic() - begun) * 1e3)
            report.bad += status != 200
    writer.close()


async def watch(pid: int, begun: float, until: float, every_s: float, report: Report) -> None:
    while time.monotonic() < until:
        report.rss_mib.append((time.monotonic() - begun, rss_mib(pid)))
        report.fds.append(len(os.listdir(f"/proc/{pid}/fd")))
        await asyncio.sleep(every_s)


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def metric(admin: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


async def soak(
    seconds: float, *, clients: int = 16, collector: str = "none", warm_s: float = 2.0, flags: Sequence[str] = ()
) -> Report:
    """Run it. collector: "none", or "blackhole", which takes connections and never answers; flags: of the gateway."""
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as silent:
        server = await asyncio.start_server(upstream, "127.0.0.1", 0)
        documents(Path(folder), server.sockets[0].getsockname()[1])
        http, grpc, admin = free_ports(3)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        environ["ORIEL_STATE"] = folder
        if collector == "blackhole":
            environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = (sys.executable, "-m", "oriel_cli.main", "gateway", "--policies", folder, "--quota-file", "none")
        ports = ("--http-port", str(http), "--grpc-port", str(grpc), "--admin-port", str(admin))
        process = await asyncio.create_subprocess_exec(*command, *ports, *flags, env=environ, cwd=ROOT)
        report = Report(seconds=seconds)
        try:
            await ready(admin, process)
            await load(http, clients, time.monotonic() + warm_s, Report(seconds=warm_s))
            begun = time.monotonic()
            until = begun + seconds
            watching = asyncio.create_task(watch(process.pid, begun, until, min(5.0, seconds / 8), report))
            await load(http, clients, until, report)
            await watching
            given_up = time.monotonic() + (DROPPED_S if collector == "blackhole" else 0.0)
            while not report.spans_dropped:
                report.spans_dropped = await asyncio.to_thread(metric, admin, "oriel_gateway_spans_dropped_total")
                if time.monotonic() >= given_up:
                    break
                await asyncio.sleep(0.1)
        finally:
            stopped = time.monotonic()
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
            report.stop_s = time.monotonic() - stopped
            server.close()
        return report


async def load(port: int, clients: int, until: float, report: Report) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(port, number, until, report))


async def ready(admin: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                await asyncio.to_thread(metric, admin, "oriel_gateway_permits")
                return
            except OSError:
                if process.returncode is not None:
                    raise RuntimeError("the gateway did not start") from None
                await asyncio.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--collector", choices=("none", "blackhole"), default="none")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    report = asyncio.run(soak(args.seconds, clients=args.clients, collector=args.collector))
    found = report.summary()
    for name, value in found.items():
        print(f"{name:<24} {value:>12.3f}")
    wrong, unjudged = missed(found, args.seconds), not_judged(args.seconds)
    print("\n".join([*(wrong or ["every bound that was judged was kept"]), *unjudged]))
    if args.json is not None:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
        settings = {"seconds": args.seconds, "clients": args.clients, "collector": args.collector}
        said = {
            "settings": settings,
            "machine": machine,
            "found": found,
            "missed": wrong,
            "not_judged": unjudged,
            "rss_mib": report.rss_mib,
        }
        args.json.write_text(json.dumps(said, indent=1) + "\n")
    return 1 if wrong and not args.report_only else 0
