"""What one hop costs: CPU microseconds per request of the gateway beside nginx and two naive Python proxies.

    python tests/bench/gateway_hop.py [--seconds 4] [--rounds 5] [--json]

Every contender forwards POST /v2/models/digits/infer, 1 KB each way, 32 keep-alive connections, to the same trivial
upstream, one process each. They take turns (A B C D, A B C D, ...) and the medians are compared, so that a machine
whose speed drifts is unfair to nobody. Counted is the CPU time of the contender's own processes (user + system, from
/proc), not wall time: the load generator shares the machine. The gateway does all its work: key, rate limit, admission,
deadline, trace context, tier headers; the others only forward. It recognises a head that a connection repeats byte by
byte; `oriel (heads vary)` is the same gateway under requests of which no two heads are alike.

Needs `nginx` and `wrk` on PATH (both are Debian packages) and Linux. The Python peers get an environment of their own
under build/bench-peers, with pinned versions.
"""

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
PATH = "/v2/models/digits/infer"
CONNECTIONS = 32
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")

NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 10000000;
  upstream u {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""

WRK = """
wrk.method = "POST"
wrk.body = string.rep("x", 1024)
wrk.headers["Authorization"] = "Bearer oriel-demo-gold"
wrk.headers["Content-Type"] = "application/json"
"""

# The same with a request id and a trace context of its own in every request, so that no two heads are alike.
WRK_VARYING = (
    WRK
    + """
local n = 0
request = function()
  n = n + 1
  wrk.headers["x-request-id"] = string.format("r%016x", n)
  wrk.headers["traceparent"] = string.format("00-%032x-%016x-00", n, n)
  return wrk.format(nil)
end
"""
)
VARYING = "oriel (heads vary)"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def peers_python() -> Path:
    """The interpreter of the peers' environment, made on first use."""
    folder = ROOT / "build" / "bench-peers"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print("making the peers' environment ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", PEERS / "requirements.txt"], check=True)
        (folder / "ready").touch()
    return python


@contextmanager
def running(command: list[str], port: int, start_s: float = 15.0, **environment: str) -> Iterator[int]:
    """The process id of a server that accepts on `port` within `start_s`."""
    log = tempfile.TemporaryFile()
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log, cwd=ROOT)
    try:
        end = time.monotonic() + start_s
        while True:
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                sys.exit(f"{command[0]} did not start: {log.read().decode()[-2000:]}")
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tree(pid: int) -> list[int]:
    """This process and its descendants."""
    out = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            out += tree(int(child))
    return out


def cpu_s(pid: int) -> float:
    """User and system seconds so far of a process tree."""
    total = 0
    for member in tree(pid):
        fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK_S


def load(port: int, seconds: int, script: str) -> tuple[int, float, float]:
    """Requests answered 200, requests per second and p99 in ms."""
    out = subprocess.run(
        [
            "wrk",
            "-t1",
            f"-c{CONNECTIONS}",
            f"-d{seconds}s",
            "--latency",
            "-s",
            script,
            f"http://127.0.0.1:{port}{PATH}",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        sys.exit(f"a contender failed requests:\n{out}")
    requests = re.search(r"(\d+) requests in", out)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s)", out)
    assert requests and rate and p99
    scale = {"us": 0.001, "ms": 1.0, "s": 1000.0}[p99[2]]
    return int(requests[1]), float(rate[1]), float(p99[1]) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for tool in ("nginx", "wrk"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not on PATH; on Debian: apt-get install nginx-light wrk")
    python = peers_python()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        same, varying = folder / "same.lua", folder / "varying.lua"
        same.write_text(WRK)
        varying.write_text(WRK_VARYING)
        upstream = free_port()
        stack.enter_context(running([sys.executable, str(PEERS / "upstream.py"), str(upstream)], upstream))
        ports = {name: free_port() for name in ("oriel", "nginx", "starlette+aiohttp", "starlette+httpx")}
        admin, grpc = free_port(), free_port()
        address = f"127.0.0.1:{upstream}"
        pids = {
            "oriel": stack.enter_context(
                running(
                    [sys.executable, "-m", "oriel_cli.main", "gateway", "--policies", "policies/examples"]
                    + ["--http-port", str(ports["oriel"]), "--grpc-port", str(grpc), "--admin-port", str(admin)]
                    + ["--endpoint", f"inference={address}"],
                    ports["oriel"],
                )
            )
        }
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, upstream=upstream, port=ports["nginx"]))
        pids["nginx"] = stack.enter_context(running(["nginx", "-c", str(config), "-p", str(folder)], ports["nginx"]))
        for name in ("starlette+aiohttp", "starlette+httpx"):
            app = "naive_" + name.partition("+")[2]
            pids[name] = stack.enter_context(
                running(
                    [str(python), "-m", "uvicorn", f"{app}:app", "--app-dir", str(PEERS), "--no-access-log"]
                    + ["--loop", "uvloop", "--http", "httptools", "--port", str(ports[name]), "--log-level", "error"],
                    ports[name],
                    UPSTREAM=f"http://{address}",
                )
            )
        ports = {"oriel": ports["oriel"], VARYING: ports["oriel"], **ports}
        pids = {"oriel": pids["oriel"], VARYING: pids["oriel"], **pids}
        figures: dict[str, dict[str, list[float]]] = {n: {"cpu_us": [], "rate": [], "p99_ms": []} for n in pids}
        for port in ports.values():
            load(port, 1, str(same))  # warm-up
        for number in range(args.rounds):
            for name, port in ports.items():
                before = cpu_s(pids[name])
                requests, rate, p99_ms = load(port, args.seconds, str(varying if name == VARYING else same))
                cpu_us = (cpu_s(pids[name]) - before) * 1e6 / requests
                figures[name]["cpu_us"].append(cpu_us)
                figures[name]["rate"].append(rate)
                figures[name]["p99_ms"].append(p99_ms)
                print(f"round {number + 1} {name:18} {cpu_us:8.1f} us  {rate:8.0f}/s", file=sys.stderr)
    medians = {name: {what: statistics.median(v) for what, v in f.items()} for name, f in figures.items()}
    own = medians["oriel"]["cpu_us"]
    ratios = {name: m["cpu_us"] / own for name, m in medians.items()}
    if args.json:
        print(json.dumps({"medians": medians, "runs": figures, "cpu_relative_to_oriel": ratios}))
        return
    print(f"{'':18} {'CPU us/request':>14} {'min-max':>16} {'req/s':>8} {'p99 ms':>7} {'x oriel':>8}")
    for name, m in medians.items():
        runs = figures[name]["cpu_us"]
        print(
            f"{name:18} {m['cpu_us']:14.1f} {f'{min(runs):.1f}-{max(runs):.1f}':>16} {m['rate']:8.0f} "
            f"{m['p99_ms']:7.2f} {ratios[name]:8.2f}"
        )
    print(f"\noriel / nginx = {own / medians['nginx']['cpu_us']:.2f}")


if __name__ == "__main__":
    main()
