"""What a shared limiter admits and adds to a call while Redis is well, gone, silent, slow, or comes and goes (R12-R15).

Two gateways' limiters in one process, a real redis-server behind a proxy that misbehaves. For each case: calls admitted
against the limit, and how long calls waited for the limiter, in the first second and after it.

    python tests/bench/limits_redis.py [--rate 100] [--tried 1000] [--seconds 5]
"""

import argparse
import asyncio
import sys
from pathlib import Path
from time import monotonic, process_time

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("wire", "policies", "gateway", "tests")]

from conformance.desk import Desk  # noqa: E402
from conformance.redis_server import PASSWORD, Proxy, redis_server  # noqa: E402

from oriel_gateway.errors import Refused  # noqa: E402
from oriel_gateway.limits import SharedLimiter  # noqa: E402
from oriel_gateway.limits.redis_ledger import RedisLedger  # noqa: E402

CASES = ("well", "refused", "reset", "blackhole", "slow 100 ms", "flapping 300 ms")


class Tally:
    def __init__(self) -> None:
        self.admitted = self.tried = self.errors = 0
        self.early: list[float] = []
        self.later: list[float] = []


async def one(desk: Desk, tally: Tally, began: float) -> None:
    start = monotonic()
    try:
        grant = await desk.take()
        grant.settle(0, True, monotonic())
        tally.admitted += 1
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


async def trouble(proxy: Proxy, case: str, seconds: float) -> None:
    if case == "slow 100 ms":
        proxy.delay_s = 0.1
    elif case == "flapping 300 ms":
        end = monotonic() + seconds
        while monotonic() < end:
            await proxy.set("blackhole")
            await asyncio.sleep(0.3)
            await proxy.set("reset")
            await proxy.set("through")
            await asyncio.sleep(0.3)
    elif case != "well":
        await proxy.set({"refused": "refuse"}.get(case, case))


async def run(case: str, rate: int, tried: int, seconds: float) -> None:
    async with redis_server() as server:
        proxy = Proxy(server.port)
        await proxy.open()
        limiters = [
            SharedLimiter(RedisLedger(proxy.url, holder=name, password=PASSWORD), replicas=2) for name in ("one", "two")
        ]
        desks = [Desk(limiter, f"limit = {{ requests_per_s = {rate}, burst = {rate // 10} }}") for limiter in limiters]
        for limiter in limiters:
            limiter.open()
        warm = Tally()
        await asyncio.gather(*(press(desk, warm, 1.5, tried) for desk in desks))
        tally = Tally()
        cpu = process_time()
        async with asyncio.TaskGroup() as group:
            group.create_task(trouble(proxy, case, seconds))
            for desk in desks:
                group.create_task(press(desk, tally, seconds, tried))
        cpu_us = (process_time() - cpu) * 1e6 / max(1, tally.tried)
        print(
            f"{case:16} {tally.admitted / seconds / rate:9.2f} {tally.errors:9d} {p(tally.early, 0.5):9.2f} "
            f"{p(tally.early, 0.99):9.2f} {p(tally.later, 0.5):9.2f} {p(tally.later, 0.99):9.2f} {cpu_us:9.1f}"
        )
        for limiter in limiters:
            await limiter.close()
        await proxy.close()


def p(waits: list[float], share: float) -> float:
    """Quantile in ms."""
    return sorted(waits)[int(len(waits) * share)] * 1e3 if waits else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=100, help="requests per second that are promised")
    parser.add_argument("--tried", type=int, default=1000, help="calls per second and gateway")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(f"{args.rate} requests per second promised, 2 x {args.tried} tried")
    heads = ("x limit", "errors", "p50 1st s", "p99", "p50 after", "p99", "us/call")
    print(f"{'redis':16} " + " ".join(f"{head:>9}" for head in heads))
    import uvloop

    for case in CASES:
        uvloop.run(run(case, args.rate, args.tried, args.seconds))


if __name__ == "__main__":
    main()
