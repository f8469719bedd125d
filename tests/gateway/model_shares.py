"""A pool in virtual time whose models take very different times: a count of the calls that were answered in time."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from random import Random

from oriel_gateway.simulated import Cancel, End, SimulatedGateway
from oriel_policies.documents import Tenant, compile_documents

DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 200
give_up_ms = 1000

[tiers.silver]
band = 1
target_ms = 2000
give_up_ms = 4000

[tenants.golden]
tier = "gold"
models = ["*"]
services = ["*"]

[tenants.golden2]
tier = "gold"
models = ["*"]
services = ["*"]

[tenants.silver]
tier = "silver"
models = ["*"]
services = ["*"]

[pools.p]
endpoints = ["127.0.0.1:1"]
max_inflight = {permits}
learn_concurrency = {learns}

[[routes]]
model = "*"
pool = "p"

[[routes]]
service = "*"
pool = "p"
"""


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Clock:
    """Virtual time, in which nothing happens but the calls that are due."""

    def __init__(self) -> None:
        self._now = 100.0
        self._due: list[tuple[float, int, _Timer]] = []
        self._numbers: Iterator[int] = count()

    def now(self) -> float:
        return self._now

    def call_at(self, when_s: float, callback: Callable[[], None]) -> _Timer:
        timer = _Timer(callback)
        heapq.heappush(self._due, (when_s, next(self._numbers), timer))
        return timer

    def run(self) -> None:
        while self._due:
            self._now, _, timer = heapq.heappop(self._due)
            if timer.callback is not None:
                timer.callback()


class House:
    """One pool. takes: model, or service and tenant -> seconds of a call, by the time since the beginning."""

    def __init__(self, takes: dict[str, Callable[[float], float]], *, permits: int = 8, learns: bool = False) -> None:
        text = DOCUMENTS.format(permits=permits, learns=str(learns).lower())
        self.snapshot = compile_documents({"all.toml": text.encode()})
        self.clock = Clock()
        self.began_s = self.clock.now()
        self.takes = takes
        self.gateway = SimulatedGateway(
            self.snapshot, self.clock.now, lambda at, call: self.clock.call_at(at, call).cancel, self._serve
        )
        self.gate = self.gateway.pools["p"]
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.ended: dict[tuple[str, str], Counter[str]] = {}

    def _serve(self, name: str, tenant: Tenant, rows: int, deadline: float, end: End) -> Cancel:
        model, now = name if name in self.takes else f"{name} {tenant.name}", self.clock.now()
        self.running[model] += 1
        self.most[model] = max(self.most[model], self.running[model])

        def finished() -> None:
            self.running[model] -= 1
            end(200, "", -1)

        timer = self.clock.call_at(now + self.takes[model](now - self.began_s), finished)

        def cancel() -> None:
            self.running[model] -= 1
            timer.cancel()

        return cancel

    def offer(self, model: str, tenant: str, per_s: float, from_s: float, to_s: float, seed: int = 1) -> None:
        """Offer calls at random times from `from_s` to `to_s`."""
        chance = Random(seed)
        at_s = from_s + chance.expovariate(per_s)
        while at_s < to_s:
            self.clock.call_at(self.began_s + at_s, lambda at_s=at_s: self.call(model, tenant, at_s))  # type: ignore[misc]
            at_s += chance.expovariate(per_s)

    def call(self, model: str, tenant: str, at_s: float = 0.0) -> None:
        """Make a call now. It counts as "good" if it is answered within the target of its tier."""
        began_s, who = self.clock.now(), self.snapshot.tenants[tenant]

        def end(status: int, reason: str, cost_us: int) -> None:
            took_s = self.clock.now() - began_s
            result = reason or ("good" if took_s <= who.tier.target_s else "late")
            self.ended.setdefault((model, tenant), Counter())[result] += 1

        path = f"/v1/services/{model}" if model not in self.takes else f"/v2/models/{model}/infer"
        self.gateway.call(who, path, {}, request_id="r", rows=1, size_bytes=100, timeout_s=None, end=end)

    def good(self, model: str, tenant: str) -> float:
        """Return the share of the calls that were answered in time."""
        results = self.ended[model, tenant]
        return results["good"] / results.total()
