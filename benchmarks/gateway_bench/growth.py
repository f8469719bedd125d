"""Does a request cost more when there is more of everything? CPU of the gateway per request, small case and large.

    python benchmarks/growth.py gateway [--seconds 3] [--rounds 3] [--cases tenants first seen zipf routes endpoints]

    tenants     10 and 100,000 tenants, each request with the key of another one, evenly at random
    first       the same, with the first request of each tenant only
    seen        the same as tenants, after each tenant has called once
    zipf        the same, but the tenant of rank k calls 1/k as often as the first, as public traffic has it
    routes      10 and 1,000 routes, each request for another model
    endpoints   2 and 1,000 upstream endpoints of one pool

Small and large take turns; medians. Needs `wrk` on PATH and Linux. What a request of the small case costs differs from
gateway_hop.py's figure: no two heads of a connection are alike here.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from harness.load import require, wrk
from harness.processes import cpu_s, free_ports, gateway

from gateway_bench.contenders import upstream

TENANTS = (10, 100_000)
SIZES = {**dict.fromkeys(("tenants", "first", "seen", "zipf"), TENANTS), "routes": (10, 1000), "endpoints": (2, 1000)}
# The number of the key of a request; `count` requests came before it.
EVENLY, IN_TURN, ZIPF = "n % keys", "(count * 7919) % keys", "math.floor(keys ^ (n / 2147483648)) - 1"
NEXT = {"first": IN_TURN, "zipf": ZIPF}
BOUND = 1.3
CONNECTIONS = 32
SCRIPT = """
local size, keys, models = {size}, {keys}, {models}
local n, count = {seed}, {count}
request = function()
  n = (n * 1103515245 + 12345) % 2147483648
  count = count + 1
  local headers = {{ ["Authorization"] = "Bearer k" .. ({next}), ["Content-Type"] = "application/json" }}
  return wrk.format("POST", "/v2/models/m" .. (n % models) .. "/infer", headers, string.rep("x", size))
end
"""


def documents(*, tenants: int = 10, routes: int = 10, ports: Sequence[int]) -> str:
    """One document. ports: of the endpoints."""
    addresses = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    lines = ["[tiers.t]", "band = 0", "target_ms = 10000", "[pools.inference]", f"endpoints = [{addresses}]"]
    lines += ["max_inflight = 64", 'probe = ""']
    for number in range(routes):
        lines += ["[[routes]]", f'model = "m{number}"', 'pool = "inference"']
    for number in range(tenants):
        digest = sha256(f"k{number}".encode()).hexdigest()
        lines += [f"[tenants.t{number}]", 'tier = "t"', 'models = ["*"]', f'keys = [{{ sha256 = "{digest}" }}]']
    return "\n".join(lines) + "\n"


class Started:
    """A gateway with `keys` tenants. count: requests that it had so far."""

    def __init__(self, stack: ExitStack, folder: Path, documents: str, keys: int, models: int) -> None:
        policies = folder / f"{keys} {models}"
        policies.mkdir(parents=True)
        (policies / "all.toml").write_text(documents)
        self.pid, port, _ = stack.enter_context(gateway(policies, start_s=120.0))
        self.count = 0
        self._url = f"http://127.0.0.1:{port}/"
        self._script = policies.with_suffix(".lua")
        self._counts = {"size": 1024, "keys": keys, "models": models}

    def run(self, following: str, seed: int, seconds: int) -> float:
        """Send requests for some seconds; return CPU microseconds per request."""
        text = SCRIPT.format(**self._counts, seed=seed, count=self.count, next=following)
        self._script.write_text(text)
        before = cpu_s(self.pid)
        requests = wrk(self._url, self._script, CONNECTIONS, seconds).requests
        self.count += requests
        return (cpu_s(self.pid) - before) * 1e6 / requests


def over_sockets(case: str, rounds: int, seconds: int) -> dict[int, list[float]]:
    """CPU microseconds per request, by size."""
    found: dict[int, list[float]] = {size: [] for size in SIZES[case]}
    kind = case if case in ("routes", "endpoints") else "tenants"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(max(SIZES["endpoints"]) if case == "endpoints" else 1)
        stack.enter_context(upstream(ports))
        started = {}
        for size in found:
            counts = {"tenants": 10, "routes": 10, "endpoints": 1, kind: size}
            text = documents(tenants=counts["tenants"], routes=counts["routes"], ports=ports[: counts["endpoints"]])
            started[size] = each = Started(stack, folder / str(size), text, counts["tenants"], counts["routes"])
            while case == "seen" and each.count < size:
                each.run(IN_TURN, size, seconds)
            each.run(NEXT.get(case, EVENLY), size, 1 if case == "first" else 2)  # warm-up
        for number in range(rounds):
            for size, each in started.items():
                found[size].append(each.run(NEXT.get(case, EVENLY), size, seconds))
                print(f"{case} {number + 1} {size:>7,} {found[size][-1]:8.1f} us", file=sys.stderr)
            if case == "first" and each.count > size:
                raise SystemExit("some tenants have called twice: choose fewer rounds or seconds")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    require("wrk")
    medians: dict[str, dict[int, float]] = {}
    for case in args.cases:
        runs = over_sockets(case, args.rounds, args.seconds)
        medians[case] = {size: statistics.median(values) for size, values in runs.items()}
    if args.json:
        print(json.dumps(medians))
        return
    print(f"{'':10} {'small':>18} {'large':>18} {'ratio':>6}")
    for case, by_size in medians.items():
        (small, a), (large, b) = by_size.items()
        word = "met" if b <= BOUND * a else "missed"
        print(f"{case:10} {small:>7,}: {a:6.1f} us {large:>7,}: {b:6.1f} us {b / a:6.2f}  {word} (<= {BOUND})")
