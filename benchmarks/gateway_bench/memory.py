"""Memory of a gateway per tenant, key, model, connection and waiting call, and of a worker of a logic server, in KiB.

    python benchmarks/cost.py memory [--count 5000]

Each figure is a difference of the proportional set size (PSS) of two moments or of two processes, divided by the
number of things. A tenant has a key and three limits; a model is one that was called; a call that waits has a body of
1 KiB. What the kernel keeps for sockets is not in it.
"""

import argparse
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

from harness.processes import PEERS, accepts, free_port, gateway, pss_mb, serving

from gateway_bench.contenders import upstream

SETTLE_S = 3.0
LIMIT = {"requests_per_s": 1_000_000, "concurrency": 10_000, "requests_per_month": 1_000_000}
DOCUMENTS = """tiers.t = {{ band = 0, target_ms = 1000, give_up_ms = 86000000 }}
pools.quick = {{ endpoints = ["127.0.0.1:{}"] }}
pools.held = {{ endpoints = ["127.0.0.1:{}"], max_inflight = 1, max_queue = 100000, probe = "" }}
routes = [{{ model = "held", pool = "held" }}, {{ model = "*", pool = "quick" }}]
"""


@contextmanager
def running(documents: str, tenants: int = 1, keys: int = 1) -> Iterator[tuple[int, int]]:
    """A gateway whose tenants have so many keys each: its process id and port. It has a state of its own."""
    with tempfile.TemporaryDirectory() as folder:
        with Path(folder, "tenants.ndjson").open("w") as file:
            for number in range(tenants):
                digests = [{"sha256": sha256(f"{number}-{key}".encode()).hexdigest()} for key in range(keys)]
                tenant = {"name": f"t{number}", "tier": "t", "models": ["*"], "keys": digests, "limit": LIMIT}
                file.write(json.dumps(tenant) + "\n")
        Path(folder, "all.toml").write_text(documents)
        with gateway(Path(folder), environment={"ORIEL_STATE": f"{folder}/state"}) as (pid, port, _):
            yield pid, port


def send(sock: socket.socket, tenant: int, model: str, *, wait: bool = True) -> None:
    """Send a call of 1 KiB, and wait for its answer."""
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {tenant}-0\r\n"
    sock.sendall(f"{head}content-length: 1024\r\n\r\n".encode() + bytes(1024))
    if wait and not (answer := sock.recv(1 << 16)).startswith(b"HTTP/1.1 200"):
        sys.exit(f"a call was not answered well: {answer[:300]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    count = parser.parse_args().count

    def measured(name: str, pid: int, before_mb: float, number: int = count) -> float:
        time.sleep(SETTLE_S)
        print(f"{name:26}{((now_mb := pss_mb(pid)) - before_mb) * 1024 / number:10.2f} KiB", flush=True)
        return now_mb

    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # accepts and never answers
        stack.enter_context(upstream([behind := free_port()]))
        documents = DOCUMENTS.format(behind, silent.getsockname()[1])
        with running(documents) as (pid, port):
            used = alone = measured("a gateway", pid, 0.0, 1)
            socks = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
            for each in socks:
                send(each, 0, "m")
            used = measured("a connection", pid, used)
            for each in socks:
                send(each, 0, "held", wait=False)
            measured("a call that waits", pid, used)
        with running(documents, tenants=count) as (pid, port):
            used = known = measured("a tenant", pid, alone)
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for number in range(count):
                send(sock, number, "m")
            used = measured("a tenant, when it calls", pid, used)
            for number in range(count):
                send(sock, 0, f"m{number}")
            measured("a model", pid, used)
        with running(documents, tenants=count, keys=2) as (pid, _):
            measured("another key", pid, known)
    used = 0.0
    for name, workers, number in (("a logic server, 1 worker", 1, 1), ("another worker", 5, 4)):
        command = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(PEERS / "logic" / "services")]
        command += [
            "--http-port",
            str(port := free_port()),
            "--admin-port",
            str(free_port()),
            "--workers",
            f"{workers}",
        ]
        with serving(command, lambda port=port: accepts(port)) as pid:  # type: ignore[misc]
            used = measured(name, pid, used, number)
