"""Time and size of the gateway's `/metrics` when many tenants call many models: `python benchmarks/cost.py scrape`.

    [--tenants 50] [--targets 20] [--causes 4] [--rounds 20]

A gateway in this process whose tenants, of three tiers, have each called each model, over a route of its own for each
model; and for each pair of them that has series of its own, late calls with `--causes` causes. Then its admin
application answers scrapes, in both formats, without sockets. The time is the processor's, of the fastest of all
rounds. Ends with exit status 1 if a scrape takes more than 50 ms or has more than 1.5 MB.
"""

import argparse
import asyncio
import sys
import time
from hashlib import sha256

from tests.gateway.operators import admin
from tests.gateway.stack import Client, gateway, upstream

from oriel_gateway.core import Gateway
from oriel_gateway.observe.objectives import Judged
from oriel_policies.promise.objectives import CAUSES

TIERS = ("gold", "silver", "bronze")
MOST_S, MOST_BYTES = 0.050, 1_500_000
FORMATS = {"text": "", "OpenMetrics": "application/openmetrics-text;version=1.0.0"}


def documents(port: int, tenants: int, targets: int) -> dict[str, bytes]:
    """Return the policy documents. port: of the server behind the gateway."""
    lines = ["[pools.p]", f'endpoints = ["127.0.0.1:{port}"]', 'probe = ""', "max_inflight = 64"]
    for band, tier in enumerate(TIERS):
        lines += [f"[tiers.{tier}]", f"band = {band}", "target_ms = 60000"]
    for number in range(targets):
        lines += ["[[routes]]", f'name = "route-{number}"', f'model = "model-{number}"', 'pool = "p"']
    for number in range(tenants):
        lines += [f"[tenants.tenant-{number}]", f'tier = "{TIERS[number % len(TIERS)]}"', 'models = ["*"]']
        lines += [f'keys = [{{ sha256 = "{sha256(b"key-%d" % number).hexdigest()}" }}]']
    return {"all.toml": "\n".join(lines).encode()}


def miss(core: Gateway, tenants: int, targets: int, causes: int) -> None:
    """Count late calls of each pair of a tenant and a model."""
    objectives = core.records.stats.objectives
    for tenant in range(tenants):
        for target in range(targets):
            cell = objectives.cell(f"tenant-{tenant}", TIERS[tenant % len(TIERS)], f"model:model-{target}")
            for cause in CAUSES[:causes]:
                cell.bad(Judged("late", cause, 0.1, cause))
    objectives.flush()


async def measure(args: argparse.Namespace) -> bool:
    good = True
    async with upstream() as up, gateway(documents(up.port, args.tenants, args.targets)) as (port, core):
        async with admin(core) as scraper:
            for _ in range(3):  # names are given by the first scrape, a cause appears as 0 in the next
                miss(core, args.tenants, args.targets, args.causes)
                await scraper.get("/metrics")
            async with Client(port) as client:
                for tenant in range(args.tenants):
                    for target in range(args.targets):
                        path = f"/v2/models/model-{target}/infer"
                        assert (await client.ask(path, b"x", key=f"key-{tenant}")).status == 200
            for name, accept in FORMATS.items():
                took_s, size = [], 0
                for _ in range(args.rounds):
                    began = time.process_time()
                    answer = await scraper.get("/metrics", headers={"accept": accept} if accept else {})
                    took_s.append(time.process_time() - began)
                    size = len(answer.content)
                lines = answer.text.count("\n")
                print(f"{name}: {min(took_s) * 1e3:.1f} ms, {size / 1e6:.2f} MB, {lines} lines")
                good = good and min(took_s) <= MOST_S and size <= MOST_BYTES
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--targets", type=int, default=20)
    parser.add_argument("--causes", type=int, default=4, help=f"of the {len(CAUSES)} that there are")
    parser.add_argument("--rounds", type=int, default=20)
    return 0 if asyncio.run(measure(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
