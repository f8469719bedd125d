"""Losses when an upstream server is killed (R10) or hangs (R11b): `python benchmarks/faults.py endpoint`.

    [--rounds 5] [--json FILE]

A gateway in a process of its own before two small model servers (5 ms of waiting each call) in theirs; eight callers
ask without a pause, deadline 1.5 s. One server gets SIGKILL, or SIGSTOP and later SIGCONT. Per fault, over the rounds:

    left alone   s from the signal until the gateway's metrics no longer count the server as usable (promised: 1)
    silence      the longest time in which no caller got a good answer, around the signal
    in flight    calls that the server held when it was signalled
    lost         answers that were not 200 (promised: at most those in flight; none of idempotent ones that are killed)
    twice        calls executed by both
    stale        calls executed after SIGCONT that had been answered 504
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gateway.pods import PROBED, Load, Pod, files, pod
from tests.gateway.process import gateway_process

CALLERS = 8
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """One round."""

    left_alone_s: float
    silence_s: float
    in_flight: int
    lost: int
    twice: int
    stale: int
    statuses: dict[int, int]


async def figure(admin: int, name: str) -> float:
    """The sum of a metric; -1 while nobody answers."""

    def read() -> float:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=2) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return -1.0
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    return await asyncio.to_thread(read)


async def usable(admin: int) -> float:
    return await figure(admin, "oriel_gateway_endpoints_usable")


async def one_round(number: signal.Signals, *, idempotent: bool, probe: str) -> Fault:
    with tempfile.TemporaryDirectory() as folder:
        async with pod() as one, pod() as other:
            documents = files([one, other], idempotent=idempotent, probe=probe)
            async with gateway_process(Path(folder), documents) as gateway:
                return await under_load(number, one, other, gateway.port, gateway.admin_port)


async def under_load(number: signal.Signals, one: Pod, other: Pod, port: int, admin: int) -> Fault:
    """Signal one of two servers while callers ask the gateway, and count what is lost."""
    while await usable(admin) < 2:
        await asyncio.sleep(0.05)
    load = Load(port, CALLERS, timeout_ms=1500)
    await asyncio.sleep(2.0)
    in_flight = int(await figure(admin, "oriel_gateway_inflight"))
    one.signal(number)
    at = time.monotonic()
    while await usable(admin) > 1 and time.monotonic() - at < 10:
        await asyncio.sleep(POLL_S)
    left_alone = time.monotonic() - at
    await asyncio.sleep(2.5)
    resumed = time.monotonic()
    if number is signal.SIGSTOP:
        one.signal(signal.SIGCONT)
        await asyncio.sleep(1.0)
    statuses = await load.stop()
    await asyncio.sleep(0.2)
    good = [at - 0.1, *sorted(when for when, status, _, _ in load.answers if status == 200 and when > at)]
    expired = {b"ran " + body for _, status, body, _ in load.answers if status == 504}
    return Fault(
        left_alone_s=left_alone,
        silence_s=max(b - a for a, b in zip(good[1:], good[2:], strict=False)),
        in_flight=min(in_flight, CALLERS),
        lost=statuses.total() - statuses[200],
        twice=sum(times > 1 for times in (one.ran + other.ran).values()),
        stale=sum(when > resumed for body, when in one.ran_s.items() if body in expired),
        statuses=dict(statuses),
    )


KINDS = {
    "killed, idempotent": (signal.SIGKILL, True, PROBED),
    "killed": (signal.SIGKILL, False, PROBED),
    "stopped, probed": (signal.SIGSTOP, False, PROBED),
    "stopped, not probed": (signal.SIGSTOP, False, 'probe = ""'),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"  # of the gateways
    found: dict[str, list[Fault]] = {}
    print(
        f"{'fault':22} {'left alone s':>20} {'silence s':>10} {'in flight':>9} {'lost':>12} {'twice':>6} {'stale':>6}"
    )
    print(f"{'':22} {'median':>10} {'slowest':>9} {'slowest':>10} {'most':>9} {'per round':>12} {'sum':>6} {'sum':>6}")
    for name, (number, idempotent, probe) in KINDS.items():
        each = found[name] = [
            asyncio.run(one_round(number, idempotent=idempotent, probe=probe)) for _ in range(args.rounds)
        ]
        alone = [fault.left_alone_s for fault in each]
        print(
            f"{name:22} {statistics.median(alone):10.2f} {max(alone):9.2f} {max(f.silence_s for f in each):10.2f} "
            f"{max(f.in_flight for f in each):9} {','.join(str(f.lost) for f in each):>12} "
            f"{sum(f.twice for f in each):6} {sum(f.stale for f in each):6}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({name: [asdict(f) for f in each] for name, each in found.items()}, indent=1))
