"""What a refusal costs: CPU microseconds of the gateway per refused and per forwarded 1 KB request (R3: <= 0.8 x).

    python benchmarks/cost.py refusals [--seconds 3] [--rounds 5]

One gateway, 32 keep-alive connections of `wrk`. Forwarded: to a trivial upstream. Refused: to a pool whose only permit
is held and where nothing may wait (`queue_full`), and for a tenant whose rate is used up (`rate_limited`). Limited:
forwarded for a tenant with a rate and a concurrency limit that it keeps. They take turns and the medians are compared.
Needs `wrk` on PATH and Linux.
"""

import argparse
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from gateway_bench.contenders import PEERS, cpu_s, free_port, running

CONNECTIONS = 32

SERVED = {"forwarded": ("quick", "any"), "limited": ("quick", "rich")}
KINDS = {**SERVED, "queue_full": ("held", "any"), "rate_limited": ("quick", "poor")}
LIMITS = {
    "any": "",
    "rich": "limit = { requests_per_s = 1000000, burst = 1000000, concurrency = 64 }",
    "poor": "limit = { requests_per_s = 0.001, burst = 1 }",
}
SCRIPT = """
wrk.method = "POST"
wrk.body = string.rep("x", 1024)
wrk.headers["Authorization"] = "Bearer bench-{tenant}"
wrk.headers["Content-Type"] = "application/json"
"""


def policies(folder: Path, quick: int, held: int) -> Path:
    lines = ["[tiers.t]", "band = 0", "target_ms = 1000", "give_up_ms = 86000000"]
    for tenant, limit in LIMITS.items():
        digest = sha256(f"bench-{tenant}".encode()).hexdigest()
        lines += [f"[tenants.{tenant}]", 'tier = "t"', 'models = ["*"]', f'keys = [{{ sha256 = "{digest}" }}]', limit]
    lines += ["[pools.quick]", f'endpoints = ["127.0.0.1:{quick}"]', "max_inflight = 64"]
    lines += ["[pools.held]", f'endpoints = ["127.0.0.1:{held}"]', "max_inflight = 1", "max_queue = 0"]
    for name in ("quick", "held"):
        lines += ["[[routes]]", f'model = "{name}"', f'pool = "{name}"']
    folder.mkdir()
    (folder / "bench.toml").write_text("\n".join(lines) + "\n")
    return folder


def offered(port: int, model: str, seconds: int, script: Path) -> tuple[int, int]:
    """Answers, and those of them that are not 2xx."""
    url = f"http://127.0.0.1:{port}/v2/models/{model}/infer"
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    requests, others = re.search(r"(\d+) requests in", out), re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    assert requests is not None
    return int(requests[1]), int(others[1]) if others else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream, port = free_port(), free_port()
        stack.enter_context(running([sys.executable, str(PEERS / "upstream.py"), str(upstream)], upstream))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # accepts and never answers
        files = policies(folder / "policies", upstream, silent.getsockname()[1])
        command = [sys.executable, "-m", "oriel_cli.main", "gateway", "--policies", str(files)]
        command += ["--http-port", str(port), "--grpc-port", str(free_port()), "--admin-port", str(free_port())]
        pid = stack.enter_context(running(command, port, OTEL_TRACES_SAMPLER_ARG="0"))
        holder = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        holder.sendall(
            b"POST /v2/models/held/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer bench-any\r\n"
            b"content-length: 1\r\n\r\nx"
        )
        scripts = {}
        for tenant in LIMITS:
            scripts[tenant] = folder / f"{tenant}.lua"
            scripts[tenant].write_text(SCRIPT.format(tenant=tenant))
        costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(args.rounds + 1):
            for kind, (model, tenant) in KINDS.items():
                before = cpu_s(pid)
                answers, others = offered(port, model, args.seconds if number else 1, scripts[tenant])
                if others < 0.999 * answers if kind not in SERVED else others:
                    sys.exit(f"{kind}: {others} of {answers} were refused")
                if number:  # the first is a warm-up
                    costs[kind].append((cpu_s(pid) - before) * 1e6 / answers)
    base = statistics.median(costs["forwarded"])
    print(f"{'':14}{'CPU us/request':>16}{'min-max':>16}{'x forwarded':>13}")
    for kind, runs in costs.items():
        span = f"{min(runs):.1f}-{max(runs):.1f}"
        print(f"{kind:14}{statistics.median(runs):16.1f}{span:>16}{statistics.median(runs) / base:13.2f}")
