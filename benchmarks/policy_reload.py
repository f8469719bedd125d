"""Times how soon a changed set of tenants is in force, how long the event loop stands still, and the memory it takes.

    .venv/bin/python benchmarks/policy_reload.py [--tenants 100000] [--reloads 3] [--revocations 20] [--busy 0]

A gateway on this process's loop serves from a folder with one NDJSON of tenants, all of whom have called (the worst
case: every tenant has become objects). Then the file is replaced. A probe asks for a turn of the loop every millisecond
and notes the longest time between two (`longest_stall_ms`; the same without a reload stands beside it, since other work
of the machine is in both) and the most CPU time the loop's thread used between two (`longest_turn_cpu_ms`: what of that
was ours).

`one_key`: a tenant's key is replaced by another in the file, at a random moment between two polls; the time from the
rename until the old key is refused and the new one is not. `toml_key`: the same in a TOML document beside the tenants.
`all_tenants`: every line is another (`effective_after_s`). busy: processes that compute all the time beside it.

Prints JSON; exit code 1 if a turn is more than 20 ms or a key lives on for more than a second.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, thread_time

import uvloop

from oriel_gateway.core import Gateway
from oriel_gateway.documents.compiler import FolderCompiler
from oriel_gateway.documents.reload import Reloader
from oriel_gateway.documents.source import FolderSource
from oriel_gateway.errors import Refused
from oriel_gateway.limits import EmbeddedLimiter
from oriel_wire.observe.trace import ListSink

DOCUMENT = """
[tiers.gold]
band = 0
target_ms = 100
[pools.p]
endpoints = ["127.0.0.1:9"]
[[routes]]
model = "*"
pool = "p"
[tenants.by-hand]
tier = "gold"
keys = [{ sha256 = "SHA256" }]
"""


def key(number: int, generation: int) -> str:
    return f"key-{generation}-{number}"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.rename(path)


def exchange(path: Path, old: str, fresh: str) -> None:
    replace(path, path.read_bytes().replace(digest(old).encode(), digest(fresh).encode(), 1))


def write_tenants(folder: Path, count: int, generation: int) -> None:
    lines = [
        json.dumps(
            {
                "name": f"tenant-{number}",
                "tier": "gold",
                "models": ["digits", "team-a-*"],
                "keys": [{"sha256": digest(key(number, generation))}],
                "limit": {"requests_per_s": 10, "burst": 20},
            }
        )
        for number in range(count)
    ]
    replace(folder / "tenants.ndjson", "\n".join(lines).encode())


def write_by_hand(folder: Path, secret: str) -> None:
    replace(folder / "all.toml", DOCUMENT.replace("SHA256", digest(secret)).encode())


def known(gateway: Gateway, secret: str) -> bool:
    try:
        gateway.identify([("x-api-key", secret)])
    except Refused:
        return False
    return True


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
        gateway.targets.tenant_lines(tenant)
        if number % 8192 < 4096:
            gateway.targets.of_line(tenant, b"POST /v2/models/digits/infer", "POST", "/v2/models/digits/infer", "")
        if number % 20 == 0:
            await asyncio.sleep(0.001)


async def revoke(gateway: Gateway, folder: Path, tenants: int, times: int) -> dict[str, object]:
    """Other keys for one tenant at a time, in its line or in the TOML document in turn."""
    path = folder / "tenants.ndjson"
    by_hand, delays_s = "by-hand-0", {"one_key": list[float](), "toml_key": list[float]()}
    for turn in range(times):
        await asyncio.sleep(0.5 + random.random())
        fresh = f"fresh-{turn}"
        if turn % 2:
            old, by_hand = by_hand, fresh
            await asyncio.to_thread(write_by_hand, folder, fresh)
        else:
            old = key(random.randrange(tenants), 0)
            await asyncio.to_thread(exchange, path, old, fresh)
        began = perf_counter()
        while known(gateway, old) or not known(gateway, fresh):
            await asyncio.sleep(0.005)
        delays_s["toml_key" if turn % 2 else "one_key"].append(perf_counter() - began)
    return {
        name: {"p50_s": round(sorted(each)[len(each) // 2], 3), "longest_s": round(max(each), 3), "times": len(each)}
        for name, each in delays_s.items()
        if each
    }


async def measure(folder: Path, tenants: int, reloads: int, revocations: int) -> dict[str, object]:
    write_by_hand(folder, "by-hand-0")
    write_tenants(folder, tenants, 0)
    source = FolderSource(folder)
    seen = source.stamp()
    compiler = FolderCompiler(folder)
    gateway = Gateway(await compiler.compile(), limiter=EmbeddedLimiter(), sink=ListSink())
    gc.collect()
    gc.freeze()
    reloader = Reloader(gateway, source, compiler.compile, seen=seen)
    figures = []
    at_start = resident_mib()
    watching = asyncio.create_task(reloader.run())
    probe = Probe()
    await call_all(gateway, tenants, 0)
    probe.take_ms()
    revoked = await revoke(gateway, folder, tenants, revocations)
    stall_ms, cpu_ms = probe.take_ms()
    revoked |= {"longest_stall_ms": stall_ms, "longest_turn_cpu_ms": cpu_ms}
    await asyncio.to_thread(write_tenants, folder, tenants, 0)
    while not known(gateway, key(0, 0)) or known(gateway, f"fresh-{(revocations - 1) // 2 * 2}"):
        await asyncio.sleep(0.05)
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
    compiler.close()
    start = {name: round(value, 1) for name, value in at_start.items()}
    return {"tenants": tenants, "started_mib": start, "revoked": revoked, "all_tenants": figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tenants", type=int, default=100_000)
    parser.add_argument("--reloads", type=int, default=3)
    parser.add_argument("--revocations", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0)
    args = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        with tempfile.TemporaryDirectory() as name:
            figures = uvloop.run(measure(Path(name), args.tenants, args.reloads, args.revocations))
    finally:
        for each in busy:
            each.kill()
            each.wait()
    figures["busy"] = args.busy
    print(json.dumps(figures, indent=2))
    revoked = figures["revoked"]
    worst = max(each["longest_turn_cpu_ms"] for each in (revoked, *figures["all_tenants"]))
    slowest = max((revoked[name]["longest_s"] for name in ("one_key", "toml_key") if name in revoked), default=0.0)
    return 0 if worst <= 20.0 and slowest <= 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
