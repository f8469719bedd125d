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
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from subprocess import run

from gateway_bench.contenders import PEERS, cpu_s, free_port, free_ports, running

SIZES = {"tenants": (10, 100_000), "routes": (10, 1000), "endpoints": (2, 1000)}
BOUND = 1.3
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


@contextmanager
def gateway(folder: Path, text: str) -> Iterator[tuple[int, int]]:
    """Process id and port of a gateway with these documents."""
    folder.mkdir()
    (folder / "all.toml").write_text(text)
    port = free_port()
    command = [sys.executable, "-m", "oriel_cli.main", "gateway", "--policies", str(folder)]
    command += ["--http-port", str(port), "--grpc-port", str(free_port()), "--admin-port", str(free_port())]
    with running(command, port, start_s=120.0) as pid:
        yield pid, port


def drive(port: int, script: Path, seconds: int) -> int:
    """Requests answered."""
    command = ["wrk", "-t1", "-c32", f"-d{seconds}s", "-s", str(script), f"http://127.0.0.1:{port}/"]
    out = run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        sys.exit(f"requests failed:\n{out}")
    return int(out.partition(" requests in")[0].split()[-1])


def over_sockets(case: str, rounds: int, seconds: int) -> dict[int, list[float]]:
    """CPU microseconds per request, by size."""
    found: dict[int, list[float]] = {size: [] for size in SIZES[case]}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(max(SIZES["endpoints"]) if case == "endpoints" else 1)
        upstream = [sys.executable, str(PEERS / "upstream.py"), *map(str, ports)]
        stack.enter_context(running(upstream, ports[0]))
        started, scripts = {}, {}
        for size in found:
            counts = {"tenants": 10, "routes": 10, "endpoints": 1, case: size}
            text = documents(tenants=counts["tenants"], routes=counts["routes"], ports=ports[: counts["endpoints"]])
            started[size] = stack.enter_context(gateway(folder / str(size), text))
            scripts[size] = folder / f"{size}.lua"
            scripts[size].write_text(
                SCRIPT.format(size=1024, keys=counts["tenants"], models=counts["routes"], seed=size)
            )
            drive(started[size][1], scripts[size], 2)  # warm-up
        for number in range(rounds):
            for size, (pid, port) in started.items():
                before = cpu_s(pid)
                requests = drive(port, scripts[size], seconds)
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
    if shutil.which("wrk") is None:
        sys.exit("wrk is not on PATH; on Debian: apt-get install wrk")
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
