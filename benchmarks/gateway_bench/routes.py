"""CPU microseconds to find the target of a request among 10 and 1,000 routes, seen before or not.

python benchmarks/growth.py routes
"""

import json
from collections.abc import Callable
from time import process_time

from oriel_gateway.routing.targets import resolve
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.promise.routing import RouteTable

ROUNDS = 5
LOOKUPS = 20_000


def snapshot(routes: int, pattern: str) -> Snapshot:
    text = '[tiers.t]\nband = 0\ntarget_ms = 100\n[pools.p]\nendpoints = ["127.0.0.1:1"]\n'
    text += '[tenants.a]\ntier = "t"\nmodels = ["*"]\n'
    text += "".join(f'[[routes]]\nmodel = "{pattern.format(n)}"\npool = "p"\n' for n in range(routes))
    return compile_documents({"a.toml": text.encode()})


def cost_us(work: Callable[[int], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = process_time()
        for number in range(LOOKUPS):
            work(number)
        best = min(best, process_time() - began)
    return best / LOOKUPS * 1e6


def measure(routes: int, pattern: str, *, remembered: bool) -> float:
    documents = snapshot(routes, pattern)
    table, tenant = RouteTable(documents.routes), documents.tenants["a"]
    paths = [f"/v2/models/{pattern.format(n % routes).replace('*', 'x')}/infer" for n in range(routes)]

    def work(number: int) -> None:
        if not remembered:
            table._known.clear()
        resolve("POST", paths[number % routes], "", tenant, table)

    return cost_us(work)


def main() -> None:
    for name, pattern in (("names", "model-{}"), ("patterns", "team-{}-*")):
        for remembered in (False, True):
            few, many = (measure(routes, pattern, remembered=remembered) for routes in (10, 1000))
            print(
                json.dumps(
                    {
                        "routes by": name,
                        "name seen before": remembered,
                        "10 routes us": round(few, 2),
                        "1000 routes us": round(many, 2),
                        "ratio": round(many / few, 2),
                    }
                )
            )
