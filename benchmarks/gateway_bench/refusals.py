"""Cost of a refusal: CPU microseconds of the gateway per refused and per forwarded 1 KB request (R3: <= 0.8 x).

    python benchmarks/cost.py refusals [--seconds 3] [--rounds 5]

One gateway, 32 keep-alive connections of `wrk`. Forwarded: to a trivial upstream. Refused: to a pool whose only permit
is held and where nothing may wait (`queue_full`), and for a tenant whose rate is used up (`rate_limited`). Limited:
forwarded for a tenant with a rate and a concurrency limit that it keeps. They take turns and the medians are compared.
Needs `wrk` on PATH and Linux.
"""

import argparse
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from harness.load import post, wrk
from harness.processes import cpu_s, free_port, gateway

from gateway_bench.contenders import upstream

CONNECTIONS = 32

SERVED = {"forwarded": ("quick", "any"), "limited": ("quick", "rich")}
KINDS = {**SERVED, "queue_full": ("held", "any"), "rate_limited": ("quick", "poor")}
LIMITS = {
    "any": "",
    "rich": "limit = { requests_per_s = 1000000, burst = 1000000, concurrency = 64 }",
    "poor": "limit = { requests_per_s = 0.001, burst = 1 }",
}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        behind = free_port()
        stack.enter_context(upstream([behind]))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # accepts and never answers
        files = policies(folder / "policies", behind, silent.getsockname()[1])
        environment = {"OTEL_TRACES_SAMPLER_ARG": "0"}
        pid, port, _ = stack.enter_context(gateway(files, environment=environment))
        holder = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        holder.sendall(
            b"POST /v2/models/held/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer bench-any\r\n"
            b"content-length: 1\r\n\r\nx"
        )
        scripts = {}
        for tenant in LIMITS:
            headers = {"Authorization": f"Bearer bench-{tenant}", "Content-Type": "application/json"}
            scripts[tenant] = post(folder / f"{tenant}.lua", b"x" * 1024, headers)
        costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(args.rounds + 1):
            for kind, (model, tenant) in KINDS.items():
                before = cpu_s(pid)
                url = f"http://127.0.0.1:{port}/v2/models/{model}/infer"
                found = wrk(url, scripts[tenant], CONNECTIONS, args.seconds if number else 1, refusals=True)
                if found.refused < 0.999 * found.requests if kind not in SERVED else found.refused:
                    sys.exit(f"{kind}: {found.refused} of {found.requests} were refused")
                if number:  # the first is a warm-up
                    costs[kind].append((cpu_s(pid) - before) * 1e6 / found.requests)
    base = statistics.median(costs["forwarded"])
    print(f"{'':14}{'CPU us/request':>16}{'min-max':>16}{'x forwarded':>13}")
    for kind, runs in costs.items():
        span = f"{min(runs):.1f}-{max(runs):.1f}"
        print(f"{kind:14}{statistics.median(runs):16.1f}{span:>16}{statistics.median(runs) / base:13.2f}")
