"""Does a request cost more when there is more of everything? CPU of the gateway per request, small case and large.

    python benchmarks/growth.py gateway [--seconds 3] [--rounds 3] [--cases tenants routes endpoints]

    tenants     10 and 100,000 tenants, each request with the key of another one
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

SIZES = {"tenants": (10, 100_000), "routes": (10, 1000), "endpoints": (2, 1000)}
BOUND = 1.3
CONNECTIONS = 32
SCRIPT = """
local size, keys, models = {size}, {keys}, {models}
local n = {seed}
request = function()
  n = (n * 1103515245 + 12345) % 2147483648
  local headers = {{ ["Authorization"] = "Bearer k" .. (n % keys), ["Content-Type"] = "application/json" }}
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


def over_sockets(case: str, rounds: int, seconds: int) -> dict[int, list[float]]:
    """CPU microseconds per request, by size."""
    found: dict[int, list[float]] = {size: [] for size in SIZES[case]}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(max(SIZES["endpoints"]) if case == "endpoints" else 1)
        stack.enter_context(upstream(ports))
        started, scripts = {}, {}
        for size in found:
            counts = {"tenants": 10, "routes": 10, "endpoints": 1, case: size}
            text = documents(tenants=counts["tenants"], routes=counts["routes"], ports=ports[: counts["endpoints"]])
            policies = folder / str(size)
            policies.mkdir()
            (policies / "all.toml").write_text(text)
            pid, port, _ = stack.enter_context(gateway(policies, start_s=120.0))
            started[size] = pid, f"http://127.0.0.1:{port}/"
            scripts[size] = folder / f"{size}.lua"
            scripts[size].write_text(
                SCRIPT.format(size=1024, keys=counts["tenants"], models=counts["routes"], seed=size)
            )
            wrk(started[size][1], scripts[size], CONNECTIONS, 2)  # warm-up
        for number in range(rounds):
            for size, (pid, url) in started.items():
                before = cpu_s(pid)
                requests = wrk(url, scripts[size], CONNECTIONS, seconds).requests
                found[size].append((cpu_s(pid) - before) * 1e6 / requests)
                print(f"{case} {number + 1} {size:>7,} {found[size][-1]:8.1f} us", file=sys.stderr)
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
