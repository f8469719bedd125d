"""Several faults at once (R36): a flood, a server that is killed, a Redis that comes and goes, changing documents.

    python benchmarks/faults.py compound [--rounds 3] [--flood 5] [--chaos 8] [--json FILE]

Two model servers of SLOTS calls of WORK_MS each; gold offers 0.3 of what both can do (C), bronze 0.3, in Poisson
arrivals whatever comes back. Then, for `--chaos` seconds: bronze offers `--flood` x C, Redis (which every call's limits
are counted in) is silent and resets in turns of 300 ms, the documents are written anew twice a second, and after a
second one server gets SIGKILL; it is started again at its port at half-time. Afterwards all is as before. Per round:

    gold in target   of what gold offered during the chaos: answered 200 within its target (promised: >= 95 %)
    lost             gold that was neither answered 200 nor refused with 429, 503 or 504
    recovery         s from the end of the chaos until 99 % of gold and bronze are in target for good (promised: 5)
    twice            calls, of either tier and in the whole round, that were executed more than once (promised: 0)

With a `--chaos` of less than 8 s the kill and the new start are most of it: then the share in target is not judged. Nor
are share and recovery where the chaos took longer than it should, because the machine had no time for this process.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import uvloop
from tests.conformance.redis_server import PASSWORD, Proxy, redis_server
from tests.gateway.pods import INFER, PROBED, Pod, pod
from tests.gateway.process import gateway_process
from tests.gateway.stack import BRONZE, GOLD, Client, documents

WORK_MS, SLOTS = 20, 4
CAPACITY = 2 * SLOTS * 1000 / WORK_MS
TARGET_S = {GOLD: 0.5, BRONZE: 2.0}
CALM_S, AFTER_S, WINDOW_S, FLAP_S, RELOAD_S = 3.0, 8.0, 0.5, 0.3, 0.5
JUDGED_S = 8.0  # of chaos, from which the share in target is judged
LATE_S = 2.0  # by which the chaos may be longer: a model server is started in it
LIMITS = 'limits = [{ model = "digits", requests_per_s = 100000, burst = 100000 }]\n'


@dataclass(frozen=True, slots=True)
class Call:
    """due_s: when it was offered, monotonic; 0: no answer."""

    key: str
    due_s: float
    took_s: float
    status: int

    @property
    def good(self) -> bool:
        return self.status == 200 and self.took_s <= TARGET_S[self.key]


@dataclass(frozen=True, slots=True)
class Round:
    chaos_s: float
    gold_offered: int
    bronze_per_s: float
    gold_in_target: float
    gold_lost: int
    recovery_s: float
    twice: int
    executed: int
    reloads: int
    statuses: dict[str, int]

    def not_judged(self, chaos_s: float) -> str:
        """The reasons why promises are not judged; empty if all are."""
        if self.chaos_s > chaos_s + LATE_S:
            return f"in target and recovery, because {chaos_s:g} s of chaos took {self.chaos_s:.1f} s on this machine"
        if chaos_s < JUDGED_S:
            return f"in target, because {chaos_s:g} s of chaos are too few; it takes {JUDGED_S:g} s"
        return ""

    def kept(self, chaos_s: float) -> bool:
        late = self.chaos_s > chaos_s + LATE_S
        in_target = late or chaos_s < JUDGED_S or self.gold_in_target >= 0.95
        return in_target and (late or self.recovery_s <= 5.0) and not self.twice


class Offer:
    """Arrivals of one tenant at a rate that may change; each on a connection that nobody uses meanwhile."""

    def __init__(self, port: int, key: str, rate: float, group: asyncio.TaskGroup) -> None:
        self.rate = rate
        self.calls: list[Call] = []
        self._port = port
        self._key = key
        self._group = group
        self._idle: list[Client] = []
        self._number = 0
        self._task = group.create_task(self._arrive())

    async def _arrive(self) -> None:
        chance = random.Random(self._key)
        due = monotonic()
        while True:
            due += chance.expovariate(self.rate)
            if (wait_s := due - monotonic()) > 0.0:
                await asyncio.sleep(wait_s)
            self._number += 1
            self._group.create_task(self._ask(due, f"{self._key}-{self._number}".encode()))

    async def _ask(self, due: float, body: bytes) -> None:
        status = 0
        client = self._idle.pop() if self._idle else None
        try:
            if client is None:
                client = await Client(self._port).__aenter__()
            reply = await client.ask(INFER, body, key=self._key)
            status = reply.status
            if reply.headers.get("connection") != "close":
                self._idle.append(client)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            if client is not None:
                client.writer.transport.abort()
        self.calls.append(Call(key=self._key, due_s=due, took_s=monotonic() - due, status=status))

    def stop(self) -> None:
        self._task.cancel()

    def close(self) -> None:
        for client in self._idle:
            client.writer.transport.abort()


def policies(ports: list[int], written: int) -> bytes:
    """A policy document: the same promises each time, and one tenant that was not there before."""
    text = documents(ports, max_queue=200, pool=PROBED)["all.toml"].decode()
    for name, key in (("gold", GOLD), ("bronze", BRONZE)):
        text = text.replace(f"[tiers.{name}]\n", f"[tiers.{name}]\n# {written}\n")
        text = text.replace("target_ms = 2000", f"target_ms = {int(TARGET_S[key] * 1e3)} ", 1)
    text = "\n".join(line for line in text.split("\n") if not line.startswith("grpc_endpoints"))
    text = text.replace("[tenants.g]\n", f"[tenants.g]\n{LIMITS}").replace("[tenants.b]\n", f"[tenants.b]\n{LIMITS}")
    return (text + f'[tenants.n{written}]\ntier = "bronze"\nmodels = ["x"]\n').encode()


async def flap(proxy: Proxy) -> None:
    while True:
        await proxy.set("blackhole")
        await asyncio.sleep(FLAP_S)
        await proxy.set("reset")
        await proxy.set("through")
        await asyncio.sleep(FLAP_S)


class Documents:
    """The gateway's policy document, written anew every RELOAD_S. times: how often it was."""

    def __init__(self, file: Path, ports: list[int]) -> None:
        self.times = 0
        self._file = file
        self._ports = ports

    async def change(self) -> None:
        while True:
            self.times += 1
            new = self._file.with_suffix(".new")
            new.write_bytes(policies(self._ports, self.times))
            new.replace(self._file)
            await asyncio.sleep(RELOAD_S)


async def one_round(folder: Path, flood: float, chaos_s: float) -> Round:
    os.environ["ORIEL_LIMITER_PASSWORD"] = PASSWORD
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server())
        proxy = Proxy(redis.port)
        await proxy.open()
        stack.push_async_callback(proxy.close)
        pods: list[Pod] = [await stack.enter_async_context(pod(WORK_MS, slots=SLOTS)) for _ in range(2)]
        ports = [each.port for each in pods]
        files = {"all.toml": policies(ports, 0)}
        process = await stack.enter_async_context(gateway_process(folder, files, "--limiter", proxy.url))
        written = Documents(folder / "policies" / "all.toml", ports)
        async with asyncio.TaskGroup() as group:
            gold = Offer(process.port, GOLD, 0.3 * CAPACITY, group)
            bronze = Offer(process.port, BRONZE, 0.3 * CAPACITY, group)
            await asyncio.sleep(CALM_S)
            began = monotonic()
            troubles = [group.create_task(flap(proxy)), group.create_task(written.change())]
            bronze.rate = flood * CAPACITY
            await asyncio.sleep(1.0)
            pods[0].signal(signal.SIGKILL)
            await asyncio.sleep(chaos_s / 2 - 1.0)
            pods.append(await stack.enter_async_context(pod(WORK_MS, port=ports[0], slots=SLOTS)))
            await asyncio.sleep(chaos_s / 2)
            for task in troubles:
                task.cancel()
            await proxy.set("through")
            bronze.rate = 0.3 * CAPACITY
            ended = monotonic()
            await asyncio.sleep(AFTER_S)
            gold.stop()
            bronze.stop()
        gold.close()
        bronze.close()
        await asyncio.sleep(0.2)
        ran = Counter[bytes]()
        for each in pods:
            ran += each.ran
        offered = [call for call in gold.calls if began <= call.due_s < ended]
        return Round(
            chaos_s=ended - began,
            gold_offered=len(offered),
            bronze_per_s=sum(began <= call.due_s < ended for call in bronze.calls) / (ended - began),
            gold_in_target=sum(call.good for call in offered) / len(offered),
            gold_lost=sum(call.status not in (200, 429, 503, 504) for call in offered),
            recovery_s=recovery(gold.calls + bronze.calls, ended),
            twice=sum(times > 1 for times in ran.values()),
            executed=ran.total(),
            reloads=written.times,
            statuses={str(code): count for code, count in sorted(Counter(c.status for c in offered).items())},
        )


def recovery(calls: list[Call], ended: float) -> float:
    """Seconds from `ended` to the end of the last window in which less than 99 % of a tier were in target."""
    last = 0.0
    for number in range(int(AFTER_S / WINDOW_S)):
        start = ended + number * WINDOW_S
        for key in (GOLD, BRONZE):
            window = [call for call in calls if call.key == key and start <= call.due_s < start + WINDOW_S]
            if sum(call.good for call in window) < 0.99 * len(window):
                last = (number + 1) * WINDOW_S
    return last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flood", type=float, default=5.0, help="of bronze, times the capacity")
    parser.add_argument("--chaos", type=float, default=8.0, help="seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found: list[Round] = []
    print(f"C = {CAPACITY:g}/s; gold offers 0.3 C, bronze {args.flood:g} C, for {args.chaos:g} s")
    heads = ("gold offered", "bronze/s", "in target %", "lost", "recovery s", "twice", "executed", "reloads")
    print("  ".join(heads) + "  answers to gold")
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            each = uvloop.run(one_round(Path(folder), args.flood, args.chaos))
        found.append(each)
        in_target = f"{each.gold_in_target * 100:.2f}"
        cells: tuple[object, ...] = (each.gold_offered, f"{each.bronze_per_s:.0f}", in_target, each.gold_lost)
        cells = (*cells, f"{each.recovery_s:.1f}", each.twice, each.executed, each.reloads)
        row = "  ".join(f"{cell:>{len(head)}}" for head, cell in zip(heads, cells, strict=True))
        print(f"{row}  {each.statuses}{'' if each.kept(args.chaos) else '  MISSED'}", flush=True)
        if why := each.not_judged(args.chaos):
            print(f"not judged: {why}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0 if all(each.kept(args.chaos) for each in found) else 1
