"""Kills a worker of the logic server every second (SIGKILL) while requests come at half of its capacity.

    python benchmarks/faults.py worker [--seconds 60] [--every 1.0] [--workers 2] [--out FOLDER]

First as fast as four clients can go, for what is possible; then open loop at half of that: requests are sent when they
are due, whether or not earlier ones were answered. Meanwhile a worker of the logic server, any one, is killed every
second, busy or not. Every request has a body of its own and its answer is compared with it. Lost are the requests that
were answered `worker_died`; whatever else is not the right answer is another failure. For each kill it is measured how
long the server had fewer workers ready than it should (`oriel_logic_workers_ready`). Needs Linux.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
from harness.environments import commit, machine
from harness.pages import conditions, targets, write_page
from harness.processes import PEERS, free_ports, serving, status_of

from oriel_wire.engine.client import HttpClient

FOLDER = PEERS / "logic" / "kills"
READY = re.compile(rb"^oriel_logic_workers_ready ([0-9.]+)", re.M)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(pid: int) -> list[int]:
    """The processes below the fork servers of a logic process."""
    return [worker for server in children(pid) for worker in children(server)]


class Bench:
    def __init__(self, pid: int, port: int, admin: int, workers: int) -> None:
        self.pid = pid
        self.client = HttpClient(host="127.0.0.1", port=port)
        self.admin = HttpClient(host="127.0.0.1", port=admin)
        self.workers = workers
        self.outcomes: Counter[str] = Counter()
        self.took_ms: list[float] = []
        self.replaced_ms: list[float] = []
        self.kills = 0

    async def one(self, number: int) -> None:
        body = b"%d" % number
        began = time.monotonic()
        headers = [("content-type", "application/octet-stream")]
        try:
            deadline = began + 20
            answer = await self.client.request("POST", "/v1/services/work", headers, body, deadline=deadline)
        except Exception as error:  # whatever it is, it is a failure of another kind
            self.outcomes[type(error).__name__] += 1
            return
        self.took_ms.append((time.monotonic() - began) * 1000)
        if answer.status == 200:
            self.outcomes["right" if answer.body == body else "wrong"] += 1
        else:
            self.outcomes[msgspec.json.decode(answer.body)["error"]["reason"]] += 1

    async def capacity_per_s(self, seconds: float) -> float:
        end = time.monotonic() + seconds

        async def go() -> None:
            while time.monotonic() < end:
                await self.one(0)

        await asyncio.gather(*(go() for _ in range(2 * self.workers)))
        found = self.outcomes["right"] / seconds
        self.outcomes.clear()
        self.took_ms.clear()
        return found

    async def offer(self, rate: float, seconds: float) -> None:
        began, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while (due := number / rate) < seconds:
                await asyncio.sleep(began + due - time.monotonic())
                number += 1
                group.create_task(self.one(number))

    async def ready(self) -> int:
        answer = await self.admin.request("GET", "/metrics", [], b"", deadline=time.monotonic() + 10)
        found = READY.search(answer.body)
        return int(float(found[1])) if found else 0

    async def kill(self, every_s: float, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() + every_s < end:
            await asyncio.sleep(every_s)
            victim = random.choice(workers_of(self.pid))
            os.kill(victim, signal.SIGKILL)
            self.kills += 1
            killed = time.monotonic()
            while victim in workers_of(self.pid) or await self.ready() < self.workers:
                await asyncio.sleep(0.01)
            self.replaced_ms.append((time.monotonic() - killed) * 1000)


async def measure(bench: Bench, every_s: float, seconds: float) -> float:
    rate = await bench.capacity_per_s(3.0) / 2
    await asyncio.gather(bench.offer(rate, seconds), bench.kill(every_s, seconds))
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills (1)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a page and its figures there")
    args = parser.parse_args()
    where = machine(os.cpu_count() or 1)
    port, admin = free_ports(2)
    command = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(FOLDER), "--no-watch"]
    command += ["--workers", str(args.workers), "--http-port", str(port), "--admin-port", str(admin)]
    with serving(command, lambda: status_of(f"http://127.0.0.1:{admin}/health/ready") == 200) as pid:
        bench = Bench(pid, port, admin, args.workers)
        rate = asyncio.run(measure(bench, args.every, args.seconds))
    lost = bench.outcomes["worker_died"]
    others = bench.outcomes.total() - lost - bench.outcomes["right"]
    met = {
        "lost requests <= kills": (f"{lost} of {bench.kills}", lost <= bench.kills),
        "other failures": (str(others), not others),
        "replaced within 1 s": (f"worst {max(bench.replaced_ms):.0f} ms", max(bench.replaced_ms) <= 1000),
    }
    text = f"{bench.outcomes.total()} requests at {rate:.0f}/s in {args.seconds:g} s, {bench.kills} kills; "
    text += f"answers {dict(bench.outcomes)}; p50 {statistics.median(bench.took_ms):.1f} ms, "
    text += f"p99 {statistics.quantiles(bench.took_ms, n=100)[98]:.1f} ms; "
    text += f"a worker replaced in {statistics.median(bench.replaced_ms):.0f} ms (median).\n\n"
    text += f"{targets(met)}\n"
    print(text)
    if args.out is not None:
        about = f"`python benchmarks/faults.py worker`; {where}."
        document = {"rate": rate, "kills": bench.kills, "outcomes": bench.outcomes, "replaced_ms": bench.replaced_ms}
        held = conditions(where, commit(), "not noted (one run)")
        write_page(args.out, "logic-kills", "Workers killed under load", f"{held}\n\n{about}", text, document)
