"""R12 to R15 as one table: what gateways that share their limits through Redis admit, and what that adds to a call.

Two gateways' limiters in one process (three where it says so), a real redis-server behind a proxy that misbehaves, far
more calls than the limit. Per case: calls admitted against the limit, the burst left out; how long calls waited for the
limiter in the first second of trouble and after it; what was promised, and whether it was kept. Last: the wait that a
refusal tells, against the wait until a call is admitted.

    .venv/bin/python benchmarks/shared_limits.py [--rate 100 --rate 1000] [--tried 1000] [--seconds 5] [--case well]

A limit of 100 per second is below what is leased: every call asks. One of 1000 per second is leased. Exit status 1 if a
promise was not kept. A run that is too short for a bound, or tries too few calls, says so and does not judge it.
"""

import argparse
import asyncio
import logging
import sys
from dataclasses import dataclass, field
from time import monotonic, process_time

import uvloop
from harness.processes import ROOT

sys.path.append(str(ROOT))

from tests.conformance.desk import Desk
from tests.conformance.redis_server import PASSWORD, Proxy, RedisServer, redis_server

from oriel_gateway.errors import Refused
from oriel_gateway.limits import SharedLimiter
from oriel_gateway.limits.redis_ledger import RedisLedger

EXACT_S = 10.0  # R14's window
CUT_OFF_S = 12.0
# In a shorter window one pause of the machine is more than what a limit may be missed by.
LEAST_S = 5.0
LEAST_WAITS = 1000  # that a p99 is judged by


@dataclass(frozen=True)
class Case:
    """at_most, at_least: x limit in the window; early_ms, later_ms: p99 of the wait. exact: the window begins a second
    after Redis is back and lasts 10 s."""

    name: str
    rule: str
    at_most: float
    at_least: float
    early_ms: float
    later_ms: float
    exact: bool = False
    gateways: int = 2


CASES = (
    Case("well", "R15", 1.05, 0.95, 5.0, 5.0),
    Case("refuses", "R12", 1.5, 0.0, 5.0, 5.0),
    Case("resets", "R12", 1.5, 0.0, 5.0, 5.0),
    Case("2 of 3 cut off", "R12", 1.5, 0.0, 5.0, 5.0, gateways=3),
    Case("answers nothing", "R13", 1.5, 0.0, 25.0, 2.0),
    Case("100 ms late", "R13", 1.5, 0.0, 25.0, 2.0),
    Case("flaps, 300 ms", "R13", 1.5, 0.0, 25.0, 2.0),
    Case("flushed", "R14", 1.05, 0.95, 25.0, 5.0, exact=True),
    Case("replaced", "R14", 1.05, 0.95, 25.0, 5.0, exact=True),
)


@dataclass
class Tally:
    tried: int = 0
    errors: int = 0
    admitted_s: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    exact_from_s: float = 0.0


async def one(desk: Desk, tally: Tally, began: float) -> None:
    start = monotonic()
    try:
        grant = await desk.take()
        grant.settle(0, True, monotonic())
        tally.admitted_s.append(monotonic() - began)
    except Refused:
        pass
    except Exception:  # counted, and shown
        tally.errors += 1
        raise
    tally.tried += 1
    (tally.early if start - began < 1.0 else tally.later).append(monotonic() - start)


async def press(desk: Desk, tally: Tally, seconds: float, tried: int) -> None:
    began = monotonic()
    sent = 0
    async with asyncio.TaskGroup() as group:
        while (passed := monotonic() - began) < seconds:
            while sent < passed * tried:
                group.create_task(one(desk, tally, began))
                sent += 1
            await asyncio.sleep(0.001)


async def trouble(server: RedisServer, proxy: Proxy, case: Case, seconds: float, tally: Tally) -> None:
    began = monotonic()
    match case.name:
        case "100 ms late":
            proxy.delay_s = 0.1
        case "flaps, 300 ms":
            while monotonic() < began + seconds:
                await proxy.set("blackhole")
                await asyncio.sleep(0.3)
                await proxy.set("reset")
                await proxy.set("through")
                await asyncio.sleep(0.3)
        case "flushed":
            ledger = RedisLedger(server.url, holder="flusher", password=PASSWORD)
            await ledger._redis.flushall()
            await ledger.close()
        case "replaced":
            await server.kill()
            await asyncio.sleep(1.0)
            await server.start()
        case "well":
            pass
        case name:
            modes = {"refuses": "refuse", "resets": "reset", "2 of 3 cut off": "refuse", "answers nothing": "blackhole"}
            await proxy.set(modes[name])
    if case.exact:
        tally.exact_from_s = monotonic() - began + 1.0


async def run(case: Case, rate: int, tried: int, seconds: float) -> bool:
    burst = max(rate // 10, rate // 4 if rate >= 400 else 0)  # a lease is a burst as well
    if case.exact:
        seconds = EXACT_S + 2.5
    elif case.gateways > 2:
        seconds = max(seconds, CUT_OFF_S)
    async with redis_server() as server:
        proxy = Proxy(server.port)
        await proxy.open()
        limiters = [
            SharedLimiter(
                RedisLedger(proxy.url if at < 2 else server.url, holder=f"gateway-{at}", password=PASSWORD),
                replicas=case.gateways,
            )
            for at in range(case.gateways)
        ]
        desks = [Desk(limiter, f"limit = {{ requests_per_s = {rate}, burst = {rate // 10} }}") for limiter in limiters]
        for limiter in limiters:
            limiter.open()
        await asyncio.gather(*(press(desk, Tally(), 2.0, tried) for desk in desks))
        tally = Tally()
        cpu = process_time()
        async with asyncio.TaskGroup() as group:
            group.create_task(trouble(server, proxy, case, seconds, tally))
            for desk in desks:
                group.create_task(press(desk, tally, seconds, tried))
        cpu_us = (process_time() - cpu) * 1e6 / max(1, tally.tried)
        for limiter in limiters:
            await limiter.close()
        await proxy.close()
    start, end = tally.exact_from_s, tally.exact_from_s + EXACT_S if case.exact else seconds
    admitted = sum(start <= at < end for at in tally.admitted_s)
    times = admitted / (rate * (end - start))
    spare = burst / (rate * (end - start))
    early, later = p(tally.early, 0.99), p(tally.later, 0.99)
    full = not case.at_least or (end - start >= LEAST_S and tried * case.gateways >= 1.5 * rate)
    judged = {
        f"at least {case.at_least:.2f} x limit": (full, times >= case.at_least - spare),
        "p99 of the first second": (len(tally.early) >= LEAST_WAITS, early <= case.early_ms),
        "p99 after it": (len(tally.later) >= LEAST_WAITS, later <= case.later_ms),
    }
    kept = (
        times <= case.at_most + spare
        and not tally.errors
        and all(met for is_judged, met in judged.values() if is_judged)
    )
    open_bounds = [bound for bound, (is_judged, _) in judged.items() if not is_judged]
    bound = f"{case.at_least:.2f}..{case.at_most:.2f}" if case.at_least else f"{case.at_most:.2f}"
    print(
        f"| {case.rule} | {case.name} | {rate} | {times:.2f} (<= {bound} + {spare:.2f}) | {tally.errors} | "
        f"{p(tally.early, 0.5):.2f} | {early:.2f} (<= {case.early_ms:g}) | {p(tally.later, 0.5):.2f} | "
        f"{later:.2f} (<= {case.later_ms:g}) | {cpu_us:.0f} | {verdict(kept, open_bounds)} |",
        flush=True,
    )
    return kept


def verdict(kept: bool, open_bounds: list[str]) -> str:
    """The cell of the last column."""
    if not kept:
        return "**no**"
    return f"not judged: {', '.join(open_bounds)}" if open_bounds else "yes"


async def retry_after(limits: str, name: str) -> bool:
    """Return whether a call of the other gateway is admitted after a refusal's `Retry-After`, and not before."""
    async with redis_server() as server:
        limiters = [
            SharedLimiter(RedisLedger(server.url, holder=name, password=PASSWORD), replicas=2)
            for name in ("one", "two")
        ]
        one, two = (Desk(limiter, limits) for limiter in limiters)
        for limiter in limiters:
            limiter.open()
        await asyncio.sleep(0.2)
        while True:
            try:
                grant = await one.take()
                grant.settle(0, True, monotonic())
            except Refused as refused:
                said_s, began = refused.retry_after_s or 0, monotonic()
                break
        while not await two.admitted():
            await asyncio.sleep(0.01)
        true_s = monotonic() - began
        for limiter in limiters:
            await limiter.close()
    kept = said_s - 1.0 <= true_s <= said_s + 0.05
    said = f"said {said_s}, was {true_s:.2f} s"
    print(f"| R15 | Retry-After, {name} | - | {said} |{' |' * 6} {'yes' if kept else '**no**'} |")
    return kept


def p(waits: list[float], share: float) -> float:
    """Quantile in ms."""
    return sorted(waits)[int(len(waits) * share)] * 1e3 if waits else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, action="append", help="requests per second that are promised")
    parser.add_argument("--tried", type=int, default=1000, help="calls per second and gateway")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| rule | Redis | limit/s | x limit | errors | p50, 1st s, ms | p99 | p50 after | p99 | CPU-us/call | kept |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    cases = [case for case in CASES if not args.case or case.name in args.case]
    kept = [
        uvloop.run(run(case, rate, args.tried, args.seconds)) for case in cases for rate in args.rate or (100, 1000)
    ]
    if not args.case:
        for limits, name in (
            ("limit = { requests_per_s = 0.5, burst = 2 }", "0.5 requests/s"),
            ("limit = { requests_per_s = 3, burst = 1 }", "3 requests/s"),
        ):
            kept.append(uvloop.run(retry_after(limits, name)))
    print(
        f"\nNot judged are p99s of fewer than {LEAST_WAITS} calls, and what is admitted at least in less than "
        f"{LEAST_S:g} s or when fewer calls are tried than one and a half times the limit."
    )
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
