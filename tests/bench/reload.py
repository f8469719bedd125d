"""How long the gateway's loop stands still while a large set of tenants is taken, and what that costs in memory.

    .venv/bin/python tests/bench/reload.py [--tenants 100000] [--reloads 3]

A gateway on this process's loop serves from a folder with one NDJSON of tenants, all of whom have called (the worst
case: every tenant has become objects). Then the file is replaced. A probe asks for a turn of the loop every millisecond
and notes the longest time between two (`longest_stall_ms`; the same without a reload stands beside it, since other work
of the machine is in both) and the most CPU time the loop's thread used between two (`longest_turn_cpu_ms`: what of that
was ours). Prints JSON; exit code 1 if that is more than 20 ms.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter, thread_time

import uvloop

from oriel_gateway.compiler import compile_folder
from oriel_gateway.core import Gateway
from oriel_gateway.limits import EmbeddedLimiter
from oriel_gateway.reload import Reloader
from oriel_gateway.sources import FolderSource
from oriel_wire.trace import ListSink

DOCUMENT = """
[tiers.gold]
band = 0
target_ms = 100
[pools.p]
endpoints = ["127.0.0.1:9"]
[[routes]]
model = "*"
pool = "p"
"""


def key(number: int, generation: int) -> str:
    return f"key-{generation}-{number}"


def write_tenants(folder: Path, count: int, generation: int) -> None:
    lines = [
        json.dumps(
            {
                "name": f"tenant-{number}",
                "tier": "gold",
                "models": ["digits", "team-a-*"],
                "keys": [{"sha256": hashlib.sha256(key(number, generation).encode()).hexdigest()}],
                "limit": {"requests_per_s": 10, "burst": 20},
            }
        )
        for number in range(count)
    ]
    new = folder / ".tenants.new"
    new.write_text("\n".join(lines))
    new.rename(folder / "tenants.ndjson")


def resident_mib() -> dict[str, float]:
    """private: this process's own memory; file: pages of mapped files, which the kernel may take back."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "private": int(fields["RssAnon"].split()[0]) / 1024,
        "file": (int(fields["RssFile"].split()[0]) + int(fields["RssShmem"].split()[0])) / 1024,
    }


class Probe:
    """The longest gap between turns of the loop, in wall time and in CPU time of the loop's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.worst_s = self.worst_cpu_s = 0.0
        self.last, self.last_cpu = perf_counter(), thread_time()
        self.loop.call_later(0.001, self.turn)

    def turn(self) -> None:
        now, cpu = perf_counter(), thread_time()
        self.worst_s = max(self.worst_s, now - self.last - 0.001)
        self.worst_cpu_s = max(self.worst_cpu_s, cpu - self.last_cpu)
        self.last, self.last_cpu = now, cpu
        self.loop.call_later(0.001, self.turn)

    def take_ms(self) -> tuple[float, float]:
        worst = round(self.worst_s * 1000.0, 2), round(self.worst_cpu_s * 1000.0, 2)
        self.worst_s = self.worst_cpu_s = 0.0
        return worst


async def call_all(gateway: Gateway, count: int, generation: int) -> None:
    """Every tenant is identified and routed once, in slices."""
    for number in range(count):
        tenant = gateway.identify([("x-api-key", key(number, generation))]).tenant
        gateway.tenant_lines(tenant)
        if number % 8192 < 4096:
            gateway.target(tenant, b"POST /v2/models/digits/infer", "POST", "/v2/models/digits/infer", "")
        if number % 20 == 0:
            await asyncio.sleep(0.001)


async def measure(folder: Path, tenants: int, reloads: int) -> dict[str, object]:
    write_tenants(folder, tenants, 0)
    source = FolderSource(folder)
    seen = source.stamp()
    gateway = Gateway(await compile_folder(folder), limiter=EmbeddedLimiter(), sink=ListSink())
    gc.collect()
    gc.freeze()
    reloader = Reloader(gateway, source, lambda: compile_folder(folder), seen=seen)
    figures = []
    at_start = resident_mib()
    watching = asyncio.create_task(reloader.run())
    probe = Probe()
    for generation in range(1, reloads + 1):
        probe.take_ms()
        await call_all(gateway, tenants, generation - 1)
        calling_ms, calling_cpu_ms = probe.take_ms()
        called = resident_mib()
        await asyncio.to_thread(write_tenants, folder, tenants, generation)
        probe.take_ms()
        began = perf_counter()
        before = gateway.snapshot
        while gateway.snapshot is before:
            await asyncio.sleep(0.005)
        effective_s = perf_counter() - began
        await asyncio.sleep(1.0)  # letting go of the old ones
        stall_ms, cpu_ms = probe.take_ms()
        await asyncio.sleep(effective_s + 1.0)
        quiet_ms, _ = probe.take_ms()
        figures.append(
            {
                "longest_stall_ms": stall_ms,
                "longest_stall_without_reload_ms": quiet_ms,
                "longest_turn_cpu_ms": cpu_ms,
                "first_calls_longest_stall_ms": calling_ms,
                "first_calls_longest_turn_cpu_ms": calling_cpu_ms,
                "effective_after_s": round(effective_s, 2),
                "all_called_mib": {name: round(value, 1) for name, value in called.items()},
                "after_mib": {name: round(value, 1) for name, value in resident_mib().items()},
            }
        )
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await gateway.close()
    start = {name: round(value, 1) for name, value in at_start.items()}
    return {"tenants": tenants, "started_mib": start, "reloads": figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tenants", type=int, default=100_000)
    parser.add_argument("--reloads", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "all.toml").write_text(DOCUMENT)
        figures = uvloop.run(measure(folder, args.tenants, args.reloads))
    print(json.dumps(figures, indent=2))
    worst = max(each["longest_turn_cpu_ms"] for each in figures["reloads"])
    return 0 if worst <= 20.0 else 1


if __name__ == "__main__":
    sys.exit(main())
