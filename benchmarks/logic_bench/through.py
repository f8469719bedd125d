"""Cost of calling models through the gateway: CPU of all servers per request of a service with one model call.

    python benchmarks/logic_server.py through [--connections 16] [--seconds 2] [--rounds 5]

The service of `call`, untyped clients and one `oriel inference` with the committed model. Two logic servers take turns:
one calls the model directly, the other through a gateway. Requests are sent to the logic servers with the headers that
a gateway adds, so that the gateway's part is that of the model calls alone. Counted is the CPU time of the processes
(user and system, from /proc); the load generator is not counted. Needs Linux and `wrk`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from harness.load import require, wrk
from harness.processes import ROOT, cpu_s, free_port, gateway_command, inference, serving, status_of

from logic_bench.contenders import FILES, Running, picture
from oriel_gateway.identity.tickets import Tickets

KEY = "0123456789abcdef" * 2
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 1000
[pools.models]
endpoints = ["127.0.0.1:{port}"]
[[routes]]
model = "*"
pool = "models"
[tenants.acme]
tier = "gold"
"""
HEADERS = {
    "content-type": "application/json",
    "x-oriel-tenant": "acme",
    "x-oriel-tier": "gold",
    "x-oriel-priority": "0",
    "x-oriel-timeout-ms": "4000",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=2, help="of one turn (2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    args = parser.parse_args()
    require("wrk")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model_pid, model_port, _ = stack.enter_context(inference(ROOT / "examples" / "models"))
        policies = folder / "policies"
        policies.mkdir()
        (policies / "all.toml").write_text(DOCUMENTS.format(port=model_port))
        public, internal = free_port(), free_port()
        command = gateway_command(policies, public, "--internal-port", str(internal))
        up = f"http://127.0.0.1:{public}/v2/health/ready"
        gateway_pid = stack.enter_context(serving(command, lambda: status_of(up) == 200, {"ORIEL_TICKET_KEYS": KEY}))
        gold = SimpleNamespace(name="gold", stream_max_s=600.0)
        ticket = Tickets([KEY.encode()]).line(SimpleNamespace(name="acme", tier=gold), "bench", 3600.0)
        headers = {**HEADERS, "x-oriel-ticket": ticket.partition(": ")[2].strip()}
        body = json.dumps({"image": picture()}).encode()
        ways: dict[str, Running] = {}
        for name, flag, port in (("direct", "--inference", model_port), ("gateway", "--gateway", internal)):
            own = free_port()
            command = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(FILES / "services")]
            command += [flag, f"127.0.0.1:{port}", "--http-port", str(own), "--admin-port", str(free_port())]
            url = f"http://127.0.0.1:{own}/v1/services/label"
            up = f"http://127.0.0.1:{own}/v1/services"
            pid = stack.enter_context(serving(command, lambda up=up: status_of(up) == 200))
            ways[name] = Running(pid, url, body, headers, folder)
            ways[name].check()
            wrk(url, ways[name].script, 4, 1)  # warm-up
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for number in range(args.rounds):
            for name, way in ways.items():
                pids = (way.pid, gateway_pid, model_pid)
                before = [cpu_s(pid) for pid in pids]
                turn = wrk(way.url, way.script, args.connections, args.seconds)
                spent = [(cpu_s(pid) - was) * 1e6 / turn.requests for pid, was in zip(pids, before, strict=True)]
                found[name].append((spent[0], spent[1], spent[2]))
                shown = "  ".join(
                    f"{what} {us:5.0f}" for what, us in zip(("logic", "gateway", "model"), spent, strict=True)
                )
                print(f"{number + 1} {name:8} {shown}  {turn.requests} requests", file=sys.stderr)
        print("| way | logic | gateway | model server | sum |\n|---|---|---|---|---|")
        for name, runs in found.items():
            middle = [statistics.median(run[index] for run in runs) for index in range(3)]
            total = statistics.median(sum(run) for run in runs)
            print(f"| {name} | {' | '.join(f'{us:.0f}' for us in middle)} | {total:.0f} |")
