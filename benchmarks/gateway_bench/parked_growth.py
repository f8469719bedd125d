"""Cost of a call that waits for the first server of its pool beside 10 or 100,000 others: CPU of its wait.

    python benchmarks/growth.py parked [--depths 10,1000,100000] [--requests 20000] [--repeats 5] [--json]

The real set of endpoints with the counts of demand, without calls around it. It is full, and as many calls leave as
come.

Cases: more urgent calls displace the newest ones, until all are more urgent; the calls leave in the order in which
they came; the newest leave first; they leave in any order.
"""

import random
import time
from types import SimpleNamespace
from typing import Any

from harness.cost import compare_depths

from oriel_gateway.pools.demand import PoolDemand
from oriel_gateway.pools.endpoint_state import HttpEndpoint
from oriel_gateway.pools.endpoints import EndpointSet

CASES = {"displaced": "", "oldest leave": "oldest", "newest leave": "newest", "any leave": "any"}
TENANTS: list[Any] = [
    SimpleNamespace(tier=SimpleNamespace(band=band, name=f"t{band}"), name="t", weight=1.0) for band in range(2)
]


class Waiter:
    __slots__ = ("deadline", "due_s", "tenant")

    def __init__(self, band: int) -> None:
        self.tenant = TENANTS[band]
        self.deadline = self.due_s = 1e6

    def unparked(self) -> None:
        pass

    def displaced(self) -> None:
        pass


def full(depth: int) -> tuple[EndpointSet[HttpEndpoint], list[Waiter]]:
    these: EndpointSet[HttpEndpoint] = EndpointSet(lambda _: None, [], max_parked=depth)  # type: ignore[arg-type,return-value]
    these.demand = PoolDemand(time.monotonic(), lambda: None)
    waiters = [Waiter(1) for _ in range(depth)]
    for each in waiters:
        these.park(each)
    return these, waiters


async def measure(case: str, depth: int, requests: int) -> float:
    """CPU microseconds per call."""
    done, used = 0, 0.0
    while done < requests:
        these, waiters = full(depth)
        leaving = {"oldest": waiters, "newest": waiters[::-1], "any": random.Random(1).sample(waiters, depth)}
        coming = [Waiter(0 if case == "displaced" else 1) for _ in range(depth)]
        gone = leaving.get(CASES[case])
        started = time.process_time()
        if gone is None:
            for each in coming:
                these.park(each)
        else:
            for each, other in zip(gone, coming, strict=True):
                these.unpark(each)
                these.park(other)
        used += time.process_time() - started
        assert these.parked == depth
        done += depth
    return used / done * 1e6


def main() -> None:
    compare_depths(__doc__, CASES, measure)
